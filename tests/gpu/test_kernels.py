"""Operations with code of their own for GPUs, against the same on a CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.comm_group import CommGroup
from megatron.core.device import to_device
from megatron.core.kernels import cross_entropy
from megatron.core.kernels.adam import adamw_, adamw_reference_
from megatron.core.kernels.cross_entropy import (
    LogitGradient,
    logit_gradient,
    logit_gradient_reference,
    logit_statistics,
    logit_statistics_reference,
)
from megatron.core.kernels.dispatch import compute_dtype
from megatron.core.kernels.extension import load_extension
from megatron.core.kernels.float_halves import joined
from megatron.core.kernels.grad_norm import ElementSpans, sum_of_squares
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.async_linear import parallel_linear
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import DropoutStream, dropout
from megatron.model.attention import attention_weights, fused_attention, weighted_values
from megatron.model.masks import alibi_slopes, attention_mask
from tests.core.test_activation_kernels import OPERATIONS, results
from tests.gpu.runs import CPU, CUDA
from tests.helpers.numerics import assert_as_exact, assert_bitwise, assert_parity, rounded
from tests.helpers.tools import command
from tests.optimizer.test_adam_kernel import (
    HYPER,
    SIZES,
    SPANS,
    TYPES,
    Types,
    buffers,
    halves_of,
    hyper_spans,
    many_spans,
    tensors,
)

pytestmark = pytest.mark.gpu

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


# ---- weight gradients ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_gradients_of_low_precision_are_summed_wide_within_a_micro_batch_too(dtype: torch.dtype) -> None:
    """2049 has 12 bits: neither dtype has that number."""
    weight = torch.nn.Parameter(torch.ones(8, 16, dtype=dtype, device=CUDA))
    weight.main_grad = torch.zeros(8, 16, device=CUDA)  # type: ignore[attr-defined]
    single = CommGroup.single("tensor")
    for count in (1, 2):
        x = torch.ones(2049, 1, 16, dtype=dtype, device=CUDA)
        parallel_linear(
            x, weight, None, group=single, sequence_parallel=False, input_gradient_reduce=True
        ).sum().backward()
        assert_bitwise(weight.main_grad.cpu(), torch.full((8, 16), 2049.0 * count))  # type: ignore[union-attr]


# ---- AdamW ----


@pytest.mark.parametrize("gradient_scale", [1.0, 3.7, 65536.0])
@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_adamw_is_the_reference(dtype: torch.dtype, step: int, gradient_scale: float) -> None:
    """In float64 too, where torch's kernel for GPUs reads the number of the step as float32."""
    hyper = replace(HYPER, step=step, gradient_scale=gradient_scale)
    mine = [tensor.to(CUDA) for tensor in tensors(dtype)]
    low_precision = torch.zeros(mine[0].shape, dtype=torch.bfloat16, device=CUDA)
    plain, exact = tensors(dtype), tensors(torch.float64)
    adamw_(*mine, spans=hyper_spans(SPANS, CUDA), hyper=hyper, low_precision=low_precision)
    adamw_reference_(*plain, spans=hyper_spans(SPANS), hyper=hyper)
    adamw_reference_(*exact, spans=hyper_spans(SPANS), hyper=hyper)
    for name, i in (("parameter", 0), ("exp_avg", 2), ("exp_avg_sq", 3)):
        assert_as_exact(mine[i].cpu(), plain[i], exact[i], name)
    assert_bitwise(low_precision.cpu(), rounded(mine[0].cpu(), torch.bfloat16), "copy in low precision")


