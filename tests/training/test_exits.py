"""Ends before the last iteration: a signal, an iteration, a time; each with a checkpoint, on all ranks together."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpointing import read_tracker
from megatron.training.failures import LauncherGone
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.pretrain import pretrain, train
from megatron.training.run import Hook, Run
from pretrain_gpt import forward_step
from tests.helpers.launch import Launched, launch, launch_tiny, rows_of
from tests.helpers.tiny import TINY_GPT, context_of_rank, tiny_config
from tests.training.runs import build, trained


def iterations_logged(folder: Path) -> int:
    file = folder / "log.json"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_iteration(run: Launched, folder: Path, iteration: int) -> None:
    deadline = time.monotonic() + 30
    while iterations_logged(folder) < iteration:
        assert time.monotonic() < deadline
        assert all(process.is_alive() for process in run.processes), run.wait(0)
        time.sleep(0.005)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_saves_and_ends_all_ranks_at_the_same_iteration(name: str, tmp_path: Path) -> None:
    arguments = ["--train-iters", "100000", "--save", "saved", "--log-json", "log.json", "--exit-signal-handler"]
    run = launch_tiny(
        tmp_path, *arguments, "--exit-signal", name, "--tensor-model-parallel-size", "2", ranks=2
    )  # fmt: skip
    wait_for_iteration(run, tmp_path, 3)
    assert run.processes[0].pid is not None
    os.kill(run.processes[0].pid, signal.Signals[name])
    outcome = run.wait(30).check()
    done = iterations_logged(tmp_path)
    assert read_tracker(tmp_path / "saved") == done >= 3
    assert f"stopped after iteration {done}: received {name}" in outcome.out[1]
    again = launch_tiny(
        tmp_path, *arguments, "--load", "saved", "--exit-interval", str(done + 1), "--tensor-model-parallel-size", "2",
        ranks=2,
    ).wait(30).check()  # fmt: skip
    assert f"at iteration {done}" in again.out[1]
    assert [row["iteration"] for row in rows_of(tmp_path / "log.json")] == list(range(1, done + 2))


def test_without_the_handler_a_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    run = launch_tiny(tmp_path, "--train-iters", "100000", "--save", "saved", "--log-json", "log.json")
    wait_for_iteration(run, tmp_path, 1)
    run.processes[0].terminate()
    assert run.wait(30).codes == [-signal.SIGTERM]
    assert read_tracker(tmp_path / "saved") is None


def test_the_handler_is_taken_back_at_the_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    trained("--exit-signal-handler", "--train-iters", "1")
    assert signal.getsignal(signal.SIGTERM) == before


def test_exit_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted from the start of training: a resumed run stops at the next multiple."""
    arguments = ["--train-iters", "7", "--exit-interval", "3", "--save", str(tmp_path), "--eval-iters", "1"]
    first, recorder = trained(*arguments)
    assert first.progress.iteration == read_tracker(tmp_path) == 3
    assert "stopped after iteration 3: reached --exit-interval 3" in capsys.readouterr().out
    assert recorder.evaluations == []  # the run is not at its end
    assert trained(*arguments, "--load", str(tmp_path))[0].progress.iteration == 6
    last, recorder = trained(*arguments, "--load", str(tmp_path))
    assert last.progress.iteration == read_tracker(tmp_path) == 7
    assert last.stop_reason is None
    assert len(recorder.evaluations) == 1


def test_exit_duration_counts_from_the_start_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    monkeypatch.setattr("megatron.training.hooks.time.monotonic", lambda: started + 61.0)
    run, _ = trained("--train-iters", "7", "--exit-duration-in-mins", "1", "--save", str(tmp_path))
    assert run.progress.iteration == read_tracker(tmp_path) == 1
    assert "stopped after iteration 1: ran for --exit-duration-in-mins 1" in capsys.readouterr().out


def test_a_run_within_its_duration_goes_on() -> None:
    run, _ = trained("--exit-duration-in-mins", "10")
    assert run.progress.iteration == 3


