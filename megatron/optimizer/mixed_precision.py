"""Main parameters and optimizer state of a slice of a gradient buffer, as flat tensors beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.distributed.grad_buffer import Bucket
from megatron.core.kernels.adam import HyperSpan, HyperSpans
from megatron.core.kernels.float_halves import Halves, Numbers, narrow_
from megatron.core.kernels.grad_norm import ElementSpans, Span
from megatron.core.shard import FlatRange, NamedTensor, shard_of
from megatron.optimizer.clip_grads import merge_spans, owned_spans
from megatron.optimizer.update_rule import FlatStep, UpdateRule


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to biases nor to any norm, which are all vectors."""
    return len(shard_of(parameter).global_shape) > 1


class MainParameters:
    """What an update rule reads and writes for this rank's slice of one `Bucket`.

    The main parameters have the model's dtype when that is float32 or float64, and are its own buffer; else (bfloat16,
    float16) they are a float32 copy from which the model's are rounded after each update; or, in halves, the model's
    bfloat16 itself and the bits that rounding takes away.

    Attributes:
        main: [n] main parameters of the slice.
        low_precision: [n] the model's parameters when they are not `main`.
        gradient: [n] their gradients, in the dtype of the gradient buffer.
        state: [n] each.
        spans: hyper-parameters along the slice. A span takes in the zeros up to the next parameter, which any
            rule leaves zero; so all spans are multiples of the buffer's alignment long.
        owned: the elements that count in norms on this rank.
    """

    def __init__(self, bucket: Bucket, rule: UpdateRule, *, in_halves: bool = False) -> None:
        self.bucket = bucket
        self.rule = rule
        self.entries = tuple(bucket.slice_entries())
        self.gradient = bucket.slice_of(bucket.gradients)
        parameters = bucket.slice_of(bucket.parameters)
        main_dtype = torch.promote_types(parameters.dtype, torch.float32)
        self.main: Numbers
        self.low_precision: Tensor | None = None
        if parameters.dtype == main_dtype:
            self.main = parameters
        elif in_halves and parameters.dtype == torch.bfloat16:
            self.main = Halves(parameters, torch.zeros_like(parameters, dtype=torch.int16))
        else:
            self.main, self.low_precision = parameters.to(main_dtype), parameters
        self.state = {
            name: torch.zeros_like(parameters, dtype=torch.bfloat16 if name in rule.narrow_states else main_dtype)
            for name in rule.state_names
        }
        self.spans = HyperSpans(self._hyper_spans(), self.main.device)
        self.owned = ElementSpans(self._owned_spans(), self.main.device)

    def _hyper_spans(self) -> list[HyperSpan]:
        """They tile the slice; the first one takes in what lies before it, the end of a parameter's padding."""
        starts = [0, *(entry.start for entry in self.entries[1:]), self.main.numel()]
        spans: list[HyperSpan] = []
        for entry, start, stop in zip(self.entries, starts, starts[1:]):
            multiplier = 1.0 if decays(entry.parameter) else 0.0
            span = HyperSpan(length=stop - start, weight_decay_multiplier=multiplier)
            if spans and spans[-1].weight_decay_multiplier == span.weight_decay_multiplier:
                last = spans.pop()
                span = HyperSpan(length=last.length + span.length, weight_decay_multiplier=span.weight_decay_multiplier)
            spans.append(span)
        return spans or [HyperSpan(length=self.main.numel(), weight_decay_multiplier=0.0)]

    def _owned_spans(self) -> list[Span]:
        """What of the parameters is owned, within the slice."""
        return merge_spans(
            (entry.start + max(start, entry.first) - entry.first, entry.start + min(stop, entry.stop) - entry.first)
            for entry in self.entries
            for start, stop in owned_spans(shard_of(entry.parameter), tuple(entry.parameter.shape))
            if start < entry.stop and stop > entry.first
        )

    def update(self, *, number: int, lr: float, weight_decay: float, gradient_scale: float) -> None:
        self.rule.update_(
            FlatStep(
                parameter=self.main,
                gradient=self.gradient,
                state=self.state,
                low_precision=self.low_precision,
                bucket=self.bucket,
                entries=self.entries,
                spans=self.spans,
                number=number,
                lr=lr,
                weight_decay=weight_decay,
                gradient_scale=gradient_scale,
            )
        )

    def lasting_tensors(self) -> list[Tensor]:
        """What is in memory as long as the run: main parameters, which may be the model's in part, and the state."""
        main = [self.main.upper, self.main.lower] if isinstance(self.main, Halves) else [self.main]
        return [*main, *self.state.values()]

    def named_main(self) -> Iterator[NamedTensor]:
        """The main parameters, as the weights of the model."""
        return self._named("model", self.main)

    def named_state(self) -> Iterator[NamedTensor]:
        for kind, flat in self.state.items():
            yield from self._named(f"optimizer.{kind}", flat)

    def _named(self, prefix: str, flat: Numbers) -> Iterator[NamedTensor]:
        """Views of a flat tensor, by parameter: in its shape, or of a slice the elements that are in it."""
        for entry in self.entries:
            shard, shape = shard_of(entry.parameter), tuple(entry.parameter.shape)
            assert shard.name, f"{entry.entry.name} has no global name"
            key = f"{prefix}.{shard.name}"
            part = entry.view(flat)
            if self.bucket.sharded:
                elements = FlatRange(shape=shape, first=entry.first, stop=entry.stop)
                yield NamedTensor(key=key, tensor=part, shard=shard, elements=elements)
            else:
                yield NamedTensor(key=key, tensor=part.view(shape), shard=shard)

    def after_load(self) -> None:
        """Round the model's parameters from the main ones again."""
        if self.low_precision is not None:
            assert isinstance(self.main, Tensor)
            narrow_(self.main, self.low_precision)
