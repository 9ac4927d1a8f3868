"""Which tokens make up a sample, and which dataset of a blend it comes from: Megatron-LM's numbers and order.

The sample walk and the blends have compiled versions (csrc/index_builder.cpp); the references here give the
same numbers. The shuffles are numpy's own compiled `RandomState.shuffle`, whose stream numpy has frozen.

Each builder asks its caller for the arrays that it fills, who may have them in a file (`IndexCache`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError
from megatron.core.kernels.extension import compiled_function

IntArray = npt.NDArray[np.integer]

_INT32_MAX = np.iinfo(np.int32).max
_UINT32_MAX = np.iinfo(np.uint32).max
MAX_BLENDED_DATASETS = np.iinfo(np.int16).max - 1

# Entries of an index that are filled or counted at once: numpy makes copies of eight bytes an entry, and an index in a
# file may be larger than the memory.
AT_ONCE = 1 << 20
# The last epoch is kept apart when less than this share of it is asked for.
_FINAL_EPOCH_SHARE = 0.80
_MOST_THREADS = 32  # of one index: more wait for the memory


class Allocate(Protocol):
    """Gives an array to fill, once for each name."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...


def in_memory(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The `Allocate` of who wants no file."""
    return np.empty(shape, dtype)


def derived_seed(seed: int, *parts: object) -> int:
    """A 32-bit seed for a stream of its own, a function of (seed, parts) alone."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How often a split is read to give the requested samples, and what is shuffled with what.

    Attributes:
        num_epochs: passes over the split.
        num_samples: samples that these give, at least the requested number.
        separate_final_epoch: shuffle the last epoch by itself. Otherwise, where only a small part of it is
            needed, most samples of the earlier epochs would be pushed out of the run by it.
        samples_before_final_epoch: samples of all epochs but the last, where that one is separate; else
            num_samples.
    """

    num_epochs: int
    num_samples: int
    separate_final_epoch: bool
    samples_before_final_epoch: int


def plan_epochs(
    *,
    tokens_per_epoch: int,
    sequence_length: int,
    requested: int | None,
    extra_tokens: int = 1,
    keep_last: bool = False,
) -> EpochPlan:
    """The smallest number of epochs that holds `requested` samples (None: one epoch), in exact integers.

    Args:
        tokens_per_epoch: tokens of the split.
        sequence_length: tokens of a sample, without the extra one.
        requested: samples wanted, None for what one epoch gives.
        extra_tokens: 1 where a sample carries the label of its last token, else 0.
        keep_last: count the last, short sample too.

    Raises:
        ValueError: samples are requested from a split without tokens.
    """
    if tokens_per_epoch == 0:
        if requested:
            raise ValueError(f"{requested} samples are requested from documents that hold no token")
        return EpochPlan(num_epochs=1, num_samples=0, separate_final_epoch=False, samples_before_final_epoch=0)
    needed = (requested or 0) * sequence_length + extra_tokens
    num_epochs = max(1, -(-needed // tokens_per_epoch))
    usable = max(0, num_epochs * tokens_per_epoch - extra_tokens)
    num_samples = -(-usable // sequence_length) if keep_last else usable // sequence_length
    separate, before = False, num_samples
    if num_epochs > 1:
        assert requested is not None
        before_final = ((num_epochs - 1) * tokens_per_epoch - extra_tokens) // sequence_length
        per_epoch = (tokens_per_epoch - extra_tokens) // sequence_length
        from_final = requested - before_final
        # An epoch adds one sample more than it holds alone where the tokens left over before it complete one.
        assert 0 <= from_final <= per_epoch + 1, (requested, before_final, per_epoch)
        separate = from_final < int(_FINAL_EPOCH_SHARE * per_epoch)
        before = before_final if separate else num_samples
    return EpochPlan(
        num_epochs=num_epochs,
        num_samples=num_samples,
        separate_final_epoch=separate,
        samples_before_final_epoch=before,
    )


def build_document_index(
    documents: IntArray, plan: EpochPlan, random: np.random.RandomState, allocate: Allocate = in_memory
) -> IntArray:
    """The order in which documents are read: all epochs shuffled together, or the last one by itself.

    Args:
        documents: [d] indices of the split's documents.
        random: advanced by one shuffle, or two where the final epoch is separate.
        allocate: asked for `document_index`.

    Returns:
        [num_epochs * d] int32 (int64 where the indices need it).
    """
    wide = documents.size > 0 and int(documents.max()) > _INT32_MAX
    order: IntArray = allocate("document_index", (plan.num_epochs * documents.size,), np.int64 if wide else np.int32)
    order.reshape(plan.num_epochs, documents.size)[:] = documents
    together = plan.num_epochs - 1 if plan.separate_final_epoch else plan.num_epochs
    _shuffle(order, together * documents.size, random)
    return order


def build_shuffle_index(plan: EpochPlan, random: np.random.RandomState, allocate: Allocate = in_memory) -> IntArray:
    """The order in which samples are served: a permutation, in two parts where the last epoch is separate.

    Args:
        allocate: asked for `shuffle_index`.

    Returns:
        [num_samples] uint32 (int64 from 2**32 - 2 samples on).
    """
    dtype = np.int64 if plan.num_samples >= _UINT32_MAX - 1 else np.uint32
    order: IntArray = allocate("shuffle_index", (plan.num_samples,), dtype)
    for begin in range(0, plan.num_samples, AT_ONCE):
        end = min(begin + AT_ONCE, plan.num_samples)
        order[begin:end] = np.arange(begin, end, dtype=dtype)
    _shuffle(order, plan.samples_before_final_epoch, random)
    return order


def _shuffle(order: IntArray, border: int, random: np.random.RandomState) -> None:
    """The part before the border, and what follows if anything does. numpy is fast for its plain arrays only."""
    plain = np.asarray(order)
    random.shuffle(plain[:border])
    if border < plain.size:
        random.shuffle(plain[border:])


def build_sample_index(
    lengths: IntArray,
    document_index: IntArray,
    *,
    sequence_length: int,
    num_samples: int,
    total_tokens: int,
    extra_tokens: int = 1,
    allocate: Allocate = in_memory,
) -> IntArray:
    """Where samples start and end: row k is (position in document_index, token offset) where sample k starts.

    Args:
        lengths: [n] int32 tokens of each document of the file.
        document_index: [m] reading order.
        num_samples: samples to place; the last one may be short.
        total_tokens: tokens in the whole reading order.
        allocate: asked for `sample_index`.

    Returns:
        [num_samples + 1, 2] int32, int64 where positions or offsets need it. Samples share their border token
        where extra_tokens is 1.

    Raises:
        ValueError: the documents do not hold that many samples.
    """
    largest = max(document_index.size, int(lengths.max(initial=0)))
    dtype = np.int32 if largest <= _INT32_MAX else np.int64
    build = compiled_function(
        f"build_sample_index_{np.dtype(dtype).name}",
        reference_cost="about six times the time to index a corpus",
    )
    rows: IntArray = allocate("sample_index", (num_samples + 1, 2), dtype)
    if build is None:
        rows[:] = sample_index_reference(
            lengths,
            document_index,
            sequence_length=sequence_length,
            num_samples=num_samples,
            total_tokens=total_tokens,
            extra_tokens=extra_tokens,
        )
        return rows
    build(
        np.require(lengths, np.int32, ["C", "A"]),  # in an .idx file they are not aligned
        np.require(document_index, None, ["C", "A"]),
        sequence_length=sequence_length,
        extra_tokens=extra_tokens,
        total_tokens=total_tokens,
        num_samples=num_samples,
        threads=builder_threads(),
        boundaries=rows,
    )
    return rows


def builder_threads() -> int:
    """All cores of this process: the other processes of its node wait for the index."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


def sample_index_reference(
    lengths: IntArray,
    document_index: IntArray,
    *,
    sequence_length: int,
    num_samples: int,
    total_tokens: int,
    extra_tokens: int,
) -> npt.NDArray[np.int64]:
    """`build_sample_index` in numpy: a running sum of lengths, searched for every border."""
    rows = np.zeros((num_samples + 1, 2), dtype=np.int64)
    if num_samples == 0:
        return rows
    ordered = lengths[document_index].astype(np.int64)
    ends = np.cumsum(ordered)
    borders = np.arange(1, num_samples + 1, dtype=np.int64) * sequence_length
    np.minimum(borders, total_tokens - extra_tokens, out=borders)
    # A border lies in the document of the last token consumed before it.
    positions = np.searchsorted(ends, borders + (extra_tokens - 1), side="right")
    if positions[-1] == ends.size:
        held = int(ends[-1]) if ends.size else 0
        raise ValueError(f"the documents hold {held} tokens, which end before sample {num_samples}")
    rows[1:, 0] = positions
    rows[1:, 1] = borders - (ends - ordered)[positions]
    return rows


BlendIndex = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]


