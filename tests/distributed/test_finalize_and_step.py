"""Reductions, global norm, clipping and update with every kind of shard, against one plain process."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads, non_finite_gradients
from megatron.core.distributed.grad_buffer import Bucket
from megatron.core.main_grad import main_grad_of
from megatron.core.shard import Init, Shard, set_shard, shard_of, whole_pieces
from megatron.optimizer.adam import AdamW
from megatron.optimizer.sgd import SGD
from tests.distributed import toy_shards
from tests.distributed.toy_shards import Layout
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_all_parity, assert_parity
from tests.optimizer.toy import optimizer_of

LR, DECAY, CLIP = 0.05, 0.3, 0.8

LAYOUTS = [
    Layout(),
    Layout(query_groups=1),
    Layout(tensor=2),
    Layout(tensor=2, query_groups=1),
    Layout(tensor=3, query_groups=1),
    Layout(tensor=4),
    Layout(tensor=4, query_groups=1),
    Layout(pipeline=2),
    Layout(pipeline=3),
    Layout(pipeline=2, tied=False),
    Layout(data=3),
    Layout(pipeline=2, data=2),
    Layout(tensor=2, query_groups=1, data=2),
    Layout(tensor=2, query_groups=1, pipeline=2),
    Layout(tensor=2, query_groups=1, pipeline=2, data=2),
    Layout(data=2, sharded=True),
    Layout(data=3, query_groups=1, sharded=True),
    Layout(pipeline=2, data=3, sharded=True),
    Layout(tensor=2, query_groups=1, pipeline=2, data=2, sharded=True),
]


Arrays = dict[str, np.ndarray]


@cache
def reference_run(query_groups: int) -> tuple[Arrays, Arrays, list[float]]:
    """Three steps of the global model in one process, by torch's own: (parameters, exp_avg, norms)."""
    layout = Layout(query_groups=query_groups)
    shapes = toy_shards.global_shapes(layout)
    parameters = {
        name: nn.Parameter(toy_shards.global_tensor("parameter", shape, name)) for name, shape in shapes.items()
    }
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    norms = []
    for step in range(3):
        for name, gradient in toy_shards.true_gradients(layout, step).items():
            parameters[name].grad = gradient
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), CLIP)))
        optimizer.step()
    moments = {name: optimizer.state[parameter]["exp_avg"].numpy() for name, parameter in parameters.items()}
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}, moments, norms


def gathered(bucket: Bucket) -> Tensor:
    """The reduced gradients of all slices."""
    return collectives.all_gather(bucket.slice_of(bucket.gradients), bucket.data_group)


def check_steps(
    rank: int, world_size: int, layout: Layout, parameters: Arrays, moments: Arrays, norms: list[float]
) -> None:
    state = toy_shards.state_of(layout, rank)
    chunk = toy_shards.build_chunk(layout, state)
    model = state.world if layout.sharded else state.model
    optimizer = optimizer_of([chunk], AdamW(), clip_grad=CLIP, model_group=model, count_zeros=True)
    optimizer.set_schedule(LR, DECAY)

    def assert_my_part(parameter: nn.Parameter, local: Tensor, whole: Tensor, what: str) -> None:
        shard = shard_of(parameter)
        expected = toy_shards.local_part(shard, tuple(parameter.shape), whole)
        assert_parity(local, expected, f"{what} of {shard.name} on rank {rank}")

    for step in range(3):
        chunk.zero_grad_buffer()
        toy_shards.set_raw_gradients(chunk, state, step)
        finalize_model_grads([chunk], tensor=state.tensor, embedding=state.embedding)
        for bucket in chunk.buckets if layout.sharded else ():
            bucket.gradients.copy_(gathered(bucket))
        truth = toy_shards.true_gradients(layout, step)
        for parameter in chunk.trainable_parameters():
            assert_my_part(parameter, main_grad_of(parameter), truth[shard_of(parameter).name], "gradient")
        report = optimizer.step()
        assert report.applied
        assert report.grad_norm == pytest.approx(norms[step], rel=1e-12)
        assert report.num_zeros == 0, "rows of padding are no gradients"
    everything = np.concatenate([array.reshape(-1) for array in parameters.values()])
    assert optimizer.params_norm() == pytest.approx(float(np.linalg.norm(everything)), rel=1e-12)
    for parameter in chunk.trainable_parameters():
        whole = torch.from_numpy(parameters[shard_of(parameter).name])
        assert_my_part(parameter, parameter.data, whole, "value")
    named = [each for each in optimizer.named_state() if each.key.startswith("optimizer.exp_avg.")]
    expected = {name: torch.from_numpy(moment) for name, moment in moments.items()}
    assert_all_parity(toy_shards.assemble(named, model), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.label)
