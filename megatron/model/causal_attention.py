"""Causal attention on CPUs in bfloat16: torch's forward kernel, and a backward that multiplies by blocks of queries.

Torch's CPU kernel goes through the weights tile by tile. That makes a fast forward, but its backward takes six times as
long, where the products of a whole block of queries, their softmax recomputed, take four times. Past `LONGEST` tokens
the tiles win, and in fp32 at any length: products are dearer there, and so is what they compute twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST = 512
# Queries of a block. Half of them less and products are too small, twice as many and most of what a block computes
# lies ahead of its queries.
_BLOCK = 128


def wins_by_blocks(query: Tensor) -> bool:
    """Whether `CausalAttention` is the fastest kernel for queries [b, a/t, s, d] that see all that comes before."""
    return query.is_cpu and query.dtype == torch.bfloat16 and query.shape[2] <= LONGEST


class CausalAttention(torch.autograd.Function):
    """Queries [b, a/t, s, d], keys and values [b, g/t, s, d] -> [b, a/t, s, d]. Only these three are kept.

    Backward, with P the weights, O the output and c = d^-0.5 (Vaswani et al. 2017, section 3.2.1):
    dV = P^T dO;  dS = softmax'(dO V^T);  dQ = c dS K;  dK = c dS^T Q. A block of queries needs the keys up to its end.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        shared = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors
        batch, heads, length, dim = query.shape
        groups = batch * key.shape[1]
        keys, values = (x.reshape(groups, length, dim) for x in (key, value))  # [b g/t, s, d]
        query_gradient = torch.empty_like(query)
        key_gradient, value_gradient = torch.zeros_like(keys), torch.zeros_like(values)
        for start in range(0, length, _BLOCK):
            stop = min(start + _BLOCK, length)
            queries, outward = (x[:, :, start:stop].reshape(groups, -1, dim) for x in (query, gradient))
            seen_keys, seen_values = keys[:, :stop], values[:, :stop]  # [b g/t, stop, d]
            weights = _causal_weights(queries, seen_keys, start)  # [b g/t, a/g n, stop], n the length of the block
            by_weight = torch.bmm(outward, seen_values.transpose(1, 2))
            by_score = torch._softmax_backward_data(by_weight, weights, -1, weights.dtype)
            of_queries = torch.bmm(by_score, seen_keys).mul_(dim**-0.5)  # [b g/t, a/g n, d]
            query_gradient[:, :, start:stop] = of_queries.view(batch, heads, stop - start, dim)
            key_gradient[:, :stop].baddbmm_(by_score.transpose(1, 2), queries, alpha=dim**-0.5)
            value_gradient[:, :stop].baddbmm_(weights.transpose(1, 2), outward)
        return query_gradient, key_gradient.view(key.shape), value_gradient.view(value.shape)


def _causal_weights(queries: Tensor, keys: Tensor, start: int) -> Tensor:
    """Weights of queries [b g/t, a/g n, d], whose positions are `start` to that of the last key, `stop` - 1.

    Scores and softmax are in float32 at least, as in forward: large scores that are rounded give other weights.
    """
    stop, dim = keys.shape[1:]
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = torch.bmm(queries.to(wide) * dim**-0.5, keys.to(wide).transpose(1, 2))  # [b g/t, a/g n, stop]
    ahead = torch.ones(stop - start, stop - start, dtype=torch.bool, device=scores.device).triu_(1)
    own = scores.view(scores.shape[0], -1, stop - start, stop)[..., start:]  # [b g/t, a/g, n, n]
    own.masked_fill_(ahead, float("-inf"))
    return scores.softmax(dim=-1).to(queries.dtype)
