"""Flags that move a rounding, and change nothing where there is none to move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.attention import attention_weights
from megatron.model.gpt_model import GPTModel
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_all_parity, assert_bitwise, assert_parity, assert_within_reference_error
from tests.model.tiny import ARCHITECTURES, batch, build, jitter, tiny_config
from tests.training.runs import rows_on_ranks, trained

FLAGS = {
    "scaling": {"apply_query_key_layer_scaling": True},
    "residual": {"fp32_residual_connection": True},
}

DROPOUT = DropoutStream(seed=5, iteration=0, sample_ids=torch.arange(2), device=torch.device("cpu"))


def losses_and_gradients(model: GPTModel, *, dropout: bool) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, position_ids, labels = batch()
    losses = model(tokens, position_ids, labels=labels, dropout=DROPOUT if dropout else None)
    losses.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return losses.detach(), gradients


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("flag", FLAGS)
def test_in_float64_the_model_is_the_same_function(flag: str, architecture: str, dropout: float) -> None:
    results = []
    for changes in ({}, FLAGS[flag]):
        drops: dict[str, Any] = {"attention_dropout": dropout, "hidden_dropout": dropout}
        model = build(tiny_config(**ARCHITECTURES[architecture], **drops, **changes))
        jitter(model)
        results.append(losses_and_gradients(model, dropout=dropout > 0))
    (plain, gradients), (losses, others) = results
    assert_parity(losses, plain, "losses")
    assert_all_parity(others, gradients)


def test_scaled_scores_that_would_overflow_float16_are_softened_as_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (60.0 * torch.randn(1, 2, 8, 64, generator=generator) for _ in range(2))
    query[..., 0], key[..., 0] = 800.0, 800.0  # scores of 80,000, all about the same: weights are none of 0 or 1 alone
    low = [tensor.half() for tensor in (query, key)]
    mask = torch.ones(8, 8, dtype=torch.bool).tril_()[None, None]
    assert bool(attention_weights(*low, mask).isnan().any()), "without scaling the scores are infinite"
    scaled = attention_weights(*low, mask, divisor=12.0)
    assert scaled.dtype == torch.float16
    assert bool(scaled.isfinite().all())
    assert_parity(scaled.double().sum(-1), torch.ones(1, 2, 8, dtype=torch.float64), floor=2.0**24)


def test_a_wide_residual_stream_adds_up_what_bfloat16_would_lose() -> None:
    """Twelve layers in bfloat16: nearer to the exact hidden states than with a stream of bfloat16."""
    config = tiny_config(num_layers=12, init_method_std=0.05)
    wide = tiny_config(num_layers=12, init_method_std=0.05, fp32_residual_connection=True)
    tokens, position_ids, labels = batch()
    exact, plain, better = (
        build(settings, dtype=dtype)(tokens, position_ids, labels=labels).detach()
        for settings, dtype in ((config, torch.float64), (config, torch.bfloat16), (wide, torch.bfloat16))
    )
    assert_within_reference_error(better, plain, exact)
    assert float((better - exact).square().mean()) < float((plain - exact).square().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_the_residual_stream_is_wide(architecture: str, dtype: torch.dtype) -> None:
    model = build(tiny_config(**ARCHITECTURES[architecture], fp32_residual_connection=True), dtype=dtype)
    seen: dict[str, set[torch.dtype]] = {}

    def note(name: str) -> Any:
        def hook(_: object, inputs: tuple[Any, ...], output: Any) -> None:
            seen.setdefault(name, set()).update({inputs[0].dtype, output.dtype})

        return hook

    for name, module in model.named_modules():
        kind = name.rsplit(".", 1)[-1]
        if kind in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer") or kind.isdigit():
            module.register_forward_hook(note("layer" if kind.isdigit() else "product"))
    losses_and_gradients(model, dropout=False)
    assert seen == {"product": {dtype}, "layer": {torch.float32}}


def test_a_wide_stream_is_recomputed_to_the_same_bits() -> None:
    results = []
    for changes in ({}, {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")}):
        config = tiny_config(fp32_residual_connection=True, **changes)
        results.append(losses_and_gradients(build(config, dtype=torch.bfloat16), dropout=False))
    (losses, gradients), (again, others) = results
    assert_bitwise(again, losses)
    for name, gradient in gradients.items():
        assert_bitwise(others[name], gradient, name)


BF16 = ("--bf16", "--fp32-residual-connection", "--train-iters", "2")


@pytest.mark.parametrize(
    "layout",
    [
        ("--pipeline-model-parallel-size", "2"),
        ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    ],
    ids=["pp2", "pp2-vpp2"],
)
def test_stages_hand_the_wide_stream_on(layout: tuple[str, ...]) -> None:
    """So the first loss has the bits of one stage."""
    _, alone = trained(*BF16)
    rows = run_distributed(rows_on_ranks, 2, *BF16, *layout)
    assert rows[1][0]["lm loss"] == alone.losses[0]
    assert rows[1][1]["lm loss"] == pytest.approx(alone.losses[1], rel=1e-3)