def test_three_steps_of_any_layout_are_those_of_torch_in_one_process(layout: Layout) -> None:
    """Every rank ends with its part of the global gradient, also of what it does not own: no copy may drift.

    The norm counts each global element once: tied, replicated and whole parameters, and no padding.
    """
    run_distributed(check_steps, layout.world_size, layout, *reference_run(layout.query_groups))


def norms_dominate(rank: int, world_size: int) -> float:
    """The gradient of the norms, whole on each rank, outweighs everything else by far."""
    state = toy_shards.state_of(Layout(tensor=world_size, query_groups=1), rank)
    chunk = toy_shards.build_chunk(Layout(tensor=world_size, query_groups=1), state)
    for parameter in chunk.trainable_parameters():
        if "norm" in shard_of(parameter).name or "proj.bias" in shard_of(parameter).name:
            main_grad_of(parameter).fill_(100.0)
    optimizer = optimizer_of([chunk], model_group=state.model)
    optimizer.set_schedule(LR, DECAY)
    return optimizer.step().grad_norm


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_whole_parameters_count_once_however_many_ranks_hold_them(tensor: int) -> None:
    expected = 100.0 * math.sqrt(3 * 2 * toy_shards.HIDDEN)
    assert run_distributed(norms_dominate, tensor) == pytest.approx([expected] * tensor, rel=1e-12)


def two_stages(rank: int, world_size: int, frozen_stage: int | None) -> tuple[float, float]:
    """One parameter a stage, with gradients 3 and 4; returns (norm, how far this stage's parameter moved)."""
    state = toy_shards.state_of(Layout(pipeline=2), rank)
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64), requires_grad=rank != frozen_stage)
    single = CommGroup.single("tensor")
    shard = Shard(
        name=f"layers.{rank}.weight", global_shape=(1, 1), dim=None, pieces=whole_pieces(1, single),
        group=single, init=Init.zeros(),
    )  # fmt: skip
    set_shard(module.weight, shard)
    chunk = DistributedDataParallel(module, data_group=state.data, grad_dtype=torch.float64)
    optimizer = optimizer_of([chunk], SGD(momentum=0.0), clip_grad=1.0, model_group=state.model)
    optimizer.set_schedule(1.0, 0.0)
    for parameter in chunk.trainable_parameters():
        main_grad_of(parameter).fill_(3.0 + rank)
    finalize_model_grads([chunk], tensor=state.tensor, embedding=state.embedding)
    report = optimizer.step()
    return report.grad_norm, -float(module.weight.detach())


def test_the_norm_spans_pipeline_stages_and_all_are_clipped_alike() -> None:
    results = run_distributed(two_stages, 2, None)
    assert [norm for norm, _ in results] == pytest.approx([5.0, 5.0], rel=1e-12)
    assert [moved for _, moved in results] == pytest.approx([0.6, 0.8], rel=1e-6)


def test_a_stage_whose_parameters_are_all_frozen_takes_part_with_a_norm_of_zero() -> None:
    results = run_distributed(two_stages, 2, 0)
    assert [norm for norm, _ in results] == pytest.approx([4.0, 4.0], rel=1e-12)
    assert [moved for _, moved in results] == pytest.approx([0.0, 1.0], rel=1e-6)


