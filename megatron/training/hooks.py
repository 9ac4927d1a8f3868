"""What happens around the iterations: logging, evaluation, exits, saving. The loop knows none of them by name."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent
from torch.utils.tensorboard.writer import SummaryWriter

from megatron.config.logging import LoggingConfig
from megatron.config.problems import UserError
from megatron.core.collectives import all_gather_object, all_reduce_
from megatron.training.checkpoints import save_run
from megatron.training.metrics import Interval, StepReport, json_number, log_line, perplexity
from megatron.training.run import Run
from megatron.training.save_folder import SaveFolder
from megatron.training.timers import format_timers
from megatron.training.train_step import evaluate


class Hook:
    """Called on each rank. A hook that communicates must do so on all ranks in the same iteration."""

    def on_start(self, run: Run) -> None:
        """Before the first iteration."""

    def after_step(self, run: Run, report: StepReport) -> None:
        """After each iteration."""

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        """After an evaluation on "validation" or "test" data; the losses are known on ranks with the output."""

    def after_timing(self, run: Run, milliseconds: Mapping[str, Sequence[float]]) -> None:
        """After a table of timers: of each timer the mean of an iteration, on each rank."""

    def on_end(self, run: Run) -> None:
        """After the last iteration of this process: the run is complete, or it was asked to stop."""

    def close(self) -> None:
        """At the very end, also when an error ends the run: let go of files and signals."""


class LogLine(Hook):
    """Megatron-LM's line every `--log-interval` iterations and after the first one, with the timers' table."""

    def __init__(self, config: LoggingConfig) -> None:
        self._config = config
        self._interval = Interval()
        self._seconds_per_sample = 0.0

    def after_step(self, run: Run, report: StepReport) -> None:
        self._interval.add(report)
        first = len(self._interval.reports) == 1 and not self._seconds_per_sample
        if report.iteration % self._config.log_interval != 0 and not first and not report.nan:
            return
        interval = self._interval
        samples = sum(each.global_batch_size for each in interval.reports)
        self._seconds_per_sample = interval.seconds / samples
        left = (run.train_iters - report.iteration) * report.global_batch_size * self._seconds_per_sample
        speed = None
        if self._config.log_throughput:
            speed = run.teraflops_per_second(samples, interval.seconds)
        run.print(
            log_line(
                interval,
                train_iters=run.train_iters,
                now=datetime.now(),
                tflops_per_second=speed,
                remaining=left,
            )
        )
        if self._config.timing_log_level > 0:
            times = run.timers.over_ranks(run.state.world, iterations=len(interval.reports))
            run.print(format_timers(times, self._config.timing_log_option))
            for hook in run.hooks:
                hook.after_timing(run, times)
        interval.clear()

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        title = f" {split} loss at iteration {run.progress.iteration} | "
        parts = [f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E}" for name, loss in losses.items()]
        line = title + " | ".join(parts) + " | "
        rule = "-" * len(line)
        run.print(f"{rule}\n{line}\n{rule}")


class MemoryReport(Hook):
    """Device memory after the first two iterations, when all lasting tensors exist. Nothing on a CPU."""

    def after_step(self, run: Run, report: StepReport) -> None:
        if run.device.type != "cuda" or report.iteration > 2 or not run.state.data.is_first:
            return
        memory = torch.cuda.memory_stats(run.device)
        values = {
            "allocated": memory["allocated_bytes.all.current"],
            "max allocated": memory["allocated_bytes.all.peak"],
            "reserved": memory["reserved_bytes.all.current"],
            "max reserved": memory["reserved_bytes.all.peak"],
        }
        text = " | ".join(f"{name}: {value / 2**20:.1f}" for name, value in values.items())
        print(f"[Rank {run.state.rank}] (after {report.iteration} iterations) memory (MB) | {text}", flush=True)


class JsonLog(Hook):
    """One JSON object a line for each iteration and evaluation, with full precision (`--log-json`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def on_start(self, run: Run) -> None:
        if not run.logs:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--log-json {self._path} can not be written ({error.strerror}); give a file in a folder that can"
            ) from error

    def after_step(self, run: Run, report: StepReport) -> None:
        self._write(report.as_json())

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        named = {f"{name} {split}": json_number(loss) for name, loss in losses.items()}
        self._write({"iteration": run.progress.iteration, **named})

    def _write(self, row: Mapping[str, object]) -> None:
        if self._file is not None:
            print(json.dumps(row), file=self._file, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


_VS_SAMPLES = " vs samples"


class TensorBoard(Hook):
    """Scalars under Megatron-LM's tags, each also against the number of samples."""

    def __init__(self, config: LoggingConfig) -> None:
        self._config = config
        self._writer: SummaryWriter | None = None

    def on_start(self, run: Run) -> None:
        if run.logs:
            assert self._config.tensorboard_dir is not None
            iteration, samples = run.progress.iteration, run.progress.consumed_train_samples
            stale, kept = _points_before_resume(self._config.tensorboard_dir, iteration, samples)
            self._writer = SummaryWriter(
                self._config.tensorboard_dir,
                max_queue=self._config.tensorboard_queue_size,
                purge_step=iteration + 1 if stale else None,
            )
            for tag, point in kept if stale else ():
                self._writer.add_scalar(tag, point.value, point.step, walltime=point.wall_time)
            self._writer.add_text("config", f"```\n{run.config.to_json()}\n```", run.progress.iteration)

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._writer is None or report.iteration % self._config.tensorboard_log_interval != 0:
            return
        self._scalar("learning-rate", report.next_learning_rate, report.iteration, report.consumed_samples)
        self._scalar("batch-size", report.global_batch_size, report.iteration, report.consumed_samples)
        for name, loss in report.losses.items():
            self._scalar(name, loss, report.iteration, report.consumed_samples)
        self._scalar("grad-norm", report.grad_norm, report.iteration, report.consumed_samples)
        if self._config.log_loss_scale_to_tensorboard:
            self._scalar("loss-scale", report.loss_scale, report.iteration, report.consumed_samples)
        if self._config.log_world_size_to_tensorboard:
            self._scalar("world-size", run.state.world.size, report.iteration, report.consumed_samples)
        if report.num_zeros is not None:
            self._scalar("num-zeros", report.num_zeros, report.iteration, report.consumed_samples)
        if report.params_norm is not None:
            self._scalar("params-norm", report.params_norm, report.iteration, report.consumed_samples)
        self._writer.add_scalar("iteration-time", report.seconds, report.iteration)
        if self._config.log_throughput:
            speed = run.teraflops_per_second(report.global_batch_size, report.seconds)
            if speed is not None:
                self._writer.add_scalar("throughput", speed, report.iteration)

    def after_timing(self, run: Run, milliseconds: Mapping[str, Sequence[float]]) -> None:
        if self._writer is not None and self._config.log_timers_to_tensorboard:
            for name, values in milliseconds.items():
                self._writer.add_scalar(f"{name}-time", max(values) / 1000.0, run.progress.iteration)

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        if self._writer is None or split != "validation":
            return
        iteration, samples = run.progress.iteration, run.progress.consumed_train_samples
        for name, loss in losses.items():
            self._scalar(f"{name} validation", loss, iteration, samples)
            if self._config.log_validation_ppl_to_tensorboard:
                self._scalar(f"{name} validation ppl", perplexity(loss), iteration, samples)

    def _scalar(self, tag: str, value: float, iteration: int, samples: int) -> None:
        assert self._writer is not None
        self._writer.add_scalar(tag, value, iteration)
        self._writer.add_scalar(tag + _VS_SAMPLES, value, samples)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _points_before_resume(folder: str, iteration: int, samples: int) -> tuple[bool, list[tuple[str, ScalarEvent]]]:
    """What a log holds at the start of a run.

    A killed run has written points past its last checkpoint, which are to be hidden, so that each step shows once.
    TensorBoard hides by the step alone, whatever the tag: the points against the number of samples, whose steps are
    larger numbers, would all go with them, so those up to the checkpoint must be written again.

    Returns:
        Whether there are points past `iteration`, and the points against samples up to `samples`, with their tags.
    """
    if not Path(folder).is_dir():
        return False, []
    log = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 1})
    log.Reload()
    points = [(tag, point) for tag in log.Tags()["scalars"] for point in log.Scalars(tag)]
    stale = any(point.step > (samples if tag.endswith(_VS_SAMPLES) else iteration) for tag, point in points)
    return stale, [(tag, point) for tag, point in points if tag.endswith(_VS_SAMPLES) and point.step <= samples]


