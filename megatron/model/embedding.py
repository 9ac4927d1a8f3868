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
from megatron.model.norms import hidden_norm


class SmallEmbedding(nn.Module):
    """A learned vector per position, or per type of a token: a table that each rank holds whole.

    Under sequence parallelism each rank looks up the tokens of its own part of the sequence, so its
    gradient is a partial sum, and nothing is communicated in the layer.
    """

    def __init__(self, rows: int, hidden_size: int, *, placement: Placement, init: Init) -> None:
        super().__init__()
        self.placement = placement
        self.weight = placement.whole_parameter(
            rows, hidden_size, init=init, partial_gradient=placement.sequence_parallel
        )

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] -> [s/t or s, b, h]"""
        ids = ids.t()  # [s, b]
        if self.placement.sequence_parallel:
            ids = scatter_to_sequence_parallel_region(ids, self.placement.group)  # [s/t, b]
        return F.embedding(ids, self.weight)  # [s/t or s, b, h]


class LanguageModelEmbedding(nn.Module):
    """Word embeddings, plus learned positions where the configuration has them, plus types of tokens, then dropout.

    Where layers end with a norm, one precedes the dropout here: Devlin et al. 2018 as published.

    Args:
        num_token_types: rows of the table of types; 0 for no such table.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        placement: Placement,
        num_token_types: int = 0,
    ) -> None:
        super().__init__()
        self.wide_residual = config.fp32_residual_connection
        init = embedding_init(config)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, padded_vocab_size=padded_vocab_size, placement=placement, init=init
        )
        self.position_embeddings: SmallEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            assert config.max_position_embeddings is not None
            self.position_embeddings = SmallEmbedding(
                config.max_position_embeddings, config.hidden_size, placement=placement, init=init
            )
        self.tokentype_embeddings: SmallEmbedding | None = None
        if num_token_types > 0:
            self.tokentype_embeddings = SmallEmbedding(
                num_token_types, config.hidden_size, placement=placement, init=init
            )
        self.layernorm = hidden_norm(config, placement) if config.layernorm_placement == "post" else None
        self.dropout = HiddenDropout(config.hidden_dropout, layer=0, site=EMBEDDING, placement=placement)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        dropout: DropoutStream | None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Ids [b, s] -> [s/t or s, b, h], the first values of the residual stream"""
        embeddings: Tensor = self.word_embeddings(tokens)  # [s/t or s, b, h]
        if self.position_embeddings is not None:
            embeddings = embeddings + self.position_embeddings(position_ids)
        if self.tokentype_embeddings is not None:
            assert token_types is not None, "this model has types of tokens"
            embeddings = embeddings + self.tokentype_embeddings(token_types)
        if self.layernorm is not None:
            embeddings = self.layernorm(embeddings)
        if self.wide_residual:
            embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        dropped: Tensor = self.dropout(embeddings, dropout)
        return dropped


def embedding_init(config: TransformerConfig) -> Init:
    """How word and position embeddings are drawn. Unlike the projections of a layer, not scaled by depth."""
    std = config.embedding_init_method_std
    return Init.normal(config.init_method_std if std is None else std)
