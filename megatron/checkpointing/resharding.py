"""From slices as they were stored to parts as they are held now. Pure: reads the index, touches no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.checkpointing.index import StoredSlice, StoredTensor
from megatron.checkpointing.slices import Box


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The elements `box` of the global tensor are to be read from `source`."""

    source: StoredSlice
    box: Box


def transfers(stored: Iterable[StoredSlice], wanted: Box) -> list[Transfer]:
    """What must be read to fill `wanted`, each element once, as the stored slices do not overlap."""
    found = []
    for source in stored:
        overlap = source.box.intersect(wanted)
        if overlap is not None:
            found.append(Transfer(source=source, box=overlap))
    return found


def misfit(stored: Mapping[str, StoredTensor], key: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Why the global tensor of this key cannot be loaded; None when it can.

    Floating-point kinds are converted into each other, so that a run can go on in another precision; anything else
    must be of the same dtype.
    """
    tensor = stored.get(key)
    if tensor is None:
        return f"{key} {shape}: not in the checkpoint"
    if tensor.shape != shape:
        return f"{key}: {tensor.shape} in the checkpoint, {shape} in the model"
    if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        return f"{key}: {tensor.dtype} in the checkpoint, {dtype} in the model"
    return None
