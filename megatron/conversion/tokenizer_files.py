"""The files of a tokenizer, as Hugging Face names them, and as our configuration does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.problems import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.conversion.whole_folder import read_json
from megatron.tokenizer.build import build_tokenizer

GENERATION = "generation_config.json"

_VOCABULARY, _MERGES, _SENTENCEPIECE, _TOKENIZERS = "vocab.json", "merges.txt", "tokenizer.model", "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def files_in(folder: Path) -> dict[str, Path]:
    """What a folder has of a tokenizer, by name."""
    names = (_TOKENIZERS, _SENTENCEPIECE, _VOCABULARY, _MERGES, *_BESIDE)
    return {name: folder / name for name in names if (folder / name).is_file()}


def files_of(config: TokenizerConfig) -> dict[str, Path]:
    """The files of a training's tokenizer, and what lies beside them of one, by the names of Hugging Face."""
    named = {_VOCABULARY: config.vocab_file, _MERGES: config.merge_file}
    if config.tokenizer_model is not None:
        model = Path(config.tokenizer_model)
        name = _TOKENIZERS if config.tokenizer_type == "HuggingFaceTokenizer" else _SENTENCEPIECE
        named[name] = str(model / name) if model.is_dir() else str(model)
    found = {name: Path(path) for name, path in named.items() if path is not None and Path(path).is_file()}
    beside = [folder / name for folder in {path.parent for path in found.values()} for name in _BESIDE]
    return found | {path.name: path for path in beside if path.is_file()}


def generation_of(config: TokenizerConfig, folder: Path) -> dict[str, Any]:
    """What `generation_config.json` says beside the tokenizer or in a folder; else the token that ends a document."""
    for place in [*{path.parent for path in files_of(config).values()}, folder]:
        if (place / GENERATION).is_file():
            return read_json(place / GENERATION)
    try:
        return {"eos_token_id": build_tokenizer(config).eod}
    except UserError:  # its files lie elsewhere now
        return {}


def tokenizer_config(files: Mapping[str, Path], folder: Path, rows: int) -> TokenizerConfig:
    """The configuration of a tokenizer whose files are copied to a folder.

    Args:
        files: by name, where they are now.
        rows: of the model's vocabulary. More than the tokenizer has tokens are `--padded-vocab-size`; a tokenizer that
            can not be used, or has more tokens than the model, gives way to numbers alone (NullTokenizer).
    """
    wanted = {name: folder / name for name in files}
    for present, moved in zip(_possible(files), _possible(wanted), strict=True):
        try:
            size = build_tokenizer(present).vocab_size
        except UserError:
            continue
        if size <= rows:
            return replace(moved, padded_vocab_size=None if size == rows else rows)
    return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=rows)


def _possible(files: Mapping[str, Path]) -> list[TokenizerConfig]:
    """The tokenizers that some files make, the most exact first."""
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
    return found
