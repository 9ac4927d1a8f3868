"""Muon against torch's, what it orthogonalizes, and what it leaves to AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.main_grad import main_grad_of
from megatron.core.shard import Init, Shard, even_pieces, set_matrices
from megatron.optimizer.adam import AdamW
from megatron.optimizer.grad_scaler import ConstantGradScaler
from megatron.optimizer.muon import _COEFFICIENTS, Muon, orthogonalized, whole_matrix
from megatron.optimizer.optimizer import MegatronOptimizer
from tests.distributed.toy_shards import Layout, state_of
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise, assert_parity
from tests.optimizer.test_mixed_precision import main_parameters
from tests.optimizer.toy import ToyModel, toy_model, with_whole_shards

MATRICES = ("linear_fc1.weight", "linear_fc2.weight")
# What torch.optim.Muon computes.
OF_TORCH: dict[str, Any] = {"coefficients": "simple", "scale_mode": "shape_scaling"}


def with_matrices(dtype: torch.dtype) -> ToyModel:
    model = toy_model(dtype)
    for name in MATRICES:
        weight = model.get_parameter(name)
        set_matrices(weight, weight.shape[0])
    return model


def optimizer_of(
    model: nn.Module, muon: Muon, scale: float = 1.0, grad_dtype: torch.dtype | None = None
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    chunk = DistributedDataParallel(
        model,
        data_group=CommGroup.single(),
        grad_dtype=grad_dtype or torch.promote_types(next(model.parameters()).dtype, torch.float32),
        config=DistributedDataParallelConfig(matrices_apart=True),
    )
    optimizer = MegatronOptimizer(
        chunk.buckets,
        AdamW(),
        matrix_rule=muon,
        scaler=ConstantGradScaler(scale),
        clip_grad=0.0,
        model_group=CommGroup.single(),
        device=torch.device("cpu"),
    )
    return chunk, optimizer


@pytest.mark.parametrize(
    "sizes", [({}, None), ({"scale_mode": "spectral", "extra_scale_factor": 0.2}, "match_rms_adamw")]
)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_steps_are_those_of_torch(dtype: torch.dtype, nesterov: bool, sizes: tuple[dict[str, Any], Any]) -> None:
    """Matrices by torch's Muon, the embedding and all vectors by its AdamW; gradients arrive multiplied by a scale."""
    model, reference = with_matrices(dtype), toy_model(dtype).float()
    changes, adjust = sizes
    muon = Muon(momentum=0.95, nesterov=nesterov, **OF_TORCH | changes)
    _, optimizer = optimizer_of(model, muon, scale=64.0)
    named = dict(reference.named_parameters())
    others = [parameter for name, parameter in named.items() if name not in MATRICES]
    theirs = [
        torch.optim.Muon(
            [named[name] for name in MATRICES],
            lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust,
        ),
        torch.optim.AdamW(
            [
                {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=0.01, betas=(0.9, 0.999), eps=1e-8,
        ),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    optimizer.set_schedule(0.01, 0.1)
    for _ in range(10):
        for name, parameter in named.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            main_grad_of(model.get_parameter(name)).copy_(parameter.grad).mul_(64.0)
        assert optimizer.step().applied
        for each in theirs:
            each.step()
    main = main_parameters(optimizer)
    for name, parameter in named.items():
        assert_parity(main[name], parameter.detach(), name)


def test_only_matrices_inside_layers_have_one_momentum_and_all_else_the_moments_of_adam() -> None:
    _, optimizer = optimizer_of(with_matrices(torch.float32), Muon())
    kinds: dict[str, set[str]] = {}
    for named in optimizer.named_state():
        _, kind, name = named.key.split(".", 2)
        kinds.setdefault(name, set()).add(kind)
    assert {name for name, kind in kinds.items() if kind == {"momentum"}} == set(MATRICES)
    assert all(kind == {"exp_avg", "exp_avg_sq"} for name, kind in kinds.items() if name not in MATRICES)
    assert optimizer.state_dict()["rule"] == "muon"
    assert optimizer.state_dict()["state_names"] == ["exp_avg", "exp_avg_sq", "momentum"]


@pytest.mark.parametrize("shape", [(48, 48), (16, 64), (64, 16), (1, 8)])
@pytest.mark.parametrize("coefficients", _COEFFICIENTS)
def test_singular_values_become_about_one_and_singular_vectors_stay(coefficients: Any, shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalized(matrix.clone(), _COEFFICIENTS[coefficients], 5)
    rotated = left.T @ result @ right.T
    assert_parity(rotated, torch.diag(rotated.diagonal()), floor=1.0)
    large = values / values.norm() > 0.02
    assert float(rotated.diagonal()[large].min()) > 0.6
    assert float(rotated.diagonal().max()) < 1.3


@pytest.mark.parametrize("split", [True, False])
def test_queries_keys_and_values_are_three_matrices_or_one(split: bool) -> None:
    """Two groups of 4 rows of queries, 2 of keys, 2 of values."""
    group, columns = (4, 2, 2), 10
    stacked = nn.Module()
    stacked.weight = nn.Parameter(torch.randn(16, columns, dtype=torch.float64))
    rows = torch.arange(16).view(2, 8).split_with_sizes(group, dim=1)
    runs = [index.flatten() for index in rows] if split else [torch.arange(16)]
    apart = nn.Module()
    for number, index in enumerate(runs):
        apart.register_parameter(str(number), nn.Parameter(stacked.weight.detach()[index].clone()))
    with_whole_shards(stacked)
    with_whole_shards(apart)
    set_matrices(stacked.weight, *group)
    for parameter in apart.parameters():
        set_matrices(parameter, parameter.shape[0])
    gradient = torch.randn(16, columns, dtype=torch.float64)
    for model in (stacked, apart):
        _, optimizer = optimizer_of(model, Muon(split_qkv=split))
        optimizer.set_schedule(0.01, 0.1)
        for number, parameter in enumerate(model.parameters()):
            main_grad_of(parameter).copy_(gradient if model is stacked else gradient[runs[number]])
        optimizer.step()
    for index, parameter in zip(runs, apart.parameters()):
        assert_bitwise(stacked.weight.detach()[index], parameter.detach())


def test_a_matrix_without_a_gradient_only_decays() -> None:
    model = with_matrices(torch.float64)
    before = model.linear_fc1.weight.detach().clone()
    _, optimizer = optimizer_of(model, Muon())
    optimizer.set_schedule(0.01, 0.1)
    optimizer.step()
    assert_bitwise(model.linear_fc1.weight.detach(), before * (1 - 0.01 * 0.1))


def test_an_update_has_the_size_of_its_mode() -> None:
    """Of an orthogonal matrix: the root of the mean square of its elements is size / the root of the longer side."""
    for mode, size in {"spectral": 8.0, "unit_rms_norm": 2.0, "shape_scaling": 2.0}.items():
        matrix = torch.linalg.qr(torch.randn(64, 16, dtype=torch.float64)).Q
        muon = Muon(scale_mode=mode, extra_scale_factor=0.5, num_steps=50, coefficients="quintic")  # type: ignore[arg-type]
        update = muon._orthogonal(matrix[None])[0]
        assert float(torch.linalg.matrix_norm(update, 2)) == pytest.approx(0.5 * size, rel=0.2)


def test_gradients_in_bfloat16_give_the_same_update_where_they_are_the_same() -> None:
    """The direction, which lies in their place, is orthogonalized in bfloat16 anyhow."""
    ends = []
    for grad_dtype in (torch.float32, torch.bfloat16):
        model = with_matrices(torch.bfloat16)
        _, optimizer = optimizer_of(model, Muon(nesterov=True), grad_dtype=grad_dtype)
        optimizer.set_schedule(0.01, 0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for parameter in model.parameters():
                main_grad_of(parameter).copy_(torch.randn(parameter.shape, generator=generator).bfloat16())
            assert optimizer.step().applied
        ends.append(main_parameters(optimizer))
    for name in MATRICES:
        assert_bitwise(ends[1][name], ends[0][name], name)


def parts_put_together(rank: int, world_size: int, owned: bool) -> Tensor:
    group = state_of(Layout(tensor=world_size), rank).tensor
    shard = Shard(
        global_shape=(6, 2), dim=0, pieces=even_pieces(6, group), group=group, init=Init.zeros(), tied=True, owned=owned
    )
    return whole_matrix(torch.full((6 // world_size, 2), 1.0 + rank), shard)


@pytest.mark.parametrize("owned", [True, False], ids=["first-stage", "copy-on-the-last-stage"])
def test_a_tied_matrix_is_whole_on_both_stages(owned: bool) -> None:
    for whole in run_distributed(parts_put_together, 2, owned):
        assert whole.tolist() == [[1.0, 1.0]] * 3 + [[2.0, 2.0]] * 3
