"""From token ids to the hidden states that enter the first layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.transformer import TransformerConfig
from megatron.core.shard import Init
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import DropoutStream, HiddenDropout
from megatron.model.dropout_sites import EMBEDDING


class PositionEmbedding(nn.Module):
    """A learned vector per position.

    Under sequence parallelism each rank looks up the positions of its own part of the sequence, so its
    gradient is a partial sum, and nothing is communicated in the layer.
    """

    def __init__(self, max_positions: int, hidden_size: int, *, placement: Placement, init: Init) -> None:
        super().__init__()
        self.placement = placement
        self.weight = placement.whole_parameter(
            max_positions, hidden_size, init=init, partial_gradient=placement.sequence_parallel
        )

    def forward(self, position_ids: Tensor) -> Tensor:
        """[b, s] -> [s/t or s, b, h]"""
        positions = position_ids.t()  # [s, b]
        if self.placement.sequence_parallel:
            positions = scatter_to_sequence_parallel_region(positions, self.placement.group)  # [s/t, b]
        return F.embedding(positions, self.weight)  # [s/t or s, b, h]


class LanguageModelEmbedding(nn.Module):
    """Word embeddings, plus learned positions where the configuration has them, then dropout."""

    def __init__(
        self, config: TransformerConfig, *, vocab_size: int, padded_vocab_size: int, placement: Placement
    ) -> None:
        super().__init__()
        self.wide_residual = config.fp32_residual_connection
        init = embedding_init(config)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, padded_vocab_size=padded_vocab_size, placement=placement, init=init
        )
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            assert config.max_position_embeddings is not None
            self.position_embeddings = PositionEmbedding(
                config.max_position_embeddings, config.hidden_size, placement=placement, init=init
            )
        self.dropout = HiddenDropout(config.hidden_dropout, layer=0, site=EMBEDDING, placement=placement)

    def forward(self, tokens: Tensor, position_ids: Tensor, dropout: DropoutStream | None) -> Tensor:
        """[b, s] twice -> [s/t or s, b, h], the first values of the residual stream"""
        embeddings: Tensor = self.word_embeddings(tokens)  # [s/t or s, b, h]
        if self.position_embeddings is not None:
            embeddings = embeddings + self.position_embeddings(position_ids)
        if self.wide_residual:
            embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        dropped: Tensor = self.dropout(embeddings, dropout)
        return dropped


def embedding_init(config: TransformerConfig) -> Init:
    """How word and position embeddings are drawn. Unlike the projections of a layer, not scaled by depth."""
    std = config.embedding_init_method_std
    return Init.normal(config.init_method_std if std is None else std)