# ---- during an evaluation ----


class SignalDuringEvaluation(Hook):
    """Sends this process a signal after some iterations of an evaluation."""

    def __init__(self, after: int) -> None:
        self.after = after

    def during_evaluation(self, run: Run, split: str, done: int, iterations: int) -> None:
        if done == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("interval, at", [(2, 2), (5, 3)], ids=["between-iterations", "at-the-end"])
def test_a_signal_ends_an_evaluation_and_saves(
    interval: int, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--eval-iters", "5", "--eval-interval", str(interval), "--save", str(tmp_path), "--split", "80,10,10"]
    run, recorder = build(*arguments, "--exit-signal-handler")
    run.hooks = [SignalDuringEvaluation(2), *run.hooks]
    train(run)
    said = capsys.readouterr().out
    assert "evaluation on validation data given up after 2 of 5 iterations" in said
    assert f"stopped after iteration {at}: received SIGTERM" in said
    assert read_tracker(tmp_path) == at
    assert recorder.evaluations == []
    # the samples count as read: the validations after a resume are those of a run that was never stopped
    assert run.progress.consumed_valid_samples == (5 * 8 if at < 3 else 0)


def test_an_exit_interval_that_meets_the_last_iteration_leaves_nothing_out() -> None:
    run, recorder = trained("--exit-interval", "3", "--eval-iters", "1")
    assert run.stop_reason is None
    assert len(recorder.evaluations) == 1


# ---- the launcher ----


def test_without_its_launcher_a_run_ends_and_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, recorder = build("--save", str(tmp_path), "--train-iters", "9")
    (exits,) = (hook for hook in run.hooks if type(hook).__name__ == "Exits")
    exits._launcher = 4321  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "getppid", lambda: 4321 if len(recorder.steps) < 2 else 1)
    with pytest.raises(LauncherGone, match="stopped after iteration 2: torchrun, which had started the ranks, is gone"):
        train(run)
    assert read_tracker(tmp_path) is None


def test_a_run_that_nobody_watches_over_may_lose_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `nohup` and the end of a shell."""
    parents = iter(range(10**6))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    assert trained()[0].progress.iteration == 3


def test_the_end_of_the_launcher_is_said_by_rank_0_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        config = tiny_config(world_size=1)
        context = replace(context_of_rank(config, 0, 1), state=replace(context_of_rank(config, 0, 1).state, rank=rank))
        with pytest.raises(SystemExit, match="1"), context.exiting():
            raise LauncherGone("torchrun is gone")
    assert capsys.readouterr().err == "torchrun is gone\n"


# ---- Ctrl-C ----


def test_an_interrupt_is_said_in_one_line(tmp_path: Path) -> None:
    arguments = ["--train-iters", "100000", "--log-json", "log.json", "--tensor-model-parallel-size", "2"]
    run = launch_tiny(tmp_path, *arguments, ranks=2)
    wait_for_iteration(run, tmp_path, 2)
    for process in run.processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    outcome = run.wait(30)
    assert outcome.codes == [130, 130]
    said = "".join(outcome.err)
    assert said.count("interrupted; the last checkpoint stays as it is\n") == 1
    assert "Traceback" not in said


def pretrain_and_name_threads() -> None:
    run = pretrain(gpt_datasets, gpt_model, forward_step)
    threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    print(f"after iteration {run.progress.iteration}, threads:", *threads)


def test_no_thread_of_a_communicator_outlives_the_run(tmp_path: Path) -> None:
    """One that frees a tensor while Python ends would abort the program, with all its work done."""
    layout = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    done = launch(
        pretrain_and_name_threads, [*TINY_GPT, *layout, "--train-iters", "1"], ranks=4, folder=tmp_path
    ).wait()
    for out in done.check().out:
        said = out[out.index("after iteration 1, threads:") :]
        assert "gloo" not in said, said
