"""GPT, whole or one pipeline chunk of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.config.pipeline_layout import StageLayout
from megatron.config.transformer import TransformerConfig
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.attention import KeyValueStore, computes_weights, local_heads
from megatron.model.flops import flops_per_batch, parameter_count
from megatron.model.language_model import LanguageModel
from megatron.model.masks import Mask, alibi_slopes, attention_mask, document_blocks, goes_by_blocks


class GPTModel(LanguageModel):
    """A decoder-only language model: embedding, layers and output head, as many of them as `stage` says.

    Arguments as for `LanguageModel`.
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
        super().__init__(
            config, stage=stage, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, placement=placement
        )
        self.embedding = self.build_embedding()
        self.decoder = self.build_layers()
        self.output_layer = self.build_output_layer(bias=False)
        self.finish()
        self.slopes: tuple[float, ...] | None = None
        if config.position_embedding_type == "alibi":
            heads = local_heads(config, placement.group)
            self.slopes = alibi_slopes(config.num_attention_heads)[heads.first : heads.first + heads.queries]

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        *,
        document_ids: Tensor | None = None,
        document_lengths: Sequence[Sequence[int]] | None = None,
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
            document_lengths: of each sample the lengths of these runs, on the host: with them long samples need no mask
                of all pairs of positions.
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
        length = tokens.shape[1] + (0 if store is None else store.length)
        mask: Mask
        by_blocks = goes_by_blocks(self.config, length, training=dropout is not None)
        if by_blocks and document_ids is not None and document_lengths is not None:
            mask = document_blocks(document_ids, document_lengths)
        else:
            mask = attention_mask(
                sequence_length=length,
                num_queries=tokens.shape[1],
                document_ids=document_ids,
                window=self.config.window_size,
                slopes=self.slopes,
                explicit=computes_weights(self.config, dropout),
                dtype=self.placement.dtype,
                device=tokens.device,
            )
        hidden_states = self.decoder(
            hidden_states, rotary=self.rotary(position_ids), mask=mask, dropout=dropout, store=store
        )
        if not self.stage.has_output:
            assert isinstance(hidden_states, Tensor)
            return hidden_states
        if labels is not None and self.config.fuses_output_layer:
            return linear_cross_entropy(
                hidden_states,
                self.output_weight(),
                labels.t(),
                placement=self.placement,
                vocab_size=self.vocab_size,
            ).t()  # [b, s]
        if last_only:
            assert not self.placement.sequence_parallel, "only one rank has the last token"
            hidden_states = hidden_states[-1:]  # [1, b, h]
        logits = self.logits(hidden_states)  # [s, b, v_padded/t]
        return self.whole_logits(logits) if labels is None else self.token_losses(logits, labels)

    def implied_parameter_count(self) -> int | None:
        return parameter_count(self.config, self.vocab_size)

    def flops_per_sample(self, sequence_length: int) -> float | None:
        return flops_per_batch(
            self.config, batch_size=1, sequence_length=sequence_length, padded_vocab_size=self.padded_vocab_size
        )
