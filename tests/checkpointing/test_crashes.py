"""A save that is killed, at any instant, or that finds the disk full, leaves the previous checkpoint."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.checkpointing import (
    AsyncSaver,
    CheckpointError,
    NoCheckpointError,
    list_checkpoints,
    load_checkpoint,
    read_tracker,
    save_checkpoint,
    storage,
)
from megatron.core.comm_group import CommGroup
from megatron.core.shard import NamedTensor
from tests.checkpointing.layouts import ALONE, whole
from tests.checkpointing.processes import call, start
from tests.checkpointing.test_distributed import load_rows, save_rows, world_group
from tests.helpers.distributed import RankFailure, run_distributed

# All calls by which a save changes the file system; mkdir, unlink and rmdir are made by pathlib and shutil.
CHANGES = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def tensors(value: float, elements: int = 40) -> list[NamedTensor]:
    return [whole(f"model.{i}", torch.full((elements,), value + i)) for i in range(3)]


def save(root: Path, iteration: int, value: float, elements: int = 40) -> None:
    save_checkpoint(root, iteration, tensors(value, elements), {"value": value}, world=ALONE)


def save_in_background(root: Path, iteration: int, value: float, elements: int = 40) -> None:
    saver = AsyncSaver(world=ALONE, replicas=CommGroup.single("replicas"))
    saver.start(root, iteration, tensors(value, elements), {"value": value})
    saver.finish()


SAVES = {"waited-for": save, "in-background": save_in_background}


def content(root: Path, step: int | None = None) -> tuple[int, float] | None:
    """Iteration and value of what loads, whole and of one save; None when there is nothing at all."""
    try:
        checkpoint = load_checkpoint(root, step=step, world=ALONE)
    except NoCheckpointError:
        return None
    elements = checkpoint.tensors["model.0"].shape[0]
    loaded = tensors(-1.0, elements)
    checkpoint.load_into(loaded, world=ALONE)
    value = checkpoint.metadata["value"]
    for actual, expected in zip(loaded, tensors(value, elements), strict=True):
        assert torch.equal(actual.tensor, expected.tensor)
    return checkpoint.iteration, value


@contextmanager
def every_change(act: Callable[[str, Callable[..., Any], tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `act(name, real function, arguments)` before each call that changes the file system."""

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call_it(*arguments: Any, **keywords: Any) -> Any:
            act(name, real, arguments)
            return real(*arguments, **keywords)

        return call_it

    with ExitStack() as stack:
        for name in CHANGES:
            stack.enter_context(patch.object(os, name, wrapped(name)))
        yield


