"""From flags to a tokenizer."""

from pathlib import Path
from typing import Any, get_args

import pytest

from megatron.config.tokenizer import TokenizerConfig, TokenizerType
from megatron.tokenizer.build import _BUILDERS, build_tokenizer
from tests.helpers.tokenizer_files import (
    BERT_VOCABULARY,
    BOTCHAN_MODEL,
    gpt2_merge_file,
    gpt2_vocab_file,
    mistral_model,
)

GPT2 = {"vocab_file": str(gpt2_vocab_file()), "merge_file": str(gpt2_merge_file())}


def test_every_type_that_can_be_asked_for_can_be_built() -> None:
    assert set(_BUILDERS) == set(get_args(TokenizerType))


@pytest.mark.parametrize(
    ("tokenizer_type", "options", "vocab_size", "eod"),
    [
        ("GPT2BPETokenizer", GPT2, 50257, 50256),
        ("SentencePieceTokenizer", {"tokenizer_model": str(BOTCHAN_MODEL)}, 1000, 2),
        ("GPTSentencePieceTokenizer", {"tokenizer_model": str(BOTCHAN_MODEL)}, 1000, 2),
        ("Llama2Tokenizer", {"tokenizer_model": str(mistral_model())}, 32000, 2),
        ("BertWordPieceLowerCase", {"vocab_file": str(BERT_VOCABULARY)}, 30522, 102),
        ("BertWordPieceCase", {"vocab_file": str(BERT_VOCABULARY)}, 30522, 102),
        ("NullTokenizer", {"vocab_size": 512}, 512, 511),
        ("NullTokenizer", {"vocab_size": 512, "null_tokenizer_eod_id": 3}, 512, 3),
        ("ByteTokenizer", {}, 257, 256),
    ],
)
def test_a_tokenizer_is_built_from_local_files(
    tokenizer_type: TokenizerType, options: dict[str, Any], vocab_size: int, eod: int
) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=tokenizer_type, **options))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == (tokenizer_type, vocab_size, eod)


@pytest.mark.parametrize(
    ("tokenizer_type", "options", "ids"),
    [
        ("GPT2BPETokenizer", GPT2, {"<|endoftext|>": 50256, "\u0120the": 262, " the": None}),
        ("Llama2Tokenizer", {"tokenizer_model": str(mistral_model())}, {"</s>": 2, "<unk>": 0, "<fim_prefix>": None}),
        ("BertWordPieceCase", {"vocab_file": str(BERT_VOCABULARY)}, {"[SEP]": 102, "[sep]": None}),
        ("NullTokenizer", {"vocab_size": 512}, {"3": None}),
        ("ByteTokenizer", {}, {"a": None}),
    ],
)
def test_a_token_is_found_by_its_name_in_the_vocabulary(
    tokenizer_type: TokenizerType, options: dict[str, Any], ids: dict[str, int | None]
) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=tokenizer_type, **options))
    assert {token: tokenizer.token_id(token) for token in ids} == ids


@pytest.mark.parametrize(
    ("tokenizer_type", "options", "special", "ordinary"),
    [
        ("GPT2BPETokenizer", GPT2, 50256, 262),
        ("SentencePieceTokenizer", {"tokenizer_model": str(BOTCHAN_MODEL)}, 2, 300),
        ("BertWordPieceCase", {"vocab_file": str(BERT_VOCABULARY)}, 102, 2000),
        ("NullTokenizer", {"vocab_size": 512}, 511, 3),
        ("ByteTokenizer", {}, 256, 97),
    ],
)
def test_special_tokens_are_told_from_pieces_of_text(
    tokenizer_type: TokenizerType, options: dict[str, Any], special: int, ordinary: int
) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=tokenizer_type, **options))
    assert tokenizer.is_special(special)
    assert not tokenizer.is_special(ordinary)


def test_a_vocabulary_size_that_is_not_the_files_is_refused() -> None:
    config = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_size=50304, **GPT2)
    with pytest.raises(ValueError, match=r"--vocab-size 50304 contradicts .* 50257 ids.*--padded-vocab-size"):
        build_tokenizer(config)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(ValueError, match="is a folder"):
        build_tokenizer(config)
