"""From the data flags of a run to its training, validation and test samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.config.data import default_split, parse_split, source_problems
from megatron.config.data import parse_blend as read_blend
from megatron.config.problems import ConfigError, UserError
from megatron.data.blended_dataset import BlendedDataset, BlockedDataset, blend_by_size, blend_by_weights, block_seed
from megatron.data.gpt_dataset import GPTDataset, build_gpt_index
from megatron.data.index_cache import IndexCache, user_cache_folder
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.mock_dataset import MockTokens
from megatron.data.sample_dataset import SampleDataset, TokenSource
from megatron.data.splits import Split, normalize, split_ranges

logger = logging.getLogger(__name__)

Requested = int | Sequence[int] | None
"""Samples wanted of a split: a number; the sizes of its blocks; None for one pass over it."""

GPTDatasets = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]


@dataclass(frozen=True, kw_only=True)
class Blend:
    """The datasets of a blend.

    Attributes:
        prefixes: paths without .bin and .idx.
        weights: share of the samples that each gives, of any sum; None: as their sizes.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend | None:
    """Read `prefix …` or `weight prefix weight prefix …`; None for no words.

    Raises:
        ValueError: weights for only some of the prefixes, or a weight that is not positive.
    """
    if not words:
        return None
    try:
        prefixes, weights = read_blend(words)
    except ValueError as error:
        raise UserError(f"{flag} {' '.join(words)}: {error}") from None
    return Blend(prefixes=prefixes, weights=weights)


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What all datasets of a run have in common."""

    sequence_length: int
    vocab_size: int
    extra_tokens: int
    keep_last_of_valid: bool
    mmap: bool
    cache_folder: Path | None
    surplus: float

    def open(self, prefix: str) -> IndexedDataset:
        return IndexedDataset(prefix, mmap=self.mmap)

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
            sequence_length=self.sequence_length,
            extra_tokens=self.extra_tokens,
            keep_last=split is Split.VALID and self.keep_last_of_valid,
            cache=self.index_cache(source),
        )
        dataset = GPTDataset(source, index, split=split, extra_tokens=self.extra_tokens, vocab_size=self.vocab_size)
        epochs = len(index.document) // max(1, len(elements))
        report = logger.info if len(dataset) else logger.warning
        report(
            "%s: %d samples from %d documents of %s, %d tokens, %d epoch%s",
            split.value,
            len(dataset),
            len(elements),
            source.prefix,
            tokens,
            epochs,
            "" if epochs == 1 else "s",
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
            self.dataset(source, split, documents, math.ceil(target * (1 + self.surplus)), seed, share)
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
    *,
    num_samples: tuple[Requested, Requested, Requested],
    seq_length: int,
    seed: int,
    vocab_size: int,
    eod: int,
    data_path: Sequence[str] = (),
    train_data_path: Sequence[str] = (),
    valid_data_path: Sequence[str] = (),
    test_data_path: Sequence[str] = (),
    split: str | None = None,
    mock_data: bool = False,
    data_cache_path: str | Path | None = None,
    mid_level_dataset_surplus: float = 0.005,
    mmap_bin_files: bool = True,
    add_extra_token: bool = True,
    drop_last_partial_validation_sequence: bool = True,
) -> GPTDatasets:
    """The training, validation and test samples of a run, in Megatron-LM's order for the same seed.

    The data comes from one blend that `split` divides, from a blend for each split, or is made up. Needs no
    process group: every process that calls it gets the same datasets, and those that share a file system
    share the work.

    Args:
        num_samples: of training, validation and test; the order depends on them. Several numbers are blocks,
            see `BlockedDataset`, and give a dataset of exactly their sum; a single number gives at least that many.
        seq_length: tokens of a sample.
        seed: of the order.
        vocab_size: ids must be below it.
        eod: end-of-document id, for mock data.
        data_path: words of `--data-path`: prefixes, or weights and prefixes in turn.
        train_data_path: words of the blend of one split alone; likewise for the other two.
        split: `--split`; None: 969, 30, 1, for mock data in equal parts.
        mock_data: made-up documents in place of files.
        data_cache_path: folder of the indices; None: beside the data, else the user's cache, else memory.
        mid_level_dataset_surplus: how much more samples than its share a dataset of a blend is built with.
        mmap_bin_files: map .bin files; False: read them.
        add_extra_token: False: the label of the last token of a sample is left out.
        drop_last_partial_validation_sequence: False: validation keeps its last, short sample.

    Returns:
        (train, valid, test); None for a split that has no data by choice (a share of 0, or no path).

    Raises:
        ConfigError: the flags do not fit together.
        ValueError: a blend or split cannot be read, or a split can not give the samples requested of it.
        IndexedDatasetError: a file is missing or damaged.
    """
    shared = parse_blend(data_path)
    own = [
        parse_blend(train_data_path, "--train-data-path"),
        parse_blend(valid_data_path, "--valid-data-path"),
        parse_blend(test_data_path, "--test-data-path"),
    ]
    problems = list(
        source_problems(
            data_path=data_path,
            train_data_path=train_data_path,
            valid_data_path=valid_data_path,
            test_data_path=test_data_path,
            split=split,
            mock_data=mock_data,
        )
    )
    if problems:
        raise ConfigError(problems)
    recipe = _Recipe(
        sequence_length=seq_length,
        vocab_size=vocab_size,
        extra_tokens=int(add_extra_token),
        keep_last_of_valid=not drop_last_partial_validation_sequence,
        mmap=mmap_bin_files,
        cache_folder=None if data_cache_path is None else Path(data_cache_path),
        surplus=mid_level_dataset_surplus,
    )
    if any(own):
        return _build_own(recipe, own, num_samples, seed)
    return _build_shared(recipe, shared, split, num_samples, seed, eod)


def _build_own(
    recipe: _Recipe,
    own: Sequence[Blend | None],
    num_samples: tuple[Requested, Requested, Requested],
    seed: int,
) -> GPTDatasets:
    """Each split from a blend of its own, whole."""

    def build(split: Split, blend: Blend | None, requested: Requested) -> SampleDataset | None:
        if blend is None:
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
    recipe: _Recipe,
    shared: Blend | None,
    split_text: str | None,
    num_samples: tuple[Requested, Requested, Requested],
    seed: int,
    eod: int,
) -> GPTDatasets:
    """All splits from one blend, or from mock data where there is none."""
    sources: list[TokenSource]
    if shared is None:
        sources = [MockTokens(vocab_size=recipe.vocab_size, eod=eod)]
    else:
        sources = [recipe.open(prefix) for prefix in shared.prefixes]
    if split_text is None:
        split_text = default_split(mock_data=shared is None)
        logger.info("--split is not given: %s", split_text)
    try:
        shares = parse_split(split_text)
    except ValueError as error:
        raise UserError(f"--split {split_text!r}: {error}") from None
    ranges = [split_ranges(shares, len(source.sequence_lengths)) for source in sources]
    share = f"--split {split_text!r}"

    def build(number: int, split: Split, requested: Requested) -> SampleDataset | None:
        elements = [parts for of_source in ranges if (parts := of_source[number]) is not None]
        if not elements:
            return None
        if shared is None or (len(sources) == 1 and shared.weights is None):
            return _blocks(requested, seed, lambda n, s: recipe.dataset(sources[0], split, elements[0], n, s, share))
        return _blocks(requested, seed, lambda n, s: recipe.blend(shared, sources, split, elements, n, s, share))

    train, valid, test = (build(number, *one) for number, one in enumerate(zip(Split, num_samples)))
    return train, valid, test


def _blocks(requested: Requested, seed: int, build: Callable[[int | None, int], SampleDataset]) -> SampleDataset:
    """`build(requested, seed)`, or one for each of several requests, each with a seed of its own."""
    if requested is None or isinstance(requested, int):
        return build(requested, seed)
    return BlockedDataset([build(size, block_seed(seed, number)) for number, size in enumerate(requested)], requested)


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
