"""Built indices on disk, shared by all processes that see the same file system.

An entry is a set of `.npy` files and a manifest with their sizes, checksums and times, each written under a
temporary name, synced and renamed, the manifest last: an entry is complete or it is not there, and one that
was damaged later is built anew. Entries are named by all that they depend on, so two processes that write the
same one write the same arrays.

Note [What is read at a start]
All ranks map all indices, which may have gigabytes, so nobody reads them whole to see that they are the ones that were
written: a file of the size and time that its manifest says is. Only one of another time, which was copied or changed,
has its checksum taken.

Note [Who builds an index]
The first process on a file system builds; the others on it poll for the manifest. There is no collective:
ranks on nodes with disks of their own each find no manifest and no lock, and build their own. The lock is
only there to save work, as publishing is atomic and repeatable, so a file system whose locks end at the node,
or that has none, costs time and nothing else. It ends with the process that holds it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError
from megatron.core.file_lock import NoLocksError, holder_of, try_lock
from megatron.core.whole_file import WholeFile, whole_file
from megatron.data.index_builder import Allocate, in_memory

logger = logging.getLogger(__name__)

Arrays = Mapping[str, npt.NDArray[Any]]
Build = Callable[[Allocate], None]
"""Fills the arrays of an entry, which it asks for by their names."""

_POLL_SECONDS = (0.02, 0.5)  # the first and the longest pause: thousands of ranks may poll one file system
_REPORT_SECONDS = 5.0
_NO_DESCRIPTOR_LEFT = {errno.EMFILE, errno.ENFILE}


class _BuildError(Exception):
    """Carries an error of a build itself, such as a corpus that can not be read, past those of the cache's files."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


def user_cache_folder() -> Path:
    """Where indices go when the data's own folder is read-only."""
    return Path.home() / ".cache" / "megatron" / "indices"


class IndexCache:
    """Looks an index up, or builds and keeps it.

    Args:
        folder: `--data-cache-path`; it must be writable where the entry is not there yet. None: the first of
            `defaults` that can be written is used, and memory where none can.
        defaults: folders to try when no folder was asked for.
    """

    def __init__(self, folder: Path | None, *, defaults: Sequence[Path] = ()) -> None:
        self._required = folder is not None
        self._folders = [folder] if folder is not None else list(defaults)

    def get(self, kind: str, description: Mapping[str, object], build: Build) -> Arrays:
        """The arrays of the entry, mapped from disk where possible.

        Args:
            kind: a readable part of the file names, such as `GPTDataset-train`.
            description: all that the arrays depend on, as JSON values; its checksum names the entry.
            build: fills the arrays, which are those of the files; called in one process a file system.

        Raises:
            UserError: the folder that was asked for can not be written, an index that stays in memory is larger than
                it, or no more files may be open.
            OSError: of the build.
        """
        text = json.dumps({"kind": kind, **description}, indent=1, sort_keys=True)
        name = f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-{kind}"
        try:
            return self._get(name, text, build)
        except _BuildError as error:
            reason = error.reason
        except OSError as error:
            reason = error
        if reason.errno in _NO_DESCRIPTOR_LEFT:
            raise UserError(
                f"index {name}: {reason.strerror}; a dataset keeps about ten open, so a blend of many needs a higher "
                "limit: `ulimit -n` shows it, and raises it up to `ulimit -Hn`"
            ) from reason
        raise reason

    def _get(self, name: str, text: str, build: Build) -> Arrays:
        """Raises OSError: no more files may be open, or a build in memory has failed with it."""
        for folder in self._folders:
            found = _load(folder, name)
            if found is not None:
                return found
        for folder in self._folders:
            try:
                return _build_once(folder, name, text, build)
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR_LEFT:
                    raise
                if self._required:
                    raise UserError(
                        f"--data-cache-path {folder}: the index {name} is not there and can not be written "
                        f"({error}); give a folder that can be written and has room for it"
                    ) from error
                logger.warning("index cache %s can not be written (%s)", folder, error)
        logger.log(
            logging.WARNING if self._folders else logging.INFO,
            "index %s is kept in memory and built anew by each process and at each start; --data-cache-path names a "
            "folder for it",
            name,
            extra={"kept": False},
        )
        return _built_in_memory(name, build)


def _built_in_memory(entry: str, build: Build) -> Arrays:
    """Raises UserError: the arrays take more than the memory of this machine."""
    arrays: dict[str, npt.NDArray[Any]] = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        needed = sum(array.nbytes for array in arrays.values()) + _bytes_of(shape, dtype)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise UserError(
                f"index {entry} takes {needed / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f} GiB of "
                "memory; --data-cache-path names a folder for it, and --train-iters or --train-samples (for "
                "validation, --eval-iters) say how many samples there are"
            )
        arrays[name] = in_memory(name, shape, dtype)
        return arrays[name]

    build(allocate)
    return arrays


