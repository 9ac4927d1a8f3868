"""Stochastic gradient descent with momentum, as an update rule over flat buffers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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

    @property
    def narrow_states(self) -> frozenset[str]:
        return frozenset()

    def update_(self, step: FlatStep) -> None:
        assert isinstance(step.parameter, Tensor)
        sizes = [span.length for span in step.spans.spans]
        parameters = step.parameter.split_with_sizes(sizes)
        gradient = step.gradient.to(step.parameter.dtype)
        if step.gradient_scale != 1.0:
            gradient.div_(step.gradient_scale)
        gradients = gradient.split_with_sizes(sizes)
        for span, parameter, part in zip(step.spans.spans, parameters, gradients):
            decay = step.weight_decay * span.weight_decay_multiplier
            if decay:
                part.add_(parameter, alpha=decay)
        if self.momentum:
            direction = step.state["momentum"].mul_(self.momentum).add_(gradient)
        else:
            direction = gradient
        step.parameter.add_(direction, alpha=-step.lr)
        if step.low_precision is not None:
            narrow_(step.parameter, step.low_precision)