class Evaluation(Hook):
    """Validation every `--eval-interval` iterations and at the end, then the test data once.

    Each validation reads on where the last one stopped. The one at the end does not count as read: a run that is
    resumed with more iterations validates on the same samples as one that had them from the start.
    """

    def __init__(self, interval: int | None, iterations: int) -> None:
        self._interval = interval
        self._iterations = iterations
        self._validated_at: int | None = None

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._interval is not None and report.iteration % self._interval == 0:
            self._validate(run)
            if run.loaders.valid is not None:
                run.progress.consumed_valid_samples += self._iterations * run.batch_sizes.global_batch_size

    def on_end(self, run: Run) -> None:
        if run.progress.iteration < run.train_iters and not run.config.training.skip_train:
            return
        if self._validated_at != run.progress.iteration:
            self._validate(run)
        if run.loaders.test is not None:
            losses = evaluate(run, run.loaders.test, self._iterations, 0)
            for hook in run.hooks:
                hook.after_evaluation(run, "test", losses)

    def _validate(self, run: Run) -> None:
        if run.loaders.valid is None:
            return
        losses = evaluate(run, run.loaders.valid, self._iterations, run.progress.consumed_valid_samples)
        self._validated_at = run.progress.iteration
        for hook in run.hooks:
            hook.after_evaluation(run, "validation", losses)


