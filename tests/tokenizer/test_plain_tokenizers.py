"""The tokenizers that need no file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.tokenizer.plain_tokenizers import ByteTokenizer, NullTokenizer


@given(st.text())
def test_bytes_give_back_every_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_end_a_document_with_an_id_of_its_own() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé\0") == [97, 195, 169, 0]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)
    assert tokenizer.decode([97, 256, 98]) == "ab"


def test_half_a_character_decodes_to_the_replacement_character() -> None:
    assert ByteTokenizer().decode([0xE2, 0x96, 97]) == "\ufffda"


def test_an_id_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="257 is not an id of ByteTokenizer"):
        ByteTokenizer().decode([97, 257])


@given(st.lists(st.integers(0, 511)))
def test_null_reads_ids_and_writes_them(ids: list[int]) -> None:
    tokenizer = NullTokenizer(512)
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@pytest.mark.parametrize(("eod_id", "expected"), [(None, 511), (0, 0), (511, 511)])
def test_null_has_vocab_size_entries_and_ends_documents_with_the_last(eod_id: int | None, expected: int) -> None:
    tokenizer = NullTokenizer(512, eod_id=eod_id)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, expected, None)


def test_null_pads_with_the_id_it_is_told() -> None:
    assert NullTokenizer(512, pad_id=0).pad == 0


@pytest.mark.parametrize("text", ["1 x", "512", "-1", "1.0", "1_0", "٣", "9" * 5000])
def test_null_refuses_what_is_not_an_id(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a token id: .* from 0 to 511"):
        NullTokenizer(512).encode(text)


@pytest.mark.parametrize("ids", [{"eod_id": 8}, {"eod_id": -1}, {"pad_id": 8}])
def test_null_has_no_ids_outside_its_vocabulary(ids: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        NullTokenizer(8, **ids)


def test_fingerprints_tell_settings_apart() -> None:
    prints = [NullTokenizer(8), NullTokenizer(9), NullTokenizer(8, eod_id=0), NullTokenizer(8, pad_id=0)]
    assert len({tokenizer.fingerprint() for tokenizer in prints}) == 4
    assert NullTokenizer(8).fingerprint() == NullTokenizer(8, eod_id=7).fingerprint()
