"""The two linear maps of a layer with a nonlinear function between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.transformer import TransformerConfig
from megatron.core.kernels.activation import gelu_tanh, swiglu
from megatron.core.shard import Init, blocked_pieces, set_matrices
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.recompute import recompute, with_input_again
from megatron.model.init import output_std


class MLP(nn.Module):
    """[s/t or s, b, h] -> [s, b, f/t] -> the same shape again.

    With SwiGLU the rows of the first weight are [gate; up], each cut over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, *, placement: Placement) -> None:
        super().__init__()
        self.activation = config.activation
        self.recomputed = "mlp" in config.recomputed_modules
        blocks = (config.ffn_size, config.ffn_size) if config.gated else (config.ffn_size,)
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            sum(blocks),
            placement=placement,
            bias=config.add_bias_linear,
            init=Init.normal(config.init_method_std),
            pieces=blocked_pieces(blocks, placement.group),
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            placement=placement,
            bias=config.add_bias_linear,
            init=Init.normal(output_std(config.init_method_std, config.num_layers)),
        )
        set_matrices(self.linear_fc1.weight, sum(blocks))
        set_matrices(self.linear_fc2.weight, config.hidden_size)

    def forward(self, hidden_states: Tensor, *, again: Callable[[], Tensor] | None = None) -> Tensor:
        """
        Args:
            again: computes `hidden_states` once more, in the backward: then they are not kept.
        """
        if self.recomputed:
            return with_input_again(partial(recompute, self._compute), hidden_states, again)
        return self._compute(hidden_states, again)

    def _compute(self, hidden_states: Tensor, again: Callable[[], Tensor] | None = None) -> Tensor:
        # [s, b, f/t], with SwiGLU [s, b, 2f/t]
        intermediate = with_input_again(self.linear_fc1, hidden_states, again)
        output: Tensor = self.linear_fc2(activate(intermediate, self.activation))  # [s/t or s, b, h]
        return output


def activate(x: Tensor, name: str) -> Tensor:
    """The activation function called `name` in the configuration; SwiGLU halves the last dimension.

    GELU: https://arxiv.org/abs/1606.08415, exact or by tanh; SwiGLU: https://arxiv.org/abs/2002.05202;
    squared ReLU: https://arxiv.org/abs/2109.08668.
    """
    if name == "gelu_tanh":
        return gelu_tanh(x)
    if name == "gelu":
        return F.gelu(x)
    if name == "squared_relu":
        return F.relu(x).square()
    assert name == "swiglu", name
    return swiglu(x)
