"""GELU by tanh (https://arxiv.org/abs/1606.08415) and SwiGLU (https://arxiv.org/abs/2002.05202), with their gradients.

Kept for backward is the input alone. Computed in float32 at least, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.kernels.dispatch import compiled_for, compute_dtype, tensor_argument

_Name = Literal["gelu", "swiglu"]
_REFERENCE_COST = "2 to 5 times the time of the function"


def gelu_tanh(x: Tensor) -> Tensor:
    """Of each element of `x`."""
    compiled = compiled_for("gelu", x, reference_cost=_REFERENCE_COST)
    if compiled is None:
        return F.gelu(x, approximate="tanh")
    activated: Tensor = _Activation.apply(x, "gelu", compiled)  # type: ignore[no-untyped-call]
    return activated


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x [.., 2 f] = [gate; up]: [.., f]."""
    compiled = compiled_for("swiglu", x, reference_cost=_REFERENCE_COST)
    if compiled is None:
        return swiglu_reference(x)
    activated: Tensor = _Activation.apply(x, "swiglu", compiled)  # type: ignore[no-untyped-call]
    return activated


def swiglu_reference(x: Tensor) -> Tensor:
    """The same in plain torch."""
    if torch.compiler.is_compiling():
        return _swiglu(x)
    activated: Tensor = _SwiGLUReference.apply(x)  # type: ignore[no-untyped-call]
    return activated


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.to(compute_dtype(x)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: _Name, compiled: Callable[..., Any]) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // (2 if name == "swiglu" else 1)
        output = x.new_empty(*x.shape[:-1], width)
        compiled(input=tensor_argument(x), rows=x.shape[:-1].numel(), width=width, output=output.data_ptr())
        ctx.save_for_backward(x)
        ctx.name, ctx.width = name, width
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        compiled = compiled_for(f"{ctx.name}_gradient", x, reference_cost=_REFERENCE_COST)
        assert compiled is not None
        gradient = gradient.contiguous()
        x_gradient = torch.empty_like(x)
        compiled(
            input=tensor_argument(x),
            rows=x.shape[:-1].numel(),
            width=ctx.width,
            gradient=gradient.data_ptr(),
            input_gradient=x_gradient.data_ptr(),
        )
        return x_gradient, None, None


class _SwiGLUReference(torch.autograd.Function):
    """Keeps its input alone: autograd would keep silu(gate), too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.to(compute_dtype(x)).chunk(2, dim=-1)
        passed = gate.sigmoid()
        slope = passed * (1 + gate * (1 - passed))  # of silu
        return torch.cat((gradient * up * slope, gradient * (gate * passed)), dim=-1).to(x.dtype)
