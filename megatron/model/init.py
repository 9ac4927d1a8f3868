"""First values of the weights: a function of (seed, global name, global index), whatever the layout.

A global tensor is drawn in blocks of whole rows, each from a generator of its own that is seeded by (seed,
name, block). A rank draws the blocks that touch its pieces and keeps its part of them, so no rank ever holds
more than one block besides its own parameters, and two layouts agree bit for bit. Draws are float32 on the
CPU, then cast: the dtype and the device of the model do not change the draw. Vocabulary rows that we pad with
are zero and take nothing from the stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.shard import Piece, Shard, shard_of

BLOCK_ELEMENTS = 2**20  # 4 MiB of float32: large enough that seeding costs nothing, small beside any layer


def initialize_weights(module: nn.Module, seed: int) -> None:
    """Give every parameter of `module` its first value. Names must have been set by `name_parameters`."""
    for parameter in module.parameters():
        shard = shard_of(parameter)
        if shard.init.kind != "given":
            initialize_parameter(parameter, shard, seed)


@torch.no_grad()
def initialize_parameter(parameter: Tensor, shard: Shard, seed: int) -> None:
    """Fill the local part of one global tensor; local indices in no piece become zero."""
    assert shard.name, f"a parameter of shape {shard.global_shape} has no global name"
    parameter.zero_()
    for local, values in _local_values(shard, seed):
        parameter[local].copy_(values)


@dataclass(frozen=True)
class _Overlap:
    """A part of one block: its place in the local tensor and in the block."""

    local: tuple[slice, ...]
    block: tuple[slice, ...]


def _local_values(shard: Shard, seed: int) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """(place in the local tensor, its values) for each part of a block that is held here."""
    for first, last in _row_blocks(shard.global_shape):
        overlaps = [
            overlap for piece in shard.pieces if (overlap := _overlap(shard.split_dim, piece, first, last)) is not None
        ]
        if overlaps:
            block = _draw(shard, seed, first, last)
            for overlap in overlaps:
                yield overlap.local, block[overlap.block]


def _overlap(split_dim: int, piece: Piece, first: int, last: int) -> _Overlap | None:
    """What a piece holds of the rows from `first` up to `last`; None for nothing."""
    if split_dim == 1:
        local = slice(piece.local, piece.local + piece.length)
        columns = slice(piece.start, piece.start + piece.length)
        return _Overlap(local=(slice(first, last), local), block=(slice(None), columns))
    assert split_dim == 0, f"a tensor split along dimension {split_dim}"
    start, stop = max(first, piece.start), min(last, piece.start + piece.length)
    if start >= stop:
        return None
    offset = piece.local - piece.start
    return _Overlap(local=(slice(start + offset, stop + offset),), block=(slice(start - first, stop - first),))


def _row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first row, last row + 1) of each block of a global tensor."""
    rows = max(1, BLOCK_ELEMENTS // max(1, prod(shape[1:])))
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])


def _draw(shard: Shard, seed: int, first: int, last: int) -> Tensor:
    """Rows `first` to `last` of the global tensor, float32."""
    shape = (last - first, *shard.global_shape[1:])
    init = shard.init
    if init.kind == "constant":
        return torch.full(shape, init.value, dtype=torch.float32)
    # A key of 128 bits: the generator of torch takes 32 on a CPU, and large models have so many blocks that two of them
    # would be drawn alike.
    key = int.from_bytes(hashlib.sha256(f"{seed}:{shard.name}:{first}".encode()).digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)) * init.std


def output_std(std: float, num_layers: int) -> float:
    """Standard deviation of the two projections of a layer that write into the residual stream.

    There are 2 per layer, and their contributions add up: GPT-2 (2019), section 2.3.
    """
    return std / sqrt(2 * num_layers)
