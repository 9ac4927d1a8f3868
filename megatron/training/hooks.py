"""What steers a run around its iterations: evaluation and exits. The loop knows none of them by name."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from types import FrameType
from typing import Any

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.core.collectives import all_gather_object, all_reduce_
from megatron.training.failures import LauncherGone, NonFiniteError, launcher_gone
from megatron.training.metrics import StepReport
from megatron.training.run import Hook, Loader, Run
from megatron.training.train_step import evaluate


class Evaluation(Hook):
    """Validation every `--eval-interval` iterations and at the end, then the test data once.

    Each validation reads on where the last one stopped, with `--full-validation` all its data from the start. The one
    at the end does not count as read: a run that is resumed with more iterations validates on the same samples as one
    that had them from the start.
    """

    def __init__(self, interval: int | None, iterations: int, *, full: bool = False) -> None:
        self._interval = interval
        self._iterations = iterations
        self._full = full
        self._validated_at: int | None = None

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._interval is not None and report.iteration % self._interval == 0:
            self._validate(run)
            if run.loaders.valid and not self._full:
                run.progress.consumed_valid_samples += self._iterations * run.batch_sizes.global_batch_size

    def on_end(self, run: Run) -> None:
        complete = run.progress.iteration >= run.train_iters or run.config.training.skip_train
        if not complete or run.stop_reason is not None:
            return
        if self._validated_at != run.progress.iteration:
            self._validate(run)
        if run.loaders.test is not None:
            self._evaluate(run, run.loaders.test, "test", self._iterations, 0)

    def _validate(self, run: Run) -> None:
        consumed = 0 if self._full else run.progress.consumed_valid_samples
        for each in run.loaders.valid:
            self._evaluate(run, each.loader, each.split, each.iterations, consumed)
            self._validated_at = run.progress.iteration

    def _evaluate(self, run: Run, loader: Loader, split: str, iterations: int, consumed: int) -> None:
        losses = evaluate(run, loader, split, iterations, consumed)
        if losses is not None:
            for hook in run.hooks:
                hook.after_evaluation(run, split, losses)


class Exits(Hook):
    """Ends the run at an iteration, after a time, on a signal or without its launcher, on all ranks together."""

    def __init__(
        self,
        *,
        interval: int | None,
        minutes: float | None,
        signal_number: signal.Signals | None,
        started: float,
        launcher: int | None,
    ) -> None:
        """
        Args:
            minutes: how long the program may run, counted from `started`, a reading of `time.monotonic`: whatever
                limits the time of a job counts the start of the program too.
            launcher: the process that must be alive; None where none has to be.
        """
        self._interval = interval
        self._minutes = minutes
        self._signal = signal_number
        self._received = False
        self._started = started
        self._launcher = launcher
        self._previous: Any = None

    def on_start(self, run: Run) -> None:
        if self._signal is not None:
            self._previous = signal.signal(self._signal, self._note_signal)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def after_step(self, run: Run, report: StepReport) -> None:
        self._heed(run)
        # The last iteration ends the run anyway, and what belongs to its end is not to be left out.
        if self._interval is not None and report.iteration % self._interval == 0 and report.iteration < run.train_iters:
            run.stop(f"reached --exit-interval {self._interval}")

    def during_evaluation(self, run: Run, split: str, done: int, iterations: int) -> None:
        self._heed(run)

    def _heed(self, run: Run) -> None:
        """Ranks see clocks, signals and the end of their launcher at different moments: they agree on them, so that
        all leave together.

        Raises:
            LauncherGone: nobody watches over the ranks of a node. The run ends as if they had been killed with their
                launcher, without a checkpoint: whoever did that wants an end now, and may have started the run again
                already, which must neither wait for this one nor write to a folder with it.
        """
        if self._minutes is None and self._signal is None and self._launcher is None:
            return
        late = self._minutes is not None and (time.monotonic() - self._started) / 60.0 > self._minutes
        alone = launcher_gone(self._launcher)
        wishes = torch.tensor([self._received, late, alone], dtype=torch.int32, device=run.device)
        all_reduce_(wishes, run.state.world, "max")
        received, late, alone = wishes.tolist()
        if alone:
            raise LauncherGone(
                f"stopped after iteration {run.progress.iteration}: torchrun, which had started the ranks, is gone; "
                f"what came after the last checkpoint was not saved, as the run may have been started again by now"
            )
        if received and self._signal is not None:
            run.stop(f"received {self._signal.name}")
        if late:
            run.stop(f"ran for --exit-duration-in-mins {self._minutes:g}")

    def close(self) -> None:
        if self._signal is not None and self._previous is not None:
            signal.signal(self._signal, self._previous)


class StopOnNaN(Hook):
    """Ends the run with an error when a loss or the gradient norm is not finite."""

    def after_step(self, run: Run, report: StepReport) -> None:
        """
        Raises:
            NonFiniteError: on all ranks.
        """
        # Known on all ranks, so all of them end here with one text, though the losses are known on some only.
        if not report.nan:
            return
        mine = [f"rank {run.state.rank}: {_some(report.faults)}"] if report.faults else []
        everyone = all_gather_object((mine, dict(report.losses)), run.state.world)
        losses = {name: loss for _, known in everyone for name, loss in known.items()}
        faults = [fault for found, _ in everyone for fault in found]
        raise NonFiniteError(
            f"iteration {report.iteration}: the gradient norm is {report.grad_norm}"
            + "".join(f", {name} {loss}" for name, loss in losses.items())
            + (f"; gradients were not finite, before any reduction, on {_some(faults, '; ')}" if faults else "")
            + f"; the weights were not updated. {_remedy(run.config.optimizer, report, losses)}"
        )


def _remedy(optimizer: OptimizerConfig, report: StepReport, losses: Mapping[str, float]) -> str:
    """What to change before the next try."""
    otherwise = "with a lower --lr or more warm-up, or skip such iterations with --no-check-for-nan-in-loss-and-grad"
    if optimizer.precision != "fp16" or not all(map(isfinite, losses.values())):
        return f"Resume from the last checkpoint {otherwise}"
    # The losses are finite in fp32; their gradients, in float16, go to 65504.
    flag, dynamic = "--min-loss-scale", "keeps the dynamic loss scale from going below it"
    if optimizer.loss_scale is not None:
        flag, dynamic = "--loss-scale", "is fixed; without the flag an overflow lowers it"
    smaller = min(report.loss_scale / 2, 4096.0)
    return (
        f"The losses being finite, a loss scale of {report.loss_scale} may be too large for gradients in float16, and "
        f"{flag} {dynamic}: try {flag} {smaller} or less. If that does not help, resume from the last checkpoint "
        f"{otherwise}"
    )


def _some(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
