"""Small things that the rank functions of these tests share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm_group import CommGroup
from megatron.core.shard import shard_of
from megatron.core.tensor_parallel.placement import Placement


def tensor_group(rank: int, world_size: int) -> CommGroup:
    """All ranks of the test as one tensor-parallel group."""
    if world_size == 1:
        return CommGroup.single("tensor")
    ranks = tuple(range(world_size))
    return CommGroup(name="tensor", ranks=ranks, rank=rank, process_group=dist.group.WORLD)


def placed(group: CommGroup, sequence_parallel: bool = False, dtype: torch.dtype = torch.float64) -> Placement:
    """A placement over `group`, in the memory of the test."""
    return Placement(group=group, sequence_parallel=sequence_parallel, dtype=dtype, device=torch.device("cpu"))


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same normal numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def local_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """What `parameter` holds of the global tensor `whole`, by its shard record; padding is zero."""
    shard = shard_of(parameter)
    assert tuple(whole.shape) == shard.global_shape
    part = torch.zeros(parameter.shape, dtype=whole.dtype)
    for piece in shard.pieces:
        part.narrow(shard.split_dim, piece.local, piece.length).copy_(
            whole.narrow(shard.split_dim, piece.start, piece.length)
        )
    return part


def fill(parameter: Tensor, whole: Tensor) -> None:
    """Give `parameter` its part of `whole`."""
    with torch.no_grad():
        parameter.copy_(local_part(parameter, whole))


def sequence_part(whole: Tensor, group: CommGroup, sequence_parallel: bool) -> Tensor:
    """This rank's positions under sequence parallelism, else everything."""
    return whole.chunk(group.size)[group.rank].clone() if sequence_parallel else whole.clone()


def give_main_grads(parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype)  # type: ignore[attr-defined]
