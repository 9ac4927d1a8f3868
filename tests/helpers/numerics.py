"""The few ways in which numbers are compared, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Two layouts that do the same mathematics in float64 differ by the order of their sums only: about 1e-16 per operation,
# grown over a few steps of a tiny model. The project's promise is this bound.
PARITY_FP64 = 1e-10
# The same in float32: 2**-24 per operation over some hundred terms.
PARITY_FP32 = 2e-5
# A loss of some 5.5 in bfloat16 against the exact one: logits have 8 bits.
LOSS_BF16 = 2**-7
# Another program's float32 beside ours: both round, in other places. The project's promise is this bound.
REFERENCE_FP32 = 1e-5
_PARITY = {torch.float64: PARITY_FP64, torch.float32: PARITY_FP32}
_REFERENCE = {torch.float64: PARITY_FP64, torch.float32: REFERENCE_FP32}


def assert_bitwise(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Both have the same dtype, shape and bits."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert torch.equal(actual, expected), f"{name}: {(actual != expected).sum()} of {actual.numel()} elements differ"


def rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of a model from main ones: to the nearest, of two the even one, in bfloat16 the larger in size."""
    nearest = wide.to(dtype)
    if dtype != torch.bfloat16:
        return nearest
    single = wide.float()
    bits = single.view(torch.int32)
    larger = ((bits >> 16).to(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(((bits & 0xFFFF) == 0x8000) & ~single.isnan(), larger, nearest)


def assert_parity(
    actual: Tensor,
    expected: Tensor,
    name: str = "tensor",
    *,
    floor: float = 0.0,
    bounds: Mapping[torch.dtype, float] = _PARITY,
) -> None:
    """Equal but for the order of sums: relative to the largest element, 1e-10 in float64, 2e-5 in float32.

    Args:
        floor: size of the terms that the elements are sums of, for a tensor that is zero in theory: what is left of it
            is the rounding of those terms.
        bounds: in place of these.
    """
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} is not {expected.dtype}"
    bound = bounds[actual.dtype]
    if actual.numel() == 0:
        return
    scale = max(floor, float(expected.detach().abs().max()))
    difference = float((actual.detach() - expected.detach()).abs().max())
    assert difference <= bound * scale, f"{name}: differs by {difference:.3e}, allowed {bound * scale:.1e}"


def assert_reference(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Ours is what another program computes: relative to the largest element, 1e-10 in float64, 1e-5 in float32."""
    assert_parity(actual, expected, name, bounds=_REFERENCE)


def assert_all_reference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """`assert_all_parity` with the bounds of `assert_reference`."""
    assert_all_parity(actual, expected, bounds=_REFERENCE)


def assert_all_parity(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, bounds: Mapping[torch.dtype, float] = _PARITY
) -> None:
    """The same names, and each tensor in parity.

    The gradient of a key bias is zero in theory, the terms of its sums being as large as other gradients: so a
    thousandth of the largest element of all is the least that a tensor is measured by.
    """
    assert sorted(actual) == sorted(expected), sorted(set(actual) ^ set(expected))
    floor = 1e-3 * max(float(tensor.detach().abs().max()) for tensor in expected.values() if tensor.numel())
    for name in expected:
        assert_parity(actual[name], expected[name], name, floor=floor, bounds=bounds)


def _error(actual: Tensor, exact: Tensor) -> float:
    """The largest one of all elements."""
    return float((actual.double() - exact.double()).abs().max()) if exact.numel() else 0.0


def assert_as_exact(actual: Tensor, plain: Tensor, exact: Tensor, name: str = "tensor") -> None:
    """In parity with float64 in wide dtypes; in low ones, at most twice as far from it as plain torch.

    Or as the exact result itself when it is rounded, which no computation can spare: plain torch may have it by luck.
    """
    rounded_once = exact.to(actual.dtype)
    if actual.dtype in (torch.float64, torch.float32):
        assert_parity(actual, rounded_once, name)
        return
    yardstick = max((plain, rounded_once), key=lambda other: _error(other, exact))
    assert_within_reference_error(actual, yardstick, exact, name)


def assert_within_reference_error(actual: Tensor, low_precision: Tensor, exact: Tensor, name: str = "tensor") -> None:
    """A low-precision result errs at most twice as much as plain torch in that precision errs from the exact one."""
    assert actual.shape == exact.shape, f"{name}: {tuple(actual.shape)} is not {tuple(exact.shape)}"
    allowed, difference = 2 * _error(low_precision, exact), _error(actual, exact)
    assert difference <= allowed, f"{name}: errs by {difference:.3e}, plain torch by {allowed / 2:.3e}"
