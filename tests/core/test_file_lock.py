"""One process holds a lock; it ends with the process, and leaves no file behind where it is let go."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.file_lock import NoLocksError, holder_of, try_lock

HOLDER = """
import sys, time
from pathlib import Path
from megatron.core.file_lock import try_lock

lock = try_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_by_one_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = try_lock(path)
    assert lock is not None
    assert try_lock(path) is None
    assert holder_of(path).startswith(f"process {os.getpid()} on ")
    lock.close()
    assert not path.exists()
    again = try_lock(path)
    assert again is not None
    lock.close()
    assert try_lock(path) is None, "a second close let go of the lock of another"
    again.close()


def test_a_lock_ends_with_its_block_however_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = try_lock(path)
    assert lock is not None
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    assert not path.exists()


def test_a_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert try_lock(path) is None
    assert f"process {holder.pid} on " in holder_of(path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    lock = try_lock(path)
    assert lock is not None
    assert f"process {os.getpid()} on " in holder_of(path)
    lock.close()


def test_a_lock_of_a_file_that_its_holder_has_just_removed_is_that_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening and the locking of the file its holder lets go and a third process takes the name anew."""
    path = tmp_path / "lock"
    first = try_lock(path)
    assert first is not None
    opened, third = os.open, []

    def open_then_lose(*arguments: object, **keywords: object) -> int:
        monkeypatch.setattr(os, "open", opened)
        descriptor = opened(*arguments, **keywords)  # type: ignore[arg-type]
        first.close()
        third.append(try_lock(path))
        return descriptor

    monkeypatch.setattr(os, "open", open_then_lose)
    assert try_lock(path) is None
    assert third[0] is not None
    third[0].close()


@pytest.mark.parametrize(
    "call, error, raised",
    [
        ("fcntl.flock", errno.ENOSYS, NoLocksError),
        ("fcntl.flock", errno.ENOLCK, NoLocksError),
        ("fcntl.flock", errno.EIO, OSError),
        ("os.fsync", errno.ENOSPC, OSError),
    ],
)
def test_a_lock_that_fails_is_held_by_nobody(
    call: str, error: int, raised: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(error, "no")

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(OSError, match="no") as caught:
            try_lock(tmp_path / "lock")
    assert caught.type is raised
    lock = try_lock(tmp_path / "lock")
    assert lock is not None
    lock.close()
