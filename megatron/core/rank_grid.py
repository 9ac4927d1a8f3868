"""Which rank does what: pure arithmetic of the named parallel axes, without any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from megatron.config.parallel import DEFAULT_ORDER


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """World of ranks as a grid with one axis for each kind of parallelism.

    In the default order `rank = tp + TP * (cp + CP * (ep + EP * (dp + DP * pp)))`: the axis named first changes
    fastest, so that tensor-parallel ranks, which talk most, are neighbours on one node.

    Attributes:
        tp, cp, ep, dp, pp: the sizes of the axes.
        order: the axes from the fastest to the slowest, joined by dashes.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER
    axes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        axes = tuple(self.order.split("-"))
        if sorted(axes) != sorted(("tp", "cp", "ep", "dp", "pp")):
            raise ValueError(f"rank order {self.order!r} must name each of tp, cp, ep, dp, pp once")
        for axis in axes:
            if self.size_of(axis) < 1:
                raise ValueError(f"size of axis {axis} is {self.size_of(axis)}; it must be at least 1")
        object.__setattr__(self, "axes", axes)

    def size_of(self, axis: str) -> int:
        return int(getattr(self, axis))

    @property
    def world_size(self) -> int:
        return prod(self.size_of(axis) for axis in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a rank on every axis."""
        assert 0 <= rank < self.world_size
        position = {}
        for axis in self.axes:
            rank, position[axis] = divmod(rank, self.size_of(axis))
        return position

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a position; axes that are not named are at 0."""
        rank, stride = 0, 1
        for axis in self.axes:
            rank += stride * coordinates.get(axis, 0)
            stride *= self.size_of(axis)
        return rank

    def group_of(self, rank: int, axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes` (joined by dashes), in rank order."""
        named = axes.split("-")
        here = self.coordinates(rank)
        members = [{axis: value for axis, value in here.items() if axis not in named}]
        for axis in named:
            members = [{**member, axis: index} for index in range(self.size_of(axis)) for member in members]
        return tuple(sorted(self.rank_at(member) for member in members))

    def groups(self, axes: str) -> list[tuple[int, ...]]:
        """All groups along `axes`; together they hold each rank once."""
        seen: set[int] = set()
        groups = []
        for rank in range(self.world_size):
            if rank not in seen:
                group = self.group_of(rank, axes)
                seen.update(group)
                groups.append(group)
        return groups

    def embedding_groups(self) -> list[tuple[int, ...]]:
        """First and last pipeline stage of each pipeline: the holders of tied embeddings."""
        return [tuple(dict.fromkeys((group[0], group[-1]))) for group in self.groups("pp")]


def stage_channels(num_stages: int, *, circular: bool = True) -> list[tuple[int, int]]:
    """The (source, destination) pairs of pipeline stages between which messages may flow, both ways, in one order.

    Args:
        circular: the last stage sends to the first one too, as it does when each stage holds several model chunks.
    """
    neighbours = [(stage, stage + 1) for stage in range(num_stages - 1)]
    if circular and num_stages > 2:  # of two stages each is the other's neighbour already
        neighbours.append((num_stages - 1, 0))
    return [pair for one, other in neighbours for pair in ((one, other), (other, one))]
