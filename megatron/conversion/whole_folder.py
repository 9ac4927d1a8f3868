"""Folders that a conversion makes: whole or not there; and the small files in them."""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.checkpointing import CheckpointError, storage
from megatron.checkpointing.index import parse_json
from megatron.conversion.portable import ConversionError
from megatron.core.file_lock import NoLocksError, holder_of, try_lock
from megatron.core.whole_file import make_folder, sync_folder

_DIGITS = 8  # at the end of a temporary name


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder under a temporary name, which gets its own when the block ends well, and vanishes when it does not.

    Files are to be on the disk when the block ends; the names of all folders are put there.

    Raises:
        ConversionError: there is something of this name, at the start or at the end; or another conversion writes it.
    """
    refuse_existing(folder)
    folder = folder.resolve()  # "." has no name, and what a link leads to is what can be replaced
    make_folder(folder.parent)
    with _held(folder):
        inside = folder.with_name(f"{_temporary(folder)}{uuid.uuid4().hex[:_DIGITS]}")
        inside.mkdir()
        try:
            yield inside
            for below, _, _ in os.walk(inside):
                sync_folder(Path(below))
            try:
                inside.rename(folder)  # over an empty folder too
            except OSError:
                refuse_existing(folder)
                raise
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(inside, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what conversions that were killed, on this host, have left beside the folder that they wrote.

    None has it now, as it is locked meanwhile. Where a file system has no locks nothing is removed.

    Returns: what was removed.

    Raises:
        ConversionError: another conversion writes the folder.
    """
    folder = folder.resolve()
    if not folder.parent.is_dir():
        return []
    with _held(folder) as alone:
        pattern = glob.escape(_temporary(folder)) + "[0-9a-f]" * _DIGITS
        leftovers = sorted(folder.parent.glob(pattern)) if alone else []
        for leftover in leftovers:
            shutil.rmtree(leftover)
    return leftovers


def _temporary(folder: Path) -> str:
    """How the name of a folder begins until it is whole: with the host, as locks may end at the machine (see
    Note [Whose temporary file is it] in `core/whole_file.py`)."""
    return f".tmp-{folder.name}-{socket.gethostname()}-"


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Keeps other conversions from writing a folder. Yields whether it can: a file system may have no locks."""
    path = folder.with_name(f".tmp-{folder.name}.lock")
    try:
        lock = try_lock(path)
    except NoLocksError:
        path.unlink(missing_ok=True)
        yield False
        return
    if lock is None:
        raise ConversionError(
            f"another conversion writes {folder}: {holder_of(path)}; wait for its end, or give another folder"
        )
    with lock:
        yield True


def refuse_existing(folder: Path) -> None:
    """Nothing that exists is written over, beside or below.

    Raises:
        ConversionError: the folder is not empty, or no folder, or cannot be one.
    """
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ConversionError(f"{folder} exists and is not empty: give a new folder, or move that one away")
        return
    for path in (folder, *folder.parents):
        if path.is_dir():
            return
        if path.is_symlink() and not path.exists():
            what = f"{path} is a link to {path.readlink()}, which is not there"
        elif path.exists():
            what = f"{path} is no folder"
        else:
            continue
        raise ConversionError(f"{folder} cannot be written: {what}; give a new folder, or move that away")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file.

    Raises:
        ConversionError: it is not there, not JSON, or no object.
    """
    try:
        return parse_json(storage.read_file(path), str(path))
    except CheckpointError as error:
        raise ConversionError(str(error)) from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    storage.write_file(path, (json.dumps(values, indent=2) + "\n").encode())


def copy_file(source: Path, target: Path) -> None:
    storage.write_file(target, source.read_bytes())
