"""The region functions of tensor and sequence parallelism: each a collective and its conjugate.

Tensor parallelism splits the last dimension (Shoeybi et al. 2019, section 3); sequence parallelism splits
dimension 0, the sequence, outside the tensor-parallel regions (Korthikanti et al. 2022, section 4). A
function returns a new tensor and never writes into its input; over a group of one rank it returns the input itself. The
layers of this package use some of them; the whole set is there for layers of users.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from megatron.core.comm_group import CommGroup

Collective = Callable[[Tensor, CommGroup], Tensor]


def _same(x: Tensor, group: CommGroup) -> Tensor:
    return x.view_as(x)


def _own_part(x: Tensor, group: CommGroup, dim: int = 0) -> Tensor:
    """This rank's part of `dim`, as a copy, so that the whole can be freed."""
    length = x.shape[dim]
    assert length % group.size == 0, f"dimension {dim} of {tuple(x.shape)} over {group.size} ranks"
    part = length // group.size
    return x.narrow(dim, group.rank * part, part).clone(memory_format=torch.contiguous_format)


_own_hidden = partial(_own_part, dim=-1)
_all_hidden = partial(all_gather, dim=-1)


def apply_eagerly(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Run an autograd function as it is written; a caller under `torch.compile` breaks its graph here."""
    return eagerly(function.apply, *arguments)


def eagerly(function: Callable[..., Tensor], *arguments: Any, **keywords: Any) -> Tensor:
    """The same for any function."""
    if torch.compiler.is_compiling():  # only then: the decorator imports the compiler, which takes seconds
        function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return function(*arguments, **keywords)


class _Region(torch.autograd.Function):
    """forward: one collective; backward: its conjugate. Both map a tensor to a new one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, forward: Collective, backward: Collective) -> Tensor:
        ctx.group, ctx.conjugate = group, backward
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(gradient, ctx.group), None, None, None


def _cross(x: Tensor, group: CommGroup, *, forward: Collective, backward: Collective) -> Tensor:
    """From one region into another; the gradient comes back by `backward`."""
    return x if group.size == 1 else apply_eagerly(_Region, x, group, forward, backward)


def copy_to_tensor_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """Enter a region in which each rank uses `x` with its own weights: f of Shoeybi et al. 2019."""
    return _cross(x, group, forward=_same, backward=all_reduce)


def reduce_from_tensor_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """Leave the region, summing the partial results of the ranks: g of Shoeybi et al. 2019."""
    return _cross(x, group, forward=all_reduce, backward=_same)


def scatter_to_tensor_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """[.., h] -> [.., h/t]: this rank's part of a tensor that all ranks hold."""
    return _cross(x, group, forward=_own_hidden, backward=_all_hidden)


def gather_from_tensor_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """[.., h/t] -> [.., h] for what follows outside the region, the same on each rank."""
    return _cross(x, group, forward=_all_hidden, backward=_own_hidden)


def scatter_to_sequence_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """[s, ..] -> [s/t, ..]: this rank's positions of a tensor that all ranks hold."""
    return _cross(x, group, forward=_own_part, backward=all_gather)


def gather_from_sequence_parallel_region(
    x: Tensor, group: CommGroup, *, backward: Literal["reduce_scatter", "scatter"]
) -> Tensor:
    """[s/t, ..] -> [s, ..].

    Args:
        backward: "reduce_scatter" when the consumer is a tensor-parallel region, where the gradient on each rank is a
            partial sum; "scatter" when all ranks compute the same with the result, where each gradient is whole.
    """
    return _cross(x, group, forward=all_gather, backward=reduce_scatter if backward == "reduce_scatter" else _own_part)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """[s, ..] partial sums -> [s/t, ..]: leave a tensor-parallel region for the sequence-parallel one."""
    return _cross(x, group, forward=reduce_scatter, backward=all_gather)


def all_to_all_between_dims(x: Tensor, group: CommGroup, *, split_dim: int, concat_dim: int) -> Tensor:
    """Split `split_dim` over the ranks instead of `concat_dim`, for example heads instead of the sequence.

    Jacobs et al. 2023.
    """
    return _cross(
        x,
        group,
        forward=partial(all_to_all, split_dim=split_dim, concat_dim=concat_dim),
        backward=partial(all_to_all, split_dim=concat_dim, concat_dim=split_dim),
    )
