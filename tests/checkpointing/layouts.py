"""Small models, split over simulated ranks in any way that shards can describe."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing.save import Save, writers_of
from megatron.checkpointing.shares import share_of
from megatron.core.comm_group import CommGroup
from megatron.core.shard import Init, NamedTensor, Piece, Shard, whole_pieces

ALONE = CommGroup.single("world")
POISON = 0xA5


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A global tensor: its key in the checkpoint, dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def random_bits(spec: Spec, seed: int) -> Tensor:
    """A tensor of any bits, so of every kind of NaN and denormal number too."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(spec.shape).numel())
    if spec.dtype == torch.bool:
        return torch.randint(0, 2, spec.shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * spec.dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(spec.dtype).reshape(spec.shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def poison_like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What no load may leave in a piece, nor touch outside of one."""
    if dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    count = int(torch.Size(shape).numel())
    return torch.full((count * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class Held:
    """One rank's shard of one global tensor; and the shape of the local tensor."""

    shard: Shard
    local_shape: tuple[int, ...]


Layout = list[dict[str, Held]]  # one entry a rank


def random_layout(specs: list[Spec], rng: random.Random) -> Layout:
    """A split of each tensor over 1 to 8 ranks: whole on some, or cut in runs of any length.

    A run may be held by several ranks (replicated keys and values), a rank may hold several runs of a tensor
    in any local order (SwiGLU, QKV) with padding between them, or none, or lack the tensor (another stage).
    """
    layout: Layout = [{} for _ in range(rng.randint(1, 8))]
    for spec in specs:
        if not spec.shape or rng.random() < 0.25:
            _hold_whole(layout, spec, rng)
        else:
            _hold_runs(layout, spec, rng)
    return layout


def _shard(spec: Spec, dim: int | None, pieces: tuple[Piece, ...], owned: bool = True) -> Shard:
    return Shard(
        name=spec.key,
        global_shape=spec.shape,
        dim=dim,
        pieces=pieces,
        group=ALONE,
        init=Init.zeros(),
        owned=owned,
    )


def _hold_whole(layout: Layout, spec: Spec, rng: random.Random) -> None:
    holders = rng.sample(range(len(layout)), rng.randint(1, len(layout)))
    tied = rng.random() < 0.5  # copies that are not owned say so in the shard (tied) or in the piece (replicated)
    for position, rank in enumerate(holders):
        length = spec.shape[0] if spec.shape else 1
        piece = Piece(local=0, start=0, length=length, holders=len(holders), owned=tied or position == 0)
        shard = _shard(spec, None, (piece,), owned=not tied or position == 0)
        layout[rank][spec.key] = Held(shard=shard, local_shape=spec.shape)


def _hold_runs(layout: Layout, spec: Spec, rng: random.Random) -> None:
    dim = rng.randrange(len(spec.shape))
    extent = spec.shape[dim]
    cuts = sorted({0, extent, *(rng.randint(0, extent) for _ in range(rng.randint(0, 6)))})
    runs: list[list[tuple[int, int, int, bool]]] = [[] for _ in layout]
    for start, stop in pairwise(cuts):
        holders = rng.sample(range(len(layout)), rng.randint(1, min(3, len(layout))))
        for rank in holders:
            runs[rank].append((start, stop - start, len(holders), rank == holders[0]))
    absent = rng.random() < 0.5
    for rank, held in enumerate(runs):
        if not held and absent and any(runs):
            continue
        rng.shuffle(held)
        pieces, local = [], rng.randint(0, 1)
        for start, length, holders, owned in held:
            pieces.append(Piece(local=local, start=start, length=length, holders=holders, owned=owned))
            local += length + rng.randint(0, 1)
        local_shape = (*spec.shape[:dim], local, *spec.shape[dim + 1 :])
        layout[rank][spec.key] = Held(shard=_shard(spec, dim, tuple(pieces)), local_shape=local_shape)


def local_tensors(layout: Layout, values: dict[str, Tensor], rank: int) -> list[NamedTensor]:
    """A rank's tensors: the global values in the pieces, poison elsewhere."""
    named = poisoned(layout, values, rank)
    for tensor in named:
        fill(tensor.tensor, tensor.shard, values[tensor.key])
    return named


def poisoned(layout: Layout, values: dict[str, Tensor], rank: int) -> list[NamedTensor]:
    """A rank's tensors before a load."""
    return [
        NamedTensor(key=key, tensor=poison_like(held.local_shape, values[key].dtype), shard=held.shard)
        for key, held in layout[rank].items()
    ]


def fill(local: Tensor, shard: Shard, value: Tensor) -> None:
    """What a load must do, written the plain way."""
    if shard.dim is None:
        local.copy_(value)
        return
    for piece in shard.pieces:
        part = value.narrow(shard.dim, piece.start, piece.length)
        local.narrow(shard.dim, piece.local, piece.length).copy_(part)


def save_simulated(root: Path, iteration: int, ranks: list[list[NamedTensor]], metadata: dict[str, object]) -> None:
    """Save as if each list belonged to a rank of its own; all end a phase before any begins the next."""
    saves = [
        Save(root=root, iteration=iteration, rank=rank).prepare(share_of(tensors, ALONE), metadata)
        for rank, tensors in enumerate(ranks)
    ]
    for save in saves:
        save.write()
    for save in saves:
        save.publish(writers_of([save.plan for save in saves]))


def whole(key: str, tensor: Tensor) -> NamedTensor:
    """A tensor that one process holds whole."""
    shard = Shard(
        name=key,
        global_shape=tuple(tensor.shape),
        dim=None,
        pieces=whole_pieces(tensor.shape[0] if tensor.dim() else 1, ALONE),
        group=ALONE,
        init=Init.zeros(),
    )
    return NamedTensor(key=key, tensor=tensor, shard=shard)
