"""Which documents belong to training, validation and test: Megatron-LM's arithmetic, read strictly."""

from __future__ import annotations

import enum
import itertools

import numpy as np
import numpy.typing as npt

from megatron.config.data import parse_split
from megatron.config.problems import UserError, counted


class Split(enum.Enum):
    """The three parts, in the order in which documents are dealt to them."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


def normalize(shares: list[float]) -> list[float]:
    """Divided by their sum, in float64."""
    values = np.asarray(shares, dtype=np.float64)
    return [float(share) for share in values / values.sum()]


def split_ranges(shares: tuple[float, float, float], num_elements: int) -> list[range | None]:
    """The elements of each part: borders are the rounded running sums. None for a part whose share is 0.

    A part with a share above 0 can still be empty, where there are too few elements.
    """
    borders = [0.0, *itertools.accumulate(shares)]
    return [
        range(round(begin * num_elements), round(end * num_elements)) if end > begin else None
        for begin, end in itertools.pairwise(borders)
    ]


def part_of_split(part: Split, split: str, num_elements: int) -> range:
    """The elements that a training with this `--split` has in a part.

    Raises:
        UserError: it is no split, or the part has none.
    """
    try:
        shares = parse_split(split)
    except ValueError as error:
        raise UserError(f"--split {split}: {error}") from None
    elements = split_ranges(shares, num_elements)[list(Split).index(part)]
    if not elements:
        raise UserError(f"--split {split} gives nothing of {counted(num_elements, 'document')} to --part {part.value}")
    return elements


def as_indices(elements: range) -> npt.NDArray[np.integer]:
    """The elements as an array of the smallest type that Megatron-LM's index can have."""
    dtype = np.int32 if elements.stop <= np.iinfo(np.int32).max else np.int64
    return np.arange(elements.start, elements.stop, dtype=dtype)
