"""Each collective against what its name says, over real ranks and over a group of one."""

from __future__ import annotations

import pytest
import torch

from megatron.core import collectives
from megatron.core.comm_group import CommGroup
from megatron.core.parallel_state import ParallelState, build_parallel_state, grid_of_world
from tests.helpers.distributed import RankFailure, run_distributed


def world_group(rank: int, world_size: int) -> CommGroup:
    return build_parallel_state(grid_of_world(world_size, tensor=world_size, pipeline=1), rank=rank).tensor


def check_values(rank: int, world_size: int) -> None:
    group = world_group(rank, world_size)
    base = torch.arange(12.0).view(6, 2)
    mine = base + 100 * rank
    everyone = [base + 100 * other for other in range(world_size)]
    assert torch.equal(collectives.all_reduce(mine, group), sum(everyone))
    assert torch.equal(collectives.all_reduce(mine, group, "max"), everyone[-1])
    for dim in (0, 1):
        assert torch.equal(collectives.all_gather(mine, group, dim), torch.cat(everyone, dim))
    total = sum(everyone)
    assert torch.equal(collectives.reduce_scatter(mine, group), total.chunk(world_size)[rank])
    assert torch.equal(mine, base + 100 * rank), "a function without a trailing underscore changed its input"
    exchanged = collectives.all_to_all(mine, group, split_dim=0, concat_dim=1)
    assert torch.equal(exchanged, torch.cat([other.chunk(world_size)[rank] for other in everyone], dim=1))
    assert collectives.all_gather_object({"rank": rank}, group) == [{"rank": other} for other in range(world_size)]


def check_in_place(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Input and output are one memory: each slice is that of the reduction of the whole, to the bit."""
    group = world_group(rank, world_size)
    everyone = [
        torch.randn(world_size * 192, generator=torch.Generator().manual_seed(other)).to(dtype)
        for other in range(world_size)
    ]
    for op in ("sum", "mean"):
        for async_op in (False, True):
            whole, sliced = everyone[rank].clone(), everyone[rank].clone()
            collectives.all_reduce_(whole, group, op)
            work = collectives.reduce_scatter_(sliced, group, op, async_op=async_op)
            if work is not None:
                work.wait()
            mine = collectives.slice_of(sliced, group)
            assert torch.equal(mine, collectives.slice_of(whole, group))
            work = collectives.all_gather_(sliced, group, async_op=async_op)
            if work is not None:
                work.wait()
            assert torch.equal(sliced, whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_slices_are_reduced_and_gathered_in_place(dtype: torch.dtype) -> None:
    for world_size in (1, 2, 3):
        run_distributed(check_in_place, world_size, dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values(world_size: int) -> None:
    run_distributed(check_values, world_size)


def test_a_group_of_one_needs_no_process_group() -> None:
    group = ParallelState.single().tensor
    tensor = torch.ones(3)
    assert collectives.all_reduce(tensor, group) is tensor
    assert collectives.all_gather(tensor, group) is tensor
    assert collectives.reduce_scatter(tensor, group) is tensor


def fail_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise RuntimeError("this rank has had enough")


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1.*this rank has had enough"):
        run_distributed(fail_on_last_rank, 2)


def groups_of_rank(rank: int, world_size: int) -> dict[str, tuple[int, ...]]:
    state = build_parallel_state(grid_of_world(world_size, tensor=2, pipeline=2), rank=rank)
    for group in (state.tensor, state.pipeline, state.data, state.model, state.world):
        assert float(collectives.all_reduce(torch.ones(()), group)) == group.size
    names = ("tensor", "pipeline", "data", "data_context", "model", "world")
    return {name: getattr(state, name).ranks for name in names}


def test_each_rank_gets_its_groups() -> None:
    ranks = run_distributed(groups_of_rank, 8)
    assert ranks[5]["tensor"] == (4, 5)
    assert ranks[5]["pipeline"] == (1, 5)
    assert ranks[5]["data"] == ranks[5]["data_context"] == (5, 7)
    assert ranks[5]["model"] == (0, 1, 4, 5)
    assert ranks[5]["world"] == tuple(range(8))
