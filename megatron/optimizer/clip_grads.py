"""Global norm of the gradients, number of zeros among them, and the clip factor.

Pascanu et al., "On the difficulty of training recurrent neural networks", 2013. Each element of the global
model counts once, on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from megatron.core.shard import Shard

# Rows of this many elements are summed in the gradient's dtype, the sums of the rows in float64.
_ROW = 4096
# The exact sum converts this many elements at a time.
_EXACT_BLOCK = 2**20

Span = tuple[int, int]  # first and last + 1 element of a flat tensor


def owned_spans(shard: Shard, local_shape: tuple[int, ...]) -> list[Span]:
    """The elements of a contiguous local parameter that this rank owns, as spans in ascending order that do not touch.

    Not owned are the copies that another rank counts (whole tensors on all tensor-parallel ranks but one,
    replicated key and value heads, the second copy of a tied tensor), and rows of padding, which are no part
    of the global tensor.
    """
    dim = shard.split_dim
    inner = prod(local_shape[dim + 1 :])
    block = prod(local_shape[dim:])
    along = merge_spans((piece.local, piece.local + piece.length) for piece in shard.owned_pieces())
    if not local_shape:  # a scalar: its one piece covers it
        return [(0, 1)] if along else []
    outer = range(prod(local_shape[:dim]))
    return merge_spans((i * block + start * inner, i * block + stop * inner) for i in outer for start, stop in along)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """The same elements in ascending order, with touching spans made one and empty ones dropped."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def sum_of_squares(flat: Tensor, spans: Iterable[Span]) -> Tensor:
    """Sum of the squares of the elements in `spans`, a float64 scalar; not finite when one of them is not.

    Deterministic. In float32 the sum of a row of 4,096 squares may overflow although all elements are finite
    (above 1e17 or so): `exact_sum_of_squares` then tells the difference.
    """
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start, stop in spans:
        whole_rows = (stop - start) // _ROW * _ROW
        parts = []
        if whole_rows:
            parts.append(torch.linalg.vector_norm(flat[start : start + whole_rows].view(-1, _ROW), dim=1))
        if start + whole_rows < stop:
            parts.append(torch.linalg.vector_norm(flat[start + whole_rows : stop]).view(1))
        for norms in parts:
            total += norms.double().square_().sum()
    return total


def exact_sum_of_squares(flat: Tensor, spans: Iterable[Span]) -> Tensor:
    """The same with each square in float64: finite whenever all elements are. Slow."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start, stop in spans:
        for block in torch.split(flat[start:stop], _EXACT_BLOCK):
            total += block.double().square_().sum()
    return total


def count_zeros(flat: Tensor, spans: Iterable[Span]) -> Tensor:
    """Number of elements in `spans` that are exactly zero, an int64 scalar."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start, stop in spans:
        total += stop - start - torch.count_nonzero(flat[start:stop])
    return total


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that brings the gradients' norm to `max_norm` at most; without clipping (0) it is 1."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
