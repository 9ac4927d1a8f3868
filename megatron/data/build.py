"""From the data flags of a run to its training, validation and test samples."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from megatron.config.data import Blend, DataConfig, parse_blend
from megatron.config.problems import UserError, counted
from megatron.data.blended_dataset import BlendedDataset, BlockedDataset, blend_by_size, blend_by_weights, block_seed
from megatron.data.gpt_dataset import GPTDataset, build_gpt_index
from megatron.data.index_cache import IndexCache, user_cache_folder
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.mock_dataset import MockTokens
from megatron.data.sample_dataset import SampleDataset, TokenArray, TokenSource
from megatron.data.splits import Split, normalize, split_ranges

logger = logging.getLogger(__name__)

Requested = int | Sequence[int] | None
"""Samples wanted of a split: a number; the sizes of its blocks, none for no dataset; None for one pass over it."""

VALIDATION = "validation"  # what a validation set is called in logs, and how the name of one of several begins

Source = TypeVar("Source", bound=TokenSource)
Sample = TypeVar("Sample")
Made = TypeVar("Made")
Splits = tuple[SampleDataset[Sample] | None, Mapping[str, SampleDataset[Sample]], SampleDataset[Sample] | None]
"""Training, validation, test; None for a split that has no data by choice: a share of 0, no path, or no block.

Validation is one dataset, called "validation", or several, each "validation NAME", with `--multiple-validation-sets`;
nothing where it has no data by choice.
"""


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """What Megatron-LM lets a caller vary of samples, and all its trainings have alike.

    Attributes:
        extra_tokens: 1 for the label of the last token of a sample; 0: that label is left out.
        keep_last_of_valid: validation keeps its last, short sample.
    """

    extra_tokens: int = 1
    keep_last_of_valid: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC, Generic[Source, Sample]):
    """What all datasets of a run have in common, and how one of them is made."""

    data: DataConfig

    @abstractmethod
    def open(self, prefix: str) -> Source:
        """The corpus of a prefix."""

    @abstractmethod
    def mock(self) -> Source:
        """What `--mock-data` stands for."""

    @abstractmethod
    def size(self, source: Source) -> int:
        """Documents of a corpus, as `--split` counts them."""

    @abstractmethod
    def dataset(
        self, source: Source, split: Split, elements: range, requested: int | None, seed: int, share: str
    ) -> SampleDataset[Sample]:
        """One split of one source: the documents `elements`. `share` says in messages where these come from.

        Raises:
            UserError: samples are requested of documents that give none.
        """

    @property
    def cache_folder(self) -> Path | None:
        return None if self.data.data_cache_path is None else Path(self.data.data_cache_path)

    def index_cache(self, source: Source, beside_data: str) -> IndexCache:
        """The cache of an index of one source, by default in a folder beside the data."""
        if self.data.mock_data:
            return IndexCache(self.cache_folder)
        return IndexCache(
            self.cache_folder, defaults=(Path(source.prefix) / "cache" / beside_data, user_cache_folder())
        )

    def each(self, build: Callable[..., Made], *parts: Iterable[Any]) -> list[Made]:
        """`build` of each of the parts, in `--num-dataset-builder-threads` threads."""
        with ThreadPoolExecutor(self.data.num_dataset_builder_threads) as pool:
            return list(pool.map(build, *parts))

    def blend(
        self,
        blend: Blend,
        sources: Sequence[Source],
        split: Split,
        elements: Sequence[range],
        requested: int | None,
        seed: int,
        share: str,
    ) -> SampleDataset[Sample]:
        """One split of a blend; Megatron-LM's numbers of samples for it and for its parts."""
        if blend.weights is None:
            datasets = self.each(
                lambda source, documents: self.dataset(source, split, documents, None, seed, share), sources, elements
            )
            mixed = blend_by_size(datasets, blend.prefixes, requested, IndexCache(self.cache_folder))
            if requested and not len(mixed):
                raise UserError(
                    f"{share} leaves {split.value} no sample in any of {', '.join(blend.prefixes)}, but "
                    f"{requested} are requested; {REMEDY[split]}"
                )
            return mixed
        if requested is None:
            raise UserError(
                f"the weights {list(blend.weights)} of {split.value} need a number of samples; give it, or "
                "leave the weights out"
            )
        shares = normalize(list(blend.weights))
        targets = [math.ceil(requested * weight) for weight in shares]
        sizes = [math.ceil(target * (1 + self.data.mid_level_dataset_surplus)) for target in targets]
        datasets = self.each(
            lambda source, documents, size: self.dataset(source, split, documents, size, seed, share),
            *(sources, elements, sizes),
        )
        return blend_by_weights(datasets, blend.prefixes, shares, sum(targets), IndexCache(self.cache_folder))


