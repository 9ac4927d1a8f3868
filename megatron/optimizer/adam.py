"""AdamW, as an update rule over flat buffers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.kernels.adam import AdamHyperParameters, adamw_
from megatron.core.kernels.float_halves import Halves
from megatron.optimizer.update_rule import FlatStep


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    narrow_states: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return "adam"

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update_(self, step: FlatStep) -> None:
        parameter = step.parameter
        adamw_(
            parameter.upper if isinstance(parameter, Halves) else parameter,
            step.gradient,
            step.state["exp_avg"],
            step.state["exp_avg_sq"],
            spans=step.spans,
            hyper=AdamHyperParameters(
                step=step.number,
                lr=step.lr,
                weight_decay=step.weight_decay,
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.eps,
                gradient_scale=step.gradient_scale,
            ),
            low_precision=step.low_precision,
            remainder=parameter.lower if isinstance(parameter, Halves) else None,
        )
