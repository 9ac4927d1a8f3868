"""From the data flags of a run to its training, validation and test samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.config.data import Blend, DataConfig, parse_blend
from megatron.config.problems import UserError, counted
from megatron.data.blended_dataset import BlendedDataset, BlockedDataset, blend_by_size, blend_by_weights, block_seed
from megatron.data.gpt_dataset import GPTDataset, build_gpt_index
from megatron.data.index_cache import IndexCache, user_cache_folder
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.mock_dataset import MockTokens
from megatron.data.sample_dataset import SampleDataset, TokenSource
from megatron.data.splits import Split, normalize, split_ranges

logger = logging.getLogger(__name__)

Requested = int | Sequence[int] | None
"""Samples wanted of a split: a number; the sizes of its blocks, none for no dataset; None for one pass over it."""

GPTDatasets = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]


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
class _Recipe:
    """What all datasets of a run have in common."""

    data: DataConfig
    shape: SampleShape
    vocab_size: int

    @property
    def cache_folder(self) -> Path | None:
        return None if self.data.data_cache_path is None else Path(self.data.data_cache_path)

    def open(self, prefix: str) -> IndexedDataset:
        return IndexedDataset(prefix, mmap=self.data.mmap_bin_files)

    def index_cache(self, source: TokenSource) -> IndexCache:
        if isinstance(source, MockTokens):
            return IndexCache(self.cache_folder)
        beside_data = Path(source.prefix) / "cache" / "GPTDataset_indices"
        return IndexCache(self.cache_folder, defaults=(beside_data, user_cache_folder()))

    def dataset(
        self, source: TokenSource, split: Split, elements: range, requested: int | None, seed: int, share: str
    ) -> GPTDataset:
        """One split of one source. `share` says in messages where `elements` comes from."""
        tokens = int(source.sequence_lengths[elements.start : elements.stop].sum(dtype=np.int64))
        if requested and tokens == 0:
            raise UserError(_empty_split(source, split, elements, requested, share))
        index = build_gpt_index(
            source,
            elements,
            split=split,
            requested=requested,
            seed=seed,
            sequence_length=self.data.seq_length,
            extra_tokens=self.shape.extra_tokens,
            keep_last=split is Split.VALID and self.shape.keep_last_of_valid,
            cache=self.index_cache(source),
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

    def blend(
        self,
        blend: Blend,
        sources: Sequence[TokenSource],
        split: Split,
        elements: Sequence[range],
        requested: int | None,
        seed: int,
        share: str,
    ) -> SampleDataset:
        """One split of a blend; Megatron-LM's numbers of samples for it and for its parts."""
        parts = list(zip(sources, elements))
        if blend.weights is None:
            datasets = [self.dataset(source, split, documents, None, seed, share) for source, documents in parts]
            mixed = blend_by_size(datasets, blend.prefixes, requested, IndexCache(self.cache_folder))
            if requested and not len(mixed):
                raise UserError(
                    f"{share} leaves {split.value} no sample in any of {', '.join(blend.prefixes)}, but "
                    f"{requested} are requested; {_REMEDY[split]}"
                )
            return mixed
        if requested is None:
            raise UserError(
                f"the weights {list(blend.weights)} of {split.value} need a number of samples; give it, or "
                "leave the weights out"
            )
        shares = normalize(list(blend.weights))
        targets = [math.ceil(requested * weight) for weight in shares]
        datasets = [
            self.dataset(
                source, split, documents, math.ceil(target * (1 + self.data.mid_level_dataset_surplus)), seed, share
            )
            for (source, documents), target in zip(parts, targets)
        ]
        return blend_by_weights(datasets, blend.prefixes, shares, sum(targets), IndexCache(self.cache_folder))


_REMEDY = {
    Split.TRAIN: "give training a larger share",
    Split.VALID: "give validation a larger share or a dataset of its own (--valid-data-path), or evaluate on "
    "none (--eval-iters 0)",
    Split.TEST: "give the test a larger share or a dataset of its own (--test-data-path), or evaluate on "
    "none (--eval-iters 0)",
}


def _empty_split(source: TokenSource, split: Split, elements: range, requested: int, share: str) -> str:
    total = len(source.sequence_lengths)
    return (
        f"{share} leaves {split.value} {len(elements)} of the {total} documents of {source.prefix}, without "
        f"a token, but {requested} samples are requested; {_REMEDY[split]}"
    )


