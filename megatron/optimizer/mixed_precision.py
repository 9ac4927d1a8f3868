"""Main parameters and optimizer state of one gradient buffer, as flat tensors beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron.core.distributed.grad_buffer import GradBuffer
from megatron.core.kernels.adam import HyperSpan, HyperSpans
from megatron.core.kernels.grad_norm import ElementSpans
from megatron.core.shard import NamedTensor, shard_of
from megatron.optimizer.clip_grads import merge_spans, owned_spans
from megatron.optimizer.update_rule import FlatStep, UpdateRule


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to biases nor to any norm, which are all vectors."""
    return len(shard_of(parameter).global_shape) > 1


class MainParameters:
    """What an update rule reads and writes for one `GradBuffer`.

    The main parameters have the dtype of the gradients. When that is the model's dtype too, they are the
    model's own buffer; else (bfloat16, float16) they are a float32 copy from which the model's are rounded
    after each update.

    Attributes:
        main: [n] main parameters.
        low_precision: [n] the model's parameters when they are not `main`.
        state: [n] each.
        spans: hyper-parameters along the buffer. A span takes in the zeros up to the next parameter, which any
            rule leaves zero; so all spans are multiples of the buffer's alignment long.
        owned: the elements that count in norms on this rank.
    """

    def __init__(self, buffer: GradBuffer, rule: UpdateRule) -> None:
        self.buffer = buffer
        self.rule = rule
        model_is_main = buffer.parameters.dtype == buffer.gradients.dtype
        self.main = buffer.parameters if model_is_main else buffer.parameters.to(buffer.gradients.dtype)
        self.low_precision = None if model_is_main else buffer.parameters
        self.state = {name: torch.zeros_like(self.main) for name in rule.state_names}
        self.spans = HyperSpans(self._hyper_spans(), self.main.device)
        owned = merge_spans(
            (entry.start + start, entry.start + stop)
            for entry in buffer.entries
            for start, stop in owned_spans(shard_of(entry.parameter), tuple(entry.parameter.shape))
        )
        self.owned = ElementSpans(owned, self.main.device)

    def _hyper_spans(self) -> list[HyperSpan]:
        starts = [entry.start for entry in self.buffer.entries] + [self.buffer.parameters.numel()]
        spans: list[HyperSpan] = []
        for entry, start, stop in zip(self.buffer.entries, starts, starts[1:]):
            span = HyperSpan(length=stop - start, weight_decay_multiplier=1.0 if decays(entry.parameter) else 0.0)
            if spans and spans[-1].weight_decay_multiplier == span.weight_decay_multiplier:
                last = spans.pop()
                span = HyperSpan(length=last.length + span.length, weight_decay_multiplier=span.weight_decay_multiplier)
            spans.append(span)
        return spans

    def update(self, *, number: int, lr: float, weight_decay: float, gradient_scale: float) -> None:
        self.rule.update_(
            FlatStep(
                parameter=self.main,
                gradient=self.buffer.gradients,
                state=self.state,
                low_precision=self.low_precision,
                spans=self.spans,
                number=number,
                lr=lr,
                weight_decay=weight_decay,
                gradient_scale=gradient_scale,
            )
        )

    def of_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter of the model with its main one, a view in the same shape."""
        for entry in self.buffer.entries:
            yield entry.parameter, entry.view(self.main)

    def named_state(self) -> Iterator[NamedTensor]:
        """Views of the state, by parameter."""
        for kind, flat in self.state.items():
            for entry in self.buffer.entries:
                shard = shard_of(entry.parameter)
                assert shard.name, f"{entry.name} has no global name"
                yield NamedTensor(key=f"optimizer.{kind}.{shard.name}", tensor=entry.view(flat), shard=shard)

    def after_load(self) -> None:
        """Round the model's parameters from the main ones again."""
        if self.low_precision is not None:
            self.low_precision.copy_(self.main)
