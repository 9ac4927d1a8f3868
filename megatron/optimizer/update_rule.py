"""What the optimizer asks of an update rule, and what it gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.distributed.grad_buffer import Bucket, EntrySlice
from megatron.core.kernels.adam import HyperSpans
from megatron.core.kernels.float_halves import Numbers


@dataclass(frozen=True, kw_only=True)
class FlatStep:
    """One update of one flat buffer of n elements.

    Attributes:
        parameter: [n] main parameters, updated in place; in halves where the model's bfloat16 is one of them.
        gradient: [n] in the same dtype or bfloat16, still multiplied by `gradient_scale`; may be overwritten.
        state: [n] each, by the names of the rule, updated in place.
        low_precision: [n] receives the rounded parameters, when the model computes in a narrower dtype.
        bucket: what it is a slice of.
        entries: where parameters, or parts of them, lie in it: for a rule that looks at whole ones.
        spans: hyper-parameters along the buffer; they tile it.
        number: of this update, from 1.
    """

    parameter: Numbers
    gradient: Tensor
    state: Mapping[str, Tensor]
    low_precision: Tensor | None
    bucket: Bucket
    entries: Sequence[EntrySlice]
    spans: HyperSpans
    number: int
    lr: float
    weight_decay: float
    gradient_scale: float


class UpdateRule(Protocol):
    """How parameters follow from gradients."""

    @property
    def name(self) -> str: ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """The flat tensors of state that it needs, each as long as the parameters and zero at first."""

    @property
    def narrow_states(self) -> frozenset[str]:
        """Those of them that are kept in bfloat16; the others have the dtype of the main parameters."""

    def update_(self, step: FlatStep) -> None: ...
