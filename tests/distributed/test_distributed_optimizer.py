"""The distributed optimizer: the updates of the plain one, in slices, for a part of its memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.grad_buffer import ALIGNMENT
from megatron.core.main_grad import main_grad_of
from megatron.optimizer.optimizer import MegatronOptimizer
from tests.distributed.toy_shards import Layout, state_of
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise
from tests.helpers.tiny import StepResult, assemble, train_steps
from tests.optimizer.toy import optimizer_of, toy_model, with_whole_shards
from tests.parity.layouts import DATA_PARALLELISM

SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True)


def rank_of(size: int, rank: int) -> CommGroup:
    """A group that nothing is sent over."""
    return CommGroup(name="data", ranks=tuple(range(size)), rank=rank, process_group=object())  # type: ignore[arg-type]


def chunk_of_rank(size: int, rank: int, dtype: torch.dtype, **choices: object) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, **choices)  # type: ignore[arg-type]
    model = toy_model(dtype)
    return DistributedDataParallel(model, data_group=rank_of(size, rank), grad_dtype=torch.float32, config=config)


# ---- slices ----


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("bucket_size", [None, 1, 60])
def test_the_slices_of_the_ranks_hold_each_element_once_and_are_as_long(size: int, bucket_size: int | None) -> None:
    chunks = [chunk_of_rank(size, rank, torch.float32, bucket_size=bucket_size) for rank in range(size)]
    held = {name: torch.zeros(parameter.numel()) for name, parameter in chunks[0].module.named_parameters()}
    for chunk in chunks:
        for bucket, same_bucket in zip(chunk.buckets, chunks[0].buckets, strict=True):
            slice_ = bucket.slice_of(bucket.parameters)
            assert slice_.numel() * size == bucket.parameters.numel() == same_bucket.parameters.numel()
            assert slice_.numel() % ALIGNMENT == 0
            for part in bucket.slice_entries():
                held[part.entry.name][part.first : part.stop] += 1
                assert_bitwise(part.view(slice_), part.parameter.detach().view(-1)[part.first : part.stop])
    assert all(bool((count == 1).all()) for count in held.values())


@pytest.mark.parametrize("bucket_size, expected", [(None, 1), (1, 7), (40, 3), (60, 2), (10_000, 1)])
def test_a_bucket_is_closed_by_the_parameter_that_fills_it(bucket_size: int | None, expected: int) -> None:
    """The toy model has, from its end, 3, 39, 13, 91, 7, 7 and 77 elements."""
    chunk = chunk_of_rank(2, 0, torch.float32, bucket_size=bucket_size)
    assert len(chunk.buckets) == expected
    assert all(sum(e.parameter.numel() for e in b.entries) >= (bucket_size or 0) for b in chunk.buckets[:-1])


def test_buckets_are_padded_for_the_bandwidth_of_nccl_when_asked() -> None:
    chunk = chunk_of_rank(3, 1, torch.float32, bucket_size=60, pad_buckets_for_high_nccl_busbw=True)
    assert {bucket.parameters.numel() % 2**16 for bucket in chunk.buckets} == {0}
    assert {bucket.parameters.numel() % 3 for bucket in chunk.buckets} == {0}


# ---- memory ----


def state_bytes(optimizer: MegatronOptimizer) -> int:
    """What the optimizer keeps besides the model's buffers, by the memory that is behind its tensors."""
    own = {}
    for part in optimizer.parts:
        model = part.bucket.parameters.untyped_storage().data_ptr()
        for tensor in (part.main, *part.state.values()):
            storage = tensor.untyped_storage()
            if storage.data_ptr() != model:
                own[storage.data_ptr()] = storage.nbytes()
    return sum(own.values())


@pytest.mark.parametrize("dtype, per_parameter", [(torch.bfloat16, 12), (torch.float16, 12), (torch.float32, 8)])
@pytest.mark.parametrize("size", [2, 4])
def test_main_parameters_and_state_take_their_part_of_the_memory(
    dtype: torch.dtype, per_parameter: int, size: int
) -> None:
    for rank in range(size):
        chunk = chunk_of_rank(size, rank, dtype)
        elements = sum(buffer.parameters.numel() for buffer in chunk.grad_buffers)
        assert state_bytes(optimizer_of([chunk])) == per_parameter * elements // size


# ---- updates ----


@cache
def plain(precision: str) -> list[list[StepResult]]:
    return run_distributed(train_steps, 2, 3, precision, "--clip-grad", "0")