def _bytes_of(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _build_once(folder: Path, name: str, description: str, build: Build) -> Arrays:
    """Take the entry's lock and build it, or wait for the process that does.

    Raises:
        OSError: the folder can not be written.
        _BuildError: the build has failed with an error that is not of the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.lock"
    waiting = _Waiting(path)
    while True:
        try:
            lock = try_lock(path)
        except NoLocksError as error:
            logger.warning("%s has no file locks (%s): each process builds the index for itself", folder, error)
            return _found_or_built(folder, name, description, build)
        if lock is not None:
            with lock:
                return _found_or_built(folder, name, description, build)
        found = _load(folder, name)
        if found is not None:
            return found
        waiting.pause()


def _found_or_built(folder: Path, name: str, description: str, build: Build) -> Arrays:
    found = _load(folder, name)  # built between the look-up and the lock
    if found is None:
        started = time.monotonic()
        _store(folder, name, description, build)
        seconds = time.monotonic() - started
        found = _load(folder, name)
        size = sum(array.nbytes for array in found.values()) if found is not None else 0
        logger.info("built index %s, %.1f MB, in %.1f s", folder / name, size / 1e6, seconds, extra={"built": size})
    if found is None:
        raise OSError(f"{folder / name} can not be read back as it was written")
    return found


class _Waiting:
    """Pauses while another process builds, and says so now and then."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._reported = time.monotonic()
        self._pause = _POLL_SECONDS[0]

    def pause(self) -> None:
        now = time.monotonic()
        if now - self._reported > _REPORT_SECONDS:
            self._reported = now
            logger.info("waiting for an index that another process builds: %s, %s", self._lock, holder_of(self._lock))
        time.sleep(self._pause)
        self._pause = min(1.2 * self._pause, _POLL_SECONDS[1])


def _store(folder: Path, entry: str, description: str, build: Build) -> None:
    """Build the arrays in mapped files, so that one larger than the memory goes to the disk meanwhile."""
    files: dict[Path, WholeFile] = {}
    refused: OSError | None = None

    def allocate(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        nonlocal refused
        path = folder / f"{entry}-{name}.npy"
        try:
            files[path] = WholeFile(path)
            return _mapped(files[path], shape, np.dtype(dtype))
        except OSError as error:
            refused = error
            raise

    entries: dict[str, dict[str, int]] = {}
    try:
        try:
            build(allocate)
        except OSError as error:
            if error is refused:
                raise
            raise _BuildError(error) from error
        for path, file in files.items():
            file.publish()  # syncs what was written through the mapping, too
            status = path.stat()
            entries[path.name] = {
                "bytes": status.st_size,
                "modified_ns": status.st_mtime_ns,
                "crc32": _checksum(path),
            }
    finally:
        for file in files.values():
            file.discard()
    manifest = json.dumps({"files": entries, "description": json.loads(description)}, indent=1)
    with whole_file(folder / f"{entry}.json") as manifest_file:
        manifest_file.write(manifest.encode())


def _mapped(file: WholeFile, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array whose memory is an `.npy` file.

    Raises OSError where the disk has no room for it: written through a mapping, a full one would end the process.
    """
    needed, free = _bytes_of(shape, dtype), shutil.disk_usage(Path(file.file.name).parent).free
    if needed > free:  # said with numbers, and some are larger than a file can be
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: an array of {needed / 2**30:,.0f} GiB, and {free / 2**30:,.0f} GiB are free",
        )
    array: npt.NDArray[Any] = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        file.file.name, mode="w+", dtype=dtype, shape=shape
    )
    os.posix_fallocate(file.file.fileno(), 0, os.fstat(file.file.fileno()).st_size)
    return array


def _load(folder: Path, name: str) -> Arrays | None:
    """The entry, or None when it is not there, not complete or damaged.

    Raises:
        OSError: no more files may be open, which says nothing of the entry.
    """
    manifest = folder / f"{name}.json"
    try:
        entries: dict[str, dict[str, int]] = json.loads(manifest.read_text())["files"]
        if not isinstance(entries, dict) or not entries:
            raise ValueError(f"{manifest.name} names no files")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for file_name, expected in entries.items():
            path = folder / file_name
            status = path.stat()
            if status.st_size != expected["bytes"]:
                raise ValueError(f"{path.name} has {status.st_size} bytes, {expected['bytes']} were written")
            if status.st_mtime_ns != expected["modified_ns"] and _checksum(path) != expected["crc32"]:
                raise ValueError(f"{path.name} has another checksum than when it was written")
            key = file_name.removeprefix(f"{name}-").removesuffix(".npy")
            arrays[key] = np.load(path, mmap_mode="r", allow_pickle=False)
        return arrays
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR_LEFT:
            raise
        logger.warning("index %s is damaged and is not used (%s)", folder / name, error)
        return None


def _checksum(path: Path) -> int:
    """CRC-32 of the bytes of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
