"""SentencePiece: the model is taken as it is, and a lossless model loses nothing."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from megatron.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.helpers.tokenizer_files import BOTCHAN_MODEL, mistral_model

LOSSLESS = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
}


def train(path: Path, **options: object) -> Path:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "the dog sat on the log"] * 20),
        model_writer=model,
        model_type="bpe",
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path = tmp_path_factory.mktemp("model") / "lossless.model"
    return SentencePieceTokenizer(
        train(path, vocab_size=300, control_symbols=["<|u2581|>"], user_defined_symbols=["\n", "▁▁"], **LOSSLESS)
    )


def test_a_llama_model_has_its_own_ids_and_no_token_more() -> None:
    tokenizer = SentencePieceTokenizer(mistral_model(), name="Llama2Tokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (32000, 2, None)
    assert tokenizer.encode("Hello world, 你好 😀") == [22557, 1526, 28725, 28705, 29383, 29530, 28705, 30575]


def test_encoding_adds_neither_bos_nor_eod() -> None:
    tokenizer = SentencePieceTokenizer(BOTCHAN_MODEL)
    assert tokenizer.encode("Hello world") == [285, 35, 934, 178, 54]
    assert tokenizer.encode("") == []


def test_an_end_of_document_piece_that_is_not_the_eos_is_found_by_name(tmp_path: Path) -> None:
    model = train(tmp_path / "m.model", vocab_size=40, eos_id=-1, bos_id=-1, control_symbols=["<|endoftext|>"])
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.eod == 1  # after <unk>


def test_a_model_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    model = train(tmp_path / "m.model", vocab_size=40, eos_id=-1)
    with pytest.raises(ValueError, match=r"--tokenizer-model .*m\.model has no end-of-document piece"):
        SentencePieceTokenizer(model)


def test_a_piece_that_merely_is_the_unknown_one_is_not_taken_for_the_end(tmp_path: Path) -> None:
    """piece_to_id answers every unknown piece with the id of <unk>, which must never become the EOD."""
    model = train(tmp_path / "m.model", vocab_size=40, eos_id=-1, unk_id=3, bos_id=0, pad_id=1, control_symbols=["x"])
    with pytest.raises(ValueError, match="no end-of-document piece"):
        SentencePieceTokenizer(model)


def test_a_pad_piece_is_known(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(train(tmp_path / "m.model", vocab_size=40, pad_id=3))
    assert (tokenizer.pad, tokenizer.eod) == (3, 2)


@given(st.text())
def test_a_lossless_model_gives_back_every_text(lossless: SentencePieceTokenizer, text: str) -> None:
    ids = lossless.encode(text)
    assert lossless.decode(ids) == text
    assert all(0 <= token < lossless.vocab_size for token in ids)
    assert lossless.eod not in ids


@given(st.text(alphabet="▁ \nthe"))
def test_a_lossless_model_keeps_sentencepieces_own_space_symbol(lossless: SentencePieceTokenizer, text: str) -> None:
    assert lossless.decode(lossless.encode(text)) == text


def test_other_models_keep_what_they_were_trained_for() -> None:
    tokenizer = SentencePieceTokenizer(mistral_model())
    assert tokenizer.encode("a▁b") == tokenizer.encode("a b")


def test_a_lone_surrogate_is_refused_in_words(lossless: SentencePieceTokenizer) -> None:
    with pytest.raises(ValueError, match=r"character 2 of the text is the lone surrogate U\+D83D"):
        lossless.encode("ab\ud83d")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "--tokenizer-model .*none.model does not exist"), (b"{}", "not a SentencePiece model")],
)
def test_a_missing_or_foreign_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "none.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        SentencePieceTokenizer(path)


def test_the_fingerprint_is_of_the_content_not_of_the_path(tmp_path: Path) -> None:
    copy = tmp_path / "other-name.model"
    copy.write_bytes(BOTCHAN_MODEL.read_bytes())
    assert SentencePieceTokenizer(copy).fingerprint() == SentencePieceTokenizer(BOTCHAN_MODEL).fingerprint()
    assert SentencePieceTokenizer(copy).fingerprint() != SentencePieceTokenizer(mistral_model()).fingerprint()
