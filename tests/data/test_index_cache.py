"""The index cache: built once a file system, never loaded damaged, usable without any folder."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.core.file_lock import NoLocksError
from megatron.data import build as build_module
from megatron.data import index_cache
from megatron.data.build import SampleShape, build_gpt_datasets
from megatron.data.index_builder import Allocate
from megatron.data.index_cache import IndexCache
from tests.data.corpora import numbered_corpus

FORK_SERVER = multiprocessing.get_context("forkserver")
VALUES = np.arange(1000, dtype=np.int32)


def get(cache: IndexCache, log: Path | None = None, pause: float = 0.0, seed: int = 1) -> np.ndarray:
    """The one array of an entry; each build writes a line to `log`."""

    def build(allocate: Allocate) -> None:
        if log is not None:
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        time.sleep(pause)
        allocate("values", VALUES.shape, VALUES.dtype)[:] = VALUES * seed
        allocate("empty", (0,), np.uint32)

    arrays = cache.get("Test-train", {"seed": seed}, build)
    assert arrays["empty"].shape == (0,)
    assert arrays["empty"].dtype == np.uint32
    return arrays["values"]


def builds(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_an_entry_is_built_once_and_then_mapped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(3):
        values = get(IndexCache(tmp_path / "cache"), log)
        assert np.array_equal(values, VALUES)
        assert isinstance(values, np.memmap)
    assert builds(log) == 1
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix in (".tmp", ".lock")]
    assert np.array_equal(get(IndexCache(tmp_path / "cache"), log, seed=2), VALUES * 2)
    assert builds(log) == 2


@pytest.mark.parametrize("ending", ["-values.npy", "-empty.npy", ".json"])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed", "removed"])
def test_a_damaged_entry_is_built_anew_and_not_loaded(ending: str, damage: str, tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    get(IndexCache(folder), log)
    (path,) = folder.glob(f"*{ending}")
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[: len(content) - 3])
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.write_bytes(content[:-3] + b"\xff\xff\xff")
    assert np.array_equal(get(IndexCache(folder), log), VALUES)
    assert builds(log) == 2
    assert np.array_equal(get(IndexCache(folder), log), VALUES)
    assert builds(log) == 2


def _rank(folder: str, log: str, delay: float, pause: float, results: Any) -> None:
    time.sleep(delay)
    results.put(int(get(IndexCache(Path(folder)), Path(log), pause).sum()))


def run_ranks(tmp_path: Path, folders: list[Path], delays: list[float], pause: float) -> int:
    """One process a folder, with one log; how often the index was built."""
    results = FORK_SERVER.Queue()
    log = tmp_path / "log"
    processes = [
        FORK_SERVER.Process(target=_rank, args=(str(folder), str(log), delay, pause, results))
        for folder, delay in zip(folders, delays)
    ]
    for process in processes:
        process.start()
    sums = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert set(sums) == {int(VALUES.sum())}
    return builds(log)


def test_processes_on_one_file_system_build_once_and_the_others_wait(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, [tmp_path / "cache"] * 4, [0.0] * 4, pause=0.5) == 1


def test_it_does_not_matter_who_comes_first(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, [tmp_path / "cache"] * 3, [1.0, 0.0, 0.3], pause=0.5) == 1


def test_nodes_with_disks_of_their_own_each_build_theirs(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, [tmp_path / "node0", tmp_path / "node1"], [0.0, 0.0], pause=0.1) == 2


OWNER = """
import sys, time
from pathlib import Path
from megatron.data.index_cache import IndexCache

def build(allocate):
    allocate("values", (1000,), "int32")
    print("building", flush=True)
    time.sleep(60)

