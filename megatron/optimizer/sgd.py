"""Stochastic gradient descent with momentum, as an update rule over flat buffers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.kernels.float_halves import narrow_
from megatron.optimizer.update_rule import FlatStep


@dataclass(frozen=True, kw_only=True)
class SGD:
    """g += decay·p; m = momentum·m + g; p -= lr·m, the decay in the gradient as in `torch.optim.SGD`."""

    momentum: float = 0.9

    @property
    def name(self) -> str:
        return "sgd"

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update_(self, step: FlatStep) -> None:
        sizes = [span.length for span in step.spans.spans]
        parameters = step.parameter.split_with_sizes(sizes)
        gradients = step.gradient.split_with_sizes(sizes)
        if step.gradient_scale != 1.0:
            step.gradient.div_(step.gradient_scale)
        for span, parameter, gradient in zip(step.spans.spans, parameters, gradients):
            decay = step.weight_decay * span.weight_decay_multiplier
            if decay:
                gradient.add_(parameter, alpha=decay)
        if self.momentum:
            direction = step.state["momentum"].mul_(self.momentum).add_(step.gradient)
        else:
            direction = step.gradient
        step.parameter.add_(direction, alpha=-step.lr)
        if step.low_precision is not None:
            narrow_(step.parameter, step.low_precision)
