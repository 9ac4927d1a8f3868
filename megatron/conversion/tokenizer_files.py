"""What a tokenizer's files make, where nothing but their names says what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.problems import UserError
from megatron.config.tokenizer import TokenizerConfig, TokenizerType
from megatron.conversion.whole_folder import read_json
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.kept_files import BESIDE, files_of

GENERATION = "generation_config.json"

_VOCABULARY, _MERGES, _SENTENCEPIECE, _TOKENIZERS = "vocab.json", "merges.txt", "tokenizer.model", "tokenizer.json"
_WORDPIECE, SETTINGS = "vocab.txt", "tokenizer_config.json"
# Whether a vocabulary of words is of small letters alone, by the kind of tokenizer.
_LOWER_CASE: Mapping[TokenizerType, bool] = {"BertWordPieceLowerCase": True, "BertWordPieceCase": False}


def files_in(folder: Path) -> dict[str, Path]:
    """What a folder has of a tokenizer, by name."""
    names = (_TOKENIZERS, _SENTENCEPIECE, _VOCABULARY, _MERGES, _WORDPIECE, *BESIDE)
    return {name: folder / name for name in names if (folder / name).is_file()}


def generation_of(config: TokenizerConfig, folder: Path) -> dict[str, Any]:
    """What `generation_config.json` says beside the tokenizer or in a folder; else the token that ends a document."""
    for place in [*{path.parent for path in files_of(config).values()}, folder]:
        if (place / GENERATION).is_file():
            return read_json(place / GENERATION)
    try:
        return {"eos_token_id": build_tokenizer(config).eod}
    except UserError:  # its files lie elsewhere now
        return {}


def settings_of(config: TokenizerConfig) -> dict[str, Any]:
    """What `tokenizer_config.json` must say of a tokenizer whose files do not tell all of it, where there is none."""
    if config.tokenizer_type not in _LOWER_CASE or SETTINGS in files_of(config):
        return {}
    return {"tokenizer_class": "BertTokenizer", "do_lower_case": _LOWER_CASE[config.tokenizer_type]}


def tokenizer_config(files: Mapping[str, Path], folder: Path, rows: int) -> TokenizerConfig:
    """The configuration of a tokenizer whose files are copied to a folder.

    Args:
        files: by name, where they are now.
        rows: of the model's vocabulary. More than the tokenizer has tokens are `--padded-vocab-size`; a tokenizer that
            can not be used, or has more tokens than the model, gives way to numbers alone (NullTokenizer).
    """
    wanted, lower_case = {name: folder / name for name in files}, _lower_case(files)
    for present, moved in zip(_possible(files, lower_case), _possible(wanted, lower_case), strict=True):
        try:
            size = build_tokenizer(present).vocab_size
        except UserError:
            continue
        if size <= rows:
            return replace(moved, padded_vocab_size=None if size == rows else rows)
    return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=rows)


def _lower_case(files: Mapping[str, Path]) -> bool:
    """Whether a vocabulary of words is of small letters alone, as Hugging Face's tokenizer takes it."""
    settings = read_json(files[SETTINGS]) if SETTINGS in files else {}
    return bool(settings.get("do_lower_case", True))


def _possible(files: Mapping[str, Path], lower_case: bool) -> list[TokenizerConfig]:
    """The tokenizers that some files make, the most exact first.

    Args:
        lower_case: whether a vocabulary of words is of small letters alone.
    """
    found = []
    if _TOKENIZERS in files:
        folder = str(files[_TOKENIZERS].parent)
        found.append(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder))
    if _SENTENCEPIECE in files:
        path = str(files[_SENTENCEPIECE])
        found.append(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path))
    if _VOCABULARY in files and _MERGES in files:
        vocabulary, merges = str(files[_VOCABULARY]), str(files[_MERGES])
        found.append(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges))
    if _WORDPIECE in files:
        (kind,) = (kind for kind, lower in _LOWER_CASE.items() if lower == lower_case)
        found.append(TokenizerConfig(tokenizer_type=kind, vocab_file=str(files[_WORDPIECE])))
    return found
