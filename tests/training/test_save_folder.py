"""What `--save` is checked for before a training starts, and not after it; and that one run holds it at a time."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.checkpointing import CheckpointError, list_checkpoints
from megatron.config.checkpoint import CheckpointConfig
from megatron.core.file_lock import try_lock
from megatron.training import save_folder
from megatron.training.save_folder import LOCK_FILE
from tests.helpers.launch import launch, launch_tiny, pretrain_gpt, pretrain_tiny
from tests.helpers.tiny import TINY_GPT, context_of_rank, tiny_config
from tests.training.runs import trained


def test_a_save_folder_that_can_not_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="preparing --save"):
        trained("--save", str(tmp_path / "file"))


def test_checkpoints_of_another_run_are_not_replaced(tmp_path: Path) -> None:
    trained("--save", str(tmp_path), "--save-interval", "2", "--train-iters", "4")
    with pytest.raises(CheckpointError, match=f"up to iteration 4, .* --load {tmp_path} goes on from them"):
        trained("--save", str(tmp_path), "--train-iters", "2")
    assert list_checkpoints(tmp_path) == (2, 4)
    trained("--save", str(tmp_path), "--load", str(tmp_path), "--train-iters", "5", "--override-opt_param-scheduler")
    assert list_checkpoints(tmp_path) == (2, 4, 5)


def test_a_finetune_does_not_replace_what_it_starts_from(tmp_path: Path) -> None:
    first, new = tmp_path / "first", tmp_path / "new"
    trained("--save", str(first), "--train-iters", "4")
    finetune = ("--load", str(first), "--finetune", "--train-iters", "3")
    with pytest.raises(CheckpointError, match=r"up to iteration 4, .* another --save folder keeps both"):
        trained(*finetune, "--save", str(first))
    assert list_checkpoints(first) == (4,)
    trained(*finetune, "--save", str(new))
    assert list_checkpoints(new) == (3,)


def test_a_step_back_does_not_mix_its_iterations_with_the_later_ones(tmp_path: Path) -> None:
    old, run = tmp_path / "old", ("--train-iters", "5", "--override-opt_param-scheduler")
    trained("--save", str(old), "--save-interval", "1", "--train-iters", "4")
    back = ("--load", str(old), "--ckpt-step", "2", *run)
    with pytest.raises(CheckpointError, match=r"--ckpt-step 2 leaves checkpoints of later iterations, 3 to 4, "):
        trained(*back, "--save", str(old))
    assert list_checkpoints(old) == (1, 2, 3, 4)
    trained(*back, "--save", str(tmp_path / "new"))
    for iteration in (3, 4):
        (old / f"iter_{iteration:07d}").rename(tmp_path / f"iter_{iteration:07d}")
    trained(*back, "--save", str(old))
    assert list_checkpoints(old) == (1, 2, 5)


def test_a_folder_whose_checkpoints_can_not_be_listed_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(root: Path) -> tuple[int, ...]:
        raise PermissionError(errno.EACCES, "Permission denied", str(root))

    with monkeypatch.context() as patch:
        patch.setattr(save_folder, "list_checkpoints", unreadable)
        with pytest.raises(CheckpointError, match="Permission denied"):
            trained("--save", str(tmp_path))
    assert not (tmp_path / LOCK_FILE).exists()
    trained("--save", str(tmp_path))


RUN = ("--save", "saved", "--load", "saved", "--load-if-exists", "--save-interval", "2")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def impatient() -> None:
    """The program of a rank that waits a moment for the holder of its folder."""
    save_folder._PATIENCE_ON_THIS_HOST = 0.5
    pretrain_gpt()


def test_a_second_run_in_one_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = launch_tiny(tmp_path, *RUN, "--train-iters", "100000", ranks=2)
    wait_until(lambda: bool(list_checkpoints(tmp_path / "saved")))
    holder = (tmp_path / "saved" / LOCK_FILE).read_text()
    arguments = [*TINY_GPT, *RUN, "--train-iters", "100000"]
    second = launch(impatient, arguments, ranks=2, folder=tmp_path).wait()
    alive = [process.is_alive() for process in first.processes]
    first.kill()
    assert alive == [True, True]
    assert second.codes == [2, 2]
    said = "".join(second.err)
    assert f"another run saves in this folder: {holder}; end it, or give another --save folder" in said
    assert holder.startswith(f"process {first.processes[0].pid} on ")
    assert "Traceback" not in said


def test_after_a_sigkill_the_next_run_goes_on_at_once(tmp_path: Path) -> None:
    killed = launch_tiny(tmp_path, *RUN, "--train-iters", "100000")
    wait_until(lambda: bool(list_checkpoints(tmp_path / "saved")))
    killed.kill()
    assert (tmp_path / "saved" / LOCK_FILE).exists(), "it had no moment to remove it"
    last = list_checkpoints(tmp_path / "saved")[-1]
    more = ("--train-iters", str(last + 2), "--override-opt_param-scheduler")
    after = pretrain_tiny(tmp_path, *RUN, *more).check()
    assert "held by" not in after.out[0]
    assert list_checkpoints(tmp_path / "saved")[-1] == last + 2
    assert not (tmp_path / "saved" / LOCK_FILE).exists()


def test_a_run_that_fails_before_it_trains_leaves_the_folder_to_others(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        trained("--save", str(tmp_path / "saved"), "--load", str(tmp_path / "absent"))
    trained("--save", str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / LOCK_FILE).exists()


@pytest.mark.parametrize("flags", [(), ("--save", "{folder}"), ("--skip-train", "--eval-iters", "1")])
def test_a_training_that_keeps_nothing_says_so_at_the_start(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(*(flag.format(folder=tmp_path) for flag in flags))
    folder = save_folder.claim_save_folder(context_of_rank(config, 0, 1))
    if folder is not None:
        folder.close()
    assert capsys.readouterr().out.count("warning: without --save nothing of this training is kept\n") == (not flags)


def test_a_run_that_only_evaluates_needs_no_folder_of_its_own(tmp_path: Path) -> None:
    trained("--save", str(tmp_path))
    lock = try_lock(tmp_path / LOCK_FILE)
    assert lock is not None
    trained("--save", str(tmp_path), "--load", str(tmp_path), "--skip-train", "--eval-iters", "1")
    lock.close()


def test_the_holder_on_another_node_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its node may just have died, of which the file server learns later."""
    lock = try_lock(tmp_path / LOCK_FILE)
    assert lock is not None
    (tmp_path / LOCK_FILE).write_text("process 7 on another-node since then")
    monkeypatch.setattr(save_folder, "_PATIENCE_ON_THIS_HOST", 0.0)
    ended = threading.Timer(1.0, lock.close)
    ended.start()
    trained("--save", str(tmp_path))
    ended.join()
    assert "is held by process 7 on another-node since then: waiting up to 100 s" in capsys.readouterr().out


def test_the_holder_on_this_host_is_waited_for_as_long_as_its_iteration_may_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose launcher was killed train on until they look for it."""
    lock = try_lock(tmp_path / LOCK_FILE)
    assert lock is not None
    now, said = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 10.0
        if now >= 50.0:
            lock.close()

    monkeypatch.setattr(save_folder, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    folder = save_folder.SaveFolder(tmp_path)
    folder.claim(CheckpointConfig(save=str(tmp_path)), 300.0, said.append)
    folder.close()
    (line,) = said
    assert f" on {socket.gethostname()} since " in line
    assert line.endswith(": waiting up to 60 s for its end")


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    trained("--save", str(tmp_path))
    assert list_checkpoints(tmp_path) == (3,)
    assert f"warning: --save {tmp_path} has no file locks" in capsys.readouterr().out
