"""Files that are whole or not there: written under a temporary name, synced, and renamed.

Note [Whose temporary file is it]
A process that is killed leaves its temporary file behind, and that of a corpus may have terabytes. So each holds a
lock (`flock`) on its own, which the kernel gives back with the process: a file that can be locked has no writer.
Process numbers would not tell, as they are used again, and mean another process in each container. Where a file system
has no such locks nothing is ever removed; where its locks end at the machine, the name of the host in that of the file
keeps machines apart.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megatron.core.file_lock import NoLocksError, try_flock

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class WholeFile:
    """A file that gets its name when it is published, over one of that name.

    What a killed writer of the same name has left on this host is removed first.

    Attributes:
        file: to be written; `file.name` is the path until then.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError: the folder cannot be written."""
        self._path = path
        remove_leftovers(path)
        self.file = _locked_file(path)

    def sync(self) -> None:
        """Have all that was written on disk."""
        self.file.flush()
        with naming(self._path):
            os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Give the file its name, on disk too."""
        self.sync()
        Path(self.file.name).replace(self._path)
        self.file.close()
        sync_folder(self._path.parent)

    def discard(self) -> None:
        """Remove the file, unless it has its name."""
        if not self.file.closed:
            Path(self.file.name).unlink(missing_ok=True)
            self.file.close()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error say which file it is about: that of a write to a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


class _Output(io.FileIO):
    """A new file under a temporary name; errors name the one that it will have."""

    def __init__(self, temporary: Path, path: Path) -> None:
        super().__init__(str(temporary), "xb")
        self._path = path

    def write(self, data: ReadableBuffer, /) -> int:
        with naming(self._path):
            return super().write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends well, and vanishes when it does not."""
    whole = WholeFile(path)
    try:
        yield whole.file
        whole.publish()
    finally:
        whole.discard()


def make_folder(path: Path) -> None:
    """Create a folder where there is none, and those above it, all of them there after a crash."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of this name and host that no process writes."""
    for leftover in glob.iglob(f"{glob.escape(str(path))}.{glob.escape(socket.gethostname())}.*.tmp"):
        with suppress(OSError):  # another process was faster, or there are no locks here
            with open(leftover, "r+b") as file:  # NFS locks only what may be written
                if try_flock(file.fileno()):
                    os.unlink(leftover)


def has_writer(path: Path) -> bool:
    """Whether a process, on any host, has a temporary file of this name; where there are no locks: may have one."""
    for temporary in glob.iglob(f"{glob.escape(str(path))}.*.tmp"):
        try:
            with open(temporary, "r+b") as file:
                if not try_flock(file.fileno()):
                    return True
        except NoLocksError:
            return True
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # it has its name by now, or was discarded
                raise
    return False


def _locked_file(path: Path) -> BinaryIO:
    while True:
        temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{uuid.uuid4().hex[:8]}.tmp")
        file = io.BufferedWriter(_Output(temporary, path), 1 << 20)
        try:
            mine = try_flock(file.fileno()) and temporary.exists()
        except NoLocksError:
            mine = True
        if mine:
            return file
        file.close()  # it was taken for a leftover before it had its lock
