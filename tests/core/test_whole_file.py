"""Files that are whole or not there, and what becomes of those that a killed process was writing."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import socket
import time
from pathlib import Path

import pytest

from megatron.core.file_lock import NoLocksError
from megatron.core.whole_file import WholeFile, has_writer, make_folder, whole_file

FORK_SERVER = multiprocessing.get_context("forkserver")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with whole_file(tmp_path / "x") as file:
        file.write(b"new")
        file.flush()
        assert (tmp_path / "x").read_text() == "old"
        assert Path(file.name).read_text() == "new"
    assert (tmp_path / "x").read_text() == "new"
    assert names(tmp_path) == ["x"]


def test_a_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with whole_file(tmp_path / "x") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert names(tmp_path) == []


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised, whole_file(tmp_path / "x") as file:
            file.write(bytes(3 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == pickle.loads(pickle.dumps(raised.value)).filename == str(tmp_path / "x")
    assert names(tmp_path) == []


def write_for_ever(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"half")
        file.flush()
        time.sleep(60)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a killed process has left of a file `x`."""
    process = FORK_SERVER.Process(target=write_for_ever, args=(tmp_path / "x",))
    process.start()
    deadline = time.monotonic() + 30
    while not any(file.stat().st_size for file in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (leftover,) = tmp_path.iterdir()
    return leftover


def test_what_a_killed_writer_left_is_removed_by_the_next_of_that_name(tmp_path: Path, killed: Path) -> None:
    with whole_file(tmp_path / "other"), whole_file(tmp_path / "x.y"):
        pass
    assert killed.exists()
    with whole_file(tmp_path / "x"):
        assert not killed.exists()
    assert names(tmp_path) == ["other", "x", "x.y"]


def test_what_another_host_left_stays(tmp_path: Path, killed: Path) -> None:
    foreign = killed.rename(killed.with_name(killed.name.replace(socket.gethostname(), "another")))
    with whole_file(tmp_path / "x"):
        pass
    assert foreign.exists()


def test_two_writers_of_one_name_leave_each_other_alone(tmp_path: Path) -> None:
    first, second = WholeFile(tmp_path / "x"), WholeFile(tmp_path / "x")
    first.file.write(b"first")
    second.file.write(b"second")
    first.publish()
    second.publish()
    assert (tmp_path / "x").read_text() == "second"
    assert names(tmp_path) == ["x"]


def test_a_file_system_without_locks_keeps_what_was_left(
    tmp_path: Path, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", without_locks)
    with whole_file(tmp_path / "x") as file:
        file.write(b"new")
    assert names(tmp_path) == sorted(["x", killed.name])


def test_a_file_has_a_writer_until_it_has_its_name_or_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    assert not has_writer(path)
    for end in (WholeFile.publish, WholeFile.discard):
        whole = WholeFile(path)
        assert has_writer(path)
        end(whole)
        assert not has_writer(path)
    whole = WholeFile(path)
    whole.file.close()  # as the kernel does for a process that dies
    assert list(tmp_path.glob("index.*.tmp"))
    assert not has_writer(path)

    def no_locks(descriptor: int) -> bool:
        raise NoLocksError(38, "Function not implemented")

    monkeypatch.setattr("megatron.core.whole_file.try_flock", no_locks)
    assert has_writer(path)  # for all that is known


def test_the_folders_above_a_new_one_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("megatron.core.whole_file.sync_folder", synced.append)
    make_folder(tmp_path / "runs" / "first")
    assert sorted(synced) == [tmp_path, tmp_path / "runs"]
    make_folder(tmp_path / "runs" / "first")
    assert len(synced) == 2
