"""GPT, whole or one pipeline chunk of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from megatron.config.pipeline_layout import StageLayout
from megatron.config.transformer import TransformerConfig
from megatron.core.shard import Init, name_parameters, set_shard, shard_of
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, column_parallel_linear
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.mappings import gather_from_tensor_parallel_region
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.attention import KeyValueStore, computes_weights, local_heads
from megatron.model.embedding import LanguageModelEmbedding, embedding_init
from megatron.model.flops import flops_per_batch, parameter_count
from megatron.model.masks import alibi_slopes, attention_mask
from megatron.model.rotary import RotaryTable, rotary_table
from megatron.model.transformer import TransformerBlock

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


class OutputLayer(ColumnParallelLinear):
    """The output head as a layer of its own: [s/t or s, b, h] -> logits [s, b, v_padded/t]."""

    def __init__(
        self, config: TransformerConfig, *, vocab_size: int, padded_vocab_size: int, placement: Placement
    ) -> None:
        super().__init__(
            config.hidden_size,
            vocab_size,
            padded_out_features=padded_vocab_size,
            placement=placement,
            bias=False,
            init=embedding_init(config) if config.tied_embeddings else Init.normal(config.init_method_std),
        )
        self.normalized = config.normalize_output_weights

    def forward(self, x: Tensor) -> Tensor:
        weight = unit_rows(self.weight) if self.normalized else self.weight
        return column_parallel_linear(x, weight, None, self.placement)


def unit_rows(weight: Tensor) -> Tensor:
    """Each row divided by its length: [v, h] -> the same shape. Baichuan 2, arXiv 2309.10305, section 2.4.

    Computed in float32 at least. Rows of zeros, as padding has, stay zero.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return F.normalize(wide, dim=-1).to(weight.dtype)


