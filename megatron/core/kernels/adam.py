"""AdamW over a whole flat buffer in one call: unscale, clip, moments, decay, parameters, low-precision copy.

This is the interface that a fused kernel fills in. `adamw_` goes through torch's own fused functional,
`adamw_reference_` is the mathematics in plain operations. Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HyperSpan:
    """A span of consecutive elements of a flat buffer that share their hyper-parameters.

    Attributes:
        length: number of elements. The spans of a buffer tile it: each starts where the one before it ends.
        weight_decay_multiplier: 0 on biases and norms.
    """

    length: int
    weight_decay_multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AdamHyperParameters:
    """What one AdamW step needs besides the tensors.

    Attributes:
        step: number of this update, from 1, for the bias corrections.
        gradient_scale: what the gradients still have to be divided by: loss scale over clip factor.
    """

    step: int
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    gradient_scale: float = 1.0


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    spans: Sequence[HyperSpan],
    hyper: AdamHyperParameters,
    low_precision: Tensor | None = None,
) -> None:
    """One AdamW step, in place, on flat tensors of one shape [n] and dtype (float32 or float64).

    Args:
        gradient: may be overwritten.
        spans: tile the n elements.
        low_precision: [n] in the model's dtype; receives the rounded parameters.

    Equal inputs give equal bits, at any position in the buffer: torch's kernel takes the last elements of a
    span that do not fill a vector one by one, so spans should be multiples of 64 long.
    """
    assert sum(span.length for span in spans) == parameter.numel(), "the spans do not tile the buffer"
    if parameter.numel() == 0:
        return
    grad_scale = None
    if hyper.gradient_scale != 1.0:
        if parameter.dtype == torch.float64:  # torch's kernel reads the factor as float32
            gradient.div_(hyper.gradient_scale)
        else:
            grad_scale = torch.full((), hyper.gradient_scale, dtype=torch.float32, device=parameter.device)
    # The CUDA kernel reads it as float32 whatever the parameters are; that is exact up to 2**24 updates.
    dtype = torch.float32 if parameter.is_cuda else parameter.dtype
    step = torch.full((), float(hyper.step), dtype=dtype, device=parameter.device)
    sizes = [span.length for span in spans]
    views = [flat.split_with_sizes(sizes) for flat in (parameter, gradient, exp_avg, exp_avg_sq)]
    for weight_decay in sorted({span.weight_decay_multiplier for span in spans}):
        members = [i for i, span in enumerate(spans) if span.weight_decay_multiplier == weight_decay]
        parameters, gradients, exp_avgs, exp_avg_sqs = ([view[i] for i in members] for view in views)
        torch._fused_adamw_(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(members),
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=weight_decay * hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
        )
    if low_precision is not None:
        low_precision.copy_(parameter)


def adamw_reference_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    spans: Sequence[HyperSpan],
    hyper: AdamHyperParameters,
    low_precision: Tensor | None = None,
) -> None:
    """The same as `adamw_` in plain operations; `gradient` is left alone."""
    assert sum(span.length for span in spans) == parameter.numel(), "the spans do not tile the buffer"
    correction1 = 1 - hyper.beta1**hyper.step
    correction2 = 1 - hyper.beta2**hyper.step
    start = 0
    for span in spans:
        p, g, m, v = (flat[start : start + span.length] for flat in (parameter, gradient, exp_avg, exp_avg_sq))
        g = g / hyper.gradient_scale
        p.mul_(1 - hyper.lr * span.weight_decay_multiplier * hyper.weight_decay)
        m.mul_(hyper.beta1).add_(g, alpha=1 - hyper.beta1)
        v.mul_(hyper.beta2).addcmul_(g, g, value=1 - hyper.beta2)
        p.addcdiv_(m, v.sqrt().div_(math.sqrt(correction2)).add_(hyper.eps), value=-hyper.lr / correction1)
        start += span.length
    if low_precision is not None:
        low_precision.copy_(parameter)
