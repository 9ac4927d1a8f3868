"""A number of buckets that is asked for is what there is, of parameters that are reduced in the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.config.problems import UserError
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.bucket_contents import numbers_of_buckets
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.shard import set_shard, shard_of
from tests.helpers.distributed import run_distributed
from tests.optimizer.toy import with_whole_shards
from tests.training.runs import build

REDUCE = DistributedDataParallelConfig(overlap_grad_reduce=True)


def module_of(*sizes: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,), tied: tuple[int, ...] = ()) -> nn.Module:
    """Parameters of these sizes, their dtypes in turn."""
    module = nn.Module()
    for i, size in enumerate(sizes):
        module.register_parameter(str(i), nn.Parameter(torch.zeros(size, dtype=dtypes[i % len(dtypes)])))
    with_whole_shards(module)
    for i in tied:
        parameter = module.get_parameter(str(i))
        set_shard(parameter, replace(shard_of(parameter), tied=True))
    return module


def elements_of_buckets(modules: list[nn.Module], number: int) -> list[list[int]]:
    """Of each chunk the elements in each of its buckets of parameters that are not tied."""
    numbers = numbers_of_buckets(modules, number, matrices_apart=False)
    chunks = [
        DistributedDataParallel(
            module, data_group=CommGroup.single(), grad_dtype=torch.float32, config=REDUCE, num_buckets=of_chunk
        )
        for module, of_chunk in zip(modules, numbers)
    ]
    return [
        [
            sum(entry.parameter.numel() for entry in bucket.entries)
            for bucket in chunk.buckets
            if not any(shard_of(entry.parameter).tied for entry in bucket.entries)
        ]
        for chunk in chunks
    ]


@pytest.mark.parametrize("number", range(1, 11))
def test_so_many_buckets_hold_ten_parameters(number: int) -> None:
    (elements,) = elements_of_buckets([module_of(*[7] * 10)], number)
    assert len(elements) == number
    assert max(elements) - min(elements) <= 7, "they are as alike as whole parameters can be"


@pytest.mark.parametrize("sizes", [(100, 1, 1, 1, 1), (1, 1, 1, 1, 100), (50, 1, 1, 50, 1)])
@pytest.mark.parametrize("number", range(1, 6))
def test_so_many_buckets_hold_parameters_of_any_sizes(number: int, sizes: tuple[int, ...]) -> None:
    (elements,) = elements_of_buckets([module_of(*sizes)], number)
    assert len(elements) == number
    assert sum(elements) == sum(sizes)


@pytest.mark.parametrize("number", range(4, 18))
def test_the_number_is_that_of_all_types_and_chunks_of_a_rank_besides_tied_parameters(number: int) -> None:
    types = (torch.float32, torch.bfloat16)
    modules = [module_of(*[9] * 8, dtypes=types), nn.Module(), module_of(*[3] * 10, dtypes=types, tied=(0,))]
    elements = elements_of_buckets(modules, number)
    assert sum(map(len, elements)) == number
    assert elements[1] == []


@pytest.mark.parametrize("number", [3, 18])
def test_a_number_that_cannot_be_had_is_refused(number: int) -> None:
    types = (torch.float32, torch.bfloat16)
    modules = [module_of(*[9] * 8, dtypes=types), module_of(*[3] * 10, dtypes=types, tied=(0,))]
    with pytest.raises(UserError, match=rf"--ddp-num-buckets {number}: .* 17 parameters .* from 4 to 17 can be had"):
        numbers_of_buckets(modules, number, matrices_apart=False)


def ordinary_buckets(rank: int, world_size: int, *arguments: str) -> int:
    run, _ = build(*arguments, rank=rank, world_size=world_size)
    buckets = [bucket for chunk in run.chunks for bucket in chunk.buckets if not bucket.late]
    return sum(not any(shard_of(entry.parameter).tied for entry in bucket.entries) for bucket in buckets)


def test_a_run_has_on_each_rank_the_number_that_it_asks_for() -> None:
    arguments = (
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
        *("--overlap-grad-reduce", "--ddp-num-buckets", "7", "--optimizer", "muon"),
    )
    assert run_distributed(ordinary_buckets, 2, *arguments) == [7, 7]
