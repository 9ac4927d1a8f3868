"""Writing a checkpoint: every rank its slices, the first the rest, and a name when all of it is on disk."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpointing import storage
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.index import (
    DTYPE_NAMES,
    VERSION,
    Index,
    StoredSlice,
    StoredTensor,
    merge,
    parse_index,
)
from megatron.checkpointing.slices import held_parts
from megatron.core.agreement import agree
from megatron.core.comm_group import CommGroup
from megatron.core.shard import NamedTensor
from megatron.core.whole_file import sync_folder


def save_checkpoint(
    root: str | os.PathLike[str],
    iteration: int,
    tensors: Iterable[NamedTensor],
    metadata: Mapping[str, Any],
    *,
    world: CommGroup,
    writes: bool,
) -> Path:
    """Save a checkpoint; a collective over `world`, a file system that all its ranks share.

    It is written to a temporary folder, synced and renamed, and only then does the tracker name it: a process
    killed at any instant leaves the previous checkpoint loadable, and what it left behind is removed by the
    next save. A failure on any rank is raised on all of them, and leaves the previous checkpoint as it was.

    Args:
        root: the `--save` folder; created if it is missing.
        iteration: number of iterations done. A checkpoint of the same iteration is replaced.
        tensors: this rank's model and optimizer tensors. Owned pieces are written; padding is in no piece.
        metadata: JSON values (tuples become lists), the same on all ranks; that of the first rank is written.
        writes: whether this rank writes tensors that all data-parallel ranks hold: True on one of them. The slices of a
            distributed optimizer are written by those that have them.

    Returns: the folder of the checkpoint.

    Raises:
        CheckpointError: on all ranks, naming those that failed and why.
    """
    save = Save(root=Path(root), iteration=iteration, rank=world.rank, metadata=metadata)
    phase = f"saving iteration {iteration} to {root}"
    mine = [named for named in tensors if writes or named.elements is not None]
    try:
        plans = agree(world, phase, lambda: save.prepare(mine), raises=CheckpointError)
        if plans[0].free_bytes < sum(plan.planned_bytes for plan in plans):
            raise CheckpointError(
                f"{phase}: {sum(plan.planned_bytes for plan in plans):,} bytes are needed, "
                f"{plans[0].free_bytes:,} are free"
            )
        shares = agree(world, phase, save.write, raises=CheckpointError)
        written = [name for name in shares if name is not None]
        agree(world, phase, lambda: save.publish(written), raises=CheckpointError)
    except Exception:
        save.discard()
        raise
    return storage.iteration_folder(Path(root), iteration)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank is going to write, and (first rank) for how much there is room."""

    planned_bytes: int
    free_bytes: int


@dataclass(kw_only=True)
class Save:
    """One rank's part of one save. All ranks must have ended a phase before any begins the next."""

    root: Path
    iteration: int
    rank: int
    metadata: Mapping[str, Any]
    pending: list[storage.PendingSlice] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    metadata_text: bytes = b""

    @property
    def folder(self) -> Path:
        return storage.temporary_folder(self.root, self.iteration)

    def prepare(self, tensors: Iterable[NamedTensor]) -> Plan:
        """Decide what this rank writes; the first also checks the metadata and makes the temporary folder."""
        for named in tensors:
            self._add(named)
        free_bytes = 0
        if self.rank == 0:
            check_json(self.metadata, "metadata")
            self.metadata_text = json.dumps(self.metadata, indent=1).encode()
            self.root.mkdir(parents=True, exist_ok=True)
            storage.clear_leftovers(self.root)
            storage.check_replaceable(self.root, self.iteration)
            self.folder.mkdir()
            file_system = os.statvfs(self.root)
            free_bytes = file_system.f_bavail * file_system.f_frsize
        return Plan(planned_bytes=sum(part.size for part in self.pending), free_bytes=free_bytes)

    def _add(self, named: NamedTensor) -> None:
        key, tensor, shard = named.key, named.tensor, named.shard
        if tensor.dtype not in DTYPE_NAMES:
            kinds = ", ".join(map(str, DTYPE_NAMES))
            raise CheckpointError(f"{key}: cannot save {tensor.dtype}; one of {kinds} can be")
        if not shard.owned:
            return
        if key in self.tensors:
            raise CheckpointError(f"{key}: two tensors of this rank have this key")
        self.tensors[key] = StoredTensor(dtype=tensor.dtype, shape=shard.global_shape, slices=())
        for part in held_parts(named):
            if part.owned:
                self.pending.append(storage.PendingSlice(key=key, tensor=part.values, box=part.placed))

    def write(self) -> str | None:
        """Write this rank's shard and its index. Returns: the name of the index, None without tensors."""
        if not self.tensors:
            return None
        files = {}
        file = storage.shard_file(self.rank)
        if self.pending:
            try:
                size, checksums = storage.write_shard(self.folder / file, self.pending, storage.BLOCK_BYTES)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{self.folder}, made by rank 0, is not here: --save must be a file system that all nodes share"
                ) from error
            files[file] = size
        slices: dict[str, list[StoredSlice]] = {key: [] for key in self.tensors}
        for part in self.pending:
            stored = StoredSlice(file=file, name=part.name, box=part.box, checksums=checksums[part.name])
            slices[part.key].append(stored)
        tensors = {
            key: StoredTensor(dtype=tensor.dtype, shape=tensor.shape, slices=tuple(slices[key]))
            for key, tensor in self.tensors.items()
        }
        share = Index(iteration=self.iteration, block_bytes=storage.BLOCK_BYTES, files=files, tensors=tensors)
        storage.write_file(self.folder / storage.share_file(self.rank), share.to_json().encode())
        return storage.share_file(self.rank)

    def publish(self, shares: list[str]) -> None:
        """On the first rank: merge the ranks' indices, mark the checkpoint complete, give it its name."""
        if self.rank != 0:
            return
        indices = []
        for name in shares:
            path = self.folder / name
            try:
                index = parse_index(storage.read_file(path), str(path))
                for file, size in index.files.items():
                    storage.check_size(self.folder / file, size)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the first rank does not see what another has written ({error}): "
                    "--save must be a file system that all nodes share"
                ) from error
            indices.append((name, index))
        if not indices:
            raise CheckpointError("no rank has any tensor to write")
        index_text = merge(indices).to_json().encode()
        for name in shares:
            (self.folder / name).unlink()
        texts = {storage.INDEX_FILE: index_text, storage.METADATA_FILE: self.metadata_text}
        for name, text in texts.items():
            storage.write_file(self.folder / name, text)
        marker = {
            "version": VERSION,
            "iteration": self.iteration,
            "files": {name: {"bytes": len(text), "crc32": zlib.crc32(text)} for name, text in texts.items()},
        }
        sync_folder(self.folder)
        storage.write_file(self.folder / storage.COMPLETE_FILE, json.dumps(marker, separators=(",", ":")).encode())
        storage.publish(self.root, self.iteration)

    def discard(self) -> None:
        """Give the disk space of a failed save back; the next save removes what cannot be removed now."""
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def check_json(value: object, path: str) -> None:
    """Refuse what JSON would change in silence (keys that are not strings) or cannot hold.

    Raises:
        CheckpointError: naming the place of the value.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path}: the key {key!r} is not a string")
            check_json(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            check_json(item, f"{path}[{position}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(f"{path}: {type(value).__name__} is no JSON value")
