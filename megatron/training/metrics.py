"""What an iteration reports: the field's log line, and the same as JSON with full precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import exp, isfinite, nan


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One training iteration.

    Attributes:
        iteration: counted from 1.
        losses: each loss term, the sum over the tokens of the global batch by their number; empty on ranks that do not
            hold the output, and when the step was skipped for want of tokens.
        applied: whether the weights were updated.
        nan: a loss is not finite, or the gradient norm is not and this is no overflow of the loss scale.
        faults: parameters whose gradient was not finite on this rank before any reduction, where that is looked for.
        learning_rate, weight_decay: those that this iteration's update used.
        next_learning_rate: that of the next iteration, which is the one the field's log line shows.
        seconds: wall-clock time of the iteration.
    """

    iteration: int
    losses: Mapping[str, float]
    applied: bool
    nan: bool
    faults: Sequence[str]
    grad_norm: float
    num_zeros: int | None
    params_norm: float | None
    loss_scale: float
    learning_rate: float
    next_learning_rate: float
    weight_decay: float
    global_batch_size: int
    consumed_samples: int
    tokens: int
    seconds: float

    def as_json(self) -> dict[str, object]:
        """Plain values with full precision; a value that is not finite is written as its name ("nan", "inf")."""
        row: dict[str, object] = {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "global_batch_size": self.global_batch_size,
            **{name: json_number(value) for name, value in self.losses.items()},
            "grad_norm": json_number(self.grad_norm),
            "loss_scale": self.loss_scale,
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "applied": self.applied,
            "tokens_per_second": self.tokens / self.seconds,
            "seconds": self.seconds,
        }
        if self.num_zeros is not None:
            row["num_zeros"] = self.num_zeros
        if self.params_norm is not None:
            row["params_norm"] = json_number(self.params_norm)
        return row


def json_number(value: float) -> float | str:
    """JSON has no word for NaN and the infinities: they are written as text."""
    return value if isfinite(value) else str(value)


def perplexity(loss: float) -> float:
    """As Megatron-LM prints it, at most e^20; that of NaN is NaN."""
    return exp(min(loss, 20.0))


@dataclass
class Interval:
    """The iterations since the last log line."""

    reports: list[StepReport] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        self.reports.append(report)

    def clear(self) -> None:
        self.reports.clear()

    @property
    def seconds(self) -> float:
        return sum(report.seconds for report in self.reports)

    @property
    def tokens(self) -> int:
        return sum(report.tokens for report in self.reports)

    @property
    def skipped(self) -> int:
        return sum(not report.applied for report in self.reports)

    @property
    def nan(self) -> int:
        return sum(report.nan for report in self.reports)

    def mean_losses(self) -> dict[str, float]:
        """Mean of each loss over the iterations whose update was applied; over all of them when none was.

        A loss that is not finite makes the mean so: it is printed, never left out.
        """
        counted = [report for report in self.reports if report.applied or report.nan] or self.reports
        names = dict.fromkeys(name for report in counted for name in report.losses)
        return {name: sum(report.losses.get(name, nan) for report in counted) / len(counted) for name in names}


def log_line(
    interval: Interval, *, train_iters: int, now: datetime, tflops_per_second: float | None, remaining: float
) -> str:
    """Megatron-LM's line of an iteration, with tokens per second and the time that is left at its end.

    Args:
        interval: the iterations since the last line; the last one is the line's own.
        tflops_per_second: of one rank; None leaves it out.
        remaining: seconds until the last iteration.
    """
    last = interval.reports[-1]
    milliseconds = 1000.0 * interval.seconds / len(interval.reports)
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {last.iteration:8d}/{train_iters:8d}",
        f" consumed samples: {last.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {milliseconds:.1f}",
    ]
    if tflops_per_second is not None:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {tflops_per_second:.{1 if tflops_per_second >= 1 else 4}f}")
    parts.append(f" learning rate: {last.next_learning_rate:.6E}")
    parts.append(f" global batch size: {last.global_batch_size:5d}")
    parts += [f" {name}: {value:.6E}" for name, value in interval.mean_losses().items()]
    parts.append(f" loss scale: {last.loss_scale:.1f}")
    parts.append(f" grad norm: {last.grad_norm:.3f}")
    if last.num_zeros is not None:
        parts.append(f" num zeros: {last.num_zeros}")
    if last.params_norm is not None:
        parts.append(f" params norm: {last.params_norm:.3f}")
    parts.append(f" number of skipped iterations: {interval.skipped:3d}")
    parts.append(f" number of nan iterations: {interval.nan:3d}")
    parts.append(f" tokens/s: {interval.tokens / interval.seconds:.0f}")
    parts.append(f" ETA: {format_duration(remaining)} ")
    return " |".join(parts) + "|"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds, with days in front when there are any."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours:d}:{minutes:02d}:{seconds_left:02d}"
