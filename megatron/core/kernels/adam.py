"""AdamW over a whole flat buffer in one call: unscale, clip, moments, decay, parameters, low-precision copy.

`adamw_` runs the compiled kernel, `adamw_reference_` is the mathematics in plain operations. Loshchilov and Hutter,
"Decoupled Weight Decay Regularization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.apex import adamw_by_apex_, multi_tensor_adam
from megatron.core.kernels.dispatch import compiled_for, tensor_argument
from megatron.core.kernels.extension import runs_in_apex
from megatron.core.kernels.float_halves import joined, narrow_, split_


@dataclass(frozen=True, kw_only=True)
class HyperSpan:
    """A span of consecutive elements of a flat buffer that share their hyper-parameters.

    Attributes:
        length: number of elements. The spans of a buffer tile it: each starts where the one before it ends.
        weight_decay_multiplier: 0 on biases and norms.
    """

    length: int
    weight_decay_multiplier: float = 1.0
    lr_multiplier: float = 1.0


class HyperSpans:
    """The spans of a buffer, written out for the kernel once and for all.

    Attributes:
        spans: in the order of the buffer.
        size: number of elements that they tile.
        ends, lr_multipliers, weight_decay_multipliers: [k] of each span, int64 and float64, where the buffer is.
    """

    def __init__(self, spans: Iterable[HyperSpan], device: torch.device) -> None:
        self.spans = tuple(spans)
        ends = list(accumulate(span.length for span in self.spans))
        self.size = ends[-1] if ends else 0
        self.ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self.lr_multipliers, self.weight_decay_multipliers = (
            torch.tensor(multipliers, dtype=torch.float64, device=device)
            for multipliers in (
                [span.lr_multiplier for span in self.spans],
                [span.weight_decay_multiplier for span in self.spans],
            )
        )


@dataclass(frozen=True, kw_only=True)
class AdamHyperParameters:
    """What one AdamW step needs besides the tensors.

    Attributes:
        step: number of this update, from 1, for the bias corrections.
        gradient_scale: what the gradients still have to be divided by: loss scale over clip factor.
        decoupled: weight decay shrinks the parameter itself (AdamW); else it is added to its gradient (Adam with L2).
    """

    step: int
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    gradient_scale: float = 1.0
    decoupled: bool = True


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    spans: HyperSpans,
    hyper: AdamHyperParameters,
    low_precision: Tensor | None = None,
    remainder: Tensor | None = None,
) -> None:
    """One AdamW step, in place, on flat tensors [n].

    Args:
        parameter: float32 or float64. The computation is in its dtype. Or bfloat16, the upper halves of float32
            parameters: see `float_halves`. Then the computation is in float32, to the same bits.
        gradient: in the dtype of the computation or bfloat16; may be overwritten.
        exp_avg, exp_avg_sq: each in that dtype or bfloat16.
        spans: tile the n elements.
        low_precision: [n] bfloat16 or float16; receives the parameters rounded by `narrow_`.
        remainder: [n] int16, the lower halves where `parameter` is the upper ones.

    With the compiled kernel an element has the same bits at any place of the buffer, with any number of threads, and on
    any device. Without it torch's fused functional runs, where the dtypes are equal: that takes the last elements of a
    span that do not fill a vector one by one, so spans should be multiples of 64 long.
    """
    assert spans.size == parameter.numel(), "the spans do not tile the buffer"
    if parameter.numel() == 0:
        return
    tensors = (parameter, gradient, exp_avg, exp_avg_sq)
    if runs_in_apex("adamw_cuda", parameter):
        assert remainder is None, "Apex knows whole parameters only"
        adamw_by_apex_(multi_tensor_adam(), *tensors, spans=spans, hyper=hyper, low_precision=low_precision)
        return
    compiled = compiled_for("adamw", parameter, reference_cost="up to twice the time of an update")
    if compiled is not None:
        adamw_compiled_(compiled, *tensors, spans=spans, hyper=hyper, low_precision=low_precision, remainder=remainder)
    elif remainder is None and {tensor.dtype for tensor in tensors} == {parameter.dtype}:
        _adamw_of_torch_(*tensors, spans=spans, hyper=hyper, low_precision=low_precision)
    else:
        adamw_reference_(*tensors, spans=spans, hyper=hyper, low_precision=low_precision, remainder=remainder)


def adamw_compiled_(
    compiled: Callable[..., Any],
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    spans: HyperSpans,
    hyper: AdamHyperParameters,
    low_precision: Tensor | None,
    remainder: Tensor | None = None,
) -> None:
    """The same by a kernel of `compiled_for`."""
    for tensor in (gradient, exp_avg, exp_avg_sq, low_precision, remainder):
        assert tensor is None or (tensor.shape == parameter.shape and tensor.device == parameter.device)
    assert remainder is None or remainder.dtype == torch.int16, remainder
    assert spans.ends.device == parameter.device, spans.ends.device
    compiled(
        size=parameter.numel(),
        parameter=tensor_argument(parameter),
        gradient=tensor_argument(gradient),
        exp_avg=tensor_argument(exp_avg),
        exp_avg_sq=tensor_argument(exp_avg_sq),
        low_precision=tensor_argument(low_precision),
        remainder=tensor_argument(remainder)[0],
        num_spans=len(spans.spans),
        span_ends=spans.ends.data_ptr(),
        lr_multipliers=spans.lr_multipliers.data_ptr(),
        weight_decay_multipliers=spans.weight_decay_multipliers.data_ptr(),
        **vars(hyper),
    )


def _adamw_of_torch_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    spans: HyperSpans,
    hyper: AdamHyperParameters,
    low_precision: Tensor | None,
) -> None:
    """The same through torch's fused functional, for tensors of one dtype; overwrites the gradient."""
    grad_scale = None
    if hyper.gradient_scale != 1.0:
        if parameter.dtype == torch.float64:  # torch's kernel reads the factor as float32
            gradient.div_(hyper.gradient_scale)
        else:
            grad_scale = torch.full((), hyper.gradient_scale, dtype=torch.float32, device=parameter.device)
    # The CUDA kernel reads it as float32 whatever the parameters are; that is exact up to 2**24 updates.
    dtype = torch.float32 if parameter.is_cuda else parameter.dtype
    step = torch.full((), float(hyper.step), dtype=dtype, device=parameter.device)
    update = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
    sizes = [span.length for span in spans.spans]
    views = [flat.split_with_sizes(sizes) for flat in (parameter, gradient, exp_avg, exp_avg_sq)]
    multipliers = [(span.lr_multiplier, span.weight_decay_multiplier) for span in spans.spans]
    for lr, weight_decay in sorted(set(multipliers)):
        members = [i for i, pair in enumerate(multipliers) if pair == (lr, weight_decay)]
        parameters, gradients, exp_avgs, exp_avg_sqs = ([view[i] for i in members] for view in views)
        update(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(members),
            lr=lr * hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=weight_decay * hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
        )
    if low_precision is not None:
        narrow_(parameter, low_precision)


