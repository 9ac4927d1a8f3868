"""What a parameter is a shard of: the one record that initialisation, gradients, norms and checkpoints read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from torch import Tensor, nn

from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import Numbers


@dataclass(frozen=True, kw_only=True)
class Init:
    """How a parameter gets its first values: drawn with a standard deviation, constant, or given by its constructor."""

    kind: Literal["normal", "constant", "given"]
    std: float = 0.0
    value: float = 0.0

    @classmethod
    def normal(cls, std: float) -> Init:
        return cls(kind="normal", std=std)

    @classmethod
    def zeros(cls) -> Init:
        return cls(kind="constant", value=0.0)

    @classmethod
    def ones(cls) -> Init:
        return cls(kind="constant", value=1.0)

    @classmethod
    def given(cls) -> Init:
        return cls(kind="given")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of indices, along the split dimension, of the global tensor that this rank holds.

    Attributes:
        local: first index in the local tensor.
        start: first index in the global tensor.
        length: number of indices.
        holders: how many ranks of the tensor-parallel group hold this run.
        owned: exactly one holder owns a run: it counts in norms and writes it to checkpoints.
    """

    local: int
    start: int
    length: int
    holders: int = 1
    owned: bool = True


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The global tensor that a parameter is a part of, and which part.

    Attributes:
        name: global name, the same in every layout; "" until `name_parameters` has run.
        global_shape: shape without the vocabulary padding that we add.
        dim: the dimension that is split over `group`; None when each rank of the group holds the whole tensor.
        pieces: the runs along `dim` (along dimension 0 when whole) that are held; indices in no piece are padding.
        group: the tensor-parallel group.
        init: how the values are drawn.
        partial_gradient: a whole tensor whose gradient is a partial sum on each rank of the group: norms and row biases
            under sequence parallelism, the norms of queries and keys.
        tied: another pipeline stage holds the same global tensor, and the gradients of both must be summed.
        matrices: of a matrix inside a layer the number of its rows. Where several are stacked, as queries, keys and
            values: the rows of each in one of the runs that repeat along dimension 0. () for any other parameter.
        owned: False on the copy of a tied tensor that does not count in norms and checkpoints.
    """

    name: str = ""
    global_shape: tuple[int, ...]
    dim: int | None
    pieces: tuple[Piece, ...]
    group: CommGroup
    init: Init
    partial_gradient: bool = False
    tied: bool = False
    matrices: tuple[int, ...] = ()
    owned: bool = True

    @property
    def split_dim(self) -> int:
        """The dimension along which `pieces` count."""
        return 0 if self.dim is None else self.dim

    @property
    def replicated_pieces(self) -> bool:
        """Whether some pieces of a split tensor live on several ranks, each with a part of the gradient."""
        return self.dim is not None and any(piece.holders > 1 for piece in self.pieces)

    def owned_pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if self.owned and piece.owned)


@dataclass(frozen=True, kw_only=True)
class FlatRange:
    """Elements `first` to `stop` of a local tensor of `shape`, in row-major order."""

    shape: tuple[int, ...]
    first: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """A local tensor (a parameter, or optimizer state of its shape), or a slice of one, under its key in a checkpoint.

    Attributes:
        tensor: in the shape of the parameter; [stop - first] for a slice.
        elements: of a slice that this data-parallel rank alone holds, which part of the local tensor it is.
    """

    key: str
    tensor: Numbers
    shard: Shard
    elements: FlatRange | None = None


def has_shard(parameter: Tensor) -> bool:
    """Whether the parameter belongs to one of our layers; a plain torch layer gives its own no record."""
    return "shard" in vars(parameter)


def shard_of(parameter: Tensor) -> Shard:
    return cast(Shard, parameter.shard)  # type: ignore[attr-defined]


def set_shard(parameter: Tensor, shard: Shard) -> None:
    parameter.shard = shard  # type: ignore[attr-defined]


def set_matrices(parameter: Tensor, *rows: int) -> None:
    """Say that a parameter is a matrix inside a layer, or several; see `Shard.matrices`."""
    set_shard(parameter, replace(shard_of(parameter), matrices=rows))


def whole_pieces(length: int, group: CommGroup) -> tuple[Piece, ...]:
    """All of dimension 0 on every rank of the group; the first one owns it."""
    return (Piece(local=0, start=0, length=length, holders=group.size, owned=group.is_first),)


def even_pieces(length: int, group: CommGroup, *, padded: int | None = None) -> tuple[Piece, ...]:
    """This rank's part when `padded` indices (default: `length`) are cut evenly over the group.

    Indices from `length` on are padding and belong to no piece, so a rank may hold none.
    """
    padded = length if padded is None else padded
    assert padded >= length and padded % group.size == 0, f"{padded} indices for {length} over {group.size} ranks"
    part = padded // group.size
    start = part * group.rank
    held = min(length, start + part) - start
    return (Piece(local=0, start=start, length=held),) if held > 0 else ()


def blocked_pieces(blocks: tuple[int, ...], group: CommGroup) -> tuple[Piece, ...]:
    """This rank's part when each of several stacked blocks, as [gate; up], is cut evenly over the group."""
    pieces = []
    local = start = 0
    for length in blocks:
        assert length % group.size == 0, f"block of {length} does not split over {group.size} ranks"
        part = length // group.size
        pieces.append(Piece(local=local, start=start + part * group.rank, length=part))
        local += part
        start += length
    return tuple(pieces)


def name_parameters(module: nn.Module) -> None:
    """Give each parameter its name in `module` as its global name, unless its shard has one already.

    Layers sit under their global number, so the names of a pipeline stage are names of the whole model.
    """
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        if not shard.name:
            set_shard(parameter, replace(shard, name=name))
