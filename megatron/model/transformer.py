"""The transformer layer with norms before each half, and a stack of such layers."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.transformer import TransformerConfig
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import DropoutStream, HiddenDropout
from megatron.model.attention import SelfAttention
from megatron.model.dropout_sites import ATTENTION_OUTPUT, MLP_OUTPUT
from megatron.model.mlp import MLP
from megatron.model.norms import Norm
from megatron.model.rotary import RotaryTable


def _hidden_norm(config: TransformerConfig, placement: Placement) -> Norm:
    """Over hidden states, of which a rank has only its positions under sequence parallelism."""
    return Norm(config, config.hidden_size, placement=placement, partial_gradient=placement.sequence_parallel)


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then the same with the MLP: [s/t or s, b, h] -> the same shape.

    Arguments as for `SelfAttention`.
    """

    def __init__(self, config: TransformerConfig, *, layer: int, placement: Placement) -> None:
        super().__init__()

        def dropout(site: int) -> HiddenDropout:
            return HiddenDropout(config.hidden_dropout, layer=layer, site=site, placement=placement)

        self.input_layernorm = _hidden_norm(config, placement)
        self.self_attention = SelfAttention(config, layer=layer, placement=placement)
        self.attention_output_dropout = dropout(ATTENTION_OUTPUT)
        self.pre_mlp_layernorm = _hidden_norm(config, placement)
        self.mlp = MLP(config, placement=placement)
        self.mlp_output_dropout = dropout(MLP_OUTPUT)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary: RotaryTable | None,
        mask: Tensor | None,
        dropout: DropoutStream | None,
    ) -> Tensor:
        """Arguments as for `SelfAttention.forward`."""
        attended = self.self_attention(self.input_layernorm(hidden_states), rotary=rotary, mask=mask, dropout=dropout)
        hidden_states = hidden_states + self.attention_output_dropout(attended, dropout)
        transformed = self.mlp(self.pre_mlp_layernorm(hidden_states))
        hidden_states = hidden_states + self.mlp_output_dropout(transformed, dropout)
        return hidden_states


class TransformerBlock(nn.Module):
    """The layers of one model chunk, under their global numbers, and the norm after the last layer of all.

    Args:
        layers: global numbers of the layers of this chunk.
        final_layernorm: whether the output of the model follows in this chunk.
    """

    def __init__(
        self, config: TransformerConfig, *, layers: range, final_layernorm: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(layer): TransformerLayer(config, layer=layer, placement=placement) for layer in layers}
        )
        self.final_layernorm = _hidden_norm(config, placement) if final_layernorm else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary: RotaryTable | None,
        mask: Tensor | None,
        dropout: DropoutStream | None,
    ) -> Tensor:
        """[s/t or s, b, h] -> the same shape. Arguments as for `SelfAttention.forward`."""
        for layer in self.layers.values():
            hidden_states = layer(hidden_states, rotary=rotary, mask=mask, dropout=dropout)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states
