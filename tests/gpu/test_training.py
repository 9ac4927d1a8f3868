"""One rank on a GPU trains as one rank on a CPU does, up to the order of sums."""

from __future__ import annotations

import pytest
import torch

from megatron.inference.generation import Sampling, generate
from megatron.model.gpt_model import GPTModel
from megatron.training.train_step import train_step
from tests.gpu.runs import CPU, CUDA, gradients_on, losses_on, run_on
from tests.helpers.numerics import (
    LOSS_BF16,
    PARITY_FP32,
    PARITY_FP64,
    assert_all_parity,
    assert_within_reference_error,
)

pytestmark = pytest.mark.gpu

# Without masks of documents torch takes its flash kernel in low precision, with them another one; with dropout of the
# attention weights no fused kernel runs.
ARCHITECTURES = {
    "gpt": (),
    "dropout": ("--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    "alibi": ("--position-embedding-type", "alibi", "--window-size", "7", "0", "--squared-relu"),
    "llama": (
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--group-query-attention", "--num-query-groups", "6", "--qk-layernorm", "--no-reset-attention-mask"),
        "--untie-embeddings-and-output-weights",
    ),
}
# The float32 cosines of rotary tables differ in their last bit between devices, whatever the dtype of the model.
WITHOUT_ROTARY = ["gpt", "dropout", "alibi"]
# Adam divides by the size of a gradient: at this rate the rounding of a tiny one does not matter in three iterations.
RATE = ("--lr", "1e-3")


@pytest.mark.parametrize("architecture", WITHOUT_ROTARY)
def test_losses_and_gradients_in_float64(architecture: str) -> None:
    arguments = ("--fp64", *ARCHITECTURES[architecture])
    assert losses_on(CUDA, *arguments) == pytest.approx(losses_on(CPU, *arguments), rel=PARITY_FP64)
    assert_all_parity(gradients_on(CUDA, *arguments), gradients_on(CPU, *arguments))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_losses_and_gradients_in_float32(architecture: str) -> None:
    arguments = (*RATE, *ARCHITECTURES[architecture])
    assert losses_on(CUDA, *arguments) == pytest.approx(losses_on(CPU, *arguments), rel=PARITY_FP32)
    assert_all_parity(gradients_on(CUDA, *arguments), gradients_on(CPU, *arguments))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_losses_and_gradients_in_bfloat16(architecture: str) -> None:
    """Gradients err from those in float64 at most twice as much as on a CPU in bfloat16."""
    arguments = (*RATE, *ARCHITECTURES[architecture])
    exact = gradients_on(CPU, *arguments, "--fp64")
    low, mine = (gradients_on(device, *arguments, "--bf16") for device in (CPU, CUDA))
    assert sorted(mine) == sorted(exact)
    whole = [torch.cat([gradients[name].flatten() for name in exact]) for gradients in (mine, low, exact)]
    assert_within_reference_error(*whole, "gradients")
    assert losses_on(CUDA, *arguments, "--bf16") == pytest.approx(losses_on(CPU, *arguments), rel=LOSS_BF16)


def test_an_overflow_in_float16_skips_the_step_on_a_gpu() -> None:
    run = run_on(CUDA, "--fp16", "--hysteresis", "1", "--initial-loss-scale", str(2.0**40))
    first = train_step(run)
    assert not first.applied
    assert run.optimizer.loss_scale == 2.0**39


def test_greedy_text_is_that_of_a_cpu() -> None:
    texts = []
    for device in (CPU, CUDA):
        model = run_on(device, "--fp64").chunks[0].module.eval()
        assert isinstance(model, GPTModel)
        tokens = generate(
            model,
            [1, 2, 3],
            num_tokens=12,
            context_length=24,
            end_token=250,
            sampling=Sampling(temperature=0),
            generator=torch.Generator(),
        )
        texts.append(list(tokens))
    assert texts[0] == texts[1]
