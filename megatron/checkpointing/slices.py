"""Boxes of global tensors: which part of one a rank holds. Pure arithmetic.

A box, not a run along one dimension, is what the index on disk speaks of: the part of a tensor that a
distributed optimizer owns is a range of elements of a shard, which is a few boxes and seldom one run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from megatron.core.kernels.float_halves import Numbers
from megatron.core.shard import NamedTensor, Shard

# Boxes that are compared in pairs, to say which are wrong; corners that fit into some hundred megabytes.
_MOST_COMPARED, _MOST_CORNERS = 2000, 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The elements of an n-dimensional tensor with `offset[i] <= index[i] < offset[i] + shape[i]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls(offset=(0,) * len(shape), shape=shape)

    @property
    def volume(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Indices of dimension 0; one without dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def index(self) -> tuple[slice, ...]:
        """What selects the box from a tensor: `tensor[box.index]`, a view also for 0-d."""
        return tuple(slice(first, first + length) for first, length in zip(self.offset, self.shape, strict=True))

    def contains(self, other: Box) -> bool:
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The elements in both; None when there is none."""
        offset, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            first, length = max(a, b), min(a + n, b + m) - max(a, b)
            if length <= 0:
                return None
            offset.append(first)
            shape.append(length)
        return Box(offset=tuple(offset), shape=tuple(shape))

    def seen_from(self, origin: tuple[int, ...]) -> Box:
        """The same elements where index `origin` counts as zero."""
        return Box(offset=tuple(a - b for a, b in zip(self.offset, origin, strict=True)), shape=self.shape)

    def moved_by(self, shift: tuple[int, ...]) -> Box:
        return Box(offset=tuple(a + b for a, b in zip(self.offset, shift, strict=True)), shape=self.shape)

    def __str__(self) -> str:
        ranges = ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.shape, strict=True))
        return f"[{ranges}]"


def flat_range_boxes(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Box]:
    """Elements `first` to `stop` of a tensor in row-major order as boxes, in order: at most 2n - 1 of them.

    The rest of a row, whole rows, the start of a row; the same within the two rows that are not whole.
    """
    if first >= stop:
        return
    if not shape:
        yield Box(offset=(), shape=())
        return
    inner = shape[1:]
    row = prod(inner)
    first_row, first_column = divmod(first, row)
    last_row, last_column = divmod(stop, row)
    if first_row == last_row:
        yield from _in_row(first_row, flat_range_boxes(inner, first_column, last_column))
        return
    if first_column:
        yield from _in_row(first_row, flat_range_boxes(inner, first_column, row))
        first_row += 1
    if last_row > first_row:
        yield Box(offset=(first_row, *(0,) * len(inner)), shape=(last_row - first_row, *inner))
    if last_column:
        yield from _in_row(last_row, flat_range_boxes(inner, 0, last_column))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box(offset=(row, *box.offset), shape=(1, *box.shape))