def test_the_kernels_for_gpus_are_built() -> None:
    """All tests of them would pass through torch's operations else."""
    module = load_extension()
    assert module is not None
    assert module.cuda, "the module was built without nvcc; put it in the PATH and run `make kernels`"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_an_adamw_update_has_the_bits_of_a_cpu(types: Types, size: int) -> None:
    on_cpu = buffers(types, size)
    on_gpu = [None if tensor is None else tensor.to(CUDA) for tensor in on_cpu]
    for step in (1, 2):
        for device, (*four, low_precision) in ((CPU, on_cpu), (CUDA, on_gpu)):
            adamw_(
                *four,
                spans=hyper_spans(many_spans(size), device),
                hyper=replace(HYPER, step=step, decoupled=step == 1),
                low_precision=low_precision,
            )
    for name, mine, expected in zip(("parameter", "gradient", "exp_avg", "exp_avg_sq", "copy"), on_gpu, on_cpu):
        if mine is not None:
            assert_bitwise(mine.cpu(), expected, name)


@pytest.mark.parametrize("size", SIZES)
def test_an_adamw_update_of_halves_has_the_bits_of_whole_parameters(size: int) -> None:
    whole, *others = (tensor.to(CUDA) for tensor in tensors(torch.float32, size))
    upper, lower = (half.to(CUDA) for half in halves_of(whole.cpu()))
    others_of_halves = [tensor.clone() for tensor in others]
    spans = hyper_spans(many_spans(size), CUDA)
    for step in (1, 2):
        adamw_(whole, *others, spans=spans, hyper=replace(HYPER, step=step))
        adamw_(upper, *others_of_halves, spans=spans, hyper=replace(HYPER, step=step), remainder=lower)
    assert_bitwise(joined(upper, lower), whole, "parameter")
    for mine, expected in zip(others_of_halves, others):
        assert_bitwise(mine, expected)
    stored, rest = halves_of(whole.cpu())
    assert_bitwise(upper.cpu(), stored, "upper half")
    assert_bitwise(lower.cpu(), rest, "lower half")


# ---- gradient norm ----


@EACH_DTYPE
def test_a_sum_of_squares_has_the_bits_of_a_cpu(dtype: torch.dtype) -> None:
    """Of no span, one element, tiles and rests of them, and of more tiles than are summed at once."""
    flat = torch.randn(18_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_gpu = flat.to(CUDA)
    for spans in ([], [(5, 6)], [(1, 4098), (4099, 9999)], [(0, flat.numel())]):
        mine, expected = (sum_of_squares(where, ElementSpans(spans, where.device)) for where in (on_gpu, flat))
        assert_bitwise(mine.cpu(), expected, str(spans))


@EACH_DTYPE
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_sum_of_squares_on_a_gpu_is_not_finite_if_one_element_is_not(dtype: torch.dtype, value: float) -> None:
    flat = torch.ones(9000, dtype=dtype, device=CUDA)
    flat[4321] = value
    assert not torch.isfinite(sum_of_squares(flat, ElementSpans([(0, 9000)], CUDA)))
    assert float(sum_of_squares(flat, ElementSpans([(0, 4321), (4322, 9000)], CUDA))) == 8999


# ---- dropout ----


def dropped(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], sample_dim: int) -> tuple[Tensor, Tensor]:
    """Ones after dropout, and their gradient."""
    stream = DropoutStream(
        seed=7, iteration=11, sample_ids=torch.arange(shape[sample_dim]) * 2**33 + 2**40, device=device
    )
    ones = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
    starts = tuple(0 if dim == sample_dim else 5 * dim for dim in range(len(shape)))
    kept = dropout(ones, 0.3, stream, layer=3, site=1, sample_dim=sample_dim, starts=starts)
    kept.sum().backward()
    assert ones.grad is not None
    return kept.detach().cpu(), ones.grad.cpu()