def build_gpt_datasets(
    data: DataConfig,
    *,
    num_samples: tuple[Requested, Requested, Requested],
    seed: int,
    vocab_size: int,
    eod: int,
    shape: SampleShape = SampleShape(),
) -> GPTDatasets:
    """The training, validation and test samples of a run, in Megatron-LM's order for the same seed.

    The data comes from one blend that `--split` divides, from a blend for each split, or is made up. Needs no
    process group: every process that calls it gets the same datasets, and those that share a file system
    share the work.

    Args:
        data: free of problems.
        num_samples: of training, validation and test; the order depends on them. Several numbers are blocks,
            see `BlockedDataset`, and give a dataset of exactly their sum; a single number gives at least that many.
        seed: of the order.
        vocab_size: ids must be below it.
        eod: end-of-document id, for mock data.

    Returns:
        (train, valid, test); None for a split that has no data by choice (a share of 0, no path, or no block).

    Raises:
        UserError: a split can not give the samples requested of it.
        IndexedDatasetError: a file is missing or damaged.
    """
    trains = _wanted(num_samples[0])
    assert not (problems := [*data.problems(), *data.source_problems(trains=trains)]), problems
    recipe = _Recipe(data=data, shape=shape, vocab_size=vocab_size)
    own = [parse_blend(path) for path in (data.train_data_path, data.valid_data_path, data.test_data_path)]
    if any(own):
        return _build_own(recipe, own, num_samples, seed)
    return _build_shared(recipe, num_samples, seed, eod)


def _build_own(
    recipe: _Recipe,
    own: Sequence[Blend | None],
    num_samples: tuple[Requested, Requested, Requested],
    seed: int,
) -> GPTDatasets:
    """Each split from a blend of its own, whole."""

    def build(split: Split, blend: Blend | None, requested: Requested) -> SampleDataset | None:
        if blend is None or not _wanted(requested):
            return None
        sources = [recipe.open(prefix) for prefix in blend.prefixes]
        elements = [range(len(source)) for source in sources]
        share = f"--{split.value}-data-path"
        if len(sources) == 1:
            return _blocks(requested, seed, lambda n, s: recipe.dataset(sources[0], split, elements[0], n, s, share))
        return _blocks(requested, seed, lambda n, s: recipe.blend(blend, sources, split, elements, n, s, share))

    train, valid, test = (build(*one) for one in zip(Split, own, num_samples))
    return train, valid, test


def _build_shared(
    recipe: _Recipe, num_samples: tuple[Requested, Requested, Requested], seed: int, eod: int
) -> GPTDatasets:
    """All splits from one blend, or from mock data where there is none."""
    data, shared = recipe.data, parse_blend(recipe.data.data_path)
    sources: list[TokenSource]
    if shared is None:
        sources = [MockTokens(vocab_size=recipe.vocab_size, eod=eod)]
    else:
        sources = [recipe.open(prefix) for prefix in shared.prefixes]
    if data.split is None:
        logger.info("--split is not given: %s", data.split_text)
    ranges = [split_ranges(data.split_weights, len(source.sequence_lengths)) for source in sources]
    share = f"--split {data.split_text!r}"

    def build(number: int, split: Split, requested: Requested) -> SampleDataset | None:
        elements = [parts for of_source in ranges if (parts := of_source[number]) is not None]
        if not elements or not _wanted(requested):
            return None
        if shared is None or (len(sources) == 1 and shared.weights is None):
            return _blocks(requested, seed, lambda n, s: recipe.dataset(sources[0], split, elements[0], n, s, share))
        return _blocks(requested, seed, lambda n, s: recipe.blend(shared, sources, split, elements, n, s, share))

    train, valid, test = (build(number, *one) for number, one in enumerate(zip(Split, num_samples)))
    return train, valid, test


def _wanted(requested: Requested) -> bool:
    return requested is None or isinstance(requested, int) or len(requested) > 0


def _blocks(requested: Requested, seed: int, build: Callable[[int | None, int], SampleDataset]) -> SampleDataset:
    """`build(requested, seed)`, or one for each of several requests, each with a seed of its own."""
    if requested is None or isinstance(requested, int):
        return build(requested, seed)
    blocks = []
    for number, size in enumerate(requested):
        if len(requested) > 1:
            logger.info("block %d of %d, for %s:", number + 1, len(requested), counted(size, "sample"))
        blocks.append(build(size, block_seed(seed, number)))
    return BlockedDataset(blocks, requested)


def token_sources(*splits: SampleDataset | None) -> tuple[TokenSource, ...]:
    """What the splits of a run are cut from, each source once."""
    found = {source.prefix: source for split in splits for source in _sources_of(split)}
    return tuple(found.values())


def _sources_of(dataset: SampleDataset | None) -> Iterator[TokenSource]:
    if isinstance(dataset, GPTDataset):
        yield dataset.source
    elif isinstance(dataset, BlendedDataset | BlockedDataset):
        for part in dataset.datasets if isinstance(dataset, BlendedDataset) else dataset.blocks:
            yield from _sources_of(part)
