"""What recomputation keeps, runs again and replays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.shard import name_parameters
from megatron.core.tensor_parallel.random import DropoutStream, RngStateTracker
from megatron.core.tensor_parallel.recompute import computed_again, recompute, with_input_again
from megatron.model.init import initialize_weights
from megatron.model.transformer import TransformerBlock
from megatron.planning.saved_tensors import SavedBytes
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_all_parity, assert_bitwise
from tests.helpers.tiny import tiny_config
from tests.tensor_parallel.collective_log import recorded_collectives
from tests.tensor_parallel.ranks import drawn, give_main_grads, placed, tensor_group

FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
PARTS = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "layernorm", "mlp")


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    function(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_layers_that_draw_from_the_generator_draw_the_same_again() -> None:
    dropped, x = partial(F.dropout, p=0.5), drawn(0, 64, 8)
    results = []
    for function in (dropped, partial(recompute, dropped)):
        torch.manual_seed(1)
        results.append((gradient(function, x), torch.rand(4)))
    assert_bitwise(results[1][0], results[0][0])
    assert_bitwise(results[1][1], results[0][1])


def test_layers_that_draw_from_a_tracker_draw_the_same_again() -> None:
    x = drawn(0, 64, 8)
    results = []
    for recomputed in (False, True):
        tracker = RngStateTracker(torch.device("cpu"))
        tracker.add("model-parallel-rng", 7)

        def dropped(x: Tensor, tracker: RngStateTracker = tracker) -> Tensor:
            with tracker.fork():
                return F.dropout(x, 0.5)

        torch.manual_seed(1)
        first = gradient(partial(recompute, dropped, tracker=tracker) if recomputed else dropped, x)
        results.append((first, gradient(dropped, x)))  # the states go on from where they were
    assert_bitwise(results[1][0], results[0][0])
    assert_bitwise(results[1][1], results[0][1])


def test_an_input_that_is_computed_again_is_not_kept_and_its_consumer_runs_once() -> None:
    weight, calls = drawn(1, 6, 8).requires_grad_(), []
    x = drawn(0, 64, 8)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,))

    def consumer(x: Tensor) -> Tensor:
        calls.append(x)
        return F.linear(x, weight)

    def through(x: Tensor) -> Tensor:
        return with_input_again(consumer, norm(x), computed_again(norm, x))

    expected = gradient(lambda x: F.linear(norm(x), weight), x)
    expected_of_weight, weight.grad = weight.grad, None
    assert_bitwise(gradient(through, x), expected)
    assert weight.grad is not None and expected_of_weight is not None
    assert_bitwise(weight.grad, expected_of_weight)
    assert len(calls) == 1
    calls.clear()
    with SavedBytes([weight]) as plain:
        kept = F.linear(norm(x.requires_grad_()), weight)
    with SavedBytes([weight]) as spared:
        again = through(x)
    assert plain.bytes - spared.bytes == 64 * 8 * 8
    assert torch.equal(kept, again)


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    with torch.no_grad():
        assert not recompute(torch.exp, drawn(0, 4).requires_grad_()).requires_grad


def _collectives_of_a_layer(rank: int, world_size: int, sequence_parallel: bool, way: tuple[str, ...]) -> list[str]:
    """Those of the backward."""
    config = tiny_config("--hidden-dropout", "0.1", *way).model
    placement = placed(tensor_group(rank, world_size), sequence_parallel)
    layer = TransformerBlock(config, layers=range(1), final_layernorm=False, placement=placement)
    name_parameters(layer)
    initialize_weights(layer, seed=1)
    give_main_grads(list(layer.parameters()), torch.float64)
    x = torch.ones(24 // world_size if sequence_parallel else 24, 2, 48, dtype=torch.float64, requires_grad=True)
    y = layer(x, rotary=None, mask=None, dropout=DropoutStream(seed=1, iteration=0, sample_ids=torch.arange(2)))
    with recorded_collectives() as log:
        y.sum().backward()
    return sorted(kind for kind, _ in log)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_recomputed_layer_repeats_all_collectives_of_its_forward_but_the_last(sequence_parallel: bool) -> None:
    """Nothing that the backward needs comes after the last product: neither its reduction nor the dropout behind it."""
    plain, repeated = (run_distributed(_collectives_of_a_layer, 2, sequence_parallel, way)[0] for way in ((), FULL))
    more = ["all_gather"] * 2 + ["reduce_scatter"] if sequence_parallel else ["all_reduce"]
    assert repeated == sorted(plain + more)


@pytest.mark.parametrize("way", [FULL, PARTS], ids=["full", "parts"])
def test_compiled_layers_are_recomputed_too(way: tuple[str, ...]) -> None:
    results = []
    for arguments, compiled in (((), False), (way, True)):
        config = tiny_config("--hidden-dropout", "0.1", *arguments).model
        placement = placed(tensor_group(0, 1))
        block = TransformerBlock(config, layers=range(2), final_layernorm=False, placement=placement)
        name_parameters(block)
        initialize_weights(block, seed=1)
        for layer in block.layers.values() if compiled else ():
            layer.compile(backend="aot_eager")
        dropout = DropoutStream(seed=1, iteration=0, sample_ids=torch.arange(2))
        x = drawn(0, 24, 2, 48).requires_grad_()
        block(x, rotary=None, mask=None, dropout=dropout).square().sum().backward()
        results.append({name: parameter.grad for name, parameter in block.named_parameters()})
    assert_all_parity(results[1], results[0])
