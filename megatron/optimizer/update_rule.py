"""What the optimizer asks of an update rule, and what it gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.kernels.adam import HyperSpans


@dataclass(frozen=True, kw_only=True)
class FlatStep:
    """One update of one flat buffer of n elements.

    Attributes:
        parameter: [n] main parameters, updated in place.
        gradient: [n] in the same dtype, still multiplied by `gradient_scale`; may be overwritten.
        state: [n] each, by the names of the rule, updated in place.
        low_precision: [n] receives the rounded parameters, when the model computes in a narrower dtype.
        spans: hyper-parameters along the buffer; they tile it.
        number: of this update, from 1.
    """

    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    low_precision: Tensor | None
    spans: HyperSpans
    number: int
    lr: float
    weight_decay: float
    gradient_scale: float


class UpdateRule(Protocol):
    """How parameters follow from gradients, element by element."""

    @property
    def name(self) -> str: ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """The flat tensors of state that it needs, each as long as the parameters and zero at first."""

    def update_(self, step: FlatStep) -> None: ...
