"""Writing a checkpoint: every rank its share, the first the rest, and a name when all of it is on disk."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic

from megatron.checkpointing import storage
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.index import VERSION, Index, StoredSlice, StoredTensor, merge, parse_index
from megatron.checkpointing.shares import Share, SomeSlice, lazy_share, share_of
from megatron.core.agreement import agree
from megatron.core.comm_group import CommGroup
from megatron.core.shard import NamedTensor
from megatron.core.whole_file import WholeFile, make_folder, sync_folder

_UNSHARED = CommGroup.single("replicas")


def save_checkpoint(
    root: str | os.PathLike[str],
    iteration: int,
    tensors: Iterable[NamedTensor],
    metadata: Mapping[str, Any],
    *,
    world: CommGroup,
    replicas: CommGroup = _UNSHARED,
) -> Path:
    """Save a checkpoint; a collective over `world`, on a file system that all its ranks share.

    It is written to a temporary folder, synced and renamed, and only then does the tracker name it: a process
    killed at any instant leaves the previous checkpoint loadable, and what it left behind is removed by the
    next save. A failure on any rank is raised on all of them, and leaves the previous checkpoint as it was.

    Args:
        root: the `--save` folder; created if it is missing.
        iteration: number of iterations done. A checkpoint of the same iteration is replaced.
        tensors: this rank's model and optimizer tensors. Owned pieces are written; padding is in no piece.
        metadata: JSON values (tuples become lists), the same on all ranks; that of the first rank is written.
        replicas: the ranks that have the same tensors, in the same order, and share out the writing of them. The slices
            of a distributed optimizer are written by those that have them.

    Returns: the folder of the checkpoint.

    Raises:
        CheckpointError: on all ranks, naming those that failed and why.
    """
    save = Save(root=Path(root), iteration=iteration, rank=world.rank)
    try:
        prepared, writers = save.prepare_on_all(tensors, metadata, world=world, replicas=replicas)
        agree(world, save.phase, prepared.write, raises=CheckpointError)
        agree(world, save.phase, lambda: prepared.publish(writers), raises=CheckpointError)
    except Exception:
        save.discard()
        raise
    return storage.iteration_folder(Path(root), iteration)


def save_converted(
    root: str | os.PathLike[str], iteration: int, tensors: Sequence[storage.LazySlice], metadata: Mapping[str, Any]
) -> Path:
    """Save whole tensors from one process, each read when its turn comes; otherwise as `save_checkpoint`."""
    save = Save(root=Path(root), iteration=iteration, rank=0)
    try:
        prepared = save.prepare(lazy_share(tensors), metadata)
        save.check_room([prepared.plan])
        prepared.write()
        prepared.publish(writers_of([prepared.plan]))
    except Exception:
        save.discard()
        raise
    return storage.iteration_folder(Path(root), iteration)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank is going to write, whether it writes at all, and (first rank) for how much there is room."""

    planned_bytes: int
    writes: bool
    free_bytes: int


def writers_of(plans: Sequence[Plan]) -> list[int]:
    """The ranks that write something."""
    return [rank for rank, plan in enumerate(plans) if plan.writes]


