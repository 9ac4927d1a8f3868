"""Products of fp32 matrices on CPUs: torch's faster path, where it is as exact as the default one."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows, inner and outer length of a layer. Above what torch multiplies by itself, and below what costs time at start;
# none a multiple of a vector, so that the ends of a kernel's loops are seen too.
_TOKENS, _INNER, _OUTER, _HEADS = 250, 390, 510, 4
# Of the product against float64, relative to its norm. Sums in fp32 have some 4e-7; bfloat16 operands 2e-3.
LARGEST_ERROR = 2e-6


def use_fast_products(fast: bool) -> None:
    """Let fp32 products of this process take the path that torch calls "medium", or the default one.

    "medium" allows oneDNN to round operands to bfloat16. Where the processor multiplies no bfloat16 matrices it keeps
    fp32, and is up to twice as fast as the default; with AMX it rounds. So `error_of_fast_products` looks.
    """
    torch.set_float32_matmul_precision("medium" if fast else "highest")


def error_of_fast_products() -> float:
    """The largest relative error of fast products against float64; the setting is afterwards what it was."""
    before = torch.get_float32_matmul_precision()
    use_fast_products(True)
    try:
        return _product_error()
    finally:
        torch.set_float32_matmul_precision(before)


def _product_error() -> float:
    """Of the products of a layer and of attention, as they are computed now."""
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator) for shape in ((_TOKENS, _INNER), (_OUTER, _INNER), (_TOKENS, _OUTER))
    )
    heads, scores = (
        torch.randn(shape, generator=generator) for shape in ((_HEADS, _TOKENS, 64), (_HEADS, _TOKENS, _TOKENS))
    )
    pairs = [
        (x, weight.t()),  # forward
        (gradient, weight),  # backward, to the input
        (gradient.t(), x),  # backward, to the weight
        (heads, heads.transpose(1, 2)),
        (scores, heads),
        (scores.transpose(1, 2), heads),
    ]
    return max(_relative_error(left @ right, left.double() @ right.double()) for left, right in pairs)


def _relative_error(product: Tensor, exact: Tensor) -> float:
    return float((product - exact).norm() / exact.norm())
