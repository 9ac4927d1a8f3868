"""BERT, whole or one pipeline chunk of it: Devlin et al. 2018, https://arxiv.org/abs/1810.04805.

What is predicted besides masked tokens is whether the two segments of a sample stand in their order: Lan et al. 2019,
https://arxiv.org/abs/1909.11942, section 3.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.bert import BertConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.config.transformer import TransformerConfig
from megatron.core.shard import Init
from megatron.core.tensor_parallel.layers import WholeLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.flops import bert_flops_per_batch, parameter_count
from megatron.model.language_model import LanguageModel
from megatron.model.masks import padding_mask
from megatron.model.norms import hidden_norm


class BertOutput(NamedTuple):
    """What a BERT says of tokens, and of pairs of segments; None where it has no head for these.

    tokens: logits [b, s, v], or with labels the losses [b, s]. pairs: logits [b, 2], or the losses [b].
    """

    tokens: Tensor
    pairs: Tensor | None


class MaskedTokenHead(nn.Module):
    """What comes before the output layer: dense, GELU (the exact one, whatever the layers have), norm.

    [s/t or s, b, h] -> the same shape.
    """

    def __init__(self, config: TransformerConfig, *, placement: Placement) -> None:
        super().__init__()
        self.dense = WholeLinear(
            config.hidden_size,
            config.hidden_size,
            placement=placement,
            init=Init.normal(config.init_method_std),
            partial_gradient=placement.sequence_parallel,
        )
        self.layernorm = hidden_norm(config, placement)

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed: Tensor = self.layernorm(F.gelu(self.dense(hidden_states)))
        return normed


class Pooler(nn.Module):
    """The first token of each sample, dense, tanh: [s/t or s, b, h] -> [b, h], the same on each rank."""

    def __init__(self, config: TransformerConfig, *, placement: Placement) -> None:
        super().__init__()
        self.placement = placement
        self.dense = WholeLinear(
            config.hidden_size,
            config.hidden_size,
            placement=placement,
            init=Init.normal(config.init_method_std),
            partial_gradient=False,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        first = hidden_states[:1]  # [1, b, h]
        if self.placement.sequence_parallel:
            # Of the first tokens of all parts of the sequence the very first: the others need not be sent.
            first = gather_from_sequence_parallel_region(first, self.placement.group, backward="scatter")  # [t, b, h]
        return torch.tanh(self.dense(first[0]))  # [b, h]


class BertModel(LanguageModel):
    """An encoder with a head for masked tokens and, if asked for, one for pairs of segments.

    Arguments as for `LanguageModel`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        bert: BertConfig,
        *,
        stage: StageLayout,
        vocab_size: int,
        padded_vocab_size: int,
        placement: Placement,
    ) -> None:
        super().__init__(
            config, stage=stage, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, placement=placement
        )
        self.bert = bert
        self.embedding = self.build_embedding(num_token_types=bert.num_token_types)
        self.encoder = self.build_layers()
        self.lm_head = MaskedTokenHead(config, placement=placement) if stage.has_output else None
        self.output_layer = self.build_output_layer(bias=True)
        self.pooler: Pooler | None = None
        self.binary_head: WholeLinear | None = None
        if stage.has_output and bert.binary_head:
            self.pooler = Pooler(config, placement=placement)
            init = Init.normal(config.init_method_std)
            self.binary_head = WholeLinear(
                config.hidden_size, 2, placement=placement, init=init, partial_gradient=False
            )
        self.finish()

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor,
        is_real: Tensor,
        *,
        labels: Tensor | None = None,
        sentence_labels: Tensor | None = None,
        hidden_states: Tensor | None = None,
        dropout: DropoutStream | None = None,
    ) -> Tensor | BertOutput:
        """One micro-batch through this chunk.

        Args:
            tokens: [b, s].
            token_types: [b, s], 0 or 1; without a binary head they have no meaning.
            is_real: [b, s] bool, False for padding, which no token attends to.
            labels: [b, s], tokens of the vocabulary, also where the loss does not count.
            sentence_labels: [b], 1 for segments that are not in their order.
            hidden_states: output of the chunk before, [s/t or s, b, h]; None in the chunk with the embedding.
            dropout: the dropout masks of this micro-batch; None for no dropout, as in evaluation.

        Returns:
            Without the output head, hidden states [s/t or s, b, h]; with it and `labels`, losses, not below float32;
            with it alone, logits of the whole vocabulary.
        """
        position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # [b, s]
        if self.embedding is not None:
            hidden_states = self.embedding(tokens, position_ids, dropout, token_types)  # [s/t or s, b, h]
        assert hidden_states is not None, "a chunk without the embedding needs the output of the chunk before"
        encoded: Tensor = self.encoder(
            hidden_states, rotary=self.rotary(position_ids), mask=padding_mask(is_real), dropout=dropout
        )
        if self.lm_head is None:
            return encoded
        logits = self.logits(self.lm_head(encoded))  # [s, b, v_padded/t]
        pairs = self._pairs(encoded)
        if labels is None:
            return BertOutput(self.whole_logits(logits), pairs)
        losses = self.token_losses(logits, labels)
        if pairs is None:
            return BertOutput(losses, None)
        assert sentence_labels is not None, "a loss over pairs needs their labels"
        wide = torch.promote_types(pairs.dtype, torch.float32)
        return BertOutput(losses, F.cross_entropy(pairs.to(wide), sentence_labels, reduction="none"))

    def _pairs(self, encoded: Tensor) -> Tensor | None:
        """[s/t or s, b, h] -> logits [b, 2]"""
        if self.pooler is None or self.binary_head is None:
            return None
        logits: Tensor = self.binary_head(self.pooler(encoded))
        return logits

    def implied_parameter_count(self) -> int | None:
        return parameter_count(self.config, self.vocab_size, self.bert)

    def flops_per_sample(self, sequence_length: int) -> float | None:
        return bert_flops_per_batch(
            self.config,
            self.bert,
            batch_size=1,
            sequence_length=sequence_length,
            padded_vocab_size=self.padded_vocab_size,
        )
