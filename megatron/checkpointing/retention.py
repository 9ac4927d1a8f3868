"""Which checkpoints are kept, and how an old one goes: whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing import storage
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.index import SHARD_FILE, check_version, parse_json
from megatron.checkpointing.load import list_checkpoints
from megatron.core.whole_file import sync_folder

_FILES_OF_A_CHECKPOINT = {storage.INDEX_FILE, storage.METADATA_FILE, storage.COMPLETE_FILE}


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What to keep besides the newest checkpoint; all of them where nothing is said.

    Attributes:
        keep_last: how many of the newest ones.
        retain_interval: those whose iteration is a multiple of it.
    """

    keep_last: int | None = None
    retain_interval: int | None = None

    def obsolete(self, present: Iterable[int], newest: int) -> list[int]:
        """Of the iterations that have a checkpoint those not to be kept, in order; none from `newest` on is."""
        if self.keep_last is None and self.retain_interval is None:
            return []
        earlier = sorted(iteration for iteration in set(present) if iteration < newest)
        others = (self.keep_last or 1) - 1
        candidates = earlier[: len(earlier) - others] if others < len(earlier) else []
        return [it for it in candidates if self.retain_interval is None or it % self.retain_interval]

    def apply(self, root: Path, newest: int) -> Iterator[str]:
        """Delete what is obsolete now that the checkpoint of iteration `newest` is complete.

        Returns: for each that went a line, and for each that could not or may not go a line that says why.
        """
        try:
            obsolete = self.obsolete(list_checkpoints(root), newest)
        except OSError as error:
            yield f"warning: no old checkpoint in {root} is deleted: {error}"
            return
        for iteration in obsolete:
            folder = storage.iteration_folder(root, iteration)
            try:
                _check_own(folder, iteration)
                delete(root, iteration)
            except (CheckpointError, OSError) as error:
                yield f"warning: {folder} is not deleted: {error}"
            else:
                yield f"deleted checkpoint {folder}"


def delete(root: Path, iteration: int) -> None:
    """Delete a checkpoint. From the first instant it has no name that is loaded; the next save removes what is left."""
    folder, deleted = storage.iteration_folder(root, iteration), storage.deleted_folder(root, iteration)
    os.rename(folder, deleted)
    sync_folder(root)
    shutil.rmtree(deleted)


def _check_own(folder: Path, iteration: int) -> None:
    """Raise CheckpointError unless the folder is a complete checkpoint of this form and holds nothing else."""
    if folder.is_symlink():
        raise CheckpointError("it is a link")
    marker = parse_json(storage.read_file(folder / storage.COMPLETE_FILE), storage.COMPLETE_FILE)
    check_version(marker, storage.COMPLETE_FILE)
    if marker.get("iteration") != iteration:
        raise CheckpointError("it was saved under another name")
    foreign = [
        entry.name
        for entry in folder.iterdir()
        if entry.name not in _FILES_OF_A_CHECKPOINT and not SHARD_FILE.fullmatch(entry.name)
    ]
    if foreign:
        raise CheckpointError(f"it holds {sorted(foreign)[0]}, which is no part of a checkpoint")
