"""The groups of a started world: who is in them, what they may take, that nobody has to be asked for them."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import timedelta
from inspect import signature

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.comm_group import CommGroup
from megatron.core.parallel_state import (
    ParallelState,
    build_parallel_state,
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
)
from megatron.core.rank_grid import RankGrid
from tests.helpers.distributed import run_distributed

AXES = {
    "tensor": "tp",
    "pipeline": "pp",
    "data": "dp",
    "context": "cp",
    "data_context": "dp-cp",
    "model": "tp-pp",
    "world": "tp-cp-ep-dp-pp",
}


def groups_of(state: ParallelState) -> dict[str, CommGroup]:
    """Every group and channel of this rank, by name."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    groups = {name: value for name, value in values.items() if isinstance(value, CommGroup)}
    return groups | {f"channel {source} to {to}": channel for (source, to), channel in state.channels.items()}


def seconds_of(group: CommGroup) -> float | None:
    """The time-out of a group's collectives and messages; None in a group of one."""
    if group.process_group is None:
        return None
    backend = group.process_group._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()  # type: ignore[no-any-return]


def timeouts(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, float | None]:
    state = build_parallel_state(RankGrid(**sizes), rank=rank, timeout=timedelta(minutes=7))
    groups = groups_of(state)
    del groups["world"]  # made by whoever has initialised torch.distributed
    return {name: seconds_of(group) for name, group in groups.items()}


@pytest.mark.parametrize("sizes", [{"tp": 2, "cp": 2, "dp": 2}, {"dp": 2, "pp": 3}, {"tp": 2, "pp": 2}], ids=str)
def test_every_group_and_channel_has_the_time_out_that_was_asked_for(sizes: dict[str, int]) -> None:
    grid = RankGrid(**sizes)
    for rank, found in enumerate(run_distributed(timeouts, grid.world_size, sizes)):
        for name, seconds in found.items():
            # the one group that may be the world's own, which has the time-out of `init_process_group`
            ranks = () if name not in AXES else grid.group_of(rank, AXES[name])
            if len(ranks) != grid.world_size:
                assert seconds in (None, 7 * 60), (rank, name)
        assert sum(seconds is not None for seconds in found.values()) >= 2


def build_without_asking(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("a rank asked the others for what the grid says")

    for name in ("all_gather_object", "get_world_size", "broadcast", "all_gather"):
        setattr(dist, name, asked)
    groups = groups_of(build_parallel_state(RankGrid(**sizes), rank=rank))
    for group in groups.values():  # every communicator works
        if group.size > 1:
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group.process_group)
            assert int(total) == sum(group.ranks)
            assert group.ranks[group.rank] == rank
    return {name: group.ranks for name, group in groups.items()}


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 3}, {"tp": 2, "dp": 2, "pp": 2}, {"pp": 4}], ids=str)
def test_groups_and_channels_follow_from_the_grid_alone(sizes: dict[str, int]) -> None:
    grid = RankGrid(**sizes)
    last = grid.pp - 1
    for rank, found in enumerate(run_distributed(build_without_asking, grid.world_size, sizes)):
        for name, axes in AXES.items():
            assert found.pop(name) == grid.group_of(rank, axes)
        pipeline = grid.group_of(rank, "pp")
        stage = pipeline.index(rank)
        ends = (pipeline[0], pipeline[-1])
        assert found.pop("embedding", None) == (ends if rank in ends else None)
        neighbours = {(stage - 1) % grid.pp, (stage + 1) % grid.pp}
        expected = {(stage, other) for other in neighbours} | {(other, stage) for other in neighbours}
        assert found == {
            f"channel {source} to {to}": tuple(sorted((pipeline[source], pipeline[to]))) for source, to in expected
        }
        assert (f"channel {last} to 0" in found) == (stage in (0, last))


def test_a_world_of_one_needs_no_communicator() -> None:
    state = ParallelState.single()
    assert state.channels == {}
    assert {group.process_group for group in groups_of(state).values()} == {None}


GETTERS = {
    "get_tensor_model_parallel": "tp",
    "get_pipeline_model_parallel": "pp",
    "get_data_parallel": "dp",
    "get_context_parallel": "cp",
}


def what_the_getters_say(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, object]:
    """Called and forgotten again: what each getter returned, groups as their ranks."""
    initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        context_parallel_size=sizes["cp"],
    )
    found: dict[str, object] = {}
    for name, ask in vars(parallel_state).items():
        if re.fullmatch(r"get_\w+_(group|rank|world_size)|is_pipeline_\w+_stage", name):
            found[name] = ask()
            if "with_context_parallel" in signature(ask).parameters:
                found[f"{name} with context"] = ask(with_context_parallel=True)
    destroy_model_parallel()
    with pytest.raises(RuntimeError, match="do not exist yet"):
        get_parallel_state()
    return {name: value.ranks if isinstance(value, CommGroup) else value for name, value in found.items()}


@pytest.mark.parametrize("sizes", [{"tp": 2, "cp": 2, "dp": 1, "pp": 2}, {"tp": 1, "cp": 2, "dp": 2, "pp": 2}], ids=str)
def test_each_getter_answers_for_its_axis(sizes: dict[str, int]) -> None:
    grid = RankGrid(**sizes)
    for rank, found in enumerate(run_distributed(what_the_getters_say, grid.world_size, sizes)):
        for getter, axes, end in [
            *((getter, axes, "") for getter, axes in GETTERS.items()),
            ("get_data_parallel", "dp-cp", " with context"),
        ]:
            ranks = grid.group_of(rank, axes)
            assert found.pop(f"{getter}_group{end}") == ranks
            assert found.pop(f"{getter}_rank{end}") == ranks.index(rank)
            assert found.pop(f"{getter}_world_size{end}") == len(ranks)
        stages = grid.group_of(rank, "pp")
        ends = (stages[0], stages[-1])
        assert found == {
            "get_model_parallel_group": grid.group_of(rank, "tp-pp"),
            "get_embedding_group": ends if rank in ends else None,
            "is_pipeline_first_stage": rank == stages[0],
            "is_pipeline_last_stage": rank == stages[-1],
        }
