"""What a run saves and deletes, in the background or not, and what it does when a save fails."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import (
    AsyncSaver,
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    read_tracker,
    staging,
    storage,
)
from megatron.training import initialize
from megatron.training.failures import LauncherGone, NonFiniteError
from megatron.training.metrics import StepReport
from megatron.training.pretrain import train
from megatron.training.run import Hook, Run
from pretrain_gpt import forward_step as gpt_forward_step
from tests.checkpointing.test_async_save import files
from tests.helpers.launch import launch, pretrain_gpt, pretrain_tiny
from tests.helpers.numerics import assert_bitwise
from tests.helpers.tiny import TINY_GPT
from tests.training.runs import build, trained
from tests.training.test_train_step import state_of

write_shard = storage.write_shard
copied = staging.StagingBuffer._copied
BOTH_WAYS = pytest.mark.parametrize("ways", [(), ("--async-save",)], ids=["waited-for", "in-background"])


def failing(*iterations: int) -> Callable[..., Any]:
    """Writes shards, but not those of these iterations."""

    def write(path: Path, *arguments: Any) -> Any:
        if any(f".tmp-iter_{iteration:07d}" in str(path) for iteration in iterations):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_shard(path, *arguments)

    return write


@BOTH_WAYS
def test_old_checkpoints_are_deleted_when_newer_ones_are_complete(
    ways: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--train-iters", "9", "--save", str(tmp_path), "--save-interval", "1", *ways]
    trained(*arguments, "--keep-last", "2", "--save-retain-interval", "3")
    assert list_checkpoints(tmp_path) == (3, 6, 8, 9)
    said = capsys.readouterr().out
    for gone in (1, 2, 4, 5, 7):
        assert said.count(f"deleted checkpoint {tmp_path / f'iter_{gone:07d}'}\n") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize(
    "layout",
    [
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        ("--use-distributed-optimizer", "--bf16"),
        ("--use-precision-aware-optimizer", "--bf16"),
    ],
)
def test_a_run_saves_the_same_in_the_background(layout: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ["--train-iters", "4", "--save", "saved", "--save-interval", "2", *layout]
    outcomes = [
        pretrain_tiny(tmp_path / name, *arguments, *ways, ranks=2).check()
        for name, ways in (("waited", ()), ("background", ("--async-save",)))
    ]
    waited, background = (files(tmp_path / name / "saved") for name in ("waited", "background"))
    assert waited.keys() == background.keys()
    for name in waited:
        if not name.endswith((storage.METADATA_FILE, storage.COMPLETE_FILE)):  # which hold the configuration
            assert waited[name] == background[name], name
    assert outcomes[0].out[1].count("successfully saved checkpoint from iteration") == 2
    assert outcomes[1].out[0].count("in the background\n") == 2
    assert outcomes[1].out[1].count("in the background; training stood still for ") == 1  # and then was at its end
    assert "waiting until the checkpoint from iteration       4 is written" in outcomes[1].out[0]


def test_the_copy_is_made_while_the_next_iteration_runs_and_its_update_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are copied in the last moment are those of the iteration still."""
    arguments = ["--train-iters", "4", "--save-interval", "2", "--save"]
    trained(*arguments, str(tmp_path / "waited"))
    forward, waiting, update = (threading.Event() for _ in range(3))
    wait_for_copy = AsyncSaver.wait_for_copy

    def forward_step(*arguments: Any) -> Any:
        forward.set()
        return gpt_forward_step(*arguments)

    def copy_late(*arguments: Any) -> Any:
        if not update.is_set():
            assert forward.wait(30.0), "the next iteration does not begin"
            assert waiting.wait(30.0), "nobody waits"
            assert not update.wait(0.3), "the update has not waited"
        return copied(*arguments)

    def wait(saver: AsyncSaver) -> None:
        waiting.set()
        wait_for_copy(saver)

    run, _ = build(*arguments, str(tmp_path / "background"), "--async-save", forward_step=forward_step)
    run.hooks = [After(2, forward.clear), *run.hooks, After(3, update.set)]
    monkeypatch.setattr(staging.StagingBuffer, "_copied", copy_late)
    monkeypatch.setattr(AsyncSaver, "wait_for_copy", wait)
    train(run)
    waited, background = (files(tmp_path / name) for name in ("waited", "background"))
    shard = f"iter_0000002/{storage.shard_file(0)}"
    assert background[shard] == waited[shard]
    stood_still = re.findall(r"training stood still for ([0-9.]+) s", capsys.readouterr().out)
    assert len(stood_still) == 1
    assert float(stood_still[0]) >= 0.3, "what the update has waited is told"