def build_blend_index(weights: Sequence[float], size: int, allocate: Allocate = in_memory) -> BlendIndex:
    """Which dataset each of `size` blended samples comes from, and which of its samples it is.

    Greedy and without chance: sample k comes from the dataset that is furthest behind weight * k.

    Args:
        weights: one positive share a dataset, of sum 1.
        allocate: asked for `dataset_index` and `dataset_sample_index`.

    Returns:
        dataset index [size] int16 and sample index within it [size] int64.

    Raises:
        UserError: too many datasets.
        ValueError: a weight that is not positive.
    """
    checked = np.asarray(weights, dtype=np.float64)
    _check_blend(checked)
    build = compiled_function("build_blend_index", reference_cost="about 3 s a million samples of a blend")
    index = _allocate_blend(size, allocate)
    if build is None:
        index[0][:], index[1][:] = blend_index_reference(checked, size)
    else:
        build(checked, *index, threads=builder_threads())
    return index


def _allocate_blend(size: int, allocate: Allocate) -> BlendIndex:
    return allocate("dataset_index", (size,), np.int16), allocate("dataset_sample_index", (size,), np.int64)


def blend_index_reference(weights: npt.NDArray[np.float64], size: int) -> BlendIndex:
    """`build_blend_index` in numpy, a sample at a time."""
    dataset_index = np.zeros(size, dtype=np.int16)
    dataset_sample_index = np.zeros(size, dtype=np.int64)
    drawn = np.zeros(weights.size, dtype=np.float64)
    for sample in range(size):
        chosen = int(np.argmax(weights * max(sample, 1) - drawn))  # the first of equals
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = drawn[chosen]
        drawn[chosen] += 1
    return dataset_index, dataset_sample_index


