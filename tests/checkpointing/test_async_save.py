"""Saved in the background: the same bytes as a save that is waited for, from a copy of what must not change yet."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
import torch
import torch.distributed as dist

from megatron.checkpointing import (
    AsyncSaver,
    CheckpointError,
    NotWritten,
    Written,
    async_save,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    staging,
    storage,
)
from megatron.checkpointing.shares import share_of
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import Halves
from megatron.core.shard import NamedTensor
from tests.checkpointing.layouts import ALONE, whole
from tests.checkpointing.test_distributed import model, world_group
from tests.checkpointing.test_shares import everything
from tests.helpers.distributed import RankFailure, run_distributed

write_shard = storage.write_shard
copied = staging.StagingBuffer._copied


def alone() -> AsyncSaver:
    return AsyncSaver(world=ALONE, replicas=CommGroup.single("replicas"))


def files(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


def never() -> bool:
    return False


def kinds() -> list[NamedTensor]:
    """Of all kinds, and one that is not contiguous."""
    return [*everything(1.5), whole("model.turned", torch.arange(48.0).reshape(6, 8).t())]


def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "waited", 5, kinds(), {"a": 1}, world=ALONE)
    saver = alone()
    with patch.object(storage, "BLOCK_BYTES", 64):  # halves are joined in blocks
        saver.reserve(kinds())
    saver.start(tmp_path / "background", 5, kinds(), {"a": 1})
    saver.finish()
    written = saver.take_end()
    assert isinstance(written, Written) and written.folder == tmp_path / "background" / "iter_0000005"
    assert files(tmp_path / "background") == files(tmp_path / "waited")


def test_a_checkpoint_is_complete_though_what_comes_after_it_fails(tmp_path: Path) -> None:
    def fail() -> list[str]:
        raise OSError(errno.EIO, "old ones cannot be listed")

    saver = alone()
    saver.start(tmp_path, 5, kinds(), {}, afterwards=fail)
    saver.finish()
    written = saver.take_end()
    assert isinstance(written, Written) and "old ones cannot be listed" in written.notes[0]
    assert list_checkpoints(tmp_path) == (5,)


def _both_ways(rank: int, world_size: int, root: Path) -> None:
    world = world_group(rank, world_size)
    group = CommGroup.single("tensor", rank)
    tensors = model(group, filled=True)
    save_checkpoint(root / "waited", 5, tensors, {}, world=world, replicas=world)
    saver = AsyncSaver(world=world, replicas=world)
    saver.start(root / "background", 5, tensors, {})
    saver.wait_for_copy()
    for named in tensors:
        assert isinstance(named.tensor, torch.Tensor)
        named.tensor.fill_(0.0)
    saver.finish()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_write_the_same_files_and_none_changes_after_the_copy(tmp_path: Path, world_size: int) -> None:
    run_distributed(_both_ways, world_size, tmp_path)
    assert files(tmp_path / "background") == files(tmp_path / "waited")


def test_the_copy_is_of_the_moment_and_the_buffer_is_one(tmp_path: Path) -> None:
    saver, values = alone(), torch.zeros(1000)
    saver.reserve([whole("model.w", values)])
    places = {saver._buffer.memory.data_ptr()}
    for iteration in range(1, 5):
        values.fill_(iteration)
        saver.start(tmp_path, iteration, [whole("model.w", values)], {})
        saver.wait_for_copy()
        values.fill_(-1)
        places.add(saver._buffer.memory.data_ptr())
        saver.finish()
        loaded = torch.zeros(1000)
        load_checkpoint(tmp_path, world=ALONE).load_into([whole("model.w", loaded)], world=ALONE)
        assert (loaded == iteration).all()
    assert len(places) == 1
    assert 4000 <= saver._buffer.memory.numel() < 4064


def test_nothing_is_under_its_name_before_it_is_complete_and_the_trainer_hears_of_its_end(tmp_path: Path) -> None:
    saver, go_on = alone(), threading.Event()
    save_checkpoint(tmp_path, 1, kinds(), {}, world=ALONE)

    def slow(*arguments: Any) -> Any:
        go_on.wait()
        return write_shard(*arguments)

    with patch.object(storage, "write_shard", slow):
        saver.start(tmp_path, 2, kinds(), {}, afterwards=lambda: ["old ones are deleted"])
        assert saver.writing == 2 and saver.take_end() is None
        assert load_checkpoint(tmp_path, world=ALONE).iteration == 1
        assert (tmp_path / ".tmp-iter_0000002").is_dir()
        go_on.set()
        saver.finish()
    written = saver.take_end()
    assert isinstance(written, Written) and written.notes == ("old ones are deleted",)
    assert saver.writing is None and saver.take_end() is None
    saver.finish()  # there is none to wait for
    assert load_checkpoint(tmp_path, world=ALONE).iteration == 2


def test_the_trainer_goes_on_at_once_and_waits_for_the_copy_before_it_changes_anything(tmp_path: Path) -> None:
    values, metadata, computed = torch.ones(1000), {"iteration": 5}, threading.Event()
    save_checkpoint(tmp_path / "waited", 5, [whole("model.w", values)], metadata, world=ALONE)
    saver = alone()

    def slow(*arguments: Any) -> Any:
        assert computed.wait(30.0)
        time.sleep(0.2)
        return copied(*arguments)

    with patch.object(staging.StagingBuffer, "_copied", slow):
        saver.start(tmp_path / "background", 5, [whole("model.w", values)], metadata)
        metadata["iteration"] = 6
        computed.set()
        saver.wait_for_copy()
        values.fill_(-1)
        saver.finish()
    assert files(tmp_path / "background") == files(tmp_path / "waited")
    saver.wait_for_copy()  # there is none to wait for


def full_disk(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAILING: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "write": (storage, "write_shard", write_shard),
    "copy": (staging.StagingBuffer, "_copied", copied),
}


def _ends_of_a_failure(rank: int, world_size: int, root: Path, victim: int, what: str) -> tuple[str, str]:
    """What the first rank hears without a word from the others, and the error that all get."""
    target, name, works = FAILING[what]
    world = world_group(rank, world_size)
    saver = AsyncSaver(world=world, replicas=world)
    tensors = model(CommGroup.single("tensor", rank), filled=True)
    saver.start(root, 1, tensors, {})
    saver.finish()
    with patch.object(target, name, full_disk if rank == victim else works):
        saver.start(root, 2, tensors, {})
        saver.wait_for_copy()
        heard = ""
        if rank == 0:
            while (end := saver.take_end()) is None:
                time.sleep(0.01)
            assert isinstance(end, NotWritten) and end.iteration == 2
            heard = str(end.error)
            assert sorted(os.listdir(root)) == ["iter_0000001", storage.TRACKER_FILE]  # the space is given back
        with pytest.raises(CheckpointError) as error:
            saver.finish()
        assert (saver.take_end() is None) == (rank == 0), "it is given once"
    assert load_checkpoint(root, world=world).iteration == 1
    saver.start(root, 2, tensors, {})
    saver.finish()
    assert load_checkpoint(root, world=world).iteration == 2
    return heard, str(error.value)


@pytest.mark.parametrize(
    "world_size, victim, what", [(1, 0, "write"), (3, 0, "write"), (3, 2, "write"), (1, 0, "copy"), (2, 1, "copy")]
)
def test_a_failure_on_any_rank_is_known_on_the_first_and_raised_on_all(
    tmp_path: Path, world_size: int, victim: int, what: str
) -> None:
    texts = run_distributed(_ends_of_a_failure, world_size, tmp_path, victim, what, timeout=60)
    for text in (texts[0][0], *(text for _, text in texts)):
        assert "saving iteration 2 to " in text
        assert f"rank {victim} on {os.uname().nodename}: OSError: [Errno 28] No space left on device" in text


def _last_words_of_the_first(rank: int, world_size: int, root: Path) -> str:
    world = world_group(rank, world_size)
    saver = AsyncSaver(world=world, replicas=world)

    def dies(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        patch.object(storage, "write_shard", dies if rank == 1 else write_shard),
        patch.object(async_save, "_LOOK_FOR_LOST_SECONDS", 0.1),
    ):
        saver.start(root, 1, model(CommGroup.single("tensor", rank), filled=True), {})
        end = saver.close(abandoned=never, patience=60.0)
    (root / "heard").write_text(str(end.error) if isinstance(end, NotWritten) else "")
    assert not list_checkpoints(root)
    assert sorted(os.listdir(root)) == ["heard"]
    return ""


def test_a_rank_that_dies_while_it_writes_is_missed(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="died without a word"):
        run_distributed(_last_words_of_the_first, 2, tmp_path, timeout=30)
    assert "rank 1 has ended, and left its share unwritten" in (tmp_path / "heard").read_text()


def _closed_without_a_word(rank: int, world_size: int, root: Path) -> None:
    world = world_group(rank, world_size)
    saver = AsyncSaver(world=world, replicas=world)
    saver.start(root, 1, model(CommGroup.single("tensor", rank), filled=True), {})
    end = saver.close(abandoned=never, patience=60.0)
    assert isinstance(end, Written) == (rank == 0)
    dist.barrier()
    assert list_checkpoints(root) == (1,)


def test_without_the_trainers_help_a_save_that_has_begun_is_completed(tmp_path: Path) -> None:
    run_distributed(_closed_without_a_word, 3, tmp_path, timeout=60)


@pytest.mark.parametrize("how", ["abandoned", "patience"])
def test_a_save_that_is_given_up_is_never_published(tmp_path: Path, how: str) -> None:
    save_checkpoint(tmp_path, 1, kinds(), {}, world=ALONE)
    saver, go_on = alone(), threading.Event()

    def slow(*arguments: Any) -> Any:
        result = write_shard(*arguments)
        go_on.wait()
        return result

    with patch.object(storage, "write_shard", slow):
        saver.start(tmp_path, 2, kinds(), {})
        background = saver._background
        assert background is not None
        if how == "abandoned":
            assert saver.close(abandoned=lambda: True, patience=60.0) is None
            go_on.set()
        else:
            background.writers = [0, 1]  # another rank, of which nothing is known
            go_on.set()
            with patch.object(async_save, "has_writer", return_value=True):
                saver.close(abandoned=never, patience=0.1)
        background.thread.join(30.0)
    assert isinstance(background.end, NotWritten) and "was given up" in str(background.end.error)
    assert list_checkpoints(tmp_path) == (1,)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", storage.TRACKER_FILE]


@pytest.mark.parametrize("act", ["reserve", "start"])
def test_what_can_not_be_saved_is_found_before_anything_is_written(tmp_path: Path, act: str) -> None:
    saver = alone()
    tensors = [whole("model.w", torch.ones(2)), whole("model.w", torch.ones(2))]
    calls: dict[str, Callable[[], object]] = {
        "reserve": lambda: saver.reserve(tensors),
        "start": lambda: saver.start(tmp_path, 1, tensors, {}),
    }
    with pytest.raises(CheckpointError, match=r"model\.w: two tensors of this rank have this key"):
        calls[act]()
    assert saver.writing is None
    assert list(tmp_path.iterdir()) == []


def test_a_bug_of_the_thread_is_raised_as_what_it_is(tmp_path: Path) -> None:
    saver = alone()
    with patch.object(storage, "write_shard", lambda *_: 1 / 0):
        saver.start(tmp_path, 1, kinds(), {})
        with pytest.raises(ZeroDivisionError):
            saver.finish()


def test_all_saves_from_a_gpu_are_copied_on_one_stream() -> None:
    """The allocator reserves memory for each stream of its own."""
    share = share_of(everything(1.5), CommGroup.single("replicas"))
    buffer = staging.StagingBuffer()
    with (
        patch.object(staging, "_moment", Mock()) as moment,
        patch.object(torch.cuda, "Stream") as new_stream,
        patch.object(torch.cuda, "stream") as on_stream,
    ):
        for _ in range(3):
            buffer.snapshot(share)()
    new_stream.assert_called_once_with(moment.return_value.device)
    stream = new_stream.return_value
    assert on_stream.call_args_list == [call(stream)] * 3
    assert stream.wait_event.call_args_list == [call(moment.return_value)] * 3


def test_what_lies_together_is_copied_at_once_and_all_of_it_is_aligned() -> None:
    """Parameters are views of a flat buffer; the C library copies long runs faster."""
    flat = torch.arange(40.0)
    views = [whole(f"model.{i}", flat[10 * i : 10 * i + 10]) for i in (2, 0, 1)]  # not 3, so that there is a gap
    others = [
        whole("model.last", flat[39:]),
        whole("model.doubles", torch.ones(3, dtype=torch.float64)),
        *everything(1.5),
    ]
    share = share_of([*views, *others], CommGroup.single("replicas"))
    runs = [[part.key for part in run.parts] for run in staging._runs(share.pending)]
    assert ["model.0", "model.1", "model.2"] in runs
    assert sorted(key for run in runs for key in run) == sorted(part.key for part in share.pending)
    buffer = staging.StagingBuffer()
    staged = {part.name: part for part in buffer.snapshot(share)().pending}
    for part in share.pending:
        values = part.tensor.joined() if isinstance(part.tensor, Halves) else part.tensor
        copied = staged[part.name].tensor
        assert isinstance(copied, torch.Tensor) and torch.equal(copied, values), part.name
        assert copied.data_ptr() % copied.element_size() == 0
        assert buffer.memory.data_ptr() <= copied.data_ptr() < buffer.memory.data_ptr() + buffer.memory.numel()
