"""The files of a tokenizer as a checkpoint keeps them, so that its model can be used where nothing else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.config.tokenizer import TOKENIZER_FILES, TokenizerConfig
from megatron.core.whole_file import make_folder, whole_file

TOKENIZER_FOLDER = "tokenizer"  # beside the iterations
# What lies beside the files that flags name, and is read or needed elsewhere with them.
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")

_VOCABULARIES = {
    "GPT2BPETokenizer": "vocab.json",
    "BertWordPieceLowerCase": "vocab.txt",
    "BertWordPieceCase": "vocab.txt",
}
_MODELS = {"HuggingFaceTokenizer": "tokenizer.json", "TikTokenizer": "tiktoken.model"}


def files_of(config: TokenizerConfig) -> dict[str, Path]:
    """The files of a training's tokenizer that are there, and what lies beside them, by the names they are kept by."""
    found = {}
    for field in TOKENIZER_FILES:
        value = getattr(config, field)
        if value is not None:
            name = _kept_name(config, field)
            path = Path(value) / name if Path(value).is_dir() else Path(value)
            if path.is_file():
                found[name] = path
    beside = [folder / name for folder in {path.parent for path in found.values()} for name in BESIDE]
    return found | {path.name: path for path in beside if path.is_file()}


def keep_files(config: TokenizerConfig, folder: Path) -> None:
    """Write copies of a tokenizer's files to a folder; one without files needs none.

    Each is whole or not there, but not all of them together: a start that ends in between leaves some of another
    tokenizer, and the next start replaces them. What lay beside the files of another one is removed, as this one would
    be read with it; the files themselves stay where they have other names, for the checkpoints that need them.

    Raises:
        OSError: one cannot be read, written or removed.
    """
    files = files_of(config)
    for name in set(BESIDE) - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, path in files.items():
        content = path.read_bytes()
        make_folder(folder)
        if not (folder / name).is_file() or (folder / name).read_bytes() != content:
            with whole_file(folder / name) as file:
                file.write(content)


def kept_in(config: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """The tokenizer from the copies in a folder, where all of its files are there; else as it is."""
    kept = {
        field: folder / _kept_name(config, field) for field in TOKENIZER_FILES if getattr(config, field) is not None
    }
    if not all(path.is_file() for path in kept.values()):
        return config
    return replace(config, **{field: str(path) for field, path in kept.items()})  # type: ignore[arg-type]


def _kept_name(config: TokenizerConfig, field: str) -> str:
    if field == "merge_file":
        return "merges.txt"
    if field == "vocab_file":
        return _VOCABULARIES[config.tokenizer_type]
    return _MODELS.get(config.tokenizer_type, "tokenizer.model")
