"""A toy with one parameter of every kind of shard, made from global tensors, over tensor × pipeline × data ranks.

Every rank gets hand-made local gradients that are its part of the truth; the truth is a table of global tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.checkpointing.slices import held_parts
from megatron.core import collectives
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_state import ParallelState, build_parallel_state, grid_of_world
from megatron.core.shard import (
    Init,
    NamedTensor,
    Piece,
    Shard,
    blocked_pieces,
    even_pieces,
    set_shard,
    shard_of,
    whole_pieces,
)

HEADS, HEAD_DIM, HIDDEN, FFN, VOCABULARY = 12, 2, 6, 12, 7


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    query_groups: int = 2
    tied: bool = True
    sharded: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def label(self) -> str:
        tied = "" if self.tied else "-untied"
        sharded = "-sharded" if self.sharded else ""
        return f"tp{self.tensor}-pp{self.pipeline}-dp{self.data}-g{self.query_groups}{tied}{sharded}"


def state_of(layout: Layout, rank: int) -> ParallelState:
    grid = grid_of_world(layout.world_size, tensor=layout.tensor, pipeline=layout.pipeline)
    return build_parallel_state(grid, rank=rank)


def qkv_pieces(query_groups: int, group: CommGroup) -> tuple[Piece, ...]:
    """Rows [q … q, k, v] for each query group; when they are fewer than ranks, several ranks hold k and v."""
    rows_of_group = (HEADS // query_groups + 2) * HEAD_DIM
    if query_groups >= group.size:
        return even_pieces(query_groups * rows_of_group, group)
    holders = group.size // query_groups
    of_group, within = divmod(group.rank, holders)
    queries = HEADS // group.size * HEAD_DIM
    start = of_group * rows_of_group
    pieces = [Piece(local=0, start=start + within * queries, length=queries)]
    for i in (0, 1):  # keys and values, as two runs
        key_start = start + HEADS // query_groups * HEAD_DIM + i * HEAD_DIM
        local = queries + i * HEAD_DIM
        pieces.append(Piece(local=local, start=key_start, length=HEAD_DIM, holders=holders, owned=within == 0))
    return tuple(pieces)


def shards_of_stage(layout: Layout, state: ParallelState) -> dict[str, tuple[Shard, tuple[int, ...]]]:
    """(shard, local shape) of each parameter that lives on this rank's stage."""
    group = state.tensor
    t = group.size
    stage, last = state.pipeline.rank, state.pipeline.size - 1
    shards: dict[str, tuple[Shard, tuple[int, ...]]] = {}

    def add(name: str, shape: tuple[int, ...], local: tuple[int, ...], dim: int | None, **fields: object) -> None:
        pieces = fields.pop("pieces", None) or (
            whole_pieces(shape[0], group) if dim is None else even_pieces(shape[dim], group)
        )
        shard = Shard(name=name, global_shape=shape, dim=dim, pieces=pieces, group=group, init=Init.zeros(), **fields)
        shards[name.replace(".", "_")] = (shard, local)

    padded = -(-(VOCABULARY + 1) // t) * t  # one row of padding at least, and a rank without a token at t = 8
    vocabulary = even_pieces(VOCABULARY, group, padded=padded)
    is_tied = layout.tied and last > 0
    if stage == 0 or (stage == last and is_tied):
        add(
            "embedding.weight", (VOCABULARY, HIDDEN), (padded // t, HIDDEN), 0,
            pieces=vocabulary, tied=is_tied, owned=stage == 0,
        )  # fmt: skip
    qkv_rows = (HEADS + 2 * layout.query_groups) * HEAD_DIM
    pieces = qkv_pieces(layout.query_groups, group)
    local_rows = sum(piece.length for piece in pieces)
    layer = f"layers.{stage}"
    if stage == last:
        for i in range(stage, 3):  # the same model of three layers on any number of stages
            _add_layer(add, f"layers.{i}", t, qkv_rows, local_rows, pieces, group)
    else:
        _add_layer(add, layer, t, qkv_rows, local_rows, pieces, group)
    return shards


def _add_layer(add, layer: str, t: int, qkv_rows: int, local_rows: int, pieces, group: CommGroup) -> None:
    add(f"{layer}.norm.weight", (HIDDEN,), (HIDDEN,), None, partial_gradient=True)
    add(f"{layer}.qkv.weight", (qkv_rows, HIDDEN), (local_rows, HIDDEN), 0, pieces=pieces)
    add(f"{layer}.qkv.bias", (qkv_rows,), (local_rows,), 0, pieces=pieces)
    add(f"{layer}.proj.weight", (HIDDEN, FFN), (HIDDEN, FFN // t), 1)
    add(f"{layer}.proj.bias", (HIDDEN,), (HIDDEN,), None)
    fc1 = blocked_pieces((FFN, FFN), group)
    add(f"{layer}.fc1.weight", (2 * FFN, HIDDEN), (2 * FFN // t, HIDDEN), 0, pieces=fc1)


def global_tensor(kind: str, shape: tuple[int, ...], name: str) -> Tensor:
    """A float64 tensor that depends on its kind and name alone."""
    seed = int.from_bytes(hashlib.sha256(f"{kind} {name}".encode()).digest()[:6], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def local_part(shard: Shard, local_shape: tuple[int, ...], whole: Tensor) -> Tensor:
    """This rank's rows of a global tensor; zero where it has none."""
    local = torch.zeros(local_shape, dtype=whole.dtype)
    for piece in shard.pieces:
        part = whole.narrow(shard.split_dim, piece.start, piece.length)
        local.narrow(shard.split_dim, piece.local, piece.length).copy_(part)
    return local


def build_chunk(
    layout: Layout, state: ParallelState, config: DistributedDataParallelConfig | None = None
) -> DistributedDataParallel:
    module = nn.Module()
    for attribute, (shard, local_shape) in shards_of_stage(layout, state).items():
        values = local_part(shard, local_shape, global_tensor("parameter", shard.global_shape, shard.name))
        parameter = nn.Parameter(values)
        set_shard(parameter, shard)
        module.register_parameter(attribute, parameter)
    config = config or DistributedDataParallelConfig(use_distributed_optimizer=layout.sharded)
    return DistributedDataParallel(module, data_group=state.data, grad_dtype=torch.float64, config=config)


def set_raw_gradients(chunk: DistributedDataParallel, state: ParallelState, step: int) -> None:
    """What a backward pass would leave: this rank's summand of each gradient, before any reduction."""
    share = (1 + state.data.rank) / sum(range(1, state.data.size + 1))
    for parameter in chunk.trainable_parameters():
        shard = shard_of(parameter)
        truth = global_tensor(f"gradient {step}", shard.global_shape, shard.name)
        part = local_part(shard, tuple(parameter.shape), truth) * share
        if shard.partial_gradient:
            part *= (1 + state.tensor.rank) / sum(range(1, state.tensor.size + 1))
        for piece in shard.pieces if shard.replicated_pieces else ():
            within = state.tensor.rank % piece.holders
            factor = (1 + within) / sum(range(1, piece.holders + 1))
            part.narrow(shard.split_dim, piece.local, piece.length).mul_(factor)
        if shard.tied:
            part *= 0.25 if state.pipeline.is_first else 0.75
        main_grad_of(parameter).copy_(part)


def true_gradients(layout: Layout, step: int) -> dict[str, Tensor]:
    """The gradients of the global model, by global name."""
    return {name: global_tensor(f"gradient {step}", shape, name) for name, shape in global_shapes(layout).items()}


def global_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    whole = Layout(query_groups=layout.query_groups)
    shards = shards_of_stage(whole, ParallelState.single())
    return {shard.name: shard.global_shape for shard, _ in shards.values()}


def assemble(named: Iterable[NamedTensor], group: CommGroup) -> dict[str, Tensor]:
    """Global tensors from the owned parts of all ranks of a group, of which each element must have one."""
    parts = [
        (each.shard.name, each.shard.global_shape, part.placed.index, part.values.clone())
        for each in named
        for part in held_parts(each)
        if part.owned
    ]
    whole: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for rank_parts in collectives.all_gather_object(parts, group):
        for name, shape, index, values in rank_parts:
            whole.setdefault(name, torch.zeros(shape, dtype=values.dtype))
            count.setdefault(name, torch.zeros(shape))
            whole[name][index] = values
            count[name][index] += 1
    assert all(bool((number == 1).all()) for number in count.values()), "an element is owned never or twice"
    return whole
