"""Which samples the model is trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from megatron.config.options import LONGEST_SEQUENCE, flag, flag_name
from megatron.config.problems import Problem, some_of

DEFAULT_SPLIT, EVEN_SPLIT = "969, 30, 1", "1, 1, 1"
_FIM_TOKEN_FIELDS = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token")
_BLEND = "[WEIGHT] PREFIX ..."
_FILE_OF_PARTS = "--per-split-data-args-path"
_PATH_FIELDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """The datasets of a blend.

    Attributes:
        prefixes: paths without .bin and .idx.
        weights: share of the samples that each gives, of any sum; None: as their sizes.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Corpora, how they are divided, and the shape of a sample."""

    data_path: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "Prefixes of .bin/.idx files, each after its weight when several are blended: 0.3 a 0.7 b.",
            words="+",
            metavar=_BLEND,
            affects="data",
            same_name=True,
            file_flags={"--data-args-path": ""},
        ),
    )
    train_data_path: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "The same for training only.",
            words="+",
            metavar=_BLEND,
            affects="data",
            same_name=True,
            file_flags={_FILE_OF_PARTS: "train"},
        ),
    )
    valid_data_path: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "The same for validation only.",
            words="+",
            metavar=_BLEND,
            same_name=True,
            file_flags={_FILE_OF_PARTS: "valid"},
        ),
    )
    test_data_path: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "The same for the test only.",
            words="+",
            metavar=_BLEND,
            same_name=True,
            file_flags={_FILE_OF_PARTS: "test"},
        ),
    )
    multiple_validation_sets: bool = field(
        default=False,
        metadata=flag("Evaluate on each dataset of --valid-data-path by itself, in place of a blend of them."),
    )
    validation_set_names: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "What the sets of --multiple-validation-sets are called in logs, in their order; by the last name of each "
            "prefix when not given.",
            words="+",
            metavar="NAME ...",
        ),
    )
    split: str | None = field(
        default=None,
        metadata=flag(
            "Shares of --data-path for training, validation and test; "
            f"{DEFAULT_SPLIT}, or equal parts with --mock-data, when not given.",
            words="+",
            metavar="TRAIN,VALID,TEST",
            affects="data",
            meaning="split_weights",
        ),
    )
    mock_data: bool = field(
        default=False,
        metadata=flag("Made-up documents whose tokens count up from 1, in place of a corpus.", affects="data"),
    )
    data_cache_path: str | None = field(
        default=None,
        metadata=flag("Folder of the index files; beside the data when not given.", metavar="DIR", node_local=True),
    )
    seq_length: int = field(
        metadata=flag(
            "Tokens of a sample.",
            affects="data",
            aliases=("--encoder-seq-length",),
            at_least=1,
            at_most=LONGEST_SEQUENCE,
        )
    )
    num_workers: int = field(
        default=2,
        metadata=flag("Threads of each rank that load data ahead; 0: when it is needed.", at_least=0, at_most=1000),
    )
    num_dataset_builder_threads: int = field(
        default=1,
        metadata=flag(
            "Datasets of a blend that are opened and indexed at the same time, where there are thousands of them.",
            at_least=1,
            at_most=1000,
        ),
    )
    reset_position_ids: bool = field(
        default=False, metadata=flag("Count positions from each document's start.", affects="input")
    )
    reset_attention_mask: bool = field(default=False, metadata=flag("Attend only within a document.", affects="input"))
    eod_mask_loss: bool = field(default=False, metadata=flag("No loss on end-of-document tokens.", affects="data"))
    dataloader_type: Literal["single", "cyclic"] = field(
        default="single",
        metadata=flag(
            "single: one shuffled order, made of as many epochs as the requested samples need; cyclic: one epoch over "
            "and over, shuffled anew each time.",
            affects="data",
            later=("external",),
        ),
    )
    mid_level_dataset_surplus: float = field(
        default=0.005, metadata=flag("Extra samples asked of each blended corpus.", affects="data", at_least=0, below=1)
    )
    mmap_bin_files: bool = field(
        default=True,
        metadata=flag("Map .bin files into memory.", off_help="Read .bin files in place of mapping them into memory."),
    )
    fim_data: bool = field(
        default=False,
        metadata=flag("Train on filling in the middle: move it behind the rest of a document.", affects="data"),
    )
    fim_rate: float = field(
        default=0.5,
        metadata=flag("Share of the documents whose middle is moved.", affects="data", at_least=0, at_most=1),
    )
    fim_spm_rate: float = field(
        default=0.5,
        metadata=flag(
            "Share of these with the suffix before the prefix, in place of behind it.",
            affects="data",
            at_least=0,
            at_most=1,
        ),
    )
    fim_split_sample: str | None = field(
        default=None,
        metadata=flag(
            "A token at which documents are cut to fragments, each with a middle of its own.", affects="data"
        ),
    )
    fim_fragment_rate: float | None = field(
        default=None,
        metadata=flag(
            "Of documents that are cut to fragments, the share of these whose middle is moved.",
            affects="data",
            at_least=0,
            at_most=1,
        ),
    )
    fim_no_prefix: str | None = field(
        default=None, metadata=flag("A text; what begins with it stays as it is.", affects="data")
    )
    fim_prefix_token: str = field(
        default="<fim_prefix>", metadata=flag("The token before what comes before the middle.", affects="data")
    )
    fim_middle_token: str = field(
        default="<fim_middle>", metadata=flag("The token before what is filled in.", affects="data")
    )
    fim_suffix_token: str = field(
        default="<fim_suffix>", metadata=flag("The token before what comes after the middle.", affects="data")
    )
    fim_pad_token: str = field(
        default="<fim_pad>",
        metadata=flag("The token that fills a sample which became shorter; no loss is on it.", affects="data"),
    )
    fim_eod_token: str | None = field(
        default=None,
        metadata=flag("The token between documents; that of the tokenizer when not given.", affects="data"),
    )

    @property
    def split_text(self) -> str:
        """--split, or what it is in Megatron-LM when it is not given."""
        if self.split is not None:
            return self.split
        return EVEN_SPLIT if self.mock_data else DEFAULT_SPLIT

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """The shares of training, validation and test, summing to 1. Raises ValueError for a bad --split."""
        return parse_split(self.split_text)

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section, files aside."""
        try:
            _ = self.split_weights
        except ValueError as error:
            yield Problem(
                flags=("--split",),
                value=repr(self.split),
                rule=str(error),
                works=f"--split {DEFAULT_SPLIT.replace(' ', '')} or --split 100,0,0",
            )
        for name in _PATH_FIELDS:
            try:
                parse_blend(getattr(self, name))
            except ValueError as error:
                yield Problem(
                    flags=(flag_name(name),),
                    rule=str(error),
                    works="one prefix; prefixes without weights; or a weight before every prefix",
                )

        yield from self._validation_problems()
        yield from self._fim_problems()

    def _validation_problems(self) -> Iterator[Problem]:
        """Whether validation sets can be told apart."""
        name = "--multiple-validation-sets"
        if not self.multiple_validation_sets:
            if self.validation_set_names:
                yield Problem(
                    flags=("--validation-set-names", name),
                    value=" ".join(self.validation_set_names),
                    rule=f"names the sets of {name}, which is not given",
                    works=f"{name}; or leave out --validation-set-names",
                )
            return
        try:
            blend = parse_blend(self.valid_data_path)
        except ValueError:  # which is reported already
            return
        if blend is None:
            yield Problem(
                flags=(name, "--valid-data-path"),
                rule="is about the datasets of --valid-data-path, which is not given",
                works=f"--valid-data-path PREFIX ..., or {_FILE_OF_PARTS} FILE",
            )
        elif blend.weights is not None:
            yield Problem(
                flags=("--valid-data-path", name),
                value=" ".join(self.valid_data_path),
                rule=f"has weights, and with {name} each dataset is evaluated by itself",
                works=f"--valid-data-path {' '.join(blend.prefixes)}",
            )
        elif self.validation_set_names and len(self.validation_set_names) != len(blend.prefixes):
            yield Problem(
                flags=("--validation-set-names", "--valid-data-path"),
                value=" ".join(self.validation_set_names),
                rule=f"is {len(self.validation_set_names)} names for the {len(blend.prefixes)} sets of "
                "--valid-data-path",
                works="a name for each set",
            )
        elif len(set(self.validation_sets)) < len(blend.prefixes):
            yield Problem(
                flags=("--validation-set-names", "--valid-data-path"),
                value=" ".join(self.validation_sets),
                rule="must tell the sets apart, and two are called the same",
                works="--validation-set-names with another name for each set",
            )

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """What the sets of --multiple-validation-sets are called."""
        return self.validation_set_names or tuple(Path(prefix).name for prefix in self.valid_data_path)

    def _fim_problems(self) -> Iterator[Problem]:
        """What of filling in the middle does not go together."""
        if not self.fim_data:
            for one in fields(self):
                if one.name.startswith("fim_") and getattr(self, one.name) != one.default:
                    yield Problem(
                        flags=(flag_name(one.name), "--fim-data"),
                        value=getattr(self, one.name),
                        rule="is about filling in the middle, and --fim-data is not given",
                        works=f"--fim-data; or leave out {flag_name(one.name)}",
                    )
            return
        if (self.fim_split_sample is None) != (self.fim_fragment_rate is None):
            given, missing = "--fim-split-sample", "--fim-fragment-rate"
            if self.fim_split_sample is None:
                given, missing = missing, given
            yield Problem(
                flags=(given, missing),
                value=self.fim_fragment_rate if self.fim_split_sample is None else self.fim_split_sample,
                rule=f"cuts documents to fragments only together with {missing}",
                works="--fim-split-sample TOKEN --fim-fragment-rate X; or leave out both",
            )
        tokens = {flag_name(one.name): getattr(self, one.name) for one in fields(self) if one.name in _FIM_TOKEN_FIELDS}
        if len(set(tokens.values())) < len(tokens):
            yield Problem(
                flags=tuple(tokens),
                value=self.fim_prefix_token,
                rule="and the other tokens of --fim-data must differ; they are "
                + ", ".join(f"{name} {token}" for name, token in tokens.items()),
                works="another token for each of them",
            )

    def source_problems(self, *, trains: bool = True) -> Iterator[Problem]:
        """Whether it is said, and once, where the samples of a run come from; of one that trains, or evaluates only."""
        parts = [flag_name(name) for name in _PATH_FIELDS[1:] if getattr(self, name)]
        yield from self._origin_problems(parts, trains=trains)
        if not trains:
            yield from self._evaluation_problems(parts)
        elif parts and not self.train_data_path and not self.data_path and not self.mock_data:
            yield Problem(
                flags=("--train-data-path", *parts),
                rule=f"there is nothing to train on: {' and '.join(parts)} give the other parts",
                works="--train-data-path PREFIX",
            )
        elif not parts and _shares(self)[0] == 0:
            yield Problem(
                flags=("--split",),
                value=self.split,
                rule="there is nothing to train on: the first share is 0",
                works=f"--split {DEFAULT_SPLIT.replace(' ', '')} or --split 100,0,0",
            )

    def _evaluation_problems(self, parts: Sequence[str]) -> Iterator[Problem]:
        """What leaves a run nothing that only evaluates."""
        if parts == ["--train-data-path"] and not self.data_path and not self.mock_data:
            yield Problem(
                flags=("--valid-data-path", "--test-data-path", *parts),
                rule="there is nothing to evaluate: --train-data-path gives the other part",
                works="--valid-data-path PREFIX or --test-data-path PREFIX",
            )
        elif not parts and not any(_shares(self)[1:]):
            yield Problem(
                flags=("--split",),
                value=self.split,
                rule="there is nothing to evaluate: the shares of validation and test are 0",
                works=f"--split {DEFAULT_SPLIT.replace(' ', '')} or --split 0,100,0",
            )

    def _origin_problems(self, parts: Sequence[str], *, trains: bool) -> Iterator[Problem]:
        """Whether samples come from exactly one of: a blend that is divided, a blend for each part, mock data."""
        if self.mock_data:
            for name in ["--data-path"] * bool(self.data_path) + list(parts):
                yield Problem(
                    flags=("--mock-data", name),
                    rule=f"takes the place of a corpus, and {name} names one",
                    works="one of the two",
                )
        elif self.data_path and parts:
            yield Problem(
                flags=("--data-path", *parts),
                rule=f"is divided by --split, and {' and '.join(parts)} give the parts themselves",
                works="--data-path with --split, or one path for each part",
            )
        elif not self.data_path and not parts:
            use, part = ("train on", "--train-data-path") if trains else ("evaluate", "--valid-data-path")
            yield Problem(
                flags=("--data-path", part, "--mock-data"),
                rule=f"there is nothing to {use}",
                works="--data-path PREFIX (of PREFIX.bin and PREFIX.idx, made by tools/preprocess_data.py), "
                f"{part} PREFIX, or --mock-data",
            )
        if parts and not self.data_path and self.split is not None:
            yield Problem(
                flags=("--split", *parts),
                value=self.split,
                rule=f"divides --data-path, and {' and '.join(parts)} give the parts themselves",
                works="leave out --split",
            )

    def file_problems(self) -> Iterator[Problem]:
        """Corpora that are not there."""
        for name in _PATH_FIELDS:
            try:
                blend = parse_blend(getattr(self, name))
            except ValueError:
                continue
            for prefix in dict.fromkeys(blend.prefixes if blend is not None else ()):
                missing = [prefix + end for end in (".bin", ".idx") if not Path(prefix + end).is_file()]
                if missing:
                    yield Problem(
                        flags=(flag_name(name),),
                        value=prefix,
                        rule=f"no file {' and no file '.join(missing)}",
                        works=_prefix_advice(prefix),
                    )


