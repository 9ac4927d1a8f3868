"""Boxes are checked against what numpy says about the same elements."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpointing.slices import Box, flat_bounds, flat_range_boxes, held_boxes, held_parts, tiling_fault
from megatron.core.shard import FlatRange, Init, NamedTensor, Piece, Shard
from tests.checkpointing.layouts import ALONE

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def _box(shape: tuple[int, ...], rng: random.Random) -> Box:
    offset = tuple(rng.randrange(extent) for extent in shape)
    sizes = tuple(rng.randint(1, extent - first) for extent, first in zip(shape, offset, strict=True))
    return Box(offset=offset, shape=sizes)


def _elements(shape: tuple[int, ...], box: Box) -> set[int]:
    return set(np.arange(int(np.prod(shape))).reshape(shape)[box.index].ravel().tolist())


@given(shapes, st.integers(0, 2**32))
def test_intersection_holds_the_elements_in_both(shape: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    one, two = _box(shape, rng), _box(shape, rng)
    common = one.intersect(two)
    expected = _elements(shape, one) & _elements(shape, two)
    assert (set() if common is None else _elements(shape, common)) == expected


@given(shapes, st.integers(0, 2**32))
def test_a_range_of_elements_is_a_few_boxes_in_order(shape: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    total = int(np.prod(shape))
    first = rng.randint(0, total)
    stop = rng.randint(first, total)
    boxes = list(flat_range_boxes(shape, first, stop))
    flat = np.arange(total).reshape(shape)
    in_order = [element for box in boxes for element in flat[box.index].ravel().tolist()]
    assert in_order == list(range(first, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.integers(0, 2**32))
def test_flat_bounds_enclose_a_box(shape: tuple[int, ...], seed: int) -> None:
    box = _box(shape, random.Random(seed))
    elements = _elements(shape, box)
    assert flat_bounds(shape, box) == (min(elements), max(elements) + 1)


def _cut_up(box: Box, rng: random.Random) -> list[Box]:
    """Any division of a box into boxes, by cutting in two again and again."""
    wide = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if not wide or rng.random() < 0.3:
        return [box]
    dim = rng.choice(wide)
    at = rng.randint(1, box.shape[dim] - 1)
    parts = []
    for first, length in ((0, at), (at, box.shape[dim] - at)):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += first
        shape[dim] = length
        parts += _cut_up(Box(offset=tuple(offset), shape=tuple(shape)), rng)
    rng.shuffle(parts)
    return parts


@given(shapes, st.integers(0, 2**32))
def test_every_division_into_boxes_is_a_cover(shape: tuple[int, ...], seed: int) -> None:
    assert tiling_fault(shape, _cut_up(Box.whole(shape), random.Random(seed))) is None


@given(shapes, st.integers(0, 2**32))
def test_a_lost_a_doubled_and_a_shifted_box_are_found(shape: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    boxes = _cut_up(Box.whole(shape), rng)
    lost = boxes.pop(rng.randrange(len(boxes)))
    fault = tiling_fault(shape, boxes)
    assert fault is not None
    assert fault.startswith(f"{lost.volume} of {Box.whole(shape).volume} elements are in no slice")
    fault = tiling_fault(shape, [*boxes, lost, lost])
    assert fault is not None
    assert "overlap" in fault
    if shape:
        outside = Box(offset=(lost.offset[0] + shape[0], *lost.offset[1:]), shape=lost.shape)
        fault = tiling_fault(shape, [*boxes, outside])
        assert fault is not None
        assert "outside" in fault


@given(shapes, st.integers(0, 2**32))
def test_boxes_are_a_cover_where_each_element_is_in_one_of_them(shape: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    boxes = _cut_up(Box.whole(shape), rng)
    for _ in range(rng.randint(0, 3)):  # lost, doubled, moved
        change = rng.randrange(3)
        if boxes and change == 0:
            boxes.pop(rng.randrange(len(boxes)))
        elif boxes and change == 1:
            boxes.append(rng.choice(boxes))
        else:
            boxes.append(_box(shape, rng))
    counts = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        counts[box.index] += 1
    assert (tiling_fault(shape, boxes) is None) == bool((counts == 1).all())


MANY = 100_000


@pytest.mark.parametrize("across", [False, True])
def test_boxes_by_the_hundred_thousand_are_checked_without_comparing_all_of_them(across: bool) -> None:
    """All in one row, so that a comparison of those that share a row takes an hour."""
    rows = [Box(offset=(0, 2 * number), shape=(1, 2)) for number in range(MANY)]
    boxes = [Box(offset=box.offset[::-1], shape=box.shape[::-1]) for box in rows] if across else rows
    shape = (2 * MANY, 1) if across else (1, 2 * MANY)
    random.Random(0).shuffle(boxes)
    assert tiling_fault(shape, boxes) is None
    fault = tiling_fault(shape, [*boxes[1:], boxes[1]])
    assert fault is not None
    assert fault.startswith(f"its {MANY} slices overlap, leave a hole")


def test_boxes_that_cut_many_dimensions_are_refused_before_their_corners_fill_the_memory() -> None:
    shape = (2,) * 16
    boxes = [Box(offset=tuple(number >> dim & 1 for dim in range(16)), shape=(1,) * 16) for number in range(5000)]
    fault = tiling_fault(shape, boxes)
    assert fault is not None
    assert "more ways than can be checked" in fault


def test_the_first_hole_is_named() -> None:
    boxes = [Box(offset=(0, 0), shape=(4, 3)), Box(offset=(0, 3), shape=(2, 3))]
    assert tiling_fault((4, 6), boxes) == "6 of 24 elements are in no slice, first [2:4, 3:6]"


@pytest.mark.parametrize(
    ("piece", "local_shape"),
    [
        (Piece(local=0, start=0, length=5), (4, 3)),  # more than the local tensor
        (Piece(local=0, start=6, length=4), (4, 3)),  # past the end of the global one
        (Piece(local=-1, start=0, length=4), (4, 3)),
        (Piece(local=0, start=0, length=4), (4, 2)),  # another width
        (Piece(local=0, start=0, length=4), (4,)),
    ],
)
def test_a_shard_that_does_not_describe_its_tensor_is_refused(piece: Piece, local_shape: tuple[int, ...]) -> None:
    shard = Shard(global_shape=(8, 3), dim=0, pieces=(piece,), group=ALONE, init=Init.zeros())
    with pytest.raises(ValueError, match=r"model\.w: a piece is"):
        held_boxes("model.w", shard, local_shape)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32))
def test_a_slice_of_a_split_tensor_holds_its_elements_where_they_are_in_the_global_one(
    rows: int, columns: int, cuts: int, seed: int
) -> None:
    """Pieces [gate; up] along either dimension, with padding behind them, cut anywhere."""
    rng = random.Random(seed)
    dim = rng.randrange(2)
    lengths = [rows, columns]
    lengths[dim] = 2 * lengths[dim]
    whole = torch.arange(2 * lengths[0] * lengths[1]).view(*(2 * n if i == dim else n for i, n in enumerate(lengths)))
    half = lengths[dim] // 2
    pieces = (Piece(local=0, start=half, length=half), Piece(local=half, start=3 * half, length=half))
    local = torch.cat([whole.narrow(dim, piece.start, piece.length) for piece in pieces], dim)
    padding = torch.full((1, *local.shape[1:]) if dim == 0 else (local.shape[0], 1), -1)
    local = torch.cat([local, padding], dim)
    shard = Shard(global_shape=tuple(whole.shape), dim=dim, pieces=pieces, group=ALONE, init=Init.zeros())
    found = torch.full_like(whole, -1)
    borders = sorted({0, local.numel(), *(rng.randint(0, local.numel()) for _ in range(cuts))})
    for first, stop in itertools.pairwise(borders):
        elements = FlatRange(shape=tuple(local.shape), first=first, stop=stop)
        for part in held_parts(
            NamedTensor(key="x", tensor=local.flatten()[first:stop], shard=shard, elements=elements)
        ):
            assert bool((found[part.placed.index] == -1).all()), "an element comes twice"
            found[part.placed.index] = part.values
    expected = torch.full_like(whole, -1)
    for piece in pieces:
        expected.narrow(dim, piece.start, piece.length).copy_(whole.narrow(dim, piece.start, piece.length))
    assert torch.equal(found, expected)
