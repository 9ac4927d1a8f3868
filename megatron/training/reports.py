"""What a run says of itself: log lines, device memory, JSON lines, TensorBoard. Each is a hook."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from io import FileIO
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent
from torch.utils.tensorboard.writer import SummaryWriter

from megatron.config.logging import LoggingConfig
from megatron.config.problems import UserError
from megatron.core.agreement import agree
from megatron.training.metrics import Interval, StepReport, format_duration, json_number, log_line, perplexity
from megatron.training.run import Hook, Run
from megatron.training.timers import format_timers

# Seconds between two lines about an evaluation that goes on.
_EVALUATION_LINE_EVERY = 30.0


class LogLine(Hook):
    """Megatron-LM's line every `--log-interval` iterations and after the first one, with the timers' table."""

    def __init__(self, config: LoggingConfig) -> None:
        self._config = config
        self._interval = Interval()
        self._seconds_per_sample = 0.0
        self._evaluation_began = 0.0  # when its first iteration was over
        self._evaluation_said = 0.0

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
        run.say(
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
            run.say(format_timers(times, self._config.timing_log_option))
            for hook in run.hooks:
                hook.after_timing(run, times)
        interval.clear()

    def during_evaluation(self, run: Run, split: str, done: int, iterations: int) -> None:
        now = time.monotonic()
        if done == 1:
            self._evaluation_began = self._evaluation_said = now
        elif now - self._evaluation_said >= _EVALUATION_LINE_EVERY and done < iterations:
            left = (now - self._evaluation_began) / (done - 1) * (iterations - done)
            run.say(f" evaluation on {split} data | iteration {done:8d}/{iterations:8d} | ETA: {format_duration(left)}")
            self._evaluation_said = now

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        title = f" {split} loss at iteration {run.progress.iteration} | "
        parts = [f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E}" for name, loss in losses.items()]
        line = title + " | ".join(parts) + " | "
        rule = "-" * len(line)
        run.say(f"{rule}\n{line}\n{rule}")


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
        self._file: FileIO | None = None

    def on_start(self, run: Run) -> None:
        what = f"opening --log-json {self._path}"
        agree(run.state.world, what, lambda: self._open(run), raises=UserError)

    def _open(self, run: Run) -> None:
        if not run.context.reports:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b", buffering=0)
        if self._file.tell() > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a run that was killed, or a full disk, left a line without its end
                self._file.write(b"\n")

    def after_step(self, run: Run, report: StepReport) -> None:
        self._write(report.as_json())

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        named = {f"{name} {split}": json_number(loss) for name, loss in losses.items()}
        self._write({"iteration": run.progress.iteration, **named})

    def _write(self, row: Mapping[str, object]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(row).encode() + b"\n")
            except OSError as error:
                self._file = None
                _warn_without(f"--log-json {self._path}", error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _warn_without(what: str, error: Exception) -> None:
    """A log is not worth a training: what fails after the start is said once, and the run goes on without it."""
    print(f"warning: {what} can not be written any more ({error}); the run goes on without it", flush=True)


_VS_SAMPLES = " vs samples"


class TensorBoard(Hook):
    """Scalars under Megatron-LM's tags, each also against the number of samples."""

    def __init__(self, config: LoggingConfig) -> None:
        self._config = config
        self._writer: SummaryWriter | None = None
        self._excepthook = threading.excepthook

    def on_start(self, run: Run) -> None:
        what = f"opening --tensorboard-dir {self._config.tensorboard_dir}"
        agree(run.state.world, what, lambda: self._open(run), raises=UserError)

    def _open(self, run: Run) -> None:
        if not run.context.reports:
            return
        assert self._config.tensorboard_dir is not None
        iteration, samples = run.progress.iteration, run.progress.consumed_train_samples
        stale, kept = _points_before_resume(self._config.tensorboard_dir, iteration, samples)
        self._writer = SummaryWriter(
            self._config.tensorboard_dir,
            max_queue=self._config.tensorboard_queue_size,
            purge_step=iteration + 1 if stale else None,
        )
        threading.excepthook = self._silence_writer
        for tag, point in kept if stale else ():
            self._writer.add_scalar(tag, point.value, point.step, walltime=point.wall_time)
        self._writer.add_text("config", f"```\n{run.config.to_json()}\n```", run.progress.iteration)

    def _silence_writer(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread hands its error to the next call, which says it: no traceback as well."""
        if not type(failure.thread).__module__.startswith("tensorboard."):
            self._excepthook(failure)

    @contextmanager
    def _writing(self) -> Iterator[SummaryWriter]:
        """The writer, which is given up when it fails, whatever it fails of."""
        assert self._writer is not None
        try:
            yield self._writer
        except Exception as error:
            self._writer = None
            _warn_without(f"--tensorboard-dir {self._config.tensorboard_dir}", error)

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._writer is None or report.iteration % self._config.tensorboard_log_interval != 0:
            return
        values = {"learning-rate": report.next_learning_rate, "batch-size": report.global_batch_size, **report.losses}
        values["grad-norm"] = report.grad_norm
        if self._config.log_loss_scale_to_tensorboard:
            values["loss-scale"] = report.loss_scale
        if self._config.log_world_size_to_tensorboard:
            values["world-size"] = run.state.world.size
        if report.num_zeros is not None:
            values["num-zeros"] = report.num_zeros
        if report.params_norm is not None:
            values["params-norm"] = report.params_norm
        times = {"iteration-time": report.seconds}
        if self._config.log_throughput:
            speed = run.teraflops_per_second(report.global_batch_size, report.seconds)
            if speed is not None:
                times["throughput"] = speed
        self._add(values, iteration=report.iteration, samples=report.consumed_samples)
        self._add(times, iteration=report.iteration)

    def after_timing(self, run: Run, milliseconds: Mapping[str, Sequence[float]]) -> None:
        if self._config.log_timers_to_tensorboard:
            seconds = {f"{name}-time": max(values) / 1000.0 for name, values in milliseconds.items()}
            self._add(seconds, iteration=run.progress.iteration)

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        if split == "test":
            return
        values = {f"{name} {split}": loss for name, loss in losses.items()}
        if self._config.log_validation_ppl_to_tensorboard:
            values |= {f"{name} {split} ppl": perplexity(loss) for name, loss in losses.items()}
        self._add(values, iteration=run.progress.iteration, samples=run.progress.consumed_train_samples)

    def _add(self, values: Mapping[str, float], *, iteration: int, samples: int | None = None) -> None:
        """Points at an iteration, and with `samples` also against their number."""
        if self._writer is None:
            return
        with self._writing() as writer:
            for tag, value in values.items():
                writer.add_scalar(tag, value, iteration)
                if samples is not None:
                    writer.add_scalar(tag + _VS_SAMPLES, value, samples)

    def close(self) -> None:
        if self._writer is not None:
            with self._writing() as writer:
                writer.close()
        threading.excepthook = self._excepthook


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