REMEDY = {
    Split.TRAIN: "give training a larger share",
    Split.VALID: "give validation a larger share or a dataset of its own (--valid-data-path), or evaluate on "
    "none (--eval-iters 0)",
    Split.TEST: "give the test a larger share or a dataset of its own (--test-data-path), or evaluate on "
    "none (--eval-iters 0)",
}


@dataclass(frozen=True, kw_only=True)
class _GPTRecipe(Recipe[TokenSource, TokenArray]):
    shape: SampleShape
    vocab_size: int
    eod: int

    def open(self, prefix: str) -> TokenSource:
        corpus = IndexedDataset(prefix, mmap=self.data.mmap_bin_files, random_order=True)
        corpus.require_ids(self.vocab_size)
        return corpus

    def mock(self) -> TokenSource:
        return MockTokens(vocab_size=self.vocab_size, eod=self.eod)

    def size(self, source: TokenSource) -> int:
        return len(source.sequence_lengths)

    def dataset(
        self, source: TokenSource, split: Split, elements: range, requested: int | None, seed: int, share: str
    ) -> GPTDataset:
        tokens = int(source.sequence_lengths[elements.start : elements.stop].sum(dtype=np.int64))
        if requested and tokens == 0:
            raise UserError(
                f"{share} leaves {split.value} {len(elements)} of the {self.size(source)} documents of "
                f"{source.prefix}, without a token, but {requested} samples are requested; {REMEDY[split]}"
            )
        index = build_gpt_index(
            source,
            elements,
            split=split,
            requested=requested,
            seed=seed,
            sequence_length=self.data.seq_length,
            extra_tokens=self.shape.extra_tokens,
            keep_last=split is Split.VALID and self.shape.keep_last_of_valid,
            cache=self.index_cache(source, "GPTDataset_indices"),
        )
        dataset = GPTDataset(
            source, index, split=split, extra_tokens=self.shape.extra_tokens, vocab_size=self.vocab_size
        )
        epochs = len(index.document) // max(1, len(elements))
        report = logger.info if len(dataset) else logger.warning
        report(
            "%s: %s from %s of %s, %s, %s",
            split.value,
            counted(len(dataset), "sample"),
            counted(len(elements), "document"),
            source.prefix,
            counted(tokens, "token"),
            counted(epochs, "epoch"),
        )
        return dataset


def build_gpt_datasets(
    data: DataConfig,
    *,
    num_samples: tuple[Requested, Requested, Requested],
    seed: int,
    vocab_size: int,
    eod: int,
    shape: SampleShape = SampleShape(),
) -> Splits[TokenArray]:
    """The training, validation and test samples of a GPT: windows of ids. See `build_splits`.

    Args:
        vocab_size: ids must be below it.
        eod: end-of-document id, for mock data.
    """
    return build_splits(_GPTRecipe(data=data, shape=shape, vocab_size=vocab_size, eod=eod), num_samples, seed)


def build_splits(
    recipe: Recipe[Source, Sample], num_samples: tuple[Requested, Requested, Requested], seed: int
) -> Splits[Sample]:
    """The training, validation and test samples of a run, in Megatron-LM's order for the same seed.

    The data comes from one blend that `--split` divides, from a blend for each split, or is made up. Needs no
    process group: every process that calls it gets the same datasets, and those that share a file system
    share the work.

    Args:
        recipe: its configuration is free of problems.
        num_samples: of training, validation and test; the order depends on them. Several numbers are blocks,
            see `BlockedDataset`, and give a dataset of exactly their sum; a single number gives at least that many.
        seed: of the order.

    Raises:
        UserError: a split can not give the samples requested of it.
        IndexedDatasetError: a file is missing or damaged.
    """
    data, trains = recipe.data, _wanted(num_samples[0])
    assert not (problems := [*data.problems(), *data.source_problems(trains=trains)]), problems
    own = [parse_blend(path) for path in (data.train_data_path, data.valid_data_path, data.test_data_path)]
    if any(own):
        return _build_own(recipe, own, num_samples, seed)
    return _build_shared(recipe, num_samples, seed)