IndexCache(Path(sys.argv[1])).get("Test-train", {"seed": 1}, build)
"""


def test_the_lock_of_a_killed_owner_is_taken_over(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "building\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert list(folder.glob("*.lock"))
    assert np.array_equal(get(IndexCache(folder), log), VALUES)
    assert builds(log) == 1
    assert not list(folder.glob("*.lock*"))


@pytest.mark.parametrize(
    "content", ["[]", '"x"', "7", '{"files": null}', '{"files": []}', '{"files": {}}', '{"files": {"x": 7}}']
)
def test_a_manifest_that_is_none_is_no_entry(content: str, tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    get(IndexCache(folder), log)
    (manifest,) = folder.glob("*.json")
    manifest.write_text(content)
    assert np.array_equal(get(IndexCache(folder), log), VALUES)
    assert builds(log) == 2


@pytest.mark.parametrize("text", ["process 1 on another-host since yesterday", f"process {os.getpid()} on here", ""])
def test_what_a_lock_file_says_holds_nobody_up(text: str, tmp_path: Path) -> None:
    """Its process has died, on another host or in a container whose process numbers mean others here."""
    folder, log = tmp_path / "cache", tmp_path / "log"
    get(IndexCache(folder), log)
    (manifest,) = folder.glob("*.json")
    manifest.unlink()
    manifest.with_suffix(".lock").write_text(text)
    assert np.array_equal(get(IndexCache(folder), log), VALUES)
    assert builds(log) == 2
    assert not list(folder.glob("*.lock"))


def test_without_file_locks_each_process_builds_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_lock(path: Path) -> None:
        raise NoLocksError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(index_cache, "try_lock", no_lock)
    for _ in range(2):
        assert np.array_equal(get(IndexCache(tmp_path / "cache"), tmp_path / "log"), VALUES)
    assert builds(tmp_path / "log") == 1
    assert "has no file locks" in caplog.text


def test_an_entry_that_is_as_it_was_written_is_mapped_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, log, read = tmp_path / "cache", tmp_path / "log", []
    get(IndexCache(folder), log)
    checksum = index_cache._checksum
    monkeypatch.setattr(index_cache, "_checksum", lambda path: read.append(path) or checksum(path))
    get(IndexCache(folder), log)
    assert read == []
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied, copy_function=shutil.copyfile)  # with times of its own
    assert np.array_equal(get(IndexCache(copied), log), VALUES)
    assert len(read) == 2
    assert builds(log) == 1


def test_an_owner_that_fails_frees_the_lock(tmp_path: Path) -> None:
    def fail(allocate: Allocate) -> None:
        allocate("values", VALUES.shape, VALUES.dtype)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        IndexCache(tmp_path).get("Test-train", {"seed": 1}, fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_full_disk_leaves_no_entry_and_is_told(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is taken before it is written to: a write through a mapping could not fail but with a signal."""

    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ValueError, match=r"--data-cache-path .* can not be written .*No space left"):
        get(IndexCache(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_index_larger_than_the_memory_lies_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that has to stay in memory is refused by the bytes that its arrays have, eight an entry if need be."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": VALUES.nbytes, "SC_PHYS_PAGES": 3}.__getitem__)
    get(IndexCache(None))

    def build(allocate: Allocate) -> None:
        allocate("values", VALUES.shape, np.int64)
        allocate("more", VALUES.shape, np.int64)

    with pytest.raises(ValueError, match=r"takes 0 GiB, and this machine has .*--data-cache-path names a folder"):
        IndexCache(None).get("Test-train", {}, build)
    assert set(IndexCache(tmp_path).get("Test-train", {}, build)) == {"values", "more"}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_no_damage(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    get(IndexCache(tmp_path / "cache"), log)
    entry = sorted((tmp_path / "cache").iterdir())

    def full(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(np, "load", full)
    for cache in (IndexCache(tmp_path / "cache"), IndexCache(None, defaults=[tmp_path / "cache"])):
        with pytest.raises(ValueError, match=r"Too many open files.*`ulimit -n`"):
            get(cache, log)
    monkeypatch.undo()
    monkeypatch.setattr(index_cache, "try_lock", full)
    with pytest.raises(ValueError, match=r"Too many open files.*`ulimit -n`"):
        get(IndexCache(None, defaults=[tmp_path / "cache", tmp_path / "other"]), log, seed=2)
    assert builds(log) == 1
    assert sorted((tmp_path / "cache").iterdir()) == entry


def test_a_corpus_that_can_not_be_read_is_no_matter_of_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(allocate: Allocate) -> None:
        calls.append(allocate("values", VALUES.shape, VALUES.dtype))
        raise OSError(errno.EIO, "Input/output error", "corpus.bin")

    for cache in (IndexCache(tmp_path / "asked"), IndexCache(None, defaults=[tmp_path / "one", tmp_path / "other"])):
        with pytest.raises(OSError, match=r"^\[Errno 5\] Input/output error: 'corpus.bin'$"):
            cache.get("Test-train", {"seed": 1}, fail)
    assert len(calls) == 2
    assert not (tmp_path / "other").exists()
    assert not caplog.records


def blocked_folder(tmp_path: Path, name: str) -> Path:
    """A folder that nobody can write, root included: its parent is a file."""
    (tmp_path / name).write_text("")
    return tmp_path / name / "cache"


def test_a_folder_that_was_asked_for_and_can_not_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data-cache-path .*can not be written.*give a folder"):
        get(IndexCache(blocked_folder(tmp_path, "file")))


def test_without_a_folder_of_its_own_the_next_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "log"
    folders = (blocked_folder(tmp_path, "file"), tmp_path / "user")
    for _ in range(2):
        assert np.array_equal(get(IndexCache(None, defaults=folders), log), VALUES)
    assert builds(log) == 1
    assert "file/cache can not be written" in caplog.text


def test_without_any_folder_the_index_stays_in_memory_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = get(IndexCache(None, defaults=(blocked_folder(tmp_path, "file"),)))
    assert np.array_equal(values, VALUES)
    assert "is kept in memory" in caplog.text
    assert "--data-cache-path" in caplog.text


def test_an_index_lies_beside_read_only_data_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = numbered_corpus(tmp_path / "corpus", [9] * 10)
    monkeypatch.setattr(build_module, "user_cache_folder", lambda: tmp_path / "user")

    def build() -> None:
        data = DataConfig(data_path=(str(corpus),), split="1", seq_length=4)
        build_gpt_datasets(data, num_samples=(4, 0, 0), seed=1, vocab_size=1000, eod=0)

    corpus.write_text("")  # takes the place of the folder <prefix>/cache/GPTDataset_indices
    build()
    assert list((tmp_path / "user").glob("*-GPTDataset-train.json"))
    corpus.unlink()
    (tmp_path / "user").rename(tmp_path / "put away")
    build()
    assert list((corpus / "cache" / "GPTDataset_indices").glob("*-GPTDataset-train.json"))
    assert not (tmp_path / "user").exists()


def test_a_corpus_that_was_replaced_gets_an_index_of_its_own(tmp_path: Path) -> None:
    for lengths in ([8, 10] * 5, [10, 8] * 5):  # as many documents and tokens
        corpus = numbered_corpus(tmp_path / "corpus", lengths)
        data = DataConfig(data_path=(str(corpus),), split="1", seq_length=4, data_cache_path=str(tmp_path / "cache"))
        train = build_gpt_datasets(data, num_samples=(4, 0, 0), seed=1, vocab_size=1000, eod=0)[0]
        assert train is not None
        assert all(len(train[number]) == 5 for number in range(len(train)))
    manifests = sorted((tmp_path / "cache").glob("*.json"))
    assert len(manifests) == 2
    description = json.loads(manifests[0].read_text())["description"]
    assert description["dataset"] == str(corpus)
    assert description["requested"] == 4


def test_an_entry_is_found_by_all_that_its_content_depends_on(tmp_path: Path) -> None:
    """Each call differs from the first in one thing; with a shared cache it gets what it gets without one."""
    corpus = numbered_corpus(tmp_path / "corpus", [9, 0, 30, 4] * 5)
    first: dict[str, Any] = {"num_samples": (None, None, None), "seed": 1, "vocab_size": 1000, "eod": 0}
    data = DataConfig(data_path=(str(corpus),), split="60,40,0", seq_length=4)
    changes: list[dict[str, Any]] = [
        {},
        {"num_samples": (200, 100, None)},
        {"data": replace(data, seq_length=5)},
        {"seed": 2},
        {"data": replace(data, split="50,50,0")},
        {"shape": SampleShape(extra_tokens=0)},
        {"shape": SampleShape(keep_last_of_valid=True)},
    ]

    def indices(cache: Path, change: dict[str, Any]) -> list[bytes]:
        settings = {"data": data, **first, **change}
        settings["data"] = replace(settings["data"], data_cache_path=str(cache))
        train, valid, _ = build_gpt_datasets(**settings)
        return [
            getattr(split.index, kind).tobytes()  # type: ignore[union-attr]
            for split in (train, valid["validation"])
            for kind in ("document", "sample", "shuffle")
        ]

    shared = [indices(tmp_path / "shared", change) for change in changes]
    alone = [indices(tmp_path / f"alone{number}", change) for number, change in enumerate(changes)]
    assert shared == alone
    assert len({tuple(entry) for entry in shared}) == len(changes)
