"""The comparisons that the parity tests rest on must notice small mistakes, also in small tensors."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.numerics import assert_all_parity, assert_parity


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_error_of_a_thousandth_in_a_small_tensor_is_noticed(dtype: torch.dtype) -> None:
    expected = {"large": torch.full((3,), 5e-2, dtype=dtype), "norm": torch.full((4,), 1.8e-4, dtype=dtype)}
    actual = {"large": expected["large"], "norm": expected["norm"] * 1.001}
    with pytest.raises(AssertionError, match="norm: differs"):
        assert_all_parity(actual, expected)


def test_rounding_alone_passes() -> None:
    expected = torch.tensor([1e-4, 2e-4])
    assert_parity(expected * (1 + 1e-6), expected)


def test_what_is_zero_in_theory_is_measured_by_its_terms() -> None:
    zero = torch.zeros(2)
    with pytest.raises(AssertionError):
        assert_parity(zero + 1e-9, zero)
    assert_parity(zero + 1e-9, zero, floor=1e-3)
