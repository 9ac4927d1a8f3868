"""The transformer layer, with its norms before or after each half, and a stack of such layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megatron.config.transformer import TransformerConfig
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import DropoutStream, HiddenDropout
from megatron.core.tensor_parallel.recompute import computed_again, recompute
from megatron.model.attention import KeyValueStore, SelfAttention
from megatron.model.dropout_sites import ATTENTION_OUTPUT, MLP_OUTPUT
from megatron.model.masks import Mask
from megatron.model.mlp import MLP
from megatron.model.norms import Norm, hidden_norm
from megatron.model.rotary import RotaryTable


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then the same with the MLP: [s/t or s, b, h] -> the same shape.

    With the norms after: norm(x + dropout(attention(x))), then the same with the MLP (Vaswani et al. 2017, 3.1).
    Arguments as for `SelfAttention`.
    """

    def __init__(self, config: TransformerConfig, *, layer: int, placement: Placement) -> None:
        super().__init__()

        def dropout(site: int) -> HiddenDropout:
            return HiddenDropout(config.hidden_dropout, layer=layer, site=site, placement=placement)

        def norm() -> Norm:
            return hidden_norm(config, placement)

        self.norms_follow = config.layernorm_placement == "post"
        self.residual_is_normed = config.residual_is_normed
        self.recomputes_norms = "layernorm" in config.recomputed_modules
        if not self.norms_follow:
            self.input_layernorm = norm()
        self.self_attention = SelfAttention(config, layer=layer, placement=placement)
        self.attention_output_dropout = dropout(ATTENTION_OUTPUT)
        if self.norms_follow:
            self.post_attention_layernorm = norm()
        else:
            self.pre_mlp_layernorm = norm()
        self.mlp = MLP(config, placement=placement)
        self.mlp_output_dropout = dropout(MLP_OUTPUT)
        if self.norms_follow:
            self.post_mlp_layernorm = norm()

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary: RotaryTable | None,
        mask: Mask,
        dropout: DropoutStream | None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """Arguments as for `SelfAttention.forward`."""
        if self.norms_follow:
            attended = self.self_attention(hidden_states, rotary=rotary, mask=mask, dropout=dropout, store=store)
            attended = self.attention_output_dropout(attended, dropout)
            hidden_states = self.post_attention_layernorm(hidden_states + attended)
            transformed = self.mlp_output_dropout(self.mlp(hidden_states), dropout)
            hidden_states = self.post_mlp_layernorm(hidden_states + transformed)
            return hidden_states
        normed, again = self._normed(self.input_layernorm, hidden_states)
        attended = self.self_attention(normed, rotary=rotary, mask=mask, dropout=dropout, again=again, store=store)
        residual = normed if self.residual_is_normed else hidden_states
        hidden_states = residual + self.attention_output_dropout(attended, dropout)
        normed, again = self._normed(self.pre_mlp_layernorm, hidden_states)
        transformed = self.mlp(normed, again=again)
        residual = normed if self.residual_is_normed else hidden_states
        hidden_states = residual + self.mlp_output_dropout(transformed, dropout)
        return hidden_states

    def _normed(self, norm: Norm, hidden_states: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """The normalised hidden states, and how to have them once more, where they are not kept for the backward."""
        return norm(hidden_states), computed_again(norm, hidden_states) if self.recomputes_norms else None


class TransformerBlock(nn.Module):
    """The layers of one model chunk, under their global numbers, and the norm after the last layer of all.

    Args:
        layers: global numbers of the layers of this chunk.
        final_layernorm: whether that norm follows in this chunk. Layers that end with a norm need none.
    """

    def __init__(
        self, config: TransformerConfig, *, layers: range, final_layernorm: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.units = config.recompute_units(layers)
        # Hidden states are kept in parts where each rank has the whole of them.
        self.keeps_parts_over = placement.group if config.distribute_saved_activations else None
        self.layers = nn.ModuleDict(
            {str(layer): TransformerLayer(config, layer=layer, placement=placement) for layer in layers}
        )
        self.final_layernorm = hidden_norm(config, placement) if final_layernorm else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary: RotaryTable | None,
        mask: Mask,
        dropout: DropoutStream | None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """[s/t or s, b, h] -> the same shape. Arguments as for `SelfAttention.forward`."""
        for unit in self.units:
            run = partial(self._run, unit.layers, rotary=rotary, mask=mask, dropout=dropout, store=store)
            if unit.recomputed:
                hidden_states = recompute(run, hidden_states, distributed_over=self.keeps_parts_over)
            else:
                hidden_states = run(hidden_states)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states

    def _run(
        self,
        layers: range,
        hidden_states: Tensor,
        *,
        rotary: RotaryTable | None,
        mask: Mask,
        dropout: DropoutStream | None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        for layer in layers:
            hidden_states = self.layers[str(layer)](
                hidden_states, rotary=rotary, mask=mask, dropout=dropout, store=store
            )
        return hidden_states
