"""Runs of a split parameter that several tensor-parallel ranks hold: where they lie, to sum gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.distributed.grad_buffer import main_grad_of
from megatron.core.shard import Piece, shard_of


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A replicated run: its first index in the local parameter, and in the concatenation of all such runs."""

    local: int
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ReplicatedRuns:
    """The replicated runs of one parameter: key and value heads that are fewer than the ranks.

    Attributes:
        dim: the dimension along which the runs lie.
        size: total length of the different replicated runs of the global tensor.
        runs: those that this rank holds.
    """

    parameter: nn.Parameter
    dim: int
    size: int
    runs: tuple[LocalRun, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenation of all replicated runs of the global tensor."""
        shape = list(self.parameter.shape)
        shape[self.dim] = self.size
        return tuple(shape)

    def place(self, concatenation: Tensor) -> None:
        """Write this rank's gradient of its runs into a zeroed tensor of `shape`."""
        gradient = main_grad_of(self.parameter)
        for run in self.runs:
            part = gradient.narrow(self.dim, run.local, run.length)
            concatenation.narrow(self.dim, run.offset, run.length).copy_(part)

    def take_back(self, concatenation: Tensor) -> None:
        """Overwrite this rank's gradient of its runs with the summed one."""
        gradient = main_grad_of(self.parameter)
        for run in self.runs:
            part = concatenation.narrow(self.dim, run.offset, run.length)
            gradient.narrow(self.dim, run.local, run.length).copy_(part)


def find_replicated_runs(parameters: Iterable[nn.Parameter]) -> tuple[ReplicatedRuns, ...]:
    """The parameters with replicated runs, which all have the same tensor-parallel group.

    One collective over it, where there are any: each rank knows only its own runs.
    """
    replicated = [parameter for parameter in parameters if shard_of(parameter).replicated_pieces]
    if not replicated:
        return ()
    group = shard_of(replicated[0]).group
    mine = [[piece for piece in shard_of(parameter).pieces if piece.holders > 1] for parameter in replicated]
    every_rank = collectives.all_gather_object(
        [[(piece.start, piece.length, piece.holders) for piece in pieces] for pieces in mine], group
    )
    return tuple(
        _place_runs(parameter, pieces, Counter(run for runs in of_ranks for run in runs))
        for parameter, pieces, of_ranks in zip(replicated, mine, zip(*every_rank, strict=True), strict=True)
    )


def _place_runs(
    parameter: nn.Parameter, mine: Sequence[Piece], holders: Counter[tuple[int, int, int]]
) -> ReplicatedRuns:
    """The runs of one parameter, one behind the other.

    Args:
        mine: the runs that this rank holds.
        holders: (start, length, promised number of holders) of all runs -> how many ranks hold it.
    """
    shard = shard_of(parameter)
    offsets = {}
    size = 0
    for start, length, promised in sorted(holders):
        count = holders[start, length, promised]
        assert count == promised, f"{shard.name}: {count} ranks hold run {start}+{length}, not {promised}"
        offsets[start] = size
        size += length
    runs = tuple(LocalRun(local=piece.local, offset=offsets[piece.start], length=piece.length) for piece in mine)
    return ReplicatedRuns(parameter=parameter, dim=shard.split_dim, size=size, runs=runs)
