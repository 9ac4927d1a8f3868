"""Learning rate and weight decay as functions of the number of samples trained on.

Steps are counted in samples, so that a schedule does not depend on the batch size. The first update uses the values at
step 0: with a warm-up that is `init_lr`, by default 0, as in Megatron-LM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from megatron.config.megatron_config import ScheduleLengths
from megatron.config.optimizer import DecayStyle, OptimizerConfig, WeightDecayStyle, WsdDecayStyle
from megatron.config.problems import UserError

OnLoad = Literal["check", "override", "use_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """Linear warm-up from `init_lr` to `max_lr`, then a decay to `min_lr`, which holds from there on.

    Attributes:
        lr_warmup_steps, lr_decay_steps: in samples, both from the start of training. May be fractions of
            samples.
        wsd_decay_steps: length of the final decay of warm-up, stable, decay (Hu et al., "MiniCPM", 2024).
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    lr_warmup_steps: float = 0
    lr_decay_steps: float
    lr_decay_style: DecayStyle = "linear"
    wsd_decay_steps: float | None = None
    lr_wsd_decay_style: WsdDecayStyle = "exponential"

    def __post_init__(self) -> None:
        assert 0 <= self.min_lr <= self.max_lr, (self.min_lr, self.max_lr)
        assert 0 <= self.init_lr <= self.max_lr, (self.init_lr, self.max_lr)
        assert 0 <= self.lr_warmup_steps < self.lr_decay_steps, (self.lr_warmup_steps, self.lr_decay_steps)
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None and 0 < self.wsd_decay_steps <= self.lr_decay_steps, self

    def at(self, num_steps: float) -> float:
        """The learning rate of an update that comes after `num_steps` samples."""
        if self.lr_warmup_steps > 0 and num_steps <= self.lr_warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * num_steps / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return self.max_lr
        if num_steps > self.lr_decay_steps:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            warmup = max(self.lr_warmup_steps, 1)
            return max(self.min_lr, self.max_lr * math.sqrt(warmup) / math.sqrt(max(num_steps, 1)))
        return self.min_lr + self._height(num_steps) * (self.max_lr - self.min_lr)

    def _height(self, num_steps: float) -> float:
        """From 1 at `max_lr` to 0 at `min_lr`, after the warm-up."""
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None
            start = self.lr_decay_steps - self.wsd_decay_steps
            return 1.0 if num_steps <= start else self._wsd_height((num_steps - start) / self.wsd_decay_steps)
        ratio = (num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        return 1.0 - ratio if self.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)

    def _wsd_height(self, ratio: float) -> float:
        if self.lr_wsd_decay_style == "linear":
            return 1.0 - ratio
        if self.lr_wsd_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        if self.lr_wsd_decay_style == "exponential":
            return float(2.0 * 0.5**ratio - 1.0)
        return 1.0 - math.sqrt(ratio)


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay that grows from `start_wd` to `end_wd` over `wd_incr_steps` samples and stays there."""

    start_wd: float
    end_wd: float
    wd_incr_steps: float = 0
    wd_incr_style: WeightDecayStyle = "constant"

    def __post_init__(self) -> None:
        assert 0 <= self.start_wd <= self.end_wd, (self.start_wd, self.end_wd)
        if self.wd_incr_style == "constant":
            assert self.start_wd == self.end_wd, (self.start_wd, self.end_wd)
        else:
            assert self.wd_incr_steps > 0, self.wd_incr_steps

    def at(self, num_steps: float) -> float:
        """The weight decay of an update that comes after `num_steps` samples."""
        if self.wd_incr_style == "constant" or num_steps > self.wd_incr_steps:
            return self.end_wd
        ratio = num_steps / self.wd_incr_steps
        height = ratio if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.start_wd + height * (self.end_wd - self.start_wd)


_LENGTH_OF_TRAINING = ("--train-iters", "--train-samples")
# The keys of a saved state that two runs must agree in, and the flags that set them.
_FLAGS = {
    "max_lr": ("--lr",),
    "min_lr": ("--min-lr",),
    "init_lr": ("--lr-warmup-init",),
    "lr_warmup_steps": ("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction"),
    "lr_decay_steps": ("--lr-decay-iters", "--lr-decay-samples", *_LENGTH_OF_TRAINING),
    "lr_decay_style": ("--lr-decay-style",),
    "wsd_decay_steps": ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
    "lr_wsd_decay_style": ("--lr-wsd-decay-style",),
    "start_wd": ("--start-weight-decay", "--weight-decay"),
    "end_wd": ("--end-weight-decay", "--weight-decay"),
    "wd_incr_steps": _LENGTH_OF_TRAINING,
    "wd_incr_style": ("--weight-decay-incr-style",),
}
# Those that say nothing to a run that goes on with the schedules of its checkpoint.
SCHEDULE_FLAGS = frozenset(flag for flags in _FLAGS.values() for flag in flags).difference(_LENGTH_OF_TRAINING)


class ParamScheduler:
    """Where a run stands in its schedules. It holds no optimizer: the loop hands `lr` and `weight_decay` over
    each step.

    So nothing depends on the order in which optimizer and scheduler are built or loaded, and the values of
    the first step after a resume are those of its position. The state is plain JSON, apart from the
    optimizer's tensors: a run that leaves those behind (`--no-load-optim`) still knows where it is.
    """

    def __init__(
        self,
        learning_rate: LearningRateSchedule,
        weight_decay: WeightDecaySchedule,
        *,
        on_load: OnLoad = "check",
        samples_per_iteration: int | None = None,
    ) -> None:
        """
        Args:
            on_load: when a checkpoint was written with another schedule: "check" refuses, "override" keeps
                the present one, "use_checkpoint" takes over the saved one.
            samples_per_iteration: to name lengths in iterations too, where they were given so.
        """
        self.learning_rate_schedule = learning_rate
        self.weight_decay_schedule = weight_decay
        self.on_load = on_load
        self.samples_per_iteration = samples_per_iteration
        self.num_steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self.learning_rate_schedule.at(self.num_steps)

    @property
    def weight_decay(self) -> float:
        """Weight decay of the next update."""
        return self.weight_decay_schedule.at(self.num_steps)

    def step(self, increment: int) -> None:
        """Go on by the samples of an applied update."""
        assert increment >= 0, increment
        self.num_steps += increment

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, under Megatron-LM's names."""
        return {
            "num_steps": self.num_steps,
            **asdict(self.learning_rate_schedule),
            **asdict(self.weight_decay_schedule),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the position, and treat the schedules as `on_load` says. Values that the state lacks are
        not compared.

        Raises:
            UserError: the schedules differ and `on_load` is "check"; names each difference.
        """
        if self.on_load == "check":
            self._refuse_differences(state)
        elif self.on_load == "use_checkpoint":
            self.learning_rate_schedule = replace(self.learning_rate_schedule, **_present(LearningRateSchedule, state))
            self.weight_decay_schedule = replace(self.weight_decay_schedule, **_present(WeightDecaySchedule, state))
        self.num_steps = int(state["num_steps"])

    def _refuse_differences(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        without_effect = set()
        if "constant" == mine["lr_decay_style"] == state.get("lr_decay_style"):
            without_effect.add("lr_decay_steps")
        if mine["lr_decay_style"] != "WSD":
            without_effect |= {"wsd_decay_steps", "lr_wsd_decay_style"}
        if "constant" == mine["wd_incr_style"] == state.get("wd_incr_style", "constant"):
            without_effect.add("wd_incr_steps")
        lines = [
            f"  {key} ({', '.join(flags)}): {self._shown(key, state[key])} in the checkpoint, "
            f"{self._shown(key, mine[key])} in this run"
            for key, flags in _FLAGS.items()
            if key in state and state[key] != mine[key] and key not in without_effect
        ]
        if lines:
            raise UserError(
                "the schedule of this run is not the one of the checkpoint:\n" + "\n".join(lines) + "\n"
                "Give the saved values, --override-opt_param-scheduler to go on with this run's, or "
                "--use-checkpoint-opt_param-scheduler to go on with the checkpoint's."
            )

    def _shown(self, key: str, value: object) -> str:
        """A value, and a length as it may have been given: in iterations of this run, too."""
        if not key.endswith("_steps") or not isinstance(value, int | float):
            return repr(value)
        if self.samples_per_iteration is None:
            return f"{value!r} samples"
        return f"{value!r} samples ({value / self.samples_per_iteration:.10g} iterations)"


def build_param_scheduler(
    config: OptimizerConfig,
    lengths: ScheduleLengths,
    *,
    on_load: OnLoad = "check",
    samples_per_iteration: int | None = None,
) -> ParamScheduler:
    """The schedules of a run, whose lengths in samples follow from its configuration."""
    return ParamScheduler(
        LearningRateSchedule(
            max_lr=config.lr,
            min_lr=config.min_lr,
            init_lr=config.lr_warmup_init,
            lr_warmup_steps=lengths.warmup,
            lr_decay_steps=lengths.decay,
            lr_decay_style=config.lr_decay_style,
            wsd_decay_steps=lengths.wsd_decay,
            lr_wsd_decay_style=config.lr_wsd_decay_style,
        ),
        WeightDecaySchedule(
            start_wd=config.weight_decay if config.start_weight_decay is None else config.start_weight_decay,
            end_wd=config.weight_decay if config.end_weight_decay is None else config.end_weight_decay,
            wd_incr_steps=lengths.weight_decay_ramp,
            wd_incr_style=config.weight_decay_incr_style,
        ),
        on_load=on_load,
        samples_per_iteration=samples_per_iteration,
    )


def _present(schedule: type[LearningRateSchedule | WeightDecaySchedule], state: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: state[field.name] for field in fields(schedule) if field.name in state}
