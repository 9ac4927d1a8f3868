"""A lock on a file that the kernel gives up when its process ends, however it ends.

It is `flock`: there is no stale lock to tell from a live one, and no process id to trust across containers and hosts.
It reaches as far as the file system says: over all nodes on NFS and on Lustre mounted with `flock`, over the processes
of one node on a file system whose locks are local.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class NoLocksError(OSError):
    """The file system has no locks."""


class FileLock:
    """A lock that this process holds, until it is closed or left as a context. Made by `try_lock`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file, then let go of it; once more does nothing."""
        if self._descriptor >= 0:
            with suppress(FileNotFoundError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1


def try_lock(path: Path) -> FileLock | None:
    """The lock, with words in its file that name this process; None while another process holds it.

    Raises:
        NoLocksError: the file system has none.
        OSError: the file cannot be written.
    """
    while True:
        with ExitStack() as on_failure:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            on_failure.callback(os.close, descriptor)
            if not try_flock(descriptor):
                return None
            if not _is_at(descriptor, path):  # its holder has removed it since it was opened: try the one of now
                continue
            on_failure.callback(path.unlink, missing_ok=True)
            _sign(descriptor)
            on_failure.pop_all()
            return FileLock(path, descriptor)


def try_flock(descriptor: int) -> bool:
    """Lock the open file itself, until it is closed; False when another holds it.

    Raises:
        NoLocksError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocksError(*error.args) from error
        raise
    return True


def _sign(descriptor: int) -> None:
    """Write who holds the lock, for those on other nodes too."""
    words = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
    os.ftruncate(descriptor, 0)
    os.write(descriptor, words.encode())
    os.fsync(descriptor)


def holder_of(path: Path) -> str:
    """Who holds the lock, in words."""
    try:
        return path.read_text() or "a process that is just starting"
    except OSError:
        return "a process that is just ending"


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
