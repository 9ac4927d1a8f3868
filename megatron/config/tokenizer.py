"""The tokenizer and the size of its vocabulary in the model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron.config.options import LARGEST_VOCABULARY, flag, flag_name, shown_value
from megatron.config.problems import Problem, some_of, words_or

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
]
TiktokenPattern = Literal["v1", "v2", "llama3"]
# The files (and sizes) that each type is made from, and how such files end.
_NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "GPT2BPETokenizer": {"vocab_file": (".json",), "merge_file": (".txt",)},
    "SentencePieceTokenizer": {"tokenizer_model": (".model",)},
    "GPTSentencePieceTokenizer": {"tokenizer_model": (".model",)},
    "Llama2Tokenizer": {"tokenizer_model": (".model",)},
    "HuggingFaceTokenizer": {"tokenizer_model": (".json",)},
    "BertWordPieceLowerCase": {"vocab_file": (".txt",)},
    "BertWordPieceCase": {"vocab_file": (".txt",)},
    "TikTokenizer": {"tokenizer_model": (".json", ".model")},
    "ByteTokenizer": {},
    "NullTokenizer": {"vocab_size": ()},
}
# The types of which --vocab-size decides how many ids they have; the others have what their files say.
SIZED_TYPES = ("NullTokenizer", "TikTokenizer")
# The fields that name files: paths, which another machine may have elsewhere.
TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """What turns text into tokens."""

    tokenizer_type: TokenizerType = field(
        metadata=flag(
            "Kind of tokenizer.",
            affects="input",
            later=(
                "BertWordPieceTokenizer",
                "MultimodalTokenizer",
                "NullMultimodalTokenizer",
                "SFTTokenizer",
            ),
        )
    )
    vocab_file: str | None = field(
        default=None, metadata=flag("vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPiece*.", metavar="FILE")
    )
    merge_file: str | None = field(default=None, metadata=flag("Merges of GPT2BPETokenizer.", metavar="FILE"))
    tokenizer_model: str | None = field(
        default=None,
        metadata=flag(
            "SentencePiece .model; tokenizer.json (or its folder) of HuggingFaceTokenizer; .json or .model of "
            "TikTokenizer.",
            aliases=("--tokenizer-path",),
            metavar="FILE",
        ),
    )
    tokenizer_hf_include_special_tokens: bool = field(
        default=True,
        metadata=flag(
            "Keep the special tokens that BertWordPiece* and HuggingFaceTokenizer put round a text.",
            off="--tokenizer-hf-no-include-special-tokens",
            off_help="Leave out what BertWordPiece* and HuggingFaceTokenizer put round a text ([CLS] ... [SEP]).",
            affects="input",
        ),
    )
    tiktoken_pattern: TiktokenPattern | None = field(
        default=None,
        metadata=flag(
            "How TikTokenizer cuts texts; when not given, v2 with a .json file and llama3 with a .model file.",
            affects="input",
        ),
    )
    tiktoken_num_special_tokens: int | None = field(
        default=None,
        metadata=flag(
            "Special tokens of TikTokenizer; when not given, 1000 with a .json file and 256 with a .model file.",
            affects="tensors",
            at_least=1,
            at_most=1_000_000,
        ),
    )
    tiktoken_special_tokens: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "The first special tokens of TikTokenizer, one of which ends a document; when not given, the usual ones.",
            words="+",
            metavar="TOKEN ...",
            affects="input",
        ),
    )
    vocab_size: int | None = field(
        default=None,
        metadata=flag(
            "Vocabulary of NullTokenizer, or what TikTokenizer uses of its file; others know what it must be.",
            affects="tensors",
            at_least=1,
            at_most=LARGEST_VOCABULARY,
        ),
    )
    make_vocab_size_divisible_by: int = field(
        default=128, metadata=flag("Pad the vocabulary to a multiple of this x TP.", at_least=1, at_most=1_000_000)
    )
    padded_vocab_size: int | None = field(
        default=None,
        metadata=flag(
            "Vocabulary rows of the model itself, instead of the tokenizer's size.",
            affects="tensors",
            at_least=1,
            at_most=LARGEST_VOCABULARY,
        ),
    )
    null_tokenizer_eod_id: int | None = field(
        default=None,
        metadata=flag("End-of-document id of NullTokenizer; the last when not given.", affects="input", at_least=0),
    )
    null_tokenizer_pad_id: int = field(default=-1, metadata=flag("Padding id of NullTokenizer; -1: none.", at_least=-1))

    @property
    def shown(self) -> str:
        """For messages, the flags of its files, or of its type where it has none."""
        paths = {field: getattr(self, field) for field in TOKENIZER_FILES}
        files = " ".join(f"{flag_name(field)} {path}" for field, path in paths.items() if path is not None)
        return files or f"--tokenizer-type {self.tokenizer_type}"

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section, files aside."""
        needs = _NEEDS[self.tokenizer_type]
        for name in needs:
            if getattr(self, name) is None:
                yield Problem(
                    flags=(flag_name(name), "--tokenizer-type"),
                    rule=f"not given, and {self.tokenizer_type} is made from "
                    f"{' and '.join(flag_name(need) for need in needs)}",
                    works=f"{flag_name(name)} {'N' if name == 'vocab_size' else 'FILE'}",
                )
        for name in TOKENIZER_FILES:
            if name not in needs and getattr(self, name) is not None:
                users = [kind for kind, uses in _NEEDS.items() if name in uses]
                yield Problem(
                    flags=(flag_name(name), "--tokenizer-type"),
                    value=getattr(self, name),
                    rule=f"{self.tokenizer_type} does not use it",
                    works=f"leave out {flag_name(name)}; or --tokenizer-type {users[0]}",
                )
        yield from self._size_problems()
        yield from self._tiktoken_problems()

    def _size_problems(self) -> Iterator[Problem]:
        size, padded, eod = self.vocab_size, self.padded_vocab_size, self.null_tokenizer_eod_id
        if size is not None and padded is not None and padded < size:
            yield Problem(
                flags=("--padded-vocab-size", "--vocab-size"),
                value=padded,
                rule=f"must not be less than --vocab-size {size}",
                works=f"--padded-vocab-size {size} or more; or leave it out",
            )
        null = self.tokenizer_type == "NullTokenizer"
        for name, value, default in (
            ("--null-tokenizer-eod-id", eod, None),
            ("--null-tokenizer-pad-id", self.null_tokenizer_pad_id, -1),
        ):
            if value == default or value is None:
                continue
            if not null:
                yield Problem(
                    flags=(name, "--tokenizer-type"),
                    value=value,
                    rule=f"belongs to NullTokenizer, and --tokenizer-type is {self.tokenizer_type}",
                    works=f"leave out {name}",
                )
            elif size is not None and not 0 <= value < size:
                yield Problem(
                    flags=(name, "--vocab-size"),
                    value=value,
                    rule=f"must be a token: at least 0, less than --vocab-size {size}",
                    works=f"{name} {size - 1}, or --vocab-size {max(value, 0) + 1} or more",
                )

    def _tiktoken_problems(self) -> Iterator[Problem]:
        special, number = self.tiktoken_special_tokens, self.tiktoken_num_special_tokens
        for name in ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"):
            value = getattr(self, name)
            if value and self.tokenizer_type != "TikTokenizer":
                yield Problem(
                    flags=(flag_name(name), "--tokenizer-type"),
                    value=shown_value(value),
                    rule=f"belongs to TikTokenizer, and --tokenizer-type is {self.tokenizer_type}",
                    works=f"leave out {flag_name(name)}",
                )
        twice = sorted({token for token in special if special.count(token) > 1})
        if twice:
            yield Problem(
                flags=("--tiktoken-special-tokens",),
                value=shown_value(special),
                rule=f"{' and '.join(twice)} must stand there once",
                works=f"--tiktoken-special-tokens {' '.join(dict.fromkeys(special))}",
            )
        if number is not None and number < len(special):
            yield Problem(
                flags=("--tiktoken-num-special-tokens", "--tiktoken-special-tokens"),
                value=number,
                rule=f"must not be less than the {len(special)} that are named",
                works=f"--tiktoken-num-special-tokens {len(special)} or more",
            )

    def file_problems(self) -> Iterator[Problem]:
        """Tokenizer files that are not there."""
        for name, endings in _NEEDS[self.tokenizer_type].items():
            value = getattr(self, name)
            if name not in TOKENIZER_FILES or value is None or Path(value).is_file():
                continue
            if name == "tokenizer_model" and self.tokenizer_type == "HuggingFaceTokenizer" and Path(value).is_dir():
                if (Path(value) / "tokenizer.json").is_file():
                    continue
                yield Problem(
                    flags=(flag_name(name),),
                    value=value,
                    rule="the folder has no tokenizer.json",
                    works="the folder of a model saved with a fast tokenizer",
                )
                continue
            yield Problem(
                flags=(flag_name(name),),
                value=value,
                rule="is a folder, a file is needed" if Path(value).is_dir() else "no such file",
                works=_file_advice(Path(value), endings=endings),
            )


def padded_vocab_size(vocab_size: int, make_divisible_by: int, tensor_parallel_size: int) -> int:
    """The vocabulary rounded up to a multiple of make_divisible_by x tensor_parallel_size (Megatron-LM)."""
    multiple = make_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def _file_advice(path: Path, *, endings: Sequence[str]) -> str:
    """The files of such endings that lie there, those of names like this one first."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"an existing file; there is no folder {folder} either (paths are relative to {Path.cwd()})"
    shown = (entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    names = sorted(entry.name for entry in shown if entry.suffix in endings)
    near = difflib.get_close_matches(path.name, names, n=5)
    files = near + [name for name in names if name not in near]
    kind = words_or(endings)
    return f"in {folder} are {some_of(files)}" if files else f"an existing file; {folder} has none that ends in {kind}"
