"""LayerNorm (https://arxiv.org/abs/1607.06450) and RMSNorm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.transformer import TransformerConfig
from megatron.core.shard import Init
from megatron.core.tensor_parallel.placement import Placement


class Norm(nn.Module):
    """The norm that the configuration names, over the last dimension.

    LayerNorm subtracts the mean, divides by the standard deviation, scales and shifts. RMSNorm divides by the root mean
    square and scales.

    Args:
        size: length of the last dimension.
        partial_gradient: whether each rank of the tensor-parallel group, which all hold the whole parameters, sees only
            a part of the tokens or heads, so that gradients must be summed.
    """

    def __init__(self, config: TransformerConfig, size: int, *, placement: Placement, partial_gradient: bool) -> None:
        super().__init__()
        self.shape = (size,)
        self.epsilon = config.norm_epsilon
        self.weight = placement.whole_parameter(size, init=Init.ones(), partial_gradient=partial_gradient)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = placement.whole_parameter(size, init=Init.zeros(), partial_gradient=partial_gradient)

    def forward(self, x: Tensor) -> Tensor:
        """Of the dtype of the parameters; `x` is computed with in its own, which is wider in a wide residual stream."""
        weight = self.weight.to(x.dtype)
        if self.bias is None:
            normed = F.rms_norm(x, self.shape, weight, self.epsilon) if x.is_cuda else rms_norm(x, weight, self.epsilon)
            return normed.to(self.weight.dtype)
        bias = self.bias.to(x.dtype)
        return F.layer_norm(x, self.shape, weight, bias, self.epsilon).to(self.weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm that keeps its input and a number for each row; torch's own, on a CPU, keeps two copies in fp32."""
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()  # [.., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale  # in the dtype of the scale
        of_normed = gradient * weight.to(scale.dtype)
        weight_gradient = (gradient * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        along = (of_normed * normed).mean(dim=-1, keepdim=True)
        return of_normed.sub_(normed.mul_(along)).mul_(scale).to(x.dtype), weight_gradient, None