class Exits(Hook):
    """Ends the run at an iteration, after a time, or on a signal, on all ranks in the same iteration."""

    def __init__(
        self, *, interval: int | None, minutes: float | None, signal_number: signal.Signals | None, started: float
    ) -> None:
        """
        Args:
            minutes: how long the program may run, counted from `started`, a reading of `time.monotonic`: whatever
                limits the time of a job counts the start of the program too.
        """
        self._interval = interval
        self._minutes = minutes
        self._signal = signal_number
        self._received = False
        self._started = started
        self._previous: Any = None

    def on_start(self, run: Run) -> None:
        if self._signal is not None:
            self._previous = signal.signal(self._signal, self._note_signal)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._minutes is not None or self._signal is not None:
            late = self._minutes is not None and (time.monotonic() - self._started) / 60.0 > self._minutes
            # Ranks see clocks and signals at different moments: they agree, so that all leave together.
            wish = torch.tensor([self._received, late], dtype=torch.int32, device=run.device)
            all_reduce_(wish, run.state.world, "max")
            received, late = wish.tolist()
            if received and self._signal is not None:
                run.stop(f"received {self._signal.name}")
            if late:
                run.stop(f"ran for --exit-duration-in-mins {self._minutes:g}")
        if self._interval is not None and report.iteration % self._interval == 0:
            run.stop(f"reached --exit-interval {self._interval}")

    def close(self) -> None:
        if self._signal is not None and self._previous is not None:
            signal.signal(self._signal, self._previous)


class StopOnNaN(Hook):
    """Ends the run with an error when a loss or the gradient norm is not finite."""

    def after_step(self, run: Run, report: StepReport) -> None:
        # Known on all ranks, so all of them end here with one text, though the losses are known on some only.
        if not report.nan:
            return
        mine = [f"rank {run.state.rank}: {_some(report.faults)}"] if report.faults else []
        everyone = all_gather_object((mine, dict(report.losses)), run.state.world)
        losses = {name: loss for _, known in everyone for name, loss in known.items()}
        faults = [fault for found, _ in everyone for fault in found]
        raise FloatingPointError(
            f"iteration {report.iteration}: the gradient norm is {report.grad_norm}"
            + "".join(f", {name} {loss}" for name, loss in losses.items())
            + (f"; gradients were not finite, before any reduction, on {_some(faults, '; ')}" if faults else "")
            + "; the weights were not updated. Resume from the last checkpoint with a lower --lr or more warm-up, "
            "or skip such iterations with --no-check-for-nan-in-loss-and-grad"
        )


def _some(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Saving(Hook):
    """A checkpoint every `--save-interval` iterations, and when the run ends before or at its last one."""

    def __init__(self, folder: SaveFolder, interval: int | None) -> None:
        self._folder = folder
        self._interval = interval
        self._last: int | None = None

    def on_start(self, run: Run) -> None:
        self._last = run.progress.iteration  # what was just loaded, or nothing worth keeping, needs no saving

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._interval is not None and report.iteration % self._interval == 0:
            self._save(run)

    def on_end(self, run: Run) -> None:
        self._save(run)

    def _save(self, run: Run) -> None:
        if self._last != run.progress.iteration:
            save_run(run, self._folder.path)
            self._last = run.progress.iteration

    def close(self) -> None:
        self._folder.close()
