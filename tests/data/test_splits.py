"""The split of documents into training, validation and test."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import parse_split
from megatron.data.splits import as_indices, split_ranges


@pytest.mark.parametrize(
    "text",
    [
        "-1,1,0",
        "90,abc5,5",
        "0,0,0",
        "",
        ",",
        "1,,2",
        "1,2,3,4",
        "nan,1,1",
        "inf,1,1",
        "969 30 1",
        "1e308,1e308,1",
    ],
)
def test_a_text_that_is_not_shares_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"one to three numbers, none negative|at least one part must be more than 0"):
        parse_split(text)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("969, 30, 1", (0.969, 0.03, 0.001)),
        ("1", (1.0, 0.0, 0.0)),
        ("100,0,0", (1.0, 0.0, 0.0)),
        ("0,0.5,.5", (0.0, 0.5, 0.5)),
        ("98,2", (0.98, 0.02, 0.0)),
        ("99990,8,2", (0.9999, 0.00008, 0.00002)),
    ],
)
def test_shares_are_relative_and_those_left_out_are_0(text: str, expected: tuple[float, float, float]) -> None:
    assert parse_split(text) == expected


@pytest.mark.parametrize(
    "text, count, borders",
    [
        ("449,50,1", 502, [0, 451, 501, 502]),
        ("969,30,1", 10, [0, 10, 10, 10]),
        ("969,30,1", 659, [0, 639, 658, 659]),
    ],
)
def test_borders_are_rounded_running_sums(text: str, count: int, borders: list[int]) -> None:
    ranges = split_ranges(parse_split(text), count)
    assert ranges == [range(begin, end) for begin, end in itertools.pairwise(borders)]


def test_a_share_of_0_has_no_part() -> None:
    assert split_ranges(parse_split("60,0,40"), 5) == [range(3), None, range(3, 5)]


@given(
    shares=st.tuples(*[st.floats(0, 1000)] * 3).filter(lambda shares: sum(shares) > 1e-3),
    count=st.integers(0, 10**12),
)
def test_every_document_is_in_one_part(shares: tuple[float, float, float], count: int) -> None:
    parts = [
        part
        for part in split_ranges(parse_split(",".join(f"{share:.9f}" for share in shares)), count)
        if part is not None
    ]
    assert parts[0].start == 0
    assert parts[-1].stop == count
    assert all(before.stop == after.start for before, after in itertools.pairwise(parts))


def test_indices_are_as_wide_as_they_must_be() -> None:
    assert str(as_indices(range(2, 4)).dtype) == "int32"
    assert str(as_indices(range(2**31, 2**31 + 2)).dtype) == "int64"
