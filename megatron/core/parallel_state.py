"""The process groups of a run: built once, returned as a value, and kept in one slot for the field's getters.

Code in `core/` and `model/` receives the groups it needs; the getters are for `training/`, tools, users and tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.config.parallel import DEFAULT_ORDER
from megatron.config.problems import UserError
from megatron.core.comm_group import CommGroup
from megatron.core.rank_grid import RankGrid

_parallel_state: ParallelState | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """This rank's groups along each axis.

    Attributes:
        grid: the whole world as a grid.
        rank: the global rank.
        tensor, pipeline, data, context: the groups along one axis.
        data_context: data × context: the ranks that hold the same weights and see different tokens.
        model: tensor × pipeline: the ranks that hold one model together.
        embedding: first and last pipeline stage; None on the stages between.
        world: all ranks.
        nodes: the node of each rank.
    """

    grid: RankGrid
    rank: int
    tensor: CommGroup
    pipeline: CommGroup
    data: CommGroup
    context: CommGroup
    data_context: CommGroup
    model: CommGroup
    embedding: CommGroup | None
    world: CommGroup
    nodes: tuple[str, ...]

    @classmethod
    def single(cls) -> ParallelState:
        """One process that is the whole world; needs no `torch.distributed`."""
        return build_parallel_state(RankGrid(), rank=0)

    def __str__(self) -> str:
        return describe_groups(self.grid, self.nodes)


def build_parallel_state(
    grid: RankGrid, *, rank: int, nodes: Sequence[str] | None = None, timeout: timedelta | None = None
) -> ParallelState:
    """Create the communicators of `rank` for a grid. Each rank of the world must call it with the same grid.

    Only the members of a group take part in making it, so start-up does not grow with the number of groups; axes that
    hold the same ranks share one communicator. torch names such a group by its ranks and by how many groups the member
    has already, so all members must have made equally many before: that holds along the axes, whose groups each rank
    has one of, and the embedding group, which only the ends of a pipeline have, must come last.
    """
    everyone = tuple(range(grid.world_size))
    communicators: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if grid.world_size > 1:
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is not initialised"
        communicators[everyone] = world

    def group(name: str, ranks: tuple[int, ...]) -> CommGroup:
        if len(ranks) == 1:
            return CommGroup.single(name, rank)
        if ranks not in communicators:
            communicators[ranks] = dist.new_group(
                list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
            )
        return CommGroup(name=name, ranks=ranks, rank=ranks.index(rank), process_group=communicators[ranks])

    pipeline_ranks = grid.group_of(rank, "pp")
    ends = tuple(dict.fromkeys((pipeline_ranks[0], pipeline_ranks[-1])))
    return ParallelState(
        grid=grid,
        rank=rank,
        tensor=group("tensor", grid.group_of(rank, "tp")),
        pipeline=group("pipeline", pipeline_ranks),
        data=group("data", grid.group_of(rank, "dp")),
        context=group("context", grid.group_of(rank, "cp")),
        data_context=group("data-context", grid.group_of(rank, "dp-cp")),
        model=group("model", grid.group_of(rank, "tp-pp")),
        world=group("world", everyone),
        embedding=group("embedding", ends) if rank in ends else None,
        nodes=tuple(nodes) if nodes is not None else ("node0",) * grid.world_size,
    )


def initialize_model_parallel(
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    order: str = DEFAULT_ORDER,
    nodes: Sequence[str] | None = None,
    timeout: timedelta | None = None,
) -> ParallelState:
    """Build the groups over the initialised world and keep them for the getters below.

    Without `torch.distributed` the world is this one process.

    Args:
        timeout: of a collective over any of the groups; None: torch's own for the backend.

    Raises:
        ValueError: the world does not divide by the product of the sizes.
        RuntimeError: the groups exist already.
    """
    global _parallel_state
    if _parallel_state is not None:
        raise RuntimeError("model parallel groups exist already; call destroy_model_parallel() first")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    grid = grid_of_world(
        world_size,
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        context=context_parallel_size,
        order=order,
    )
    _parallel_state = build_parallel_state(grid, rank=rank, nodes=nodes, timeout=timeout)
    return _parallel_state


def grid_of_world(
    world_size: int, *, tensor: int, pipeline: int, context: int = 1, order: str = DEFAULT_ORDER
) -> RankGrid:
    """The grid of `world_size` ranks, the data-parallel size being what the other axes leave.

    Raises:
        ValueError: the world does not divide.
    """
    model_size = tensor * pipeline * context
    if world_size % model_size != 0:
        raise UserError(
            f"world size {world_size} is not divisible by tensor {tensor} × pipeline {pipeline} × context {context} "
            f"= {model_size}: start a multiple of {model_size} ranks"
        )
    return RankGrid(tp=tensor, cp=context, dp=world_size // model_size, pp=pipeline, order=order)


def destroy_model_parallel() -> None:
    """Forget the groups; the communicators go with `torch.distributed.destroy_process_group`."""
    global _parallel_state
    _parallel_state = None


def get_parallel_state() -> ParallelState:
    if _parallel_state is None:
        raise RuntimeError("model parallel groups do not exist yet: call initialize_megatron() first")
    return _parallel_state


def get_tensor_model_parallel_group() -> CommGroup:
    return get_parallel_state().tensor


def get_tensor_model_parallel_rank() -> int:
    return get_parallel_state().tensor.rank


def get_tensor_model_parallel_world_size() -> int:
    return get_parallel_state().tensor.size


def get_pipeline_model_parallel_group() -> CommGroup:
    return get_parallel_state().pipeline


def get_pipeline_model_parallel_rank() -> int:
    return get_parallel_state().pipeline.rank


def get_pipeline_model_parallel_world_size() -> int:
    return get_parallel_state().pipeline.size


def is_pipeline_first_stage() -> bool:
    return get_parallel_state().pipeline.is_first


def is_pipeline_last_stage() -> bool:
    return get_parallel_state().pipeline.is_last


def get_data_parallel_group(with_context_parallel: bool = False) -> CommGroup:
    state = get_parallel_state()
    return state.data_context if with_context_parallel else state.data


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return get_data_parallel_group(with_context_parallel).rank


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return get_data_parallel_group(with_context_parallel).size


def get_context_parallel_group() -> CommGroup:
    return get_parallel_state().context


def get_context_parallel_rank() -> int:
    return get_parallel_state().context.rank


def get_context_parallel_world_size() -> int:
    return get_parallel_state().context.size


def get_model_parallel_group() -> CommGroup:
    return get_parallel_state().model


def get_embedding_group() -> CommGroup | None:
    return get_parallel_state().embedding


_AXIS_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "tp-pp": "model",
    "dp-cp": "data-context",
}


def describe_groups(grid: RankGrid, nodes: Sequence[str]) -> str:
    """The whole map as text: each rank with its node, its coordinates and the members of each of its groups."""
    axes = [axis for axis in grid.axes if axis != "ep"]
    sizes = " × ".join(f"{_AXIS_NAMES[axis]} {grid.size_of(axis)}" for axis in reversed(axes))
    lines = [f"{grid.world_size} ranks on {len(set(nodes))} node(s) = {sizes}"]
    embedding = {rank: group for group in grid.embedding_groups() for rank in group}
    for rank in range(grid.world_size):
        here = grid.coordinates(rank)
        position = " ".join(f"{axis}={here[axis]}" for axis in axes)
        groups = [f"{name} {_ranks(grid.group_of(rank, axis))}" for axis, name in _AXIS_NAMES.items()]
        if rank in embedding:
            groups.append(f"embedding {_ranks(embedding[rank])}")
        lines.append(f"rank {rank} on {nodes[rank]}: {position} | " + " | ".join(groups))
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    """Members of a group, shortened to `first:last:step` when they are many and evenly spaced."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 8 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"[{ranks[0]}, {ranks[1]}, … {ranks[-1]}] ({len(ranks)} ranks, step {step})"
    return str(list(ranks))
