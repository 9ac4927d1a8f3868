"""Checkpoints that belong to the model, not to the layout that wrote it.

One form on disk: safetensors files that hold slices of global tensors, and JSON that says which slice lies
where. No pickle is read or written. `torch.distributed.checkpoint` is not used: its `.metadata` file is a
pickle, so reading one can run code, and it has neither checksums nor a form that is whole or absent after a
kill. What would be taken from it, overlapping boxes, is a page of arithmetic (`slices.py`, `resharding.py`),
and needs no DTensor.

    <save>/latest_checkpointed_iteration.txt  names the newest checkpoint, moved last
    <save>/iter_0000100/
        shard_00000.safetensors           the slices that rank 0 owns, named "<key>@<offset>"
        index.json                        global tensors: dtype, shape, slices, checksums; sizes of the files
        metadata.json                     what the caller saved: configuration, iteration, schedule, ...
        COMPLETE                          checksums of these two, written last
    <save>/.tmp-iter_0000100/                 a save that has not ended
    <save>/.replaced-iter_0000100/            what a second save of the iteration replaces, for an instant
    <save>/.deleted-iter_0000050/             an old one that is being deleted
"""

from megatron.checkpointing.async_save import AsyncSaver, NotWritten, Written
from megatron.checkpointing.errors import CheckpointBelowError, CheckpointError, NoCheckpointError
from megatron.checkpointing.load import (
    Checkpoint,
    LoadSummary,
    list_checkpoints,
    load_checkpoint,
    read_tracker,
)
from megatron.checkpointing.model_tensors import is_weight, model_tensors, weight_key
from megatron.checkpointing.retention import Retention
from megatron.checkpointing.save import save_checkpoint, save_converted
from megatron.checkpointing.storage import LazySlice

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointBelowError",
    "CheckpointError",
    "LazySlice",
    "LoadSummary",
    "NoCheckpointError",
    "NotWritten",
    "Retention",
    "Written",
    "is_weight",
    "list_checkpoints",
    "load_checkpoint",
    "model_tensors",
    "read_tracker",
    "save_checkpoint",
    "save_converted",
    "weight_key",
]
