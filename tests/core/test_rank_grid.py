"""The grid of ranks against Megatron-LM's own tables and the properties of any grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.parallel import DEFAULT_ORDER, PIPELINE_BEFORE_DATA_ORDER
from megatron.core.parallel_state import describe_groups, grid_of_world
from megatron.core.rank_grid import RankGrid, stage_channels

TABLES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "tables" / "rank_groups.json").read_text()
)


def grid_of_table(table: dict[str, Any]) -> RankGrid:
    prefix = "expert_" if table["kind"] == "expert" else ""
    sizes = {axis: table.get(prefix + axis, table.get(axis, 1)) for axis in ("tp", "ep", "cp", "pp")}
    rest = sizes["tp"] * sizes["ep"] * sizes["cp"] * sizes["pp"]
    return RankGrid(**sizes, dp=table["world"] // rest, order=table["order"])


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table['kind']}-{table['order']}-{table['world']}")
def test_groups_are_those_of_megatron_lm(table: dict[str, Any]) -> None:
    grid = grid_of_table(table)
    assert grid.world_size == table["world"]
    for axes, expected in table["groups"].items():
        if axes == "embedding":
            actual = grid.embedding_groups()
        elif axes == "position_embedding":
            actual = [group[:1] for group in grid.groups("pp")]
        else:
            actual = grid.groups(axes)
        assert [list(group) for group in actual] == expected, axes


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    order=st.sampled_from([DEFAULT_ORDER, PIPELINE_BEFORE_DATA_ORDER]),
    axes=st.sampled_from(["tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-cp-dp-pp"]),
)
def test_groups_along_any_axes_partition_the_world(sizes: tuple[int, ...], order: str, axes: str) -> None:
    grid = RankGrid(tp=sizes[0], cp=sizes[1], dp=sizes[2], pp=sizes[3], order=order)
    groups = grid.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for rank in range(grid.world_size):
        assert grid.rank_at(grid.coordinates(rank)) == rank
        assert grid.group_of(rank, axes) in groups


def test_1536_ranks_of_tensor_8_and_data_192() -> None:
    grid = grid_of_world(1536, tensor=8, pipeline=1)
    assert grid.groups("tp") == [tuple(range(8 * i, 8 * i + 8)) for i in range(192)]
    assert grid.groups("dp") == [tuple(range(i, 1536, 8)) for i in range(8)]
    text = describe_groups(grid, [f"node{rank // 8}" for rank in range(1536)])
    assert "1536 ranks on 192 node(s)" in text
    assert "rank 9 on node1: pp=0 dp=1" not in text  # axes are printed fastest first
    line = next(line for line in text.splitlines() if line.startswith("rank 9 "))
    assert "tp=1" in line and "dp=1" in line and "tensor [8, 9, 10, 11, 12, 13, 14, 15]" in line
    assert "data [1, 9, … 1529] (192 ranks, step 8)" in line


def test_the_map_looks_at_each_member_once_for_each_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of thousands of ranks is worked out once, not once for each of its members."""
    grid = RankGrid(dp=4096)
    members = []
    original = RankGrid.group_of

    def counted(self: RankGrid, rank: int, axes: str) -> tuple[int, ...]:
        group = original(self, rank, axes)
        members.append(len(group))
        return group

    monkeypatch.setattr(RankGrid, "group_of", counted)
    assert len(describe_groups(grid, ["node0"] * 4096).splitlines()) == 4097
    assert sum(members) == 5 * 4096  # tensor, pipeline, data, model, embedding


@pytest.mark.parametrize(
    "num_stages, circular, expected",
    [
        (1, True, []),
        (2, True, [(0, 1), (1, 0)]),
        (3, False, [(0, 1), (1, 0), (1, 2), (2, 1)]),
        (3, True, [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)]),
    ],
)
def test_channels_between_stages(num_stages: int, circular: bool, expected: list[tuple[int, int]]) -> None:
    assert stage_channels(num_stages, circular=circular) == expected


def test_512_ranks_of_tensor_2_pipeline_4_and_data_64() -> None:
    grid = grid_of_world(512, tensor=2, pipeline=4)
    assert grid.dp == 64
    assert grid.group_of(0, "pp") == (0, 128, 256, 384)
    assert grid.group_of(0, "dp") == tuple(range(0, 128, 2))
    assert grid.embedding_groups()[1] == (1, 385)
    assert len(grid.groups("tp-pp")) == 64


def test_a_world_that_does_not_divide_says_how_many_ranks_to_start() -> None:
    with pytest.raises(ValueError, match=r"world size 6 is not divisible by .*= 4: start a multiple of 4 ranks"):
        grid_of_world(6, tensor=2, pipeline=2)
