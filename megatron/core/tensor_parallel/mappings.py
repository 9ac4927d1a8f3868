"""The region functions of tensor and sequence parallelism: each a collective and its conjugate.

Tensor parallelism splits the last dimension (Shoeybi et al. 2019, section 3); sequence parallelism splits
dimension 0, the sequence, outside the tensor-parallel regions (Korthikanti et al. 2022, section 4). A
function returns a new tensor and never writes into its input; over a group of one rank it returns the input itself. The
layers of this package use some of them; the whole set is there for layers of users.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from megatron.core.comm_group import CommGroup

SEQUENCE_DIM = 0
HIDDEN_DIM = -1


def _own_part(tensor: Tensor, group: CommGroup, dim: int) -> Tensor:
    """This rank's part of `dim`, as a copy, so that the whole can be freed."""
    length = tensor.shape[dim]
    assert length % group.size == 0, f"dimension {dim} of {tuple(tensor.shape)} over {group.size} ranks"
    part = length // group.size
    return tensor.narrow(dim, group.rank * part, part).clone(memory_format=torch.contiguous_format)


def apply_eagerly(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Run an autograd function as it is written; a caller under `torch.compile` breaks its graph here."""
    apply = function.apply
    if torch.compiler.is_compiling():  # only then: the decorator imports the compiler, which takes seconds
        apply = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]
    output: Tensor = apply(*arguments)  # type: ignore[no-untyped-call]
    return output


class _Copy(torch.autograd.Function):
    """forward: identity; backward: all-reduce. The f of Shoeybi et al. 2019, section 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    """forward: all-reduce; backward: identity. The g of Shoeybi et al. 2019, section 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Scatter(torch.autograd.Function):
    """forward: keep this rank's part of `dim`; backward: all-gather. For an input that all ranks hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_part(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.group, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    """forward: all-gather `dim`; backward: keep this rank's part. For a consumer that all ranks repeat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(gradient, ctx.group, ctx.dim), None, None


class _GatherSequence(torch.autograd.Function):
    """forward: all-gather the sequence; backward: reduce-scatter it. Korthikanti et al. 2022, section 4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group, SEQUENCE_DIM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient, ctx.group, SEQUENCE_DIM), None


class _ReduceScatterSequence(torch.autograd.Function):
    """forward: reduce-scatter the sequence; backward: all-gather it. Korthikanti et al. 2022, section 4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group, SEQUENCE_DIM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, ctx.group, SEQUENCE_DIM), None


class _AllToAll(torch.autograd.Function):
    """forward: split one dimension, concatenate another; backward: the reverse. Jacobs et al. 2023."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, split_dim: int, concat_dim: int) -> Tensor:
        ctx.group, ctx.split_dim, ctx.concat_dim = group, split_dim, concat_dim
        return all_to_all(x, group, split_dim=split_dim, concat_dim=concat_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, concat_dim = ctx.concat_dim, ctx.split_dim
        return all_to_all(gradient, ctx.group, split_dim=split_dim, concat_dim=concat_dim), None, None, None


def copy_to_tensor_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """Enter a region in which each rank uses `x` with its own weights: the gradients are summed."""
    return x if group.size == 1 else apply_eagerly(_Copy, x, group)


def reduce_from_tensor_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """Leave the region: sum the partial results of the ranks."""
    return x if group.size == 1 else apply_eagerly(_Reduce, x, group)


def scatter_to_tensor_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """[.., h] -> [.., h/t]: this rank's part of a tensor that all ranks hold."""
    return x if group.size == 1 else apply_eagerly(_Scatter, x, group, HIDDEN_DIM)


def gather_from_tensor_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """[.., h/t] -> [.., h] for what follows outside the region, the same on each rank."""
    return x if group.size == 1 else apply_eagerly(_Gather, x, group, HIDDEN_DIM)


def scatter_to_sequence_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """[s, ..] -> [s/t, ..]: this rank's positions of a tensor that all ranks hold."""
    return x if group.size == 1 else apply_eagerly(_Scatter, x, group, SEQUENCE_DIM)


def gather_from_sequence_parallel_region(
    x: Tensor, group: CommGroup, *, backward: Literal["reduce_scatter", "scatter"]
) -> Tensor:
    """[s/t, ..] -> [s, ..].

    Args:
        backward: "reduce_scatter" when the consumer is a tensor-parallel region, where the gradient on each rank is a
            partial sum; "scatter" when all ranks compute the same with the result, where each gradient is whole.
    """
    if group.size == 1:
        return x
    if backward == "reduce_scatter":
        return apply_eagerly(_GatherSequence, x, group)
    return apply_eagerly(_Gather, x, group, SEQUENCE_DIM)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: CommGroup) -> Tensor:
    """[s, ..] partial sums -> [s/t, ..]: leave a tensor-parallel region for the sequence-parallel one."""
    return x if group.size == 1 else apply_eagerly(_ReduceScatterSequence, x, group)


def all_to_all_between_dims(x: Tensor, group: CommGroup, *, split_dim: int, concat_dim: int) -> Tensor:
    """Split `split_dim` over the ranks instead of `concat_dim`, for example heads instead of the sequence."""
    return x if group.size == 1 else apply_eagerly(_AllToAll, x, group, split_dim, concat_dim)
