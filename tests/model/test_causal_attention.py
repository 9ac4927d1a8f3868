"""Attention whose backward goes by blocks of queries is attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.attention import fused_attention
from megatron.model.causal_attention import LONGEST, CausalAttention, wins_by_blocks
from tests.helpers.numerics import assert_all_parity, assert_within_reference_error
from tests.helpers.operations import RecordedOperations


def heads(count: int, length: int, seed: int, dtype: torch.dtype = torch.float64, dim: int = 8) -> Tensor:
    """[b, a, s, d], laid out as they leave the projection, [s, b, a, d]"""
    generator = torch.Generator().manual_seed(seed)
    laid_out = torch.randn(length, 2, count, dim, generator=generator, dtype=torch.float64)
    return laid_out.permute(1, 2, 0, 3).to(dtype).requires_grad_()


def gradients(
    attend: object,
    length: int,
    groups: int,
    dtype: torch.dtype,
    *,
    dim: int = 8,
    scale: int = 1,
    values: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Output and gradients, of inputs that are rounded to `values` first."""
    inputs = [
        (heads(count, length, seed, dim=dim).detach() * factor).to(values).to(dtype).requires_grad_()
        for seed, (count, factor) in enumerate(((4, scale), (groups, scale), (groups, 1)))
    ]
    output = attend(*inputs)  # type: ignore[operator]
    output.backward(heads(4, length, 3, dim=dim).detach().to(values).to(dtype))
    names = ("query", "key", "value")
    return {"output": output.detach()} | {name: x.grad for name, x in zip(names, inputs) if x.grad is not None}


def torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("length", [1, 24, 128, 129, 300])
def test_its_gradients_are_those_of_torch(length: int, groups: int) -> None:
    ours, theirs = (
        gradients(attend, length, groups, torch.float64) for attend in (CausalAttention.apply, torch_attention)
    )
    assert len(ours) == 4
    assert_all_parity(ours, theirs)


@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("groups", [4, 1])
def test_in_bfloat16_it_errs_at_most_twice_as_much_as_torch(groups: int, scale: int) -> None:
    """With the scores of trained heads, too, which are far from 0: queries and keys are multiplied by `scale`."""
    rounded, theirs = (
        gradients(attend, 300, groups, torch.bfloat16, dim=64, scale=scale)
        for attend in (CausalAttention.apply, torch_attention)
    )
    exact = gradients(torch_attention, 300, groups, torch.float64, dim=64, scale=scale, values=torch.bfloat16)
    for name in exact:
        assert_within_reference_error(rounded[name], theirs[name], exact[name], name)


@pytest.mark.parametrize(
    "length, dtype, wins",
    [
        (24, torch.bfloat16, True),
        (LONGEST, torch.bfloat16, True),
        (LONGEST + 1, torch.bfloat16, False),
        (24, torch.float32, False),
        (24, torch.float64, False),
    ],
)
def test_it_is_chosen_where_it_is_the_fastest(length: int, dtype: torch.dtype, wins: bool) -> None:
    query, key, value = (heads(2, length, seed, dtype) for seed in range(3))
    assert wins_by_blocks(query) == wins
    with RecordedOperations() as recorded:
        fused_attention(query, key, value, None).sum().backward()
    assert ("bmm" in str(recorded.names)) == wins