@dataclass(frozen=True, kw_only=True)
class Save:
    """One rank's part of one save. All ranks must have ended a phase before any begins the next."""

    root: Path
    iteration: int
    rank: int

    @property
    def folder(self) -> Path:
        return storage.temporary_folder(self.root, self.iteration)

    @property
    def phase(self) -> str:
        """What is done, in words for errors."""
        return f"saving iteration {self.iteration} to {self.root}"

    def prepare_on_all(
        self, tensors: Iterable[NamedTensor], metadata: Mapping[str, Any], *, world: CommGroup, replicas: CommGroup
    ) -> tuple[PreparedSave[storage.PendingSlice], list[int]]:
        """Prepare, and see that there is room for all; a collective. Returns: also the ranks that write something."""
        prepared: list[PreparedSave[storage.PendingSlice]] = []

        def prepare() -> Plan:
            prepared.append(self.prepare(share_of(tensors, replicas), metadata))
            return prepared[0].plan

        plans = agree(world, self.phase, prepare, raises=CheckpointError)
        self.check_room(plans)
        return prepared[0], writers_of(plans)

    def prepare(self, share: Share[SomeSlice], metadata: Mapping[str, Any]) -> PreparedSave[SomeSlice]:
        """Make ready to write a share; the first rank also checks the metadata and makes the temporary folder."""
        metadata_text, free_bytes = b"", 0
        if self.rank == 0:
            check_json(metadata, "metadata")
            metadata_text = json.dumps(metadata, indent=1).encode()
            make_folder(self.root)
            storage.clear_leftovers(self.root)
            storage.check_replaceable(self.root, self.iteration)
            self.folder.mkdir()
            file_system = os.statvfs(self.root)
            free_bytes = file_system.f_bavail * file_system.f_frsize
        plan = Plan(planned_bytes=share.size, writes=bool(share.tensors), free_bytes=free_bytes)
        return PreparedSave(
            root=self.root,
            iteration=self.iteration,
            rank=self.rank,
            share=share,
            metadata_text=metadata_text,
            plan=plan,
        )

    def check_room(self, plans: Sequence[Plan]) -> None:
        """Refuse to begin what there is no room for."""
        needed, free = sum(plan.planned_bytes for plan in plans), plans[0].free_bytes
        if free < needed:
            raise CheckpointError(f"{self.phase}: {needed:,} bytes are needed, {free:,} are free")

    def discard(self) -> None:
        """Give the disk space of a failed save back; the next save removes what cannot be removed now."""
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class PreparedSave(Save, Generic[SomeSlice]):
    """A save that can begin.

    Attributes:
        metadata_text: what is written of the metadata, on the first rank.
    """

    share: Share[SomeSlice]
    metadata_text: bytes
    plan: Plan

    def write(self) -> None:
        """Write this rank's shard and, when that is on disk, the index of it."""
        if self.share.tensors:
            index_file = self.open_index_file()
            try:
                self.write_shard(index_file.file)
                index_file.publish()
            finally:
                index_file.discard()

    def open_index_file(self) -> WholeFile:
        """The file for the index of this rank's share. It has its name only when the share is on disk."""
        try:
            return WholeFile(self.folder / storage.index_file(self.rank))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.folder}, made by rank 0, is not here: --save must be a file system that all nodes share"
            ) from error

    def write_shard(self, index_file: BinaryIO) -> None:
        """Write this rank's shard, and to an open file the index of it."""
        files: dict[str, int] = {}
        checksums: dict[str, tuple[int, ...]] = {}
        file = storage.shard_file(self.rank)
        if self.share.pending:
            files[file], checksums = storage.write_shard(self.folder / file, self.share.pending, storage.BLOCK_BYTES)
        slices: dict[str, list[StoredSlice]] = {key: [] for key in self.share.tensors}
        for part in storage.in_file_order(self.share.pending):
            stored = StoredSlice(file=file, name=part.name, box=part.box, checksums=checksums[part.name])
            slices[part.key].append(stored)
        tensors = {
            key: StoredTensor(dtype=tensor.dtype, shape=tensor.shape, slices=tuple(slices[key]))
            for key, tensor in self.share.tensors.items()
        }
        index = Index(iteration=self.iteration, block_bytes=storage.BLOCK_BYTES, files=files, tensors=tensors)
        index_file.write(index.to_json().encode())

    def publish(self, writers: Sequence[int]) -> None:
        """On the first rank: merge the indices of the ranks that wrote, mark the checkpoint complete, name it."""
        if self.rank != 0:
            return
        indices = []
        names = [storage.index_file(rank) for rank in writers]
        for name in names:
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
        for name in names:
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
