"""The weight gradient of 16-bit layers on a CPU goes through a scratch, whatever its size, into `main_grad`."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch

from megatron.core.kernels.choice import KernelChoice, set_kernel_choice
from megatron.core.main_grad import forget
from megatron.core.tensor_parallel import async_linear
from megatron.core.tensor_parallel.async_linear import accumulate_weight_gradient
from tests.helpers.numerics import assert_bitwise
from tests.helpers.operations import RecordedOperations


@pytest.mark.parametrize("scratch", [1, 24, 100, 1000], ids="scratch of {}".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_product_is_rounded_once_and_added(dtype: torch.dtype, scratch: int) -> None:
    """Of whole numbers that each have 6 bits: their sums are exact until they are rounded to 8 or 11."""
    generator = torch.Generator().manual_seed(0)
    gradient, x = (torch.randint(-60, 60, (10, columns), generator=generator).to(dtype) for columns in (19, 12))
    main_grad = torch.randint(-9, 9, (19, 12), generator=generator).float()
    exact = gradient.double().t() @ x.double()
    assert (exact != exact.to(dtype)).any()
    expected = main_grad + exact.to(dtype)
    with patch.object(async_linear, "_SCRATCH", scratch), patch.object(async_linear, "_PART", 7):
        accumulate_weight_gradient(main_grad, gradient, x)
    assert_bitwise(main_grad, expected)


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize(
    "dtype, wide",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_first_product_of_a_step_is_written_over_what_is_there(
    dtype: torch.dtype, wide: torch.dtype, apart: bool
) -> None:
    weight = torch.zeros(19, 12, dtype=dtype)
    weight.main_grad = main_grad = torch.full((19, 12), math.nan, dtype=wide)  # type: ignore[attr-defined]
    gradient, x = (torch.ones(10, columns, dtype=dtype) for columns in (19, 12))
    set_kernel_choice(KernelChoice(weight_gradients_apart=apart))
    try:
        forget(weight)
        with RecordedOperations() as recorded:
            for total in (10.0, 20.0):
                accumulate_weight_gradient(main_grad, gradient, x)
                assert_bitwise(main_grad, torch.full((19, 12), total, dtype=wide))
        assert "aten::zero_" not in recorded.names
    finally:
        set_kernel_choice(KernelChoice())


def test_no_tensor_is_larger_than_the_scratch() -> None:
    gradient, x = torch.ones(10, 64, dtype=torch.bfloat16), torch.ones(10, 12, dtype=torch.bfloat16)
    with (
        patch.object(async_linear, "_SCRATCH", 48),
        patch.object(async_linear, "_PART", 16),
        RecordedOperations() as recorded,
    ):
        accumulate_weight_gradient(torch.zeros(64, 12), gradient, x)
    made = {output.untyped_storage().nbytes() for output in recorded.outputs if output.dtype == torch.bfloat16}
    made -= {gradient.untyped_storage().nbytes()}
    assert max(made) <= 48 * 2