class GPTModel(nn.Module):
    """A decoder-only language model: embedding, layers and output head, as many of them as `stage` says.

    A tied output head multiplies with the word embeddings themselves when they are in the same chunk. In
    another chunk it holds a copy, a parameter of its own under the same global name: drawn alike, counted and
    saved once, its gradient summed with that of the embedding before each update.

    Args:
        stage: the layers of this pipeline chunk, and whether it has the embedding and the output.
        vocab_size: rows of the vocabulary that belong to the model.
        padded_vocab_size: rows held in memory, a multiple of the tensor-parallel size. Those from
            `vocab_size` on are zero and take part in nothing.
        placement: how this chunk is spread over a tensor-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        stage: StageLayout,
        vocab_size: int,
        padded_vocab_size: int,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size
        self.placement = placement
        self.embedding: LanguageModelEmbedding | None = None
        if stage.has_embedding:
            self.embedding = LanguageModelEmbedding(
                config, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, placement=placement
            )
        self.decoder = TransformerBlock(
            config, layers=stage.layers, final_layernorm=stage.has_output, placement=placement
        )
        self.output_layer: OutputLayer | None = None
        if stage.has_output and not (config.tied_embeddings and stage.has_embedding):
            self.output_layer = OutputLayer(
                config, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, placement=placement
            )
        self._tie()
        name_parameters(self)
        self.slopes: tuple[float, ...] | None = None
        if config.position_embedding_type == "alibi":
            heads = local_heads(config, placement.group)
            self.slopes = alibi_slopes(config.num_attention_heads)[heads.first : heads.first + heads.queries]

    def _tie(self) -> None:
        """Mark a word embedding whose other half is in another chunk: here the embedding, there the head."""
        if not self.config.tied_embeddings or self.stage.has_embedding == self.stage.has_output:
            return
        if self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
            set_shard(weight, replace(shard_of(weight), tied=True))
        if self.output_layer is not None:
            weight = self.output_layer.weight
            set_shard(weight, replace(shard_of(weight), name=WORD_EMBEDDINGS, tied=True, owned=False))

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        *,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        hidden_states: Tensor | None = None,
        dropout: DropoutStream | None = None,
        store: KeyValueStore | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """One micro-batch through this chunk.

        Args:
            tokens: [b, s].
            position_ids: [b, s], for learned and rotary positions.
            document_ids: [b, s]; attention stays within runs of one number. None: all tokens are one
                document. With a store, of the tokens in it, too, [b, store.length + s].
            labels: [b, s].
            hidden_states: output of the chunk before, [s/t or s, b, h]; None in the chunk with the embedding.
            dropout: the dropout masks of this micro-batch; None for no dropout, as in evaluation.
            store: keys and values of the tokens before these, which takes those of these; for use without gradients.
            last_only: compute logits of the last token only, as if s were 1 there; not with sequence parallelism.

        Returns:
            Without the output head, hidden states [s/t or s, b, h]; with it and `labels`, the loss of each
            token [b, s], not below float32; with it alone, logits [b, s, v] of the whole vocabulary.
        """
        if self.embedding is not None:
            hidden_states = self.embedding(tokens, position_ids, dropout)  # [s/t or s, b, h]
        assert hidden_states is not None, "a chunk without the embedding needs the output of the chunk before"
        mask = attention_mask(
            sequence_length=tokens.shape[1] + (0 if store is None else store.length),
            num_queries=tokens.shape[1],
            document_ids=document_ids,
            window=self.config.window_size,
            slopes=self.slopes,
            explicit=computes_weights(self.config, dropout),
            dtype=self.placement.dtype,
            device=tokens.device,
        )
        hidden_states = self.decoder(
            hidden_states, rotary=self._rotary(position_ids), mask=mask, dropout=dropout, store=store
        )
        if not self.stage.has_output:
            assert isinstance(hidden_states, Tensor)
            return hidden_states
        if labels is not None and self.config.fuses_output_layer:
            return linear_cross_entropy(
                hidden_states,
                self._output_weight(),
                labels.t(),
                placement=self.placement,
                vocab_size=self.vocab_size,
            ).t()  # [b, s]
        if last_only:
            assert not self.placement.sequence_parallel, "only one rank has the last token"
            hidden_states = hidden_states[-1:]  # [1, b, h]
        logits = self._logits(hidden_states)  # [s, b, v_padded/t]
        if labels is None:
            whole = gather_from_tensor_parallel_region(logits, self.placement.group)  # [s, b, v_padded]
            return whole[..., : self.vocab_size].transpose(0, 1)  # [b, s, v]
        losses = vocab_parallel_cross_entropy(
            logits,
            labels.t(),
            group=self.placement.group,
            vocab_size=self.vocab_size,
            overwrite_logits=not self._is_watched(),
        )  # [s, b]
        return losses.t()  # [b, s]

    def layers_to_compile(self) -> Iterable[nn.Module]:
        """The transformer layers of this chunk: one compilation serves all, and each stays a whole for the others."""
        return self.decoder.layers.values()

    def implied_parameter_count(self) -> int | None:
        """Parameters of the whole model; None, in a subclass, for not known."""
        return parameter_count(self.config, self.vocab_size)

    def flops_per_sample(self, sequence_length: int) -> float | None:
        """Floating-point operations of forward and backward over one sample; None, in a subclass, for not known."""
        return flops_per_batch(
            self.config, batch_size=1, sequence_length=sequence_length, padded_vocab_size=self.padded_vocab_size
        )

    def _rotary(self, position_ids: Tensor) -> RotaryTable | None:
        if self.config.position_embedding_type != "rope":
            return None
        return rotary_table(self.config, position_ids, self.placement.dtype)

    def _is_watched(self) -> bool:
        """Whether a hook, on the output layer or on all modules, may keep the logits."""
        return self.output_layer is not None and bool(self.output_layer._forward_hooks or _global_forward_hooks)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """[s/t or s, b, h] -> [s, b, v_padded/t]"""
        if self.output_layer is not None:
            logits: Tensor = self.output_layer(hidden_states)
            return logits
        return column_parallel_linear(hidden_states, self._output_weight(), None, self.placement)

    def _output_weight(self) -> Tensor:
        """What hidden states are multiplied with, [v_padded/t, h]."""
        if self.output_layer is not None:
            weight = self.output_layer.weight
        else:
            assert self.embedding is not None
            weight = self.embedding.word_embeddings.weight
        return unit_rows(weight) if self.config.normalize_output_weights else weight
