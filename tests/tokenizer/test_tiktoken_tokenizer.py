"""Byte-pair ranks in both forms: their ids, their special tokens, and files that are what they must be."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from megatron.tokenizer import tiktoken_tokenizer
from megatron.tokenizer.tiktoken_tokenizer import TikTokenizer
from tests.helpers.tokenizer_files import package_file

BYTES = [bytes([byte]) for byte in range(256)]
MERGED = [b"th", b"the", b" the", b"  ", b"\xc3\xa9", b"12", b"123"]
TOKENS = [*BYTES, *MERGED]


def entries(tokens: Sequence[bytes]) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]


def write_json(folder: Path, content: Any) -> Path:
    path = folder / "vocab.json"
    path.write_text(json.dumps(content))
    return path


def write_lines(folder: Path, tokens: Sequence[bytes] = TOKENS) -> Path:
    path = folder / "tokenizer.model"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TikTokenizer:
    return TikTokenizer(write_json(tmp_path_factory.mktemp("json"), entries(TOKENS)))


def test_a_published_vocabulary_gives_the_ids_of_its_own_program(tmp_path: Path) -> None:
    published = json.loads(package_file("mistral_common", "data/tekken_240718.json").read_bytes())
    vocabulary = published["vocab"][:20_000]
    theirs = Tekkenizer(
        vocab=vocabulary,
        special_tokens=list(Tekkenizer.DEPRECATED_SPECIAL_TOKENS),
        pattern=published["config"]["pattern"],
        vocab_size=21_000,
        num_special_tokens=1000,
        version=TokenizerVersion.v3,
    )
    ours = TikTokenizer(write_json(tmp_path, vocabulary))
    assert ours.vocab_size == 21_000
    for text in ("Hello world, 你好 😀", "if x:\n\treturn  12345\r\n", "l'été d'ÉCOLE   n'est\u00a0pas//\n\n"):
        assert ours.encode(text) == theirs.encode(text, bos=False, eos=False)


def test_the_special_tokens_of_json_stand_first_and_those_of_lines_last(small: TikTokenizer, tmp_path: Path) -> None:
    assert (small.vocab_size, small.eod, small.pad, small.cls, small.sep, small.mask) == (1263, 2, 4, 5, 6, 3)
    assert small.encode("the the") == [1257, 1258]
    lines = TikTokenizer(write_lines(tmp_path))
    assert (lines.vocab_size, lines.eod, lines.pad, lines.cls) == (519, 264, 267, None)
    assert lines.encode("the the") == [257, 258]
    assert lines.decode([263, 272, 273, 274, 518]) == (
        "<|begin_of_text|><|eot_id|><|python_tag|><|reserved_special_token_3|><|reserved_special_token_247|>"
    )


def test_a_literal_special_token_becomes_its_id(small: TikTokenizer) -> None:
    ids = small.encode("a</s>b<SPECIAL_999>")
    assert ids == [1097, 2, 1098, 999]
    assert small.decode(ids) == "a</s>b<SPECIAL_999>"


def test_a_token_is_found_by_its_name(small: TikTokenizer) -> None:
    assert small.token_id("</s>") == small.eod
    assert small.token_id("a") == small.encode("a")[0]
    assert small.token_id("<fim_prefix>") is None
    assert small.is_special(small.eod) and not small.is_special(small.encode("a")[0])


def test_a_pattern_decides_where_a_text_is_cut(tmp_path: Path) -> None:
    path = write_lines(tmp_path)
    assert TikTokenizer(path).encode("123") == [262]
    assert TikTokenizer(path, pattern="v1").encode("123") == [49, 50, 51]
    assert TikTokenizer(path, pattern="v2").fingerprint() != TikTokenizer(path, pattern="v1").fingerprint()


def test_special_tokens_can_be_named_and_counted(tmp_path: Path) -> None:
    path = write_json(tmp_path, entries(TOKENS))
    tokenizer = TikTokenizer(path, special_tokens=["<|im_start|>", "<|endoftext|>"], num_special_tokens=3)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (3 + len(TOKENS), 1, None)
    assert tokenizer.encode("a<|im_start|><SPECIAL_2>") == [3 + 97, 0, 2]


@pytest.mark.parametrize("special", [["<a>", "<b>"], ["</s>", "<|endoftext|>"]])
def test_exactly_one_special_token_must_end_a_document(tmp_path: Path, special: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--tiktoken-special-tokens: .* exactly one of"):
        TikTokenizer(write_json(tmp_path, entries(TOKENS)), special_tokens=special)


def test_more_special_tokens_than_their_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tiktoken-num-special-tokens 6 is less than the 7 special tokens"):
        TikTokenizer(write_json(tmp_path, entries(TOKENS)), num_special_tokens=6)


def test_a_vocabulary_size_takes_the_first_entries(tmp_path: Path) -> None:
    path = write_json(tmp_path, entries(TOKENS))
    tokenizer = TikTokenizer(path, vocab_size=1257)
    assert (tokenizer.vocab_size, tokenizer.encode("the")) == (1257, [1256, 1101])
    with pytest.raises(ValueError, match=r"--vocab-size 1264 is more than .* has: 263 tokens, and 1,000 special ones"):
        TikTokenizer(path, vocab_size=1264)
    with pytest.raises(ValueError, match="--vocab-size 1255 leaves no room for the 256 bytes"):
        TikTokenizer(path, vocab_size=1255)


def test_a_vocabulary_has_at_most_131072_ids_where_no_size_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiktoken_tokenizer._LARGEST_BY_DEFAULT == 131072
    monkeypatch.setattr(tiktoken_tokenizer, "_LARGEST_BY_DEFAULT", 1260)
    assert TikTokenizer(write_json(tmp_path, entries(TOKENS))).vocab_size == 1260


@given(st.text())
def test_every_text_comes_back(small: TikTokenizer, text: str) -> None:
    assert small.decode(small.encode(text)) == text


def test_half_a_character_decodes_to_the_replacement_character(small: TikTokenizer) -> None:
    assert small.decode([1000 + 0xE2, 1000 + 97]) == "\ufffda"


def test_an_id_that_does_not_exist_is_refused(small: TikTokenizer) -> None:
    with pytest.raises(ValueError, match="1263 is not an id of TikTokenizer"):
        small.decode([1263])


def test_a_lone_surrogate_is_refused_in_words(small: TikTokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83D"):
        small.encode("\ud83d")


def test_a_run_of_spaces_that_the_library_cannot_match_is_said_in_words(small: TikTokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"a text of 1,000,000 characters is too much for tiktoken .* shorten such runs"
    ):
        small.encode(" " * 1_000_000)


@pytest.mark.parametrize(
    "content, message",
    [
        ("[", "is not JSON"),
        ('{"config": {}, "vocab": []}', "is no tiktoken vocabulary: a list of"),
        (json.dumps([{"rank": 1, "token_bytes": "AA=="}]), "entry 0 must have the rank 0"),
        (json.dumps([{"rank": 0, "token_bytes": "é"}]), "entry 0: .* is not base64"),
        (json.dumps([{"rank": 0, "token_bytes": "\ud800"}]), "entry 0: .* is not base64"),
        (json.dumps(entries(BYTES[1:])), r"lacks 1 of the 256 bytes \(b'\\x00'\)"),
        (json.dumps(entries([*BYTES, b"a"])), "the token b'a' comes more than once"),
        ("", "lacks 256 of the 256 bytes"),
        (
            "IQ== 0\nIg== 2\n",
            r"line 2 must be a token in base64 and the rank 1, it is b'Ig== 2'; a SentencePiece model",
        ),
        ("I 0\n", "line 1: b'I' is not base64"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^--tokenizer-model {path}.*{message}"):
        TikTokenizer(path)


def test_the_library_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken_tokenizer, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package tiktoken, which is not installed: pip install tiktoken"):
        TikTokenizer("tokenizer.model")
