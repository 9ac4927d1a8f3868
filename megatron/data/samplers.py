"""Which samples a rank reads: pure functions of the consumed samples, so a resume needs no other state.

The samples of a run stand in one global order. A step takes the next ones of it, and deals them to
micro-batches and data-parallel ranks in turn; the layout decides who reads a sample, never which samples a step has.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError
from megatron.data.index_builder import derived_seed


class SampleOrder(Protocol):
    """Maps positions in the run's order to samples of the dataset."""

    def __call__(self, position: int) -> int:
        """The dataset's sample at `position`."""


class SequentialOrder:
    """`--dataloader-type single`: the dataset, which is shuffled already, from its beginning to its end.

    Args:
        num_samples: size of the dataset.
        wrap: begin again at the end, as validation does; otherwise the end is an error.
        name: what is read, for messages.
    """

    def __init__(self, num_samples: int, *, wrap: bool = False, name: str = "training") -> None:
        _check_size(num_samples, name)
        self._num_samples, self._wrap, self._name = num_samples, wrap, name

    def __call__(self, position: int) -> int:
        """The sample at `position`.

        Raises:
            IndexError: the dataset ends before it.
        """
        if position < self._num_samples:
            return position
        if not self._wrap:
            raise IndexError(
                f"{self._name}: sample {position} is read, but {self._num_samples} were requested and built; "
                "more are appended when the run is started with more --train-iters or --train-samples"
            )
        return position % self._num_samples


class CyclicOrder:
    """`--dataloader-type cyclic`: the whole dataset again and again, each time in another order.

    The order of an epoch is a function of (seed, epoch). All samples take part in every epoch: none is left
    out where the batch does not divide their number.

    Args:
        num_samples: size of the dataset.
        seed: of the orders.
        name: what is read, for messages.
    """

    def __init__(self, num_samples: int, *, seed: int, name: str = "training") -> None:
        _check_size(num_samples, name)
        self._num_samples, self._seed = num_samples, seed
        # Two epochs, as a prefetching loader reads the next one before the last samples of this one are asked
        # for. The entries are replaced, never changed, so threads may share them.
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def __call__(self, position: int) -> int:
        """The sample at `position`."""
        epoch, within = divmod(position, self._num_samples)
        order = self._orders.get(epoch)
        if order is None:
            random = np.random.RandomState(derived_seed(self._seed, "epoch", epoch))
            order = random.permutation(self._num_samples).astype(np.int64, copy=False)
            near = {known: kept for known, kept in self._orders.items() if abs(known - epoch) == 1}
            self._orders = {**near, epoch: order}
        return int(order[within])


def _check_size(num_samples: int, name: str) -> None:
    if num_samples < 1:
        raise UserError(f"{name}: the dataset holds no sample to read")


def microbatch_positions(first: int, *, micro_batch_size: int, dp_rank: int, dp_size: int) -> range:
    """The positions that one rank reads of the micro-batches of all ranks that begin at position `first`.

    Rank r of R: `micro_batch_size` samples from first + r*micro_batch_size on; the next micro-batch begins at
    first + R*micro_batch_size.
    """
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
    begin = first + dp_rank * micro_batch_size
    return range(begin, begin + micro_batch_size)