@pytest.mark.parametrize("chunk", [1 << 26, 1 << 12], ids=["whole", "in-chunks"])
@pytest.mark.parametrize("shape, sample_dim", [((33, 2, 129), 1), ((2, 3, 17, 17), 0)], ids=["hidden", "attention"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_dropout_mask_is_that_of_a_cpu_to_the_bit(
    dtype: torch.dtype, shape: tuple[int, ...], sample_dim: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "_ACCELERATOR_CHUNK", chunk)
    mine, expected = dropped(CUDA, dtype, shape, sample_dim), dropped(CPU, dtype, shape, sample_dim)
    assert 0.6 < float((mine[0] != 0).double().mean()) < 0.8
    assert_bitwise(mine[0], expected[0], "forward")
    assert_bitwise(mine[1], expected[1], "backward")
    assert_bitwise(mine[1], mine[0], "mask of the backward")


# ---- cross entropy ----

VOCABULARY = 1003


def token_losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The losses [s, b], and the gradient of their mean with respect to the logits."""
    logits = logits.detach().requires_grad_()
    losses = vocab_parallel_cross_entropy(
        logits, target, group=CommGroup.single(), vocab_size=VOCABULARY, label_smoothing=0.1
    )
    losses.mean().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


@pytest.mark.parametrize("padded", [1003, 1024], ids=["unaligned", "aligned"])
@pytest.mark.parametrize("implementation", ["native", "torch"])
@EACH_DTYPE
def test_cross_entropy_is_that_of_a_cpu(
    dtype: torch.dtype, implementation: str, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(37, 2, padded, generator=generator)).to(dtype)
    target = torch.randint(VOCABULARY, (37, 2), generator=generator)
    plain, exact = token_losses(logits, target), token_losses(logits.double(), target)
    if implementation == "torch":
        monkeypatch.setattr(cross_entropy, "compiled_for", lambda name, logits, *, reference_cost: None)
        monkeypatch.setattr(cross_entropy, "_ACCELERATOR_BLOCK", 1 << 13)
    mine = token_losses(logits.to(CUDA), target.to(CUDA))
    assert_parity(mine[0].cpu(), exact[0].to(mine[0].dtype), "losses")
    assert_as_exact(mine[1].cpu(), plain[1], exact[1], "gradient")
    assert not mine[1][..., VOCABULARY:].any(), "the padding has a gradient"


@pytest.mark.parametrize(
    ("rows", "width", "valid"), [(1, 1, 1), (3, 7, 5), (37, 1024, 1003), (130, 255, 255), (2, 50_304, 50_257)]
)
@EACH_DTYPE
def test_the_kernels_of_cross_entropy_are_the_references(dtype: torch.dtype, rows: int, width: int, valid: int) -> None:
    """Of logits in which other columns than the valid ones are not even numbers."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, width, generator=generator)).to(dtype)
    logits[:, valid:] = torch.nan
    target = torch.randint(valid, (rows,), generator=generator)
    exact = logit_statistics_reference(logits.double(), target, valid=valid, with_logit_sum=True)
    mine = logit_statistics(logits.to(CUDA), target.to(CUDA), valid=valid, with_logit_sum=True)
    for name, value, expected in zip(exact._fields, mine, exact):
        assert value is not None and expected is not None
        assert_parity(value.cpu(), expected.to(value.dtype), name)
    gradients = []
    for where, of_dtype in ((CUDA, dtype), (CPU, dtype), (CPU, torch.float64)):
        values = logits.clone().to(where, of_dtype)
        numbers = [tensor.to(where, compute_dtype(values)) for tensor in (exact.maximum, exact.sum, 1 / exact.sum)]
        of_rows = LogitGradient(
            maximum=numbers[0], sum=numbers[1], scale=numbers[2], on_target=0.8, on_each=0.1 / valid
        )
        write = logit_gradient if where == CUDA else logit_gradient_reference
        write(values, target.to(where), of_rows, valid=valid, out=values)  # over the logits
        gradients.append(values)
    assert_as_exact(gradients[0].cpu(), gradients[1], gradients[2], "gradient")
    assert not gradients[0][:, valid:].any()


def test_the_doctor_finds_the_kernels_of_a_gpu_right() -> None:
    words = command("doctor", "--device", "cuda", "--kernels", "native")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- activations ----


@pytest.mark.parametrize("shape", [(1, 2), (3, 0), (40, 2, 66), (40, 2, 64), (5, 1, 4000)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@EACH_DTYPE
def test_an_activation_is_that_of_a_cpu(
    dtype: torch.dtype, operation: tuple[Any, Any, bool], shape: tuple[int, ...]
) -> None:
    function, plain, with_weight = operation
    mine = results(function, with_weight, shape, dtype, wide=False, device=CUDA)
    exact = results(plain, with_weight, shape, dtype, wide=True)
    for name, one, other, best in zip(
        ("output", "x", "weight"), mine, results(plain, with_weight, shape, dtype, wide=False), exact
    ):
        assert_as_exact(one.cpu(), other, best, name)


def test_the_backward_of_a_norm_has_more_rows_than_a_grid_is_high() -> None:
    """Such are the rows of a norm over each head: tokens times heads."""
    shape, dtype = (2_097_153, 2), torch.float32
    mine = results(*OPERATIONS["rms_norm"][::2], shape, dtype, wide=False, device=CUDA)  # type: ignore[misc]
    exact = results(*OPERATIONS["rms_norm"][1:], shape, dtype, wide=True)  # type: ignore[misc]
    for name, one, best in zip(("output", "x", "weight"), mine, exact):
        assert_parity(one.cpu(), best.to(dtype), name)


# ---- attention ----

BATCH, HEADS, SEQUENCE, WIDTH = 2, 4, 37, 16
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9 + [2] * 21, [0] * 36 + [1]])
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {"document_ids": DOCUMENTS},
    "window": {"window": (5, 0)},
    "alibi": {"slopes": alibi_slopes(HEADS)},
    "all": {"document_ids": DOCUMENTS, "window": (5, 0), "slopes": alibi_slopes(HEADS)},
}
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return weighted_values(attention_weights(query, key, mask), value)


def attend(
    attention: Attention, device: torch.device, dtype: torch.dtype, kind: str, groups: int, values: torch.dtype
) -> list[Tensor]:
    """Output [b, a, s, d] and the gradients of queries, keys and values, which are rounded to `values` first."""
    settings: dict[str, Any] = {"document_ids": None, "window": None, "slopes": None} | MASKS[kind]
    if settings["document_ids"] is not None:
        settings["document_ids"] = settings["document_ids"].to(device)
    explicit = attention is explicit_attention
    mask = attention_mask(sequence_length=SEQUENCE, explicit=explicit, dtype=dtype, device=device, **settings)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(BATCH, count, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64).to(values)
        for count in (HEADS, groups, groups, HEADS)
    ]
    query, key, value, weight = (tensor.to(device, dtype) for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = attention(query, key, value, mask)
    gradients = torch.autograd.grad((output * weight).sum(), leaves)
    return [tensor.detach() for tensor in (output, *gradients)]


@pytest.mark.parametrize("attention", [fused_attention, explicit_attention], ids=["fused", "explicit"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", MASKS)
@EACH_DTYPE
def test_attention_is_that_of_a_cpu(dtype: torch.dtype, kind: str, groups: int, attention: Attention) -> None:
    """In low precision it errs at most twice as much as the worse of the two ways on a CPU."""
    mine = attend(attention, CUDA, dtype, kind, groups, values=dtype)
    exact = attend(explicit_attention, CPU, torch.float64, kind, groups, values=dtype)
    plain = [attend(way, CPU, dtype, kind, groups, values=dtype) for way in (fused_attention, explicit_attention)]
    for index, name in enumerate(("output", "query", "key", "value")):
        worse = max((way[index] for way in plain), key=lambda other: float((other - exact[index]).abs().max()))
        assert_as_exact(mine[index].cpu(), worse, exact[index], name)


def test_a_copy_that_the_host_does_not_wait_for_is_whole_and_may_outlive_its_source() -> None:
    copies = [to_device(torch.full((1000, 1000), number), CUDA) for number in range(20)]
    for number, copy in enumerate(copies):
        assert_bitwise(copy.cpu(), torch.full((1000, 1000), number), f"copy {number}")
