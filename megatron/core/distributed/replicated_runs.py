"""Runs of a split parameter that several tensor-parallel ranks hold: where they lie, to sum gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.distributed.grad_buffer import main_grad_of
from megatron.core.shard import shard_of


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
    """The parameters with replicated runs. Collective over their group: each rank knows only its own runs."""
    found = []
    for parameter in parameters:
        shard = shard_of(parameter)
        if not shard.replicated_pieces:
            continue
        mine = [piece for piece in shard.pieces if piece.holders > 1]
        every_rank = collectives.all_gather_object(
            [(piece.start, piece.length, piece.holders) for piece in mine], shard.group
        )
        holders = Counter(run for one_rank in every_rank for run in one_rank)
        offsets = {}
        size = 0
        for start, length, promised in sorted(holders):
            count = holders[start, length, promised]
            assert count == promised, f"{shard.name}: {count} ranks hold run {start}+{length}, not {promised}"
            offsets[start] = size
            size += length
        runs = tuple(LocalRun(local=piece.local, offset=offsets[piece.start], length=piece.length) for piece in mine)
        found.append(ReplicatedRuns(parameter=parameter, dim=shard.split_dim, size=size, runs=runs))
    return tuple(found)
