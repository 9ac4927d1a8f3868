"""What of a gradient counts in the global norm, number of zeros among it, and the clip factor.

Pascanu et al., "On the difficulty of training recurrent neural networks", 2013. Each element of the global
model counts once, on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from megatron.core.kernels.grad_norm import ElementSpans, Span
from megatron.core.shard import Shard


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


def count_zeros(flat: Tensor, spans: ElementSpans) -> Tensor:
    """Number of elements in `spans` that are exactly zero, an int64 scalar."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start, stop in spans.spans:
        total += stop - start - torch.count_nonzero(flat[start:stop])
    return total


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that brings the gradients' norm to `max_norm` at most; without clipping (0) it is 1."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