def flat_bounds(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Row-major positions, in a tensor of `shape`, of a non-empty box's first element and past its last."""
    first = last = 0
    for extent, a, n in zip(shape, box.offset, box.shape, strict=True):
        first = first * extent + a
        last = last * extent + a + n - 1
    return first, last + 1


@dataclass(frozen=True, kw_only=True)
class HeldBox:
    """One part of a global tensor in memory: where it is there, and where in the global tensor."""

    local: Box
    placed: Box
    owned: bool


def held_boxes(key: str, shard: Shard, local_shape: tuple[int, ...]) -> tuple[HeldBox, ...]:
    """The parts of its global tensor that a local tensor holds; padding is in none of them, empty parts are left out.

    Raises:
        ValueError: the shard does not describe a tensor of this shape.
    """
    shape = shard.global_shape
    whole = Box.whole(shape)
    if shard.dim is None:
        if local_shape != shape:
            raise ValueError(f"{key}: local shape {local_shape}, but the whole tensor is {shape}")
        owned = shard.owned and any(piece.owned for piece in shard.pieces)
        return (HeldBox(local=whole, placed=whole, owned=owned),) if whole.volume else ()
    dim = shard.dim
    held = []
    for piece in shard.pieces:
        local = Box(offset=_with(whole.offset, dim, piece.local), shape=_with(shape, dim, piece.length))
        placed = Box(offset=_with(whole.offset, dim, piece.start), shape=local.shape)
        room = Box.whole(local_shape)
        if len(local_shape) != len(shape) or not room.contains(local) or not whole.contains(placed):
            raise ValueError(
                f"{key}: a piece is {local} of the local tensor {local_shape}, {placed} of the global tensor {shape}"
            )
        if local.volume:
            held.append(HeldBox(local=local, placed=placed, owned=shard.owned and piece.owned))
    return tuple(held)


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """Values of a box of a global tensor, in its shape: a view of what a rank holds."""

    values: Numbers
    placed: Box
    owned: bool


def held_parts(named: NamedTensor) -> Iterator[HeldPart]:
    """The parts of its global tensor that a tensor, or a slice of one, holds.

    Raises:
        ValueError: the shard does not describe a tensor of this shape.
    """
    tensor, elements = named.tensor.detach(), named.elements
    if elements is None:
        for held in held_boxes(named.key, named.shard, tuple(tensor.shape)):
            yield HeldPart(values=tensor[held.local.index], placed=held.placed, owned=held.owned)
        return
    local = held_boxes(named.key, named.shard, elements.shape)
    done = 0
    for run in flat_range_boxes(elements.shape, elements.first, elements.stop):
        values = tensor[done : done + run.volume].view(run.shape)
        done += run.volume
        for held in local:
            box = run.intersect(held.local)
            if box is not None:
                placed = box.seen_from(held.local.offset).moved_by(held.placed.offset)
                yield HeldPart(values=values[box.seen_from(run.offset).index], placed=placed, owned=held.owned)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def tiling_fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why the boxes do not cover a tensor of `shape`, each element once; None when they do."""
    whole = Box.whole(shape)
    for box in boxes:
        if not whole.contains(box):
            return f"slice {box} lies outside the tensor {shape}"
    if _corners_cancel(whole, boxes):
        return None
    if len(boxes) > _MOST_COMPARED:
        return f"its {len(boxes)} slices overlap, leave a hole, or cut it in more ways than can be checked"
    overlap = _first_overlap(boxes)
    if overlap is not None:
        return f"slices {overlap[0]} and {overlap[1]} overlap"
    missing = whole.volume - sum(box.volume for box in boxes)
    return f"{missing} of {whole.volume} elements are in no slice, first {_first_hole(whole, boxes)}"


def _corners_cancel(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether the boxes are a tiling of the whole, in time that hardly grows faster than their number.

    A corner of a box counts +1 or -1 by the number of its coordinates that are ends. These counts are the differences,
    along every dimension, of how often each element is in a box, and determine it: they are those of the whole where
    each element is in one box, and only there. Dimensions that no box cuts are left out.
    """
    if not whole.volume:
        return True
    if not boxes:
        return False
    offsets = np.array([box.offset for box in (whole, *boxes)], dtype=np.int64)
    ends = offsets + np.array([box.shape for box in (whole, *boxes)], dtype=np.int64)
    cut = ((offsets != offsets[0]) | (ends != ends[0])).any(axis=0)
    offsets, ends = offsets[:, cut], ends[:, cut]
    count, dimensions = offsets.shape
    if count << dimensions > _MOST_CORNERS:
        return False
    weight = np.where(np.arange(count) == 0, -1, 1)
    if not dimensions:
        return not weight.sum()
    corners, signs = [], []
    for is_end in itertools.product((False, True), repeat=dimensions):
        corners.append(np.where(is_end, ends, offsets))
        signs.append(weight * (-1) ** sum(is_end))
    corner, sign = np.concatenate(corners), np.concatenate(signs)
    order = np.lexsort(corner.T)
    corner, sign = corner[order], sign[order]
    is_new = np.append(True, (corner[1:] != corner[:-1]).any(axis=1))
    return not np.add.reduceat(sign, np.flatnonzero(is_new)).any()


def _first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Sweep along dimension 0; only boxes that share an index of it are compared."""
    if boxes and not boxes[0].shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    live: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        live = [other for other in live if other.offset[0] + other.shape[0] > box.offset[0]]
        for other in live:
            if other.intersect(box) is not None:
                return other, box
        live.append(box)
    return None


def _first_hole(whole: Box, boxes: Sequence[Box]) -> Box:
    """The first box that remains after all others were cut out of the whole. There must be one."""
    remaining = [whole]
    for box in boxes:
        remaining = [part for piece in remaining for part in _cut(piece, box)]
    return min(remaining, key=lambda box: box.offset)


def _cut(piece: Box, hole: Box) -> list[Box]:
    """`piece` without `hole`, as boxes: along each dimension what lies before and after it."""
    middle = piece.intersect(hole)
    if middle is None:
        return [piece]
    parts = []
    offset, shape = list(piece.offset), list(piece.shape)
    for dim in range(len(shape)):
        before = middle.offset[dim] - offset[dim]
        after = offset[dim] + shape[dim] - (middle.offset[dim] + middle.shape[dim])
        for first, length in ((offset[dim], before), (offset[dim] + shape[dim] - after, after)):
            if length > 0:
                part = Box(
                    offset=(*offset[:dim], first, *offset[dim + 1 :]),
                    shape=(*shape[:dim], length, *shape[dim + 1 :]),
                )
                parts.append(part)
        offset[dim], shape[dim] = middle.offset[dim], middle.shape[dim]
    return parts