def _build_own(
    recipe: Recipe[Source, Sample],
    own: Sequence[Blend | None],
    num_samples: tuple[Requested, Requested, Requested],
    seed: int,
) -> Splits[Sample]:
    """Each split from a blend of its own, whole."""

    def build(split: Split, blend: Blend | None, requested: Requested) -> dict[str, SampleDataset[Sample]]:
        """By what each is called; of a split that is no validation the name has no meaning."""
        if blend is None or not _wanted(requested):
            return {}
        sources = recipe.each(recipe.open, blend.prefixes)
        elements = [range(recipe.size(source)) for source in sources]
        share = f"--{split.value}-data-path"
        if split is Split.VALID and recipe.data.multiple_validation_sets:
            assert requested is None or isinstance(requested, int)
            sets = recipe.each(
                lambda source, documents: recipe.dataset(source, split, documents, requested, seed, share),
                *(sources, elements),
            )
            return dict(zip((f"{VALIDATION} {name}" for name in recipe.data.validation_sets), sets, strict=True))
        if len(sources) == 1:
            alone = _blocks(requested, seed, lambda n, s: recipe.dataset(sources[0], split, elements[0], n, s, share))
        else:
            alone = _blocks(requested, seed, lambda n, s: recipe.blend(blend, sources, split, elements, n, s, share))
        return {VALIDATION: alone}

    train, valid, test = (build(*one) for one in zip(Split, own, num_samples))
    return train.get(VALIDATION), valid, test.get(VALIDATION)


def _build_shared(
    recipe: Recipe[Source, Sample], num_samples: tuple[Requested, Requested, Requested], seed: int
) -> Splits[Sample]:
    """All splits from one blend, or from mock data where there is none."""
    data, shared = recipe.data, parse_blend(recipe.data.data_path)
    sources = [recipe.mock()] if shared is None else recipe.each(recipe.open, shared.prefixes)
    if data.split is None:
        logger.info("--split is not given: %s", data.split_text)
    ranges = [split_ranges(data.split_weights, recipe.size(source)) for source in sources]
    share = f"--split {data.split_text!r}"

    def build(number: int, split: Split, requested: Requested) -> SampleDataset[Sample] | None:
        elements = [parts for of_source in ranges if (parts := of_source[number]) is not None]
        if not elements or not _wanted(requested):
            return None
        if shared is None or (len(sources) == 1 and shared.weights is None):
            return _blocks(requested, seed, lambda n, s: recipe.dataset(sources[0], split, elements[0], n, s, share))
        return _blocks(requested, seed, lambda n, s: recipe.blend(shared, sources, split, elements, n, s, share))

    train, valid, test = (build(number, *one) for number, one in enumerate(zip(Split, num_samples)))
    return train, {} if valid is None else {VALIDATION: valid}, test


def _wanted(requested: Requested) -> bool:
    return requested is None or isinstance(requested, int) or len(requested) > 0


def _blocks(
    requested: Requested, seed: int, build: Callable[[int | None, int], SampleDataset[Sample]]
) -> SampleDataset[Sample]:
    """`build(requested, seed)`, or one for each of several requests, each with a seed of its own."""
    if requested is None or isinstance(requested, int):
        return build(requested, seed)
    blocks = []
    for number, size in enumerate(requested):
        if len(requested) > 1:
            logger.info("block %d of %d, for %s:", number + 1, len(requested), counted(size, "sample"))
        blocks.append(build(size, block_seed(seed, number)))
    return BlockedDataset(blocks, requested)


@runtime_checkable
class _FromSource(Protocol):
    @property
    def source(self) -> TokenSource:
        """What the samples are cut from."""


def token_sources(*splits: SampleDataset[Any] | None) -> tuple[TokenSource, ...]:
    """What the splits of a run are cut from, each source once."""
    found = {source.prefix: source for split in splits for source in _sources_of(split)}
    return tuple(found.values())


def _sources_of(dataset: object) -> Iterator[TokenSource]:
    parts: Iterable[object] = ()
    if isinstance(dataset, BlendedDataset):
        parts = dataset.datasets
    elif isinstance(dataset, BlockedDataset):
        parts = dataset.blocks
    elif isinstance(dataset, _FromSource):
        yield dataset.source
    for part in parts:
        yield from _sources_of(part)