def test_a_copy_that_fails_is_told_and_the_training_goes_on_to_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(buffer: staging.StagingBuffer, share: Any) -> Any:
        if list_checkpoints(tmp_path) == (2,):
            raise RuntimeError("the device is lost")
        return copied(buffer, share)

    monkeypatch.setattr(staging.StagingBuffer, "_copied", copy)
    run, _ = build("--train-iters", "6", "--save", str(tmp_path), "--save-interval", "2", "--async-save")
    run.hooks = [*run.hooks, After(5, lambda: monkeypatch.setattr(staging.StagingBuffer, "_copied", copied))]
    train(run)
    assert list_checkpoints(tmp_path) == (2, 6)
    said = capsys.readouterr().out
    assert said.count("ERROR: the checkpoint from iteration 4 is NOT saved, and those before it stay") == 1
    assert said.count("the device is lost") == 1


@BOTH_WAYS
def test_a_save_that_fails_is_told_and_the_training_goes_on_to_the_next(
    ways: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--train-iters", "7", "--save-interval", "2", *ways]
    straight, _ = trained("--train-iters", "7")
    monkeypatch.setattr(storage, "write_shard", failing(4))
    run, _ = trained(*arguments, "--save", str(tmp_path))
    assert list_checkpoints(tmp_path) == (2, 6, 7)
    said = capsys.readouterr().out
    assert said.count("ERROR: the checkpoint from iteration 4 is NOT saved, and those before it stay") == 1
    assert said.count("No space left on device") == 1
    for name, tensor in state_of(straight).items():
        assert_bitwise(state_of(run)[name], tensor, name)


@BOTH_WAYS
def test_a_save_that_fails_where_the_run_ends_is_tried_again(
    ways: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = iter([failing(4), write_shard])
    monkeypatch.setattr(storage, "write_shard", lambda path, *more: next(tries)(path, *more))
    trained("--train-iters", "4", "--save", str(tmp_path), "--save-interval", "4", *ways)
    assert list_checkpoints(tmp_path) == (4,)
    assert capsys.readouterr().out.count("the checkpoint from iteration 4 is NOT saved") == 1


def pretrain_on_a_disk_that_fills_up() -> None:
    storage.write_shard = failing(4)
    pretrain_gpt()


@BOTH_WAYS
def test_a_run_whose_last_save_fails_ends_with_its_reason_and_status_2(ways: tuple[str, ...], tmp_path: Path) -> None:
    arguments = [*TINY_GPT, "--train-iters", "4", "--save", "saved", "--save-interval", "2", *ways]
    outcome = launch(pretrain_on_a_disk_that_fills_up, arguments, ranks=2, folder=tmp_path).wait()
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert (
        said.count("pretrain_gpt.py: error: saving iteration 4 to saved failed on all 2 ranks: OSError: [Errno 28]")
        == 1
    )
    assert "Traceback" not in said
    assert list_checkpoints(tmp_path / "saved") == (2,)
    assert sorted(os.listdir(tmp_path / "saved")) == ["iter_0000002", storage.TRACKER_FILE]


class After(Hook):
    """Does something after an iteration."""

    def __init__(self, iteration: int, act: Callable[[], object]) -> None:
        self.iteration = iteration
        self.act = act

    def after_step(self, run: Run, report: StepReport) -> None:
        if report.iteration == self.iteration:
            self.act()


def pretrain_killed_while_it_writes() -> None:
    """The second rank, by its thread, when half of its share of iteration 4 is on disk."""

    def write(path: Path, *arguments: Any) -> Any:
        result = write_shard(path, *arguments)
        if ".tmp-iter_0000004" in str(path) and os.environ["RANK"] == "1":
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    storage.write_shard = write
    initialize._TIME_TO_SPEAK = 0.3
    pretrain_gpt()


def test_a_rank_that_is_killed_while_it_writes_in_the_background_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    arguments = [*TINY_GPT, "--train-iters", "200", "--save", "saved", "--save-interval", "2", "--async-save"]
    outcome = launch(pretrain_killed_while_it_writes, arguments, ranks=2, folder=tmp_path).wait()
    assert outcome.codes == [1, -signal.SIGKILL]
    assert "has lost another rank" in outcome.err[0] and "Traceback" not in outcome.err[0]
    assert list_checkpoints(tmp_path / "saved") == (2,)
    assert read_tracker(tmp_path / "saved") == 2
    assert not (tmp_path / "saved" / ".tmp-iter_0000004").exists()


def not_finite() -> None:
    raise NonFiniteError("the loss is nan")


def test_an_error_that_ends_the_run_lets_a_save_in_the_background_be_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, close = threading.Event(), AsyncSaver.close

    def close_with_a_word(*arguments: Any, **how: Any) -> Any:
        closing.set()
        return close(*arguments, **how)

    def write(*arguments: Any) -> Any:
        closing.wait()
        return write_shard(*arguments)

    run, _ = build("--train-iters", "9", "--save", str(tmp_path), "--save-interval", "2", "--async-save")
    run.hooks = [After(3, not_finite), *run.hooks]
    monkeypatch.setattr(AsyncSaver, "close", close_with_a_word)
    monkeypatch.setattr(storage, "write_shard", write)
    with pytest.raises(NonFiniteError):
        train(run)
    said = capsys.readouterr().out
    assert "waiting until the checkpoint from iteration       2 is written" in said
    assert "successfully saved checkpoint from iteration       2 to " in said
    assert read_tracker(tmp_path) == 2
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_save_that_fails_while_an_error_ends_the_run_is_told_and_no_other_is_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def write(*arguments: Any) -> Any:
        failed.wait()
        return failing(2)(*arguments)

    run, _ = build("--train-iters", "9", "--save", str(tmp_path), "--save-interval", "2", "--async-save")
    run.hooks = [After(3, failed.set), After(3, not_finite), *run.hooks]
    monkeypatch.setattr(storage, "write_shard", write)
    with pytest.raises(NonFiniteError):
        train(run)
    said = capsys.readouterr().out
    assert said.count("the checkpoint from iteration 2 is NOT saved, and those before it stay as they are. ") == 1
    assert said.count("No space left on device") == 1
    assert "goes on" not in said


def test_without_its_launcher_a_run_publishes_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been started again."""
    run, recorder = build("--train-iters", "9", "--save", str(tmp_path), "--save-interval", "2", "--async-save")
    object.__setattr__(run.context, "launcher", 4321)
    (exits,) = (hook for hook in run.hooks if type(hook).__name__ == "Exits")
    exits._launcher = 4321  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "getppid", lambda: 4321 if len(recorder.steps) < 3 else 1)
    ended = threading.Event()

    def write(*arguments: Any) -> Any:
        ended.wait()
        return write_shard(*arguments)

    monkeypatch.setattr(storage, "write_shard", write)
    with pytest.raises(LauncherGone):
        train(run)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint")
    ended.set()
    thread.join()
    assert list_checkpoints(tmp_path) == ()


def test_the_next_save_waits_for_the_last_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited, finish = threading.Event(), AsyncSaver.finish

    def finish_late(saver: AsyncSaver) -> None:
        if saver.writing is not None:
            time.sleep(0.3)
            awaited.set()
        finish(saver)

    def write(*arguments: Any) -> Any:
        awaited.wait()
        awaited.clear()
        return write_shard(*arguments)

    monkeypatch.setattr(storage, "write_shard", write)
    monkeypatch.setattr(AsyncSaver, "finish", finish_late)
    monkeypatch.setattr("megatron.training.saving._LONG_WAIT", 0.2)
    trained("--train-iters", "3", "--save", str(tmp_path), "--save-interval", "1", "--async-save")
    said = capsys.readouterr().out
    assert said.count("s, until the checkpoint before was written") == 2
    for iteration in (1, 2, 3):
        assert said.count(f"waiting until the checkpoint from iteration       {iteration} is written") == 1
    assert list_checkpoints(tmp_path) == (1, 2, 3)


def test_a_hook_that_cannot_close_keeps_no_other_from_closing(tmp_path: Path) -> None:
    class Stubborn(Hook):
        def close(self) -> None:
            raise OSError("no space left for the log")

    run, _ = build("--train-iters", "2", "--save", str(tmp_path), "--async-save")
    run.hooks = [Stubborn(), *run.hooks]
    with pytest.raises(OSError, match="no space left for the log"):
        train(run)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000002", storage.TRACKER_FILE]  # and the lock is given up


def test_tensors_that_can_not_be_saved_are_found_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recorder = build("--save", str(tmp_path), "--async-save")
    named = list(run.optimizer.named_main_parameters())
    monkeypatch.setattr(run.optimizer, "named_main_parameters", lambda: [*named, named[0]])
    with pytest.raises(CheckpointError, match="two tensors of this rank have this key"):
        train(run)
    assert recorder.steps == []


def test_a_resumed_run_goes_on_from_what_was_saved_in_the_background(tmp_path: Path) -> None:
    straight, _ = trained("--train-iters", "6")
    arguments = ["--train-iters", "6", "--save", str(tmp_path), "--load", str(tmp_path), "--load-if-exists"]
    for _ in range(2):
        run, _ = trained(*arguments, "--async-save", "--exit-interval", "3", "--save-interval", "1")
    assert run.progress.iteration == 6
    for name, tensor in state_of(straight).items():
        assert_bitwise(state_of(run)[name], tensor, name)
    assert load_checkpoint(tmp_path, world=run.state.world).iteration == 6
