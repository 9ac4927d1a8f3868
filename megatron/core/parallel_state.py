"""The process groups of a run: built once, returned as a value, and kept in one slot for the field's getters.

Code in `core/` and `model/` receives the groups it needs; the getters are for `training/`, tools, users and tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import zip_longest

import torch.distributed as dist

from megatron.config.parallel import DEFAULT_ORDER
from megatron.core.comm_group import CommGroup
from megatron.core.rank_grid import RankGrid, stage_channels

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
        channels: (source, destination) stage -> a communicator that carries messages of this rank's pipeline from one
            to the other and nothing else; those that have this rank at an end.
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
    channels: Mapping[tuple[int, int], CommGroup]
    world: CommGroup
    nodes: tuple[str, ...]

    @classmethod
    def single(cls) -> ParallelState:
        """One process that is the whole world; needs no `torch.distributed`."""
        return build_parallel_state(RankGrid(), rank=0)

    def leave(self) -> None:
        """Let go of all communicators: nothing can be sent over these groups any more."""
        along_axes = [group for group in vars(self).values() if isinstance(group, CommGroup)]
        for group in [*along_axes, *self.channels.values()]:
            group.leave()

    def __str__(self) -> str:
        return describe_groups(self.grid, self.nodes)


def build_parallel_state(
    grid: RankGrid, *, rank: int, nodes: Sequence[str] | None = None, timeout: timedelta | None = None
) -> ParallelState:
    """Create the communicators of a grid. Each rank of the world must call it with the same grid.

    torch wants every rank at the making of every group, in one order. To a rank that is no member this costs some ten
    microseconds: a tenth of a second for the ten thousand groups of 4,096 ranks. Axes that hold the same ranks share
    one communicator.
    """
    everyone = tuple(range(grid.world_size))
    made: dict[tuple[int, ...], CommGroup | None] = {}
    if grid.world_size > 1:
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is not initialised"
        made[everyone] = CommGroup(name="world", ranks=everyone, rank=rank, process_group=world)

    def make(name: str, ranks: tuple[int, ...]) -> CommGroup | None:
        """A group of `ranks`, in ascending order; None where this rank is none of them."""
        communicator = dist.new_group(list(ranks), timeout=timeout, group_desc=name) if len(ranks) > 1 else None
        if rank not in ranks:
            return None
        return CommGroup(name=name, ranks=ranks, rank=ranks.index(rank), process_group=communicator)

    def one_of(name: str, groups: Iterable[tuple[int, ...]]) -> CommGroup | None:
        """The group among `groups` that this rank is in; all of them are made."""
        mine = None
        for ranks in groups:
            if ranks not in made:
                made[ranks] = make(name, ranks)
            if (group := made[ranks]) is not None:
                mine = replace(group, name=name)
        return mine

    def along(name: str, axes: str) -> CommGroup:
        group = one_of(name, grid.groups(axes))
        assert group is not None, f"rank {rank} has no place along {axes}"
        return group

    channels: dict[tuple[int, int], CommGroup] = {}
    for pipeline in grid.groups("pp"):
        for source, destination in stage_channels(grid.pp):
            ends = sorted((pipeline[source], pipeline[destination]))
            channel = make(f"pipeline stage {source} to {destination}", tuple(ends))
            if channel is not None:
                channels[source, destination] = channel
    return ParallelState(
        grid=grid,
        rank=rank,
        tensor=along("tensor", "tp"),
        pipeline=along("pipeline", "pp"),
        data=along("data", "dp"),
        context=along("context", "cp"),
        data_context=along("data-context", "dp-cp"),
        model=along("model", "tp-pp"),
        world=along("world", "-".join(grid.axes)),
        embedding=one_of("embedding", grid.embedding_groups()),
        channels=channels,
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
        raise ValueError(
            f"world size {world_size} is not divisible by tensor {tensor} × pipeline {pipeline} × context {context} "
            f"= {model_size}: start a multiple of {model_size} ranks"
        )
    return RankGrid(tp=tensor, cp=context, dp=world_size // model_size, pp=pipeline, order=order)


def destroy_model_parallel() -> None:
    """Leave the groups and forget them; their communicators go with `torch.distributed.destroy_process_group`."""
    global _parallel_state
    if _parallel_state is not None:
        _parallel_state.leave()
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
    """The whole map as text in columns: each rank with its node, its coordinates and the members of its groups.

    A world without context parallelism says nothing of it: its context groups hold one rank each.
    """
    axes = [axis for axis in grid.axes if axis != "ep" and (axis != "cp" or grid.size_of("cp") > 1)]
    sizes = " × ".join(f"{_AXIS_NAMES[axis]} {grid.size_of(axis)}" for axis in reversed(axes))
    kinds = {name: grid.groups(axis) for axis, name in _AXIS_NAMES.items() if "cp" not in axis or "cp" in axes}
    rows = []
    for rank in range(grid.world_size):
        here = grid.coordinates(rank)
        rows.append([f"rank {rank} on {nodes[rank]}: " + " ".join(f"{axis}={here[axis]}" for axis in axes)])
    for name, groups in {**kinds, "embedding": grid.embedding_groups()}.items():
        for group in groups:
            text = f"{name} {_ranks(group)}"
            for rank in group:
                rows[rank].append(text)
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([f"{grid.world_size} ranks on {len(set(nodes))} node(s) = {sizes}", *table])


def _ranks(ranks: tuple[int, ...]) -> str:
    """Members of a group; many that are evenly spaced as `[0, 8, … 1528] (192 ranks, step 8)`."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 8 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"[{ranks[0]}, {ranks[1]}, … {ranks[-1]}] ({len(ranks)} ranks, step {step})"
    return str(list(ranks))
