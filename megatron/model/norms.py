"""LayerNorm (https://arxiv.org/abs/1607.06450) and RMSNorm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.transformer import TransformerConfig
from megatron.core.kernels.norm import norm
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
        self.epsilon = config.norm_epsilon
        self.weight = placement.whole_parameter(size, init=Init.ones(), partial_gradient=partial_gradient)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = placement.whole_parameter(size, init=Init.zeros(), partial_gradient=partial_gradient)

    def forward(self, x: Tensor) -> Tensor:
        """Of the dtype of the parameters; `x` is computed with in its own, which is wider in a wide residual stream."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return norm(x, self.weight.to(x.dtype), bias, self.epsilon).to(self.weight.dtype)


def hidden_norm(config: TransformerConfig, placement: Placement) -> Norm:
    """Over hidden states, of which a rank has only its positions under sequence parallelism."""
    return Norm(config, config.hidden_size, placement=placement, partial_gradient=placement.sequence_parallel)
