"""The optimizer step: global norm, overflow check, clipping, update, low-precision copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.config.problems import UserError
from megatron.core import collectives
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.grad_buffer import Bucket
from megatron.core.kernels.grad_norm import sum_of_squares
from megatron.core.shard import NamedTensor, shard_of
from megatron.optimizer.clip_grads import clip_factor, count_zeros
from megatron.optimizer.grad_scaler import GradScaler
from megatron.optimizer.mixed_precision import MainParameters
from megatron.optimizer.update_rule import UpdateRule


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What a step did; the same on all ranks.

    Attributes:
        applied: False when the step was skipped: nothing but the loss scale has changed.
        grad_norm: global norm of the unscaled gradients before clipping; not finite when one of them was not.
        num_zeros: gradient elements of the global model that are exactly zero, when that is counted.
        overflow: a skipped step that is part of the method: the loss scale was too large and is being lowered. A step
            that was skipped without it met a NaN or an infinity that no loss scale explains.
    """

    applied: bool
    grad_norm: float
    num_zeros: int | None
    overflow: bool = False


class MegatronOptimizer:
    """One optimizer for all model chunks of a rank: any update rule, in any precision.

    `step` expects final gradients in the buffers (`finalize_model_grads`). Each of its decisions comes from a
    number that was reduced over all ranks of the model, so all of them apply a step or none does.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        rule: UpdateRule,
        *,
        scaler: GradScaler,
        clip_grad: float,
        model_group: CommGroup,
        device: torch.device,
        count_zeros: bool = False,
        matrix_rule: UpdateRule | None = None,
        main_in_halves: bool = False,
    ) -> None:
        """
        Args:
            buckets: in the order in which they are updated, and gathered.
            clip_grad: largest global norm; 0 for no clipping.
            model_group: all ranks whose slices together are the model, once: tensor × pipeline, with the distributed
                optimizer × data.
            device: where the buckets are, or would be on a rank whose parameters are all frozen.
            count_zeros: report the number of zero gradient elements, for one more pass over the gradients.
            matrix_rule: for buckets of matrices inside layers, which then lie apart; None: `rule`.
            main_in_halves: of a model in bfloat16, keep no copy of the main parameters but the bits that it lacks.
        """
        self.rule = rule
        self.scaler = scaler
        self.clip_grad = clip_grad
        self.model_group = model_group
        self.matrix_rule = matrix_rule
        self.parts = tuple(
            MainParameters(bucket, self._rule_of(bucket), in_halves=main_in_halves) for bucket in buckets
        )
        self._device = device
        self._count_zeros = count_zeros
        self._updates = 0
        self._schedule: tuple[float, float] | None = None

    def _rule_of(self, bucket: Bucket) -> UpdateRule:
        if self.matrix_rule is None:
            return self.rule
        (matrices,) = {bool(shard_of(entry.parameter).matrices) for entry in bucket.entries}
        return self.matrix_rule if matrices else self.rule

    @property
    def loss_scale(self) -> float:
        """The factor that the losses of the next step must carry into their backward pass."""
        return self.scaler.scale

    def set_schedule(self, lr: float, weight_decay: float) -> None:
        """The learning rate and weight decay of the steps to come; nothing else sets them."""
        self._schedule = (lr, weight_decay)

    @torch.no_grad()
    def step(self) -> UpdateReport:
        """Update the parameters from the gradients; skip it when a gradient is not finite.

        With a dynamic loss scale such an overflow is part of the method and moves the scale. Without one it
        is a fault: the caller sees `applied=False` with a `grad_norm` that is not finite, and decides.
        """
        assert self._schedule is not None, "set_schedule() must be called before step()"
        lr, weight_decay = self._schedule
        scale = self.loss_scale
        grad_norm = self._norm(lambda part: sum_of_squares(part.gradient, part.owned)) / scale
        num_zeros = None
        if self._count_zeros:
            num_zeros = int(self._over_model(lambda part: count_zeros(part.gradient, part.owned), torch.int64))
        finite = math.isfinite(grad_norm)
        if finite:
            self._updates += 1
            gradient_scale = scale / clip_factor(grad_norm, self.clip_grad)
            for part in self.parts:
                part.bucket.finish_gather()
            for part in self.parts:
                part.update(number=self._updates, lr=lr, weight_decay=weight_decay, gradient_scale=gradient_scale)
                part.bucket.start_gather()
            for part in self.parts:
                if not part.bucket.awaited_by_modules:
                    part.bucket.finish_gather()
        overflow = not finite and self.scaler.absorbs_overflow
        self.scaler.update(found_inf=not finite)
        return UpdateReport(
            applied=finite,
            grad_norm=grad_norm,
            num_zeros=num_zeros,
            overflow=overflow,
        )

    def skip_step(self) -> UpdateReport:
        """The report of a step that changes nothing, such as one on a batch without a single token."""
        return UpdateReport(applied=False, grad_norm=0.0, num_zeros=None)

    @torch.no_grad()
    def params_norm(self) -> float:
        """Global norm of the main parameters; a collective over the ranks of the model."""
        return self._norm(lambda part: sum_of_squares(part.main, part.owned))

    def _norm(self, measure: Callable[[MainParameters], Tensor]) -> float:
        """The root of a sum of squares over the global model."""
        total = float(self._over_model(measure, torch.float64))
        return math.sqrt(total) if total >= 0 else total  # a NaN stays one

    def _over_model(self, measure: Callable[[MainParameters], Tensor], dtype: torch.dtype) -> Tensor:
        """Sum of a measure of each part's owned elements, over the ranks of the model."""
        total = torch.zeros((), dtype=dtype, device=self._device)
        for part in self.parts:
            total += measure(part)
        collectives.all_reduce_(total, self.model_group)
        return total

    def named_main_parameters(self) -> Iterator[NamedTensor]:
        """What the updates work on, of which the model's trainable parameters are the rounding, or which are these.

        They are the weights that a checkpoint keeps. To load one, copy into them and call `after_load`.
        """
        for part in self.parts:
            yield from part.named_main()

    def named_state(self) -> Iterator[NamedTensor]:
        """The rule's state as shards of global tensors. To load a checkpoint, copy into them."""
        for part in self.parts:
            yield from part.named_state()

    @torch.no_grad()
    def after_load(self) -> None:
        """Round the model's parameters from the main ones, which were loaded; a collective where these are slices."""
        for part in self.parts:
            part.after_load()
            part.bucket.start_gather()
            part.bucket.finish_gather()

    @property
    def name(self) -> str:
        """The value of `--optimizer`."""
        return self.rule.name if self.matrix_rule is None else self.matrix_rule.name

    @property
    def _state_names(self) -> list[str]:
        rules = [rule for rule in (self.rule, self.matrix_rule) if rule is not None]
        return [name for rule in rules for name in rule.state_names]

    def state_dict(self) -> dict[str, Any]:
        """What is not a tensor, as plain JSON values."""
        return {
            "rule": self.name,
            "state_names": self._state_names,
            "num_updates": self._updates,
            "grad_scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            UserError: the state is another optimizer's.
        """
        anew = "--no-load-optim starts the optimizer anew, --finetune the whole run"
        if state["rule"] != self.name:
            raise UserError(
                f"--optimizer {self.name}: it was saved with --optimizer {state['rule']}, whose state is another; "
                f"--optimizer {state['rule']} goes on with it, {anew}"
            )
        if state["state_names"] != self._state_names:
            saved, present = ("with" if names else "without" for names in (state["state_names"], self._state_names))
            raise UserError(
                f"--sgd-momentum: it was saved {saved} momentum, this run is {present}; the saved value goes on, {anew}"
            )
        self._updates = int(state["num_updates"])
        self.scaler.load_state_dict(state["grad_scaler"])
