"""What GPT and BERT have in common: an embedding, layers, and an output layer that may share the embedding's weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from megatron.config.pipeline_layout import StageLayout
from megatron.config.transformer import TransformerConfig
from megatron.core.shard import Init, even_pieces, name_parameters, set_shard, shard_of
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import column_parallel_linear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_parallel_region
from megatron.core.tensor_parallel.placement import Placement
from megatron.model.embedding import LanguageModelEmbedding, embedding_init
from megatron.model.rotary import RotaryTable, rotary_table
from megatron.model.transformer import TransformerBlock, TransformerLayer

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


class OutputLayer(nn.Module):
    """The output head as a layer of its own: [s/t or s, b, h] -> logits [s, b, v_padded/t].

    Args:
        own_weight: whether it has one; otherwise each call brings that of the word embeddings.
        bias: whether each token of the vocabulary has one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        placement: Placement,
        own_weight: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.placement = placement
        self.normalized = config.normalize_output_weights
        pieces = even_pieces(vocab_size, placement.group, padded=padded_vocab_size)
        rows = padded_vocab_size // placement.group.size
        self.weight: nn.Parameter | None = None
        if own_weight:
            init = embedding_init(config) if config.tied_embeddings else Init.normal(config.init_method_std)
            self.weight = placement.split_parameter(
                vocab_size, config.hidden_size, dim=0, pieces=pieces, local_length=rows, init=init
            )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = placement.split_parameter(
                vocab_size, dim=0, pieces=pieces, local_length=rows, init=Init.zeros()
            )

    def forward(self, x: Tensor, shared_weight: Tensor | None = None) -> Tensor:
        weight = self.weight if shared_weight is None else shared_weight
        assert weight is not None, "an output layer without a weight of its own takes that of the embedding"
        return column_parallel_linear(x, unit_rows(weight) if self.normalized else weight, self.bias, self.placement)


def unit_rows(weight: Tensor) -> Tensor:
    """Each row divided by its length: [v, h] -> the same shape. Baichuan 2, arXiv 2309.10305, section 2.4.

    Computed in float32 at least. Rows of zeros, as padding has, stay zero.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return F.normalize(wide, dim=-1).to(weight.dtype)


class LanguageModel(nn.Module, ABC):
    """A model over tokens, or a pipeline chunk of it: as much of each part as `stage` says.

    A tied output head multiplies with the word embeddings themselves when they are in the same chunk. In
    another chunk it holds a copy, a parameter of its own under the same global name: drawn alike, counted and
    saved once, its gradient summed with that of the embedding before each update.

    A subclass builds its parts in the order of the forward pass, and then calls `finish`.

    Args:
        stage: the layers of this pipeline chunk, and whether it has the embedding and the output.
        vocab_size: rows of the vocabulary that belong to the model.
        padded_vocab_size: rows held in memory, a multiple of the tensor-parallel size. Those from
            `vocab_size` on are zero and take part in nothing.
        placement: how this chunk is spread over a tensor-parallel group.
    """

    embedding: LanguageModelEmbedding | None
    output_layer: OutputLayer | None

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

    # ---- building ----

    def build_embedding(self, *, num_token_types: int = 0) -> LanguageModelEmbedding | None:
        if not self.stage.has_embedding:
            return None
        return LanguageModelEmbedding(
            self.config,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
            placement=self.placement,
            num_token_types=num_token_types,
        )

    def build_layers(self) -> TransformerBlock:
        return TransformerBlock(
            self.config,
            layers=self.stage.layers,
            final_layernorm=self.stage.has_output and self.config.layernorm_placement == "pre",
            placement=self.placement,
        )

    def build_output_layer(self, *, bias: bool) -> OutputLayer | None:
        """None where the word embeddings are all that it consists of."""
        shared = self.config.tied_embeddings and self.stage.has_embedding
        if not self.stage.has_output or (shared and not bias):
            return None
        return OutputLayer(
            self.config,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
            placement=self.placement,
            own_weight=not shared,
            bias=bias,
        )

    def finish(self) -> None:
        """Tie the word embeddings to their other half, and give each parameter its global name."""
        self._tie()
        name_parameters(self)

    def _tie(self) -> None:
        """Mark a word embedding whose other half is in another chunk: here the embedding, there the head."""
        if not self.config.tied_embeddings or self.stage.has_embedding == self.stage.has_output:
            return
        if self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
            set_shard(weight, replace(shard_of(weight), tied=True))
        if self.output_layer is not None:
            assert self.output_layer.weight is not None
            weight = self.output_layer.weight
            set_shard(weight, replace(shard_of(weight), name=WORD_EMBEDDINGS, tied=True, owned=False))

    # ---- what a model says of itself ----

    def layers_to_compile(self) -> Iterable[nn.Module]:
        """The transformer layers of this chunk: one compilation serves all, and each stays a whole for the others."""
        return [module for module in self.modules() if isinstance(module, TransformerLayer)]

    @abstractmethod
    def implied_parameter_count(self) -> int | None:
        """Parameters of the whole model, over all chunks and ranks; None for not known."""

    @abstractmethod
    def flops_per_sample(self, sequence_length: int) -> float | None:
        """Floating-point operations of forward and backward of the whole model over one sample; None for not known."""

    # ---- the forward pass ----

    def rotary(self, position_ids: Tensor) -> RotaryTable | None:
        """The table of rotary positions [b, s], where the model has them."""
        if self.config.position_embedding_type != "rope":
            return None
        return rotary_table(self.config, position_ids, self.placement.dtype)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[s/t or s, b, h] -> [s, b, v_padded/t]"""
        if self.output_layer is None:
            return column_parallel_linear(hidden_states, self.output_weight(), None, self.placement)
        shared = self._word_embeddings() if self.output_layer.weight is None else None
        logits: Tensor = self.output_layer(hidden_states, shared)
        return logits

    def output_weight(self) -> Tensor:
        """What hidden states are multiplied with, [v_padded/t, h]."""
        own = None if self.output_layer is None else self.output_layer.weight
        weight = self._word_embeddings() if own is None else own
        return unit_rows(weight) if self.config.normalize_output_weights else weight

    def _word_embeddings(self) -> Tensor:
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    def whole_logits(self, logits: Tensor) -> Tensor:
        """[s, b, v_padded/t] -> [b, s, v] on each rank."""
        whole = gather_from_tensor_parallel_region(logits, self.placement.group)  # [s, b, v_padded]
        return whole[..., : self.vocab_size].transpose(0, 1)  # [b, s, v]

    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[s, b, v_padded/t] and [b, s] -> [b, s], not below float32. The logits are used up unless a hook has them."""
        losses = vocab_parallel_cross_entropy(
            logits,
            labels.t(),
            group=self.placement.group,
            vocab_size=self.vocab_size,
            overwrite_logits=not self._is_watched(),
        )  # [s, b]
        return losses.t()  # [b, s]

    def _is_watched(self) -> bool:
        """Whether a hook, on the output layer or on all modules, may keep the logits."""
        return self.output_layer is not None and bool(self.output_layer._forward_hooks or _global_forward_hooks)