def adamw_reference_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    spans: HyperSpans,
    hyper: AdamHyperParameters,
    low_precision: Tensor | None = None,
    remainder: Tensor | None = None,
) -> None:
    """The same as `adamw_` in plain operations; `gradient` is left alone."""
    assert spans.size == parameter.numel(), "the spans do not tile the buffer"
    main = parameter if remainder is None else joined(parameter, remainder)
    correction1 = 1 - hyper.beta1**hyper.step
    correction2 = 1 - hyper.beta2**hyper.step
    start = 0
    for span in spans.spans:
        p, g, m, v = (flat[start : start + span.length] for flat in (main, gradient, exp_avg, exp_avg_sq))
        lr, weight_decay = span.lr_multiplier * hyper.lr, span.weight_decay_multiplier * hyper.weight_decay
        g = g.to(p.dtype) / hyper.gradient_scale
        if hyper.decoupled:
            p.mul_(1 - lr * weight_decay)
        else:
            g.add_(p, alpha=weight_decay)
        new_m = m.to(p.dtype, copy=True).mul_(hyper.beta1).add_(g, alpha=1 - hyper.beta1)
        new_v = v.to(p.dtype, copy=True).mul_(hyper.beta2).addcmul_(g, g, value=1 - hyper.beta2)
        p.addcdiv_(new_m, (new_v.sqrt() / math.sqrt(correction2)).add_(hyper.eps), value=-lr / correction1)
        m.copy_(new_m)
        v.copy_(new_v)
        start += span.length
    if remainder is not None:
        split_(main, parameter, remainder)
    if low_precision is not None:
        narrow_(main, low_precision)
