"""The fused AdamW update against its plain reference, and its bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.adam import AdamHyperParameters, HyperSpan, adamw_, adamw_reference_
from tests.helpers.numerics import assert_bitwise, assert_parity, assert_within_reference_error

SPANS = (
    HyperSpan(length=192),
    HyperSpan(length=64, weight_decay_multiplier=0.0),
    HyperSpan(length=128, weight_decay_multiplier=0.25),
    HyperSpan(length=640),
)
HYPER = AdamHyperParameters(step=3, lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.99, eps=1e-6, gradient_scale=3.7)


def tensors(dtype: torch.dtype, length: int = 1024) -> list[Tensor]:
    """(parameter, gradient, exp_avg, exp_avg_sq), the same values in any dtype but for rounding."""
    generator = torch.Generator().manual_seed(3)
    parameter, gradient, exp_avg = (torch.randn(length, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(length, generator=generator)
    return [values.to(dtype) for values in (parameter, gradient, exp_avg, exp_avg_sq)]


@pytest.mark.parametrize("gradient_scale", [1.0, 3.7, 65536.0])
def test_float64_is_the_reference(gradient_scale: float) -> None:
    hyper = replace(HYPER, gradient_scale=gradient_scale)
    mine, reference = tensors(torch.float64), tensors(torch.float64)
    adamw_(*mine, spans=SPANS, hyper=hyper)
    adamw_reference_(*reference, spans=SPANS, hyper=hyper)
    for name, i in (("parameter", 0), ("exp_avg", 2), ("exp_avg_sq", 3)):
        assert_parity(mine[i], reference[i], name)


@pytest.mark.parametrize("gradient_scale", [1.0, 3.7, 65536.0])
def test_float32_errs_no_more_than_plain_torch(gradient_scale: float) -> None:
    hyper = replace(HYPER, gradient_scale=gradient_scale)
    mine, plain, exact = tensors(torch.float32), tensors(torch.float32), tensors(torch.float64)
    adamw_(*mine, spans=SPANS, hyper=hyper)
    adamw_reference_(*plain, spans=SPANS, hyper=hyper)
    adamw_reference_(*exact, spans=SPANS, hyper=hyper)
    for name, i in (("parameter", 0), ("exp_avg", 2), ("exp_avg_sq", 3)):
        assert_within_reference_error(mine[i], plain[i], exact[i], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_where_an_element_lies(dtype: torch.dtype) -> None:
    """Slices that are cut on a multiple of 64 elements are updated as in the whole buffer."""
    whole, sliced = tensors(dtype), tensors(dtype)
    adamw_(*whole, spans=[HyperSpan(length=1024)], hyper=HYPER)
    for start, stop in ((0, 64), (64, 448), (448, 1024)):
        adamw_(*(flat[start:stop] for flat in sliced), spans=[HyperSpan(length=stop - start)], hyper=HYPER)
    for i in (0, 2, 3):
        assert_bitwise(sliced[i], whole[i])


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_low_precision_copy_is_the_rounded_parameter(low: torch.dtype) -> None:
    mine = tensors(torch.float32)
    copy = torch.zeros(1024, dtype=low)
    adamw_(*mine, spans=SPANS, hyper=HYPER, low_precision=copy)
    assert_bitwise(copy, mine[0].to(low))


def test_zero_padding_stays_zero() -> None:
    flat = [torch.zeros(128, dtype=torch.float32) for _ in range(4)]
    adamw_(*flat, spans=[HyperSpan(length=128)], hyper=HYPER)
    assert all(torch.count_nonzero(tensor) == 0 for tensor in flat)


def test_runs_that_do_not_tile_the_buffer_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="tile"):
        adamw_(*tensors(torch.float32), spans=SPANS[:-1], hyper=HYPER)


def test_an_empty_buffer_is_updated() -> None:
    adamw_(*tensors(torch.float32, length=0), spans=(), hyper=HYPER)
