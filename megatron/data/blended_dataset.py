"""Datasets made of datasets: a blend by weights, blocks one after another, and one filled up."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError
from megatron.data.index_builder import (
    AT_ONCE,
    Allocate,
    build_blend_index,
    build_exhaustive_blend_index,
    derived_seed,
)
from megatron.data.index_cache import IndexCache
from megatron.data.sample_dataset import SampleDataset
from megatron.data.splits import normalize

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample")

_INDEX_VERSION = 1  # counts changes of what an index holds, so that one of another version is built anew


class BlendedDataset(Generic[Sample]):
    """Samples of several datasets in a fixed order that keeps the share of each at its weight.

    Args:
        datasets: the parts.
        names: what to call them in messages.
        dataset_index: [n] which part each sample comes from.
        dataset_sample_index: [n] which of its samples that is.
        drawn: [parts] how many samples come from each.

    Raises:
        UserError: a part has fewer samples than the order draws from it.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset[Sample]],
        names: Sequence[str],
        dataset_index: npt.NDArray[np.int16],
        dataset_sample_index: npt.NDArray[np.int64],
        drawn: npt.NDArray[np.int64],
    ) -> None:
        self.datasets = tuple(datasets)
        self.dataset_index = dataset_index
        self.dataset_sample_index = dataset_sample_index
        for dataset, name, count in zip(datasets, names, drawn.tolist(), strict=True):
            if count > len(dataset):
                raise UserError(
                    f"the blend draws {count} samples from {name}, which was built with {len(dataset)}; a "
                    "larger --mid-level-dataset-surplus (default 0.005) builds more"
                )

    def __len__(self) -> int:
        return int(self.dataset_index.shape[0])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend, which has {len(self)}")
        return self.datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]


def blend_by_weights(
    datasets: Sequence[SampleDataset[Sample]],
    names: Sequence[str],
    weights: Sequence[float],
    size: int,
    cache: IndexCache,
) -> BlendedDataset[Sample]:
    """A blend of `size` samples in which each dataset has the share of its weight.

    Raises:
        UserError: a dataset is too small for its share, or there are too many.
        ValueError: a weight is not positive.
    """
    shares = normalize([float(weight) for weight in weights])

    def build(allocate: Allocate) -> None:
        chosen, _ = build_blend_index(shares, size, allocate)
        _count(chosen, len(shares), allocate)

    # By bits: a share printed with fewer digits could name another order.
    description = {"version": _INDEX_VERSION, "shares": [share.hex() for share in shares], "size": size}
    return BlendedDataset(datasets, names, **cache.get("BlendedDataset", description, build))


def blend_by_size(
    datasets: Sequence[SampleDataset[Sample]], names: Sequence[str], size: int | None, cache: IndexCache
) -> BlendedDataset[Sample]:
    """A blend in which each dataset has the share of its size.

    It has `size` samples, for None each sample once. Datasets without samples take no part.
    """
    sizes = [len(dataset) for dataset in datasets]
    present = [number for number, count in enumerate(sizes) if count > 0]
    for number, name in enumerate(names):
        if sizes[number] == 0:
            logger.warning("%s has no sample here and takes no part in the blend", name)
    counts = [sizes[number] for number in present]
    if not present or size == 0:
        nothing = np.empty(0, dtype=np.int64)
        return BlendedDataset(datasets, names, nothing.astype(np.int16), nothing, np.zeros(len(names), dtype=np.int64))

    def build(allocate: Allocate) -> None:
        if size is None:
            chosen, _ = build_exhaustive_blend_index(counts, allocate)
        else:
            shares = normalize([float(count) for count in counts])
            chosen, _ = build_blend_index(shares, min(size, sum(counts)), allocate)
        numbers = np.asarray(present, dtype=np.int16)
        for begin in range(0, len(chosen), AT_ONCE):
            part = chosen[begin : begin + AT_ONCE]
            part[:] = numbers[part]
        _count(chosen, len(sizes), allocate)

    description = {"version": _INDEX_VERSION, "sizes": sizes, "size": size}
    return BlendedDataset(datasets, names, **cache.get("BlendedDataset", description, build))


def _count(chosen: npt.NDArray[np.int16], parts: int, allocate: Allocate) -> None:
    """Fill `drawn`. It is kept with the order, which each process would have to read whole at each start."""
    drawn = allocate("drawn", (parts,), np.int64)
    drawn[:] = 0
    for begin in range(0, len(chosen), AT_ONCE):
        drawn += np.bincount(chosen[begin : begin + AT_ONCE], minlength=parts)


class BlockedDataset(Generic[Sample]):
    """Blocks of samples one after another, each cut to the number that was requested of it.

    The order of a dataset depends on the number of samples requested, so a run that is prolonged keeps the
    dataset it began with and gets the additional samples as a block of its own.

    Args:
        blocks: a dataset for each block.
        sizes: samples of each block.

    Raises:
        UserError: a block has fewer samples than its size.
    """

    def __init__(self, blocks: Sequence[SampleDataset[Sample]], sizes: Sequence[int]) -> None:
        for block, size in zip(blocks, sizes, strict=True):
            if len(block) < size:
                raise UserError(
                    f"{size} training samples are requested, the data gives {len(block)}: a blend without "
                    "weights reads each sample once; give weights in --data-path to repeat, or request fewer"
                )
        self.blocks = tuple(blocks)
        self.sizes = tuple(sizes)
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in blocks of {list(self.sizes)}")
        number = bisect.bisect_right(self._ends, index)
        return self.blocks[number][index - (self._ends[number - 1] if number else 0)]


class FilledUp(Generic[Sample]):
    """A dataset, and `blank` as often as there are samples missing to `size`."""

    def __init__(self, dataset: SampleDataset[Sample], blank: Sample, size: int) -> None:
        self._dataset, self._blank, self._size = dataset, blank, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[index] if index < len(self._dataset) else self._blank


def extend_blocks(blocks: Sequence[int], requested: int) -> list[int]:
    """The blocks of a run that had `blocks` and is now asked for `requested` samples in all.

    Fewer samples than before leave the blocks as they are: cutting them would change the order of those that stay.
    """
    missing = requested - sum(blocks)
    return [*blocks, missing] if missing > 0 else list(blocks)


def block_seed(seed: int, block: int) -> int:
    """The seed of a block's order: the run's own for the first one."""
    return seed if block == 0 else derived_seed(seed, "block", block)
