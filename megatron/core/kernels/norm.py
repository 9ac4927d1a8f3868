"""LayerNorm (https://arxiv.org/abs/1607.06450) and RMSNorm (https://arxiv.org/abs/1910.07467), with their gradients.

Kept for backward are the input and one or two numbers for each row, in float32 at least, as the computation is. RMSNorm
has a kernel; of LayerNorm, torch's own keeps as little and is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.kernels.apex import norm_by_apex, normalization
from megatron.core.kernels.dispatch import compiled_for, compute_dtype, tensor_argument
from megatron.core.kernels.extension import runs_in_apex

# Rows whose gradients of the weight are summed first, so that threads share the work and do not change the bits.
_GROUP = 32
_REFERENCE_COST = "3 to 5 times the time of the norm"


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension of x [.., h]; RMSNorm without a bias [h]. All are of one dtype."""
    if not torch.compiler.is_compiling() and runs_in_apex("rms_norm_cuda", x):
        return norm_by_apex(normalization(), x, weight, bias, epsilon)
    compiled = None if bias is not None else compiled_for("rms_norm", x, reference_cost=_REFERENCE_COST)
    if compiled is None:
        return norm_reference(x, weight, bias, epsilon)
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon, compiled)  # type: ignore[no-untyped-call]
    return normed


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """The same in plain torch."""
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    if x.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, epsilon)
    normed: Tensor = _RMSNormReference.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


def _arguments(x: Tensor, weight: Tensor, inverse: Tensor) -> dict[str, Any]:
    """What both kernels take."""
    assert weight.shape == x.shape[-1:], (weight.shape, x.shape)
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    return {
        "input": tensor_argument(x),
        "rows": inverse.numel(),
        "width": x.shape[-1],
        "weight": tensor_argument(weight)[0],
        "inverse": inverse.data_ptr(),
    }


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, compiled: Callable[..., Any]) -> Tensor:
        x = x.contiguous()
        inverse = torch.empty(x.shape[:-1].numel(), dtype=compute_dtype(x), device=x.device)
        output = torch.empty_like(x)
        compiled(**_arguments(x, weight, inverse), output=output.data_ptr(), epsilon=epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        compiled = compiled_for("rms_norm_gradient", x, reference_cost=_REFERENCE_COST)
        assert compiled is not None
        gradient = gradient.contiguous()
        x_gradient = torch.empty_like(x)
        groups = -(-inverse.numel() // _GROUP)
        weight_gradients = torch.empty(groups, *weight.shape, dtype=inverse.dtype, device=x.device)
        compiled(
            **_arguments(x, weight, inverse),
            gradient=gradient.data_ptr(),
            input_gradient=x_gradient.data_ptr(),
            weight_gradients=weight_gradients.data_ptr(),
            group=_GROUP,
        )
        return x_gradient, weight_gradients.sum(dim=0).to(weight.dtype), None, None


class _RMSNormReference(torch.autograd.Function):
    """Keeps its input and a number for each row; torch's own, on a CPU, keeps two copies in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(compute_dtype(x))
        scale = wide.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()  # [.., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale  # in the dtype of the scale
        of_normed = gradient * weight.to(scale.dtype)
        weight_gradient = (gradient * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        along = (of_normed * normed).mean(dim=-1, keepdim=True)
        return of_normed.sub_(normed.mul_(along)).mul_(scale).to(x.dtype), weight_gradient, None
