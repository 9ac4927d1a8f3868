"""Spans of a split parameter that several tensor-parallel ranks hold: where they lie, to sum gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.main_grad import main_grad_of
from megatron.core.shard import Piece, shard_of


@dataclass(frozen=True, kw_only=True)
class LocalSpan:
    """A replicated span: its first index in the local parameter, and in the concatenation of all such spans."""

    local: int
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ReplicatedSpans:
    """The replicated spans of one parameter: key and value heads that are fewer than the ranks.

    Attributes:
        dim: the dimension along which the spans lie.
        size: total length of the different replicated spans of the global tensor.
        spans: those that this rank holds.
    """

    parameter: nn.Parameter
    dim: int
    size: int
    spans: tuple[LocalSpan, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenation of all replicated spans of the global tensor."""
        shape = list(self.parameter.shape)
        shape[self.dim] = self.size
        return tuple(shape)

    def place(self, concatenation: Tensor) -> None:
        """Write this rank's gradient of its spans into a zeroed tensor of `shape`."""
        gradient = main_grad_of(self.parameter)
        for span in self.spans:
            part = gradient.narrow(self.dim, span.local, span.length)
            concatenation.narrow(self.dim, span.offset, span.length).copy_(part)

    def take_back(self, concatenation: Tensor) -> None:
        """Overwrite this rank's gradient of its spans with the summed one."""
        gradient = main_grad_of(self.parameter)
        for span in self.spans:
            part = concatenation.narrow(self.dim, span.offset, span.length)
            gradient.narrow(self.dim, span.local, span.length).copy_(part)


def find_replicated_spans(parameters: Iterable[nn.Parameter]) -> tuple[ReplicatedSpans, ...]:
    """The parameters with replicated spans, which all have the same tensor-parallel group.

    One collective over it, where there are any: each rank knows only its own spans.
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
        _place_spans(parameter, pieces, Counter(span for spans in of_ranks for span in spans))
        for parameter, pieces, of_ranks in zip(replicated, mine, zip(*every_rank, strict=True), strict=True)
    )


def _place_spans(
    parameter: nn.Parameter, mine: Sequence[Piece], holders: Counter[tuple[int, int, int]]
) -> ReplicatedSpans:
    """The spans of one parameter, one behind the other.

    Args:
        mine: the spans that this rank holds.
        holders: (start, length, promised number of holders) of all spans -> how many ranks hold it.
    """
    shard = shard_of(parameter)
    offsets = {}
    size = 0
    for start, length, promised in sorted(holders):
        count = holders[start, length, promised]
        assert count == promised, f"{shard.name}: {count} ranks hold span {start}+{length}, not {promised}"
        offsets[start] = size
        size += length
    spans = tuple(LocalSpan(local=piece.local, offset=offsets[piece.start], length=piece.length) for piece in mine)
    return ReplicatedSpans(parameter=parameter, dim=shard.split_dim, size=size, spans=spans)