def _die_at(step: int, how: str, root: Path, iteration: int, value: float) -> None:
    """Save, and die before change number `step` of the file system, half-way if it is a write."""
    count = 0

    def act(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if count == step:
            if name == "write":
                descriptor, data = arguments
                real(descriptor, data[: len(data) // 2])
            os._exit(9)
        count += 1

    with every_change(act):
        SAVES[how](root, iteration, value)
    os._exit(0)


def _saves_that_die_at_each_step(root: Path, how: str, before: list[tuple[int, float]], new: tuple[int, float]) -> int:
    """For each step: die there, see what loads, save again. Returns: the number of steps."""
    prepared = root / "prepared"
    prepared.mkdir()
    for iteration, value in before:
        save(prepared, iteration, value)
    old = content(prepared)
    for step in range(10_000):
        folder = Path(shutil.copytree(prepared, root / str(step)))
        process = os.fork()
        if process == 0:
            _die_at(step, how, folder, *new)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert code in (0, 9), (step, code)
        found = content(folder)
        assert found == new if code == 0 else found in (old, new), (step, found)
        for iteration, value in before:  # no checkpoint but the one that is saved again is touched
            if iteration != new[0]:
                assert content(folder, step=iteration) == (iteration, value), step
            else:
                assert content(folder, step=iteration) in ((iteration, value), new), step
        again = (new[0] + 1, 99.0)
        save(folder, *again)
        assert content(folder) == again, step
        expected = {iteration for iteration, _ in before} | {again[0]}
        assert expected <= set(list_checkpoints(folder)) <= expected | {new[0]}, step
        assert not [name for name in os.listdir(folder) if name.startswith(".") or name.endswith(".tmp")], step
        shutil.rmtree(folder)
        if code == 0:
            return step
    raise AssertionError("the save never ended")


BEFORE: dict[str, tuple[list[tuple[int, float]], tuple[int, float]]] = {
    "first": ([], (10, 1.0)),
    "second": ([(10, 1.0)], (20, 2.0)),
    "same-again": ([(10, 1.0), (20, 2.0)], (20, 3.0)),
    "taken-back": ([(20, 1.0), (10, 2.0)], (20, 3.0)),  # the tracker names the older one
}
# Each way to save and each state of the folder; the other pairs are for the whole product.
COVER = {
    ("first", "in-background"),
    ("second", "waited-for"),
    ("same-again", "in-background"),
    ("taken-back", "waited-for"),
}


@pytest.mark.parametrize(
    "state, how",
    [
        pytest.param(state, how, marks=[] if (state, how) in COVER else pytest.mark.full)
        for state in BEFORE
        for how in SAVES
    ],
)
def test_a_save_that_dies_before_any_change_of_the_disk_leaves_a_good_checkpoint(
    tmp_path: Path, state: str, how: str
) -> None:
    before, new = BEFORE[state]
    steps = call(_saves_that_die_at_each_step, tmp_path, how, before, new, timeout=120)
    assert steps > 25  # it was really walked through


@pytest.mark.parametrize("how", SAVES)
def test_names_appear_only_after_what_they_name_is_on_the_disk(tmp_path: Path, how: str) -> None:
    """What a power failure leaves: a file's bytes are there once it is synced, a name once its folder is."""
    save(tmp_path, 10, 1.0)
    unsynced_bytes: set[str] = set()
    unsynced_names: set[str] = set()
    synced_sizes: dict[str, int] = {}  # of files, however they were written
    renames = []

    def act(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "write":
            unsynced_bytes.add(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        elif name == "fsync":
            path = os.readlink(f"/proc/self/fd/{arguments[0]}")
            unsynced_bytes.discard(path)
            synced_sizes[path] = os.path.getsize(path)
            unsynced_names.difference_update([held for held in unsynced_names if os.path.dirname(held) == path])
        elif name == "open" and len(arguments) > 1 and arguments[1] & os.O_CREAT:
            unsynced_names.add(str(arguments[0]))
        elif name in ("rename", "replace"):
            source, target = map(str, arguments)
            inside = [path for path in unsynced_bytes | unsynced_names if path.startswith(source + "/")]
            assert not inside, f"{source} -> {target} while {inside} are not on the disk"
            assert os.path.isdir(source) or synced_sizes.get(source) == os.path.getsize(source) > 0
            if target.endswith(storage.TRACKER_FILE):
                folder = str(tmp_path / "iter_0000020")
                assert folder not in unsynced_names, "the tracker moves before the name of the checkpoint is synced"
            renames.append(os.path.basename(target))
            unsynced_names.add(target)

    with every_change(act):
        SAVES[how](tmp_path, 20, 2.0)
    assert not unsynced_bytes
    assert str(tmp_path / storage.TRACKER_FILE) not in unsynced_names
    assert renames == [storage.index_file(0), "iter_0000020", storage.TRACKER_FILE]


# ---- kill -9 at random moments ----

ELEMENTS = 200_000


def _save_for_ever(root: Path, how: str, first: int) -> None:
    for iteration in range(first, first + 10_000):
        SAVES[how](root, iteration, float(iteration), ELEMENTS)


def _kill_at_random(root: Path, how: str, kills: int) -> None:
    rng = random.Random(0)
    newest = 0
    for _ in range(kills):
        process = start(_save_for_ever, root, how, newest + 1)
        deadline = time.monotonic() + 30
        while (read_tracker(root) or 0) <= newest and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        assert process.pid is not None
        named_before = read_tracker(root)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = content(root)
        assert found is not None
        assert named_before is not None
        assert found[0] == found[1] >= named_before > newest
        newest = found[0]
        for iteration in list_checkpoints(root)[:-2]:
            shutil.rmtree(storage.iteration_folder(root, iteration))


@pytest.mark.parametrize("how", SAVES)
def test_killed_at_random_moments_the_newest_checkpoint_loads(tmp_path: Path, how: str) -> None:
    _kill_at_random(tmp_path, how, 6)


@pytest.mark.full
@pytest.mark.parametrize("how", SAVES)
def test_killed_at_random_moments_the_newest_checkpoint_loads_many_times(tmp_path: Path, how: str) -> None:
    _kill_at_random(tmp_path, how, 60)


def _ranks_save_until_one_dies(rank: int, world_size: int, root: Path, seed: int) -> None:
    rng = random.Random(seed)
    victim, moment = rng.randrange(world_size), rng.uniform(0.0, 0.3)
    world = world_group(rank, world_size)
    save_rows(root, seed * 1000, world, rows=1000)
    if rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, moment)
    for iteration in range(seed * 1000 + 1, (seed + 1) * 1000):
        save_rows(root, iteration, world, rows=1000)


@pytest.mark.parametrize("world_size", [3])
def test_when_any_rank_is_killed_the_newest_checkpoint_loads(tmp_path: Path, world_size: int) -> None:
    for seed in range(1, 4):
        with pytest.raises(RankFailure, match="died without a word"):
            run_distributed(_ranks_save_until_one_dies, world_size, tmp_path, seed, timeout=30)
        iteration = load_rows(tmp_path, ALONE, rows=1000)
        assert iteration == read_tracker(tmp_path) >= seed * 1000


# ---- a disk that is full ----


def _save_on_a_full_disk(root: Path, how: str) -> tuple[str, tuple[int, float] | None]:
    """The kernel refuses to let any file of this process grow over 64 KiB: a real error of a real write."""
    save(root, 10, 1.0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    try:
        SAVES[how](root, 20, 2.0, elements=100_000)
    except CheckpointError as error:
        assert not [name for name in os.listdir(root) if name.startswith(".")]  # the space is given back
        save(root, 30, 3.0)  # there is room for a small one
        return str(error), content(root, step=10)
    raise AssertionError("the save went through")


@pytest.mark.parametrize("how", SAVES)
def test_a_file_that_cannot_grow_leaves_the_previous_checkpoint(tmp_path: Path, how: str) -> None:
    text, before = call(_save_on_a_full_disk, tmp_path, how)
    assert "saving iteration 20" in text
    assert "rank 0 on" in text
    assert "File too large" in text
    assert before == (10, 1.0)
    assert content(tmp_path) == (30, 3.0)


@pytest.mark.parametrize("fails", ["open", "write", "fsync", "rename", "replace", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("how", SAVES)
def test_a_disk_that_fails_anywhere_leaves_the_previous_checkpoint(
    tmp_path: Path, fails: str, code: int, how: str
) -> None:
    for step in range(100):
        root = tmp_path / str(step)
        save(root, 10, 1.0)
        count = 0

        def act(name: str, _real: Callable[..., Any], _arguments: tuple[Any, ...], step: int = step) -> None:
            nonlocal count
            if name == fails:
                count += 1
                if count == step + 1:
                    raise OSError(code, os.strerror(code))

        failure = ""
        with every_change(act):
            try:
                SAVES[how](root, 20, 2.0)
            except CheckpointError as error:
                failure = str(error)
        if count <= step:  # the save makes fewer such calls
            break
        # One failure is of no consequence: making a folder that is there already.
        assert os.strerror(code) in failure or fails == "mkdir"
        assert content(root) in ((10, 1.0), (20, 2.0))
        assert content(root, step=10) == (10, 1.0)
        save(root, 30, 3.0)
        assert content(root) == (30, 3.0)
    assert 0 < step < 99


def test_a_system_that_writes_a_few_bytes_at_a_time_is_asked_again(tmp_path: Path) -> None:
    real = os.write
    with patch.object(os, "write", lambda descriptor, data: real(descriptor, data[:7])):
        save(tmp_path, 10, 1.0)
    assert content(tmp_path) == (10, 1.0)


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path, 10, 1.0)
    wrote = []
    real = os.statvfs(tmp_path)
    values = list(real)
    values[4] = 0  # f_bavail
    with patch.object(os, "statvfs", return_value=os.statvfs_result(values)):
        with every_change(lambda name, *_: wrote.append(name) if name == "write" else None):
            with pytest.raises(CheckpointError, match="480 bytes are needed, 0 are free"):
                save(tmp_path, 20, 2.0)
    assert not wrote
    assert content(tmp_path) == (10, 1.0)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000010", storage.TRACKER_FILE]


def test_a_save_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(tmp_path / "file" / "run", 10, 1.0)
