"""Contiguous buffers, accumulation into them, and data parallelism that changes nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.config.problems import UserError
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.grad_buffer import ALIGNMENT
from megatron.core.main_grad import main_grad_of
from megatron.optimizer.adam import AdamW
from tests.distributed.toy_shards import Layout, state_of
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_all_parity, assert_bitwise, assert_parity
from tests.optimizer.toy import data_parallel, loss_sum, optimizer_of, toy_batch, toy_model, with_whole_shards


def test_parameters_and_gradients_are_aligned_views_in_reverse_order() -> None:
    model = toy_model()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    (buffer,) = data_parallel(model).grad_buffers
    assert [entry.name for entry in buffer.entries] == list(reversed(values))
    for entry in buffer.entries:
        assert entry.start % ALIGNMENT == 0
        assert_bitwise(entry.parameter.data, values[entry.name], entry.name)
        for view, flat in (
            (entry.parameter, buffer.parameters),
            (main_grad_of(entry.parameter), buffer.gradients),
        ):
            assert view.data_ptr() == flat[entry.start :].data_ptr()
    assert buffer.parameters.numel() % ALIGNMENT == 0
    assert buffer.gradients.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_float32_for_narrower_parameters(dtype: torch.dtype) -> None:
    chunk = data_parallel(toy_model(dtype))
    assert {buffer.parameters.dtype for buffer in chunk.grad_buffers} == {dtype}
    assert {buffer.gradients.dtype for buffer in chunk.grad_buffers} == {torch.float32}


def test_each_dtype_has_a_buffer() -> None:
    model = toy_model(torch.bfloat16)
    model.layernorm.weight.data = model.layernorm.weight.data.float()
    chunk = data_parallel(model)
    assert [buffer.parameters.dtype for buffer in chunk.grad_buffers] == [torch.bfloat16, torch.float32]
    assert [len(buffer.entries) for buffer in chunk.grad_buffers] == [6, 1]
    optimizer = optimizer_of([chunk])
    optimizer.set_schedule(0.1, 0.0)
    main_grad_of(model.layernorm.weight).fill_(1.0)
    before = model.layernorm.weight.detach().clone()
    optimizer.step()
    assert_parity(model.layernorm.weight.data, before - 0.1)


@pytest.mark.parametrize(
    "dtype, grad_dtype, works",
    [
        (torch.float64, torch.float32, "use --fp64"),
        (torch.float32, torch.bfloat16, "leave out --grad-reduce-in-bf16"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(dtype: torch.dtype, grad_dtype: torch.dtype, works: str) -> None:
    model = toy_model(torch.bfloat16)
    model.linear_fc2.weight.data = model.linear_fc2.weight.data.to(dtype)
    with pytest.raises(UserError, match=rf"gradients of linear_fc2\.weight, .*{dtype}, .* {grad_dtype}.*{works}"):
        DistributedDataParallel(model, data_group=CommGroup.single(), grad_dtype=grad_dtype)


def test_gradients_add_up_over_micro_batches_and_grad_is_freed() -> None:
    model = toy_model()
    reference = copy.deepcopy(model)
    chunk = data_parallel(model)
    tokens, targets = toy_batch(0)
    for i in range(4):
        micro = slice(3 * i, 3 * i + 3)
        (loss_sum(chunk, tokens[micro], targets[micro]) / 12).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    (loss_sum(reference, tokens, targets) / 12).backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters()):
        assert_parity(main_grad_of(parameter), other.grad, name)
    chunk.zero_grad_buffer()
    assert all(torch.count_nonzero(main_grad_of(parameter)) == 0 for parameter in model.parameters())


def test_what_a_step_has_left_is_in_no_gradient_of_the_next() -> None:
    """Also not that of a parameter that gets none, nor where it was no number."""
    model = with_whole_shards(nn.ModuleList(nn.Linear(3, 2, dtype=torch.float64) for _ in range(2)))
    chunk = data_parallel(model)
    used, unused = model
    for buffer in chunk.grad_buffers:
        for entry in buffer.entries:
            main_grad_of(entry.parameter).fill_(math.nan)
    chunk.zero_grad_buffer()
    used(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    chunk.reduce_gradients()
    assert_bitwise(main_grad_of(used.weight), torch.full((2, 3), 4.0, dtype=torch.float64))
    (buffer,) = chunk.grad_buffers
    assert not buffer.gradients.isnan().any()
    assert all(not main_grad_of(parameter).any() for parameter in unused.parameters())


def test_low_precision_micro_batches_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16."""
    model = with_whole_shards(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16))
    chunk = data_parallel(model)
    for value in (256.0, 1.0, 1.0):
        chunk(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert float(main_grad_of(model.weight)) == 258.0


class AccumulatingLinear(torch.autograd.Function):
    """Adds the weight gradient to `main_grad` and gives autograd none, as the parallel layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        main_grad_of(weight).add_(gradient.t() @ x)
        return gradient @ weight, None


def test_a_tied_weight_gets_what_autograd_gives_and_what_its_layer_adds() -> None:
    """The embedding's gradient comes through `.grad`, the output layer's straight into the buffer."""
    model = nn.Module()
    model.embedding = nn.Embedding(11, 7, dtype=torch.float64)
    model.output_weight = model.embedding.weight
    with_whole_shards(model)
    reference = model.embedding.weight.detach().clone().requires_grad_()
    chunk = data_parallel(model)
    assert len(chunk.trainable_parameters()) == 1
    tokens, _ = toy_batch(0)
    for _ in range(2):
        AccumulatingLinear.apply(model.embedding(tokens), model.output_weight).square().sum().backward()
        (reference[tokens] @ reference.t()).square().sum().backward()
    assert_parity(main_grad_of(model.output_weight), reference.grad)
    assert model.output_weight.grad is None


def test_a_layer_that_accumulates_by_itself_leaves_autograd_nothing() -> None:
    """The hook of such a weight may run, and must not mind that there is no gradient."""
    model = with_whole_shards(nn.Linear(7, 5, bias=False, dtype=torch.float64))
    reference = model.weight.detach().clone().requires_grad_()
    data_parallel(model)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        AccumulatingLinear.apply(x, model.weight).square().sum().backward()
        (x @ reference.t()).square().sum().backward()
    assert_parity(main_grad_of(model.weight), reference.grad)
    assert model.weight.grad is None


def test_loading_a_state_dict_writes_into_the_buffer() -> None:
    model = toy_model()
    (buffer,) = data_parallel(model).grad_buffers
    other = toy_model(seed=5)
    model.load_state_dict(other.state_dict())
    for entry, parameter in zip(buffer.entries, reversed(list(other.parameters()))):
        assert_bitwise(entry.view(buffer.parameters), parameter.data, entry.name)


def train(rank: int, world_size: int, micro_batch: int) -> dict[str, np.ndarray]:
    """Three steps on global batches of 12, spread over the ranks; losses divided by the global count."""
    state = state_of(Layout(data=world_size), rank)
    model = toy_model()
    chunk = data_parallel(model, state.data)
    optimizer = optimizer_of([chunk], AdamW(), clip_grad=0.5)
    optimizer.set_schedule(0.05, 0.1)
    results: dict[str, Tensor] = {}
    for step in range(3):
        chunk.zero_grad_buffer()
        tokens, targets = (part.chunk(world_size)[rank] for part in toy_batch(step))
        for micro in zip(tokens.split(micro_batch), targets.split(micro_batch)):
            (loss_sum(chunk, *micro) / 12).backward()
        finalize_model_grads([chunk], tensor=state.tensor, embedding=state.embedding)
        results[f"norm {step}"] = torch.tensor(optimizer.step().grad_norm, dtype=torch.float64)
        results |= {f"{n} gradient {step}": main_grad_of(p).clone() for n, p in model.named_parameters()}
    results |= {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: tensor.numpy() for name, tensor in results.items()}


def tensors(results: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in results.items()}


@pytest.mark.parametrize("data, micro_batch", [(1, 3), (2, 6), (2, 1), (3, 2), (4, 3)])
def test_data_parallel_ranks_and_micro_batches_change_nothing(data: int, micro_batch: int) -> None:
    (alone,) = map(tensors, run_distributed(train, 1, 12))
    ranks = [tensors(results) for results in run_distributed(train, data, micro_batch)]
    for results in ranks:
        assert_all_parity(results, alone)
        for name, tensor in results.items():
            assert_bitwise(tensor, ranks[0][name], f"{name}: data-parallel ranks drift apart")
