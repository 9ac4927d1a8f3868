"""Collective communication over a `CommGroup`.

The only file, with the pipeline's point-to-point file, that calls `torch.distributed` communication. A function returns
a new tensor and leaves its input alone, or its name ends in `_` and it always writes into its argument. Over a group of
one rank each of them is the identity and needs no `torch.distributed`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm_group import CommGroup

Reduction = Literal["sum", "mean", "max"]
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def all_reduce_(tensor: Tensor, group: CommGroup, op: Reduction = "sum", *, async_op: bool = False) -> dist.Work | None:
    """Reduce `tensor` over the group, in place, on every rank. The handle is None unless `async_op`."""
    if group.size == 1:
        return None
    work: dist.Work | None = dist.all_reduce(tensor, op=_REDUCTIONS[op], group=group.process_group, async_op=async_op)
    return work


def all_reduce(tensor: Tensor, group: CommGroup, op: Reduction = "sum") -> Tensor:
    """The reduction of `tensor` over the group, as a new tensor (`tensor` itself in a group of one)."""
    if group.size == 1:
        return tensor
    output = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce_(output, group, op)
    return output


def all_gather_async(tensor: Tensor, group: CommGroup) -> tuple[Tensor, dist.Work | None]:
    """Concatenate the group's tensors along dimension 0; the output is ready after `work.wait()`."""
    if group.size == 1:
        return tensor, None
    output = tensor.new_empty(group.size * tensor.shape[0], *tensor.shape[1:])
    work = dist.all_gather_single(output, tensor.contiguous(), group=group.process_group, async_op=True)
    return output, work


def all_gather(tensor: Tensor, group: CommGroup, dim: int = 0) -> Tensor:
    """Concatenate the group's tensors along `dim`, in rank order."""
    if group.size == 1:
        return tensor
    output, work = all_gather_async(tensor.movedim(dim, 0), group)
    assert work is not None
    work.wait()
    return output.movedim(0, dim).contiguous()


def reduce_scatter_async(tensor: Tensor, group: CommGroup) -> tuple[Tensor, dist.Work | None]:
    """Sum over the group and keep this rank's part of dimension 0; ready after `work.wait()`."""
    if group.size == 1:
        return tensor, None
    assert tensor.shape[0] % group.size == 0, f"{tuple(tensor.shape)} does not split over {group.size} ranks"
    output = tensor.new_empty(tensor.shape[0] // group.size, *tensor.shape[1:])
    work = dist.reduce_scatter_single(output, tensor.contiguous(), group=group.process_group, async_op=True)
    return output, work


def reduce_scatter(tensor: Tensor, group: CommGroup, dim: int = 0) -> Tensor:
    """Sum over the group and keep this rank's part of `dim`."""
    if group.size == 1:
        return tensor
    output, work = reduce_scatter_async(tensor.movedim(dim, 0), group)
    assert work is not None
    work.wait()
    return output.movedim(0, dim).contiguous()


def slice_of(tensor: Tensor, group: CommGroup) -> Tensor:
    """This rank's part of dimension 0, a view; the group must divide it."""
    assert tensor.shape[0] % group.size == 0, f"{tuple(tensor.shape)} does not split over {group.size} ranks"
    part = tensor.shape[0] // group.size
    return tensor[group.rank * part : (group.rank + 1) * part]


def reduce_scatter_(
    tensor: Tensor, group: CommGroup, op: Reduction = "sum", *, async_op: bool = False
) -> dist.Work | None:
    """Reduce over the group into `slice_of(tensor, group)`; the other parts are left undefined.

    The output lies within the input: NCCL reduces in place there, and gloo works on a copy of its own.
    """
    if group.size == 1:
        return None
    work: dist.Work | None = dist.reduce_scatter_single(
        slice_of(tensor, group), tensor, op=_REDUCTIONS[op], group=group.process_group, async_op=async_op
    )
    return work


def all_gather_(tensor: Tensor, group: CommGroup, *, async_op: bool = False) -> dist.Work | None:
    """Fill each rank's part of dimension 0 with that rank's `slice_of(tensor, group)`, in place."""
    if group.size == 1:
        return None
    work: dist.Work | None = dist.all_gather_single(
        tensor, slice_of(tensor, group), group=group.process_group, async_op=async_op
    )
    return work


def all_to_all(tensor: Tensor, group: CommGroup, *, split_dim: int, concat_dim: int) -> Tensor:
    """Send part i of `split_dim` to rank i; concatenate what arrives along `concat_dim`, in rank order."""
    if group.size == 1:
        return tensor
    assert tensor.shape[split_dim] % group.size == 0, f"{tuple(tensor.shape)} does not split over {group.size} ranks"
    send = torch.stack(tensor.chunk(group.size, dim=split_dim))
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group.process_group)
    return torch.cat(receive.unbind(), dim=concat_dim)


def barrier(group: CommGroup) -> None:
    """Wait until each rank of the group is here."""
    if group.size > 1:
        dist.barrier(group=group.process_group)


def all_gather_object(value: Any, group: CommGroup) -> list[Any]:
    """The values of all ranks of the group, in rank order: for small objects of set-up and error paths."""
    if group.size == 1:
        return [value]
    gathered: list[Any] = [None] * group.size
    dist.all_gather_object(gathered, value, group=group.process_group)
    return gathered
