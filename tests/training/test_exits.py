"""Ends before the last iteration: a signal, an iteration, a time; each with a checkpoint, on all ranks together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megatron.checkpointing import read_tracker
from tests.helpers.launch import Launched, launch_tiny, rows_of
from tests.training.runs import trained


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