@pytest.mark.parametrize("choices", ["zero", "overlap", "zero-overlap"])
@pytest.mark.parametrize("precision", ["--fp64", "--bf16"])
def test_two_ranks_make_the_updates_of_the_plain_optimizer_to_the_bit(precision: str, choices: str) -> None:
    """Two numbers have one sum, and the average of their doubles is that sum."""
    arguments = (precision, "--clip-grad", "0", *DATA_PARALLELISM[choices])
    ranks = run_distributed(train_steps, 2, 3, *arguments)
    for step in range(3):
        for what in ("gradients", "parameters"):
            expected = assemble(getattr(rank[step], what) for rank in plain(precision))
            for name, tensor in assemble(getattr(rank[step], what) for rank in ranks).items():
                assert_bitwise(tensor, expected[name], f"{what} {step}: {name}")
        assert [rank[step].grad_norm for rank in ranks] == pytest.approx(
            [rank[step].grad_norm for rank in plain(precision)], rel=1e-12
        )


@pytest.mark.parametrize("choices", [(), DATA_PARALLELISM["zero-overlap"]], ids=["plain", "zero-overlap"])
def test_gradients_in_bfloat16_train_about_as_those_in_float32(choices: tuple[str, ...]) -> None:
    ranks = run_distributed(train_steps, 2, 3, "--bf16", "--clip-grad", "0", "--grad-reduce-in-bf16", *choices)
    for step in range(3):
        gradients = assemble(rank[step].gradients for rank in ranks)
        assert {tensor.dtype for tensor in gradients.values()} == {torch.bfloat16}
        assert ranks[0][step].losses == pytest.approx(plain("--bf16")[0][step].losses, rel=2**-7)
    first = plain("--bf16")[0][0].grad_norm
    assert ranks[0][0].grad_norm == pytest.approx(first, rel=2**-6)
    assert ranks[0][0].grad_norm != first


# ---- ranks with next to nothing ----


Shapes = dict[str, tuple[int, ...]]
THREE_NUMBERS: Shapes = dict.fromkeys("abc", (1,))
# Some ranks hold parts of one tensor, others of several.
ONE_LARGE: Shapes = {"matrix": (90, 7), **{f"vector{number}": (number + 1,) for number in range(10)}}


def straight_and_resumed(rank: int, world_size: int, folder: Path, shapes: Shapes) -> dict[str, Any]:
    """Train, save, load into another, train on; the numbers of both at the end."""
    state = state_of(Layout(data=world_size), rank)
    ends = []
    saved_from: MegatronOptimizer | None = None
    for first in (1.0, 5.0):
        model = with_whole_shards(nn.ParameterDict({name: torch.full(shape, first) for name, shape in shapes.items()}))
        chunk = DistributedDataParallel(model, data_group=state.data, grad_dtype=torch.float32, config=SHARDED)
        optimizer = optimizer_of([chunk], model_group=state.world)
        optimizer.set_schedule(0.1, 0.1)
        if saved_from is None:
            step(chunk, optimizer, 0)
            save_checkpoint(folder, 1, everything(optimizer), {}, world=state.world, replicas=state.data)
            saved_from = optimizer
        else:
            load_checkpoint(folder, world=state.world).load_into(everything(optimizer), world=state.world)
            optimizer.load_state_dict({**saved_from.state_dict(), "num_updates": 1})
            optimizer.after_load()
        step(chunk, optimizer, 1)
        ends.append({name: parameter.detach().clone() for name, parameter in model.items()})
    entries = sum(len(part.entries) for part in optimizer.parts)
    return {"straight": ends[0], "resumed": ends[1], "entries": entries}


def everything(optimizer: MegatronOptimizer) -> list[object]:
    return [*optimizer.named_main_parameters(), *optimizer.named_state()]


def step(chunk: DistributedDataParallel, optimizer: MegatronOptimizer, number: int) -> None:
    chunk.zero_grad_buffer()
    for i, parameter in enumerate(chunk.trainable_parameters()):
        main_grad_of(parameter).fill_(1.0 + i + number)
    chunk.reduce_gradients()
    assert optimizer.step().applied


def test_three_parameters_of_one_element_on_four_ranks_train_save_and_load(tmp_path: Path) -> None:
    ranks = run_distributed(straight_and_resumed, 4, tmp_path, THREE_NUMBERS)
    assert [rank["entries"] for rank in ranks] == [1, 1, 1, 0], "the last one has nothing but padding"
    for rank in ranks:
        for name in "abc":
            assert_bitwise(rank["resumed"][name], rank["straight"][name], name)
            assert_bitwise(rank["straight"][name], ranks[0]["straight"][name], name)
            assert float(rank["straight"][name]) < 0.9, "two steps of 0.1 each"


def test_ranks_with_parts_of_other_numbers_of_parameters_train_save_and_load(tmp_path: Path) -> None:
    ranks = run_distributed(straight_and_resumed, 4, tmp_path, ONE_LARGE)
    assert [rank["entries"] for rank in ranks] == [5, 5, 1, 1]
    for rank in ranks:
        for name in ONE_LARGE:
            assert_bitwise(rank["resumed"][name], rank["straight"][name], name)
            assert_bitwise(rank["straight"][name], ranks[0]["straight"][name], name)
            assert bool((rank["straight"][name] < 0.9).all()), "two steps of 0.1 each"