def build_exhaustive_blend_index(sizes: Sequence[int], allocate: Allocate = in_memory) -> BlendIndex:
    """`build_blend_index` with shares proportional to `sizes`, drawing every sample exactly once.

    Raises:
        UserError: too many datasets.
        ValueError: an empty one.
    """
    checked = np.asarray(sizes, dtype=np.int64)
    _check_blend(checked)
    build = compiled_function("build_exhaustive_blend_index", reference_cost="about 3 s a million samples of a blend")
    index = _allocate_blend(int(checked.sum()), allocate)
    if build is None:
        index[0][:], index[1][:] = exhaustive_blend_index_reference(checked)
    else:
        build(checked, *index, threads=builder_threads())
    return index


def exhaustive_blend_index_reference(sizes: npt.NDArray[np.int64]) -> BlendIndex:
    """`build_exhaustive_blend_index` in numpy, a sample at a time."""
    size = int(sizes.sum())
    dataset_index = np.zeros(size, dtype=np.int16)
    dataset_sample_index = np.zeros(size, dtype=np.int64)
    weights = sizes / size
    drawn = np.zeros(sizes.size, dtype=np.float64)
    spent = np.zeros(sizes.size, dtype=np.bool_)
    for sample in range(size):
        chosen = int(np.argmax(np.where(spent, -np.inf, weights * max(sample, 1) - drawn)))
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = drawn[chosen]
        drawn[chosen] += 1
        spent[chosen] = drawn[chosen] == sizes[chosen]
    return dataset_index, dataset_sample_index


def _check_blend(shares: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> None:
    if not 0 < shares.size <= MAX_BLENDED_DATASETS:
        raise UserError(f"a blend of {shares.size} datasets; 1 to {MAX_BLENDED_DATASETS} can be blended")
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        refused = [float(share) for share in shares if not (np.isfinite(share) and share > 0)]
        raise ValueError(
            f"a blend with the weights {refused}: each must be a positive number; leave a dataset out that "
            "is not to be drawn"
        )
