"""Whatever lies where a tokenizer's file should be: a tokenizer, or an error that names the flag and the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.config.problems import UserError
from megatron.config.tokenizer import TokenizerConfig, TokenizerType
from megatron.tokenizer.build import build_tokenizer
from tests.helpers.tokenizer_files import (
    BERT_VOCABULARY,
    BOTCHAN_MODEL,
    gpt2_merge_file,
    gpt2_vocab_file,
    mistral_model,
)
from tests.tokenizer.test_tiktoken_tokenizer import TOKENS, entries

# A file of each kind, in the form that one type reads.
WHOLE: dict[str, bytes] = {
    "GPT-2's vocabulary": gpt2_vocab_file().read_bytes(),
    "GPT-2's merges": gpt2_merge_file().read_bytes(),
    "a SentencePiece model": BOTCHAN_MODEL.read_bytes(),
    "BERT's vocabulary": BERT_VOCABULARY.read_bytes(),
    "tiktoken's JSON": json.dumps(entries(TOKENS)).encode(),
    "a tokenizer.json": json.dumps(
        {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "</s>"}}
    ).encode(),
}
READS: list[tuple[TokenizerType, str, str]] = [
    ("GPT2BPETokenizer", "vocab_file", "GPT-2's vocabulary"),
    ("GPT2BPETokenizer", "merge_file", "GPT-2's merges"),
    ("SentencePieceTokenizer", "tokenizer_model", "a SentencePiece model"),
    ("GPTSentencePieceTokenizer", "tokenizer_model", "a SentencePiece model"),
    ("Llama2Tokenizer", "tokenizer_model", "a SentencePiece model"),
    ("HuggingFaceTokenizer", "tokenizer_model", "a tokenizer.json"),
    ("BertWordPieceLowerCase", "vocab_file", "BERT's vocabulary"),
    ("BertWordPieceCase", "vocab_file", "BERT's vocabulary"),
    ("TikTokenizer", "tokenizer_model", "tiktoken's JSON"),
]
# What is left of a file, or stands in its place.
DAMAGE: dict[str, Any] = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "without its last byte": lambda whole: whole[:-1],
    "not UTF-8": lambda whole: b"\xff\xfe" + whole,
    "nulls": lambda whole: bytes(1000),
    "a page": lambda whole: b"<!DOCTYPE html><html>404</html>\n",
    "null": lambda whole: b"null",
    "a list": lambda whole: b"[1, 2, 3]",
    "an object": lambda whole: b'{"a": {"b": 1}}',
    "a number": lambda whole: b"1e999",
    "nested": lambda whole: b"[" * 100_000,
}
# Of these the rest is still a file of the kind, with a token less or one cut short.
STILL_WHOLE = {
    ("GPT-2's merges", "without its last byte"),
    ("BERT's vocabulary", "half"),
    ("BERT's vocabulary", "without its last byte"),
}


def build(kind: TokenizerType, files: Mapping[str, Path]) -> None:
    whole = {"vocab_file": gpt2_vocab_file(), "merge_file": gpt2_merge_file()} if kind == "GPT2BPETokenizer" else {}
    build_tokenizer(
        TokenizerConfig(tokenizer_type=kind, **{field: str(path) for field, path in {**whole, **files}.items()})
    )


def refused(kind: TokenizerType, field: str, path: Path) -> None:
    """The error names the flag and the file."""
    with pytest.raises(UserError) as raised:
        build(kind, {field: path})
    assert f"--{field.replace('_', '-')} {path}" in str(raised.value)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind, field, content", READS)
def test_a_damaged_file_is_refused_by_its_flag_and_name(
    tmp_path: Path, kind: TokenizerType, field: str, content: str, damage: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(DAMAGE[damage](WHOLE[content]))
    if (content, damage) in STILL_WHOLE:
        build(kind, {field: path})
    else:
        refused(kind, field, path)


@pytest.mark.parametrize("other", WHOLE)
@pytest.mark.parametrize("kind, field, content", READS)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, kind: TokenizerType, field: str, content: str, other: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE[other])
    if other == content:
        build(kind, {field: path})
    else:
        refused(kind, field, path)


@pytest.mark.parametrize("kind, field, content", READS)
def test_a_folder_and_nothing_are_refused(tmp_path: Path, kind: TokenizerType, field: str, content: str) -> None:
    refused(kind, field, tmp_path)
    refused(kind, field, tmp_path / "none")


def test_a_piece_of_a_model_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(mistral_model().read_bytes().replace(b"<0x41>", b"<0x\xff1>", 1))
    refused("SentencePieceTokenizer", "tokenizer_model", path)