def overflow_on_one_rank(rank: int, world_size: int) -> tuple[bool, float]:
    state = toy_shards.state_of(Layout(tensor=2, pipeline=2), rank)
    chunk = toy_shards.build_chunk(Layout(tensor=2, pipeline=2), state)
    optimizer = optimizer_of([chunk], model_group=state.model)
    optimizer.set_schedule(LR, DECAY)
    toy_shards.set_raw_gradients(chunk, state, step=0)
    if rank == 2:
        split = next(p for p in chunk.trainable_parameters() if "fc1.weight" in shard_of(p).name)
        main_grad_of(split)[0, 0] = math.nan
    before = [parameter.detach().clone() for parameter in chunk.trainable_parameters()]
    finalize_model_grads([chunk], tensor=state.tensor, embedding=state.embedding)
    report = optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(chunk.trainable_parameters(), before))
    return report.applied, report.grad_norm


def test_a_bad_gradient_on_one_rank_makes_all_ranks_skip() -> None:
    for applied, norm in run_distributed(overflow_on_one_rank, 4):
        assert not applied
        assert math.isnan(norm)


def bad_gradient_before_reduction(rank: int, world_size: int) -> list[str]:
    state = toy_shards.state_of(Layout(data=2), rank)
    chunk = toy_shards.build_chunk(Layout(data=2), state)
    toy_shards.set_raw_gradients(chunk, state, step=0)
    if rank == 1:
        main_grad_of(chunk.trainable_parameters()[0]).view(-1)[0] = math.nan
    return non_finite_gradients([chunk])


def test_the_rank_that_made_a_bad_gradient_names_the_parameter() -> None:
    assert run_distributed(bad_gradient_before_reduction, 2) == [[], ["layers.2.fc1.weight"]]


def collectives_of_finalize(rank: int, world_size: int, layout: Layout) -> list[int]:
    """Number of elements of each all-reduce, in order."""
    state = toy_shards.state_of(layout, rank)
    chunk = toy_shards.build_chunk(layout, state)
    sizes = []
    original = collectives.all_reduce_

    def counting(tensor: Tensor, group: CommGroup, *arguments: object, **keywords: object) -> object:
        if group.size > 1:
            sizes.append((group.name, tensor.numel()))
        return original(tensor, group, *arguments, **keywords)

    collectives.all_reduce_ = counting
    finalize_model_grads([chunk], tensor=state.tensor, embedding=state.embedding)
    return sizes


def test_each_reduction_is_one_collective_and_the_tied_one_comes_last() -> None:
    layout = Layout(tensor=2, query_groups=1, pipeline=2, data=2)
    sizes = run_distributed(collectives_of_finalize, 8, layout)[0]
    assert [name for name, _ in sizes] == ["tensor", "tensor", "data", "embedding"]
    partial, replicated, _, tied = (size for _, size in sizes)
    assert partial == toy_shards.HIDDEN
    assert replicated == 2 * toy_shards.HEAD_DIM * (toy_shards.HIDDEN + 1), "keys and values, weight and bias"
    assert tied == 4 * toy_shards.HIDDEN


def gathers_at_the_start(rank: int, world_size: int, layout: Layout) -> list[int]:
    """Number of parameters that each gathering of a new chunk is about."""
    state = toy_shards.state_of(layout, rank)
    parameters = []
    original = collectives.all_gather_object

    def counting(value: list[object], group: CommGroup) -> list[object]:
        parameters.append(len(value))
        return original(value, group)

    collectives.all_gather_object = counting
    toy_shards.build_chunk(layout, state)
    return parameters


@pytest.mark.parametrize("query_groups, expected", [(1, [2 * 3]), (2, [])])
def test_shared_heads_of_all_layers_are_found_in_one_collective(query_groups: int, expected: list[int]) -> None:
    """Weights and biases of three layers; none where each rank has its own heads."""
    assert run_distributed(gathers_at_the_start, 2, Layout(tensor=2, query_groups=query_groups)) == [expected] * 2