def _shares(data: DataConfig) -> tuple[float, float, float]:
    try:
        return data.split_weights
    except ValueError:  # which is reported already
        return 1 / 3, 1 / 3, 1 / 3


def parse_split(text: str) -> tuple[float, float, float]:
    """`969, 30, 1` as shares that sum to 1; parts not given are 0. Raises ValueError with the rule."""
    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part) for part in parts):
        raise ValueError("must be one to three numbers, none negative, with commas between")
    numbers = [float(part) for part in parts] + [0.0] * (3 - len(parts))
    if sum(numbers) <= 0:
        raise ValueError("at least one part must be more than 0")
    train, valid, test = (number / sum(numbers) for number in numbers)
    return train, valid, test


def parse_blend(words: Sequence[str]) -> Blend | None:
    """`prefix …` or `weight prefix weight prefix …`; None for no words. Raises ValueError with the rule."""
    if not words:
        return None
    numbers = [_as_number(word) for word in words]
    if len(words) < 2 or all(number is None for number in numbers):
        if numbers[0] is not None and not Path(words[0] + ".idx").exists():
            raise ValueError(f"{words[0]} is a weight without a prefix")
        return Blend(prefixes=tuple(words))
    if len(words) % 2 or any(number is None for number in numbers[::2]):
        wrong = next((word for word, number in zip(words[::2], numbers[::2], strict=True) if number is None), words[-1])
        raise ValueError(f"some prefixes have weights, so each needs one before it; at {wrong!r} that is not so")
    weights = tuple(number for number in numbers[::2] if number is not None)
    prefixes = tuple(words[1::2])
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not 0 < weight < float("inf"):
            raise ValueError(
                f"{weight:g} {prefix}: a weight must be a positive number; leave a dataset out to draw nothing from it"
            )
    if not sum(weights) < float("inf"):
        raise ValueError("the sum of the weights is more than a number can hold; only their shares in it count")
    return Blend(prefixes=prefixes, weights=weights)


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _prefix_advice(prefix: str) -> str:
    stem = re.sub(r"\.(bin|idx)$", "", prefix)
    if stem != prefix and Path(stem + ".idx").is_file():
        return f"{stem} (without the ending)"
    folder = Path(prefix).parent
    there = sorted(path.with_suffix("") for path in folder.glob("*.idx")) if folder.is_dir() else []
    if there:
        return f"in that folder are {some_of([str(path) for path in there])}"
    return "a prefix written by tools/preprocess_data.py"
