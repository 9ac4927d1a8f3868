"""Which part of a checkpoint each rank writes: what it alone holds, and its share of what others hold too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.index import DTYPE_NAMES, StoredTensor
from megatron.checkpointing.slices import held_parts
from megatron.checkpointing.storage import LazySlice, PendingSlice, size_of
from megatron.core.comm_group import CommGroup
from megatron.core.shard import NamedTensor

SomeSlice = TypeVar("SomeSlice", PendingSlice, LazySlice)


@dataclass(frozen=True, kw_only=True)
class Share(Generic[SomeSlice]):
    """What one rank writes: slices of one kind.

    Attributes:
        tensors: the global tensors that it speaks of, without their slices.
        pending: the slices, each of one of these tensors.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    pending: Sequence[SomeSlice] = ()

    @property
    def size(self) -> int:
        """Bytes of all slices."""
        return sum(map(size_of, self.pending))


def share_of(tensors: Iterable[NamedTensor], replicas: CommGroup) -> Share[PendingSlice]:
    """This rank's share.

    Args:
        tensors: the rank's tensors, on all ranks of `replicas` in the same order.
        replicas: the ranks that hold the same values. The slices of a distributed optimizer, which one of them alone
            has, are in the share of that one.

    Raises:
        CheckpointError: a tensor is of a kind that cannot be saved, or two have one key.
    """
    known: dict[str, StoredTensor] = {}
    alone: list[PendingSlice] = []
    replicated: list[PendingSlice] = []
    for named in tensors:
        if named.tensor.dtype not in DTYPE_NAMES:
            kinds = ", ".join(map(str, DTYPE_NAMES))
            raise CheckpointError(f"{named.key}: cannot save {named.tensor.dtype}; one of {kinds} can be")
        if not named.shard.owned:
            continue
        if named.key in known:
            raise CheckpointError(f"{named.key}: two tensors of this rank have this key")
        known[named.key] = StoredTensor(dtype=named.tensor.dtype, shape=named.shard.global_shape, slices=())
        parts = replicated if named.elements is None else alone
        parts += [
            PendingSlice(key=named.key, tensor=part.values, box=part.placed) for part in held_parts(named) if part.owned
        ]
    tables = [(part.box.rows, size_of(part) // part.box.rows) for part in replicated]
    for part, rows in zip(replicated, rows_of_share(tables, replicas.rank, replicas.size), strict=True):
        if rows:
            alone.append(part if len(rows) == part.box.rows else part.cut(rows))
    if not replicas.is_first:  # the first speaks of the tensors too that have no elements, and so no slices
        written = {part.key for part in alone}
        known = {key: tensor for key, tensor in known.items() if key in written}
    return Share(tensors=known, pending=alone)


def lazy_share(slices: Sequence[LazySlice]) -> Share[LazySlice]:
    """All of a checkpoint that one process writes, each slice of which is a whole tensor."""
    tensors = {part.key: StoredTensor(dtype=part.dtype, shape=part.shape, slices=()) for part in slices}
    return Share(tensors=tensors, pending=slices)


def rows_of_share(tables: Iterable[tuple[int, int]], rank: int, size: int) -> list[range]:
    """Of tables that `size` ranks hold, the rows that one of them writes: about as many bytes as each other one.

    The bytes of all tables, one after another, are cut evenly; a row belongs where its first byte is.

    Args:
        tables: the number of rows and the bytes of a row of each.
    """
    tables = list(tables)
    total = sum(rows * row_bytes for rows, row_bytes in tables)
    cuts = (total * rank // size, total * (rank + 1) // size)
    taken, position = [], 0
    for rows, row_bytes in tables:
        first, stop = (min(rows, max(0, -((position - cut) // row_bytes))) for cut in cuts)
        taken.append(range(first, stop))
        position += rows * row_bytes
    return taken
