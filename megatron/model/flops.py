"""Sizes that follow from the configuration alone: floating-point operations and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import nn

from megatron.config.bert import BertConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.config.transformer import TransformerConfig
from megatron.core.shard import shard_of


def flops_per_batch(config: TransformerConfig, *, batch_size: int, sequence_length: int, padded_vocab_size: int) -> int:
    """Floating-point operations of forward and backward over one global batch.

    Two operations a multiply-add, three products a weight (forward, input gradient, weight gradient). Causal
    attention counts the half of the scores that it needs; recomputation counts nothing; the padding of the
    vocabulary counts, since it is multiplied. For plain attention and an MLP of four times the hidden size h
    this is 72 B s L h^2 (1 + s/(12 h) + V/(12 L h)): https://arxiv.org/abs/2104.04473, with attention halved.
    """
    tokens = batch_size * sequence_length
    scores = config.num_layers * config.query_size * sequence_length
    return 6 * tokens * (_weights_of_layers(config) + config.hidden_size * padded_vocab_size + scores)


def bert_flops_per_batch(
    config: TransformerConfig, bert: BertConfig, *, batch_size: int, sequence_length: int, padded_vocab_size: int
) -> int:
    """`flops_per_batch` of BERT: all scores count, as do the dense layer before the output, and on the first token of
    each sample the pooler and the head over pairs."""
    hidden = config.hidden_size
    scores = 2 * config.num_layers * config.query_size * sequence_length
    by_token = _weights_of_layers(config) + hidden * (hidden + padded_vocab_size) + scores
    by_sample = hidden * (hidden + 2) if bert.binary_head else 0
    return 6 * batch_size * (sequence_length * by_token + by_sample)


def _weights_of_layers(config: TransformerConfig) -> int:
    return config.num_layers * (config.attention_weights + config.mlp_weights)


def parameter_count(config: TransformerConfig, vocab_size: int, bert: BertConfig | None = None) -> int:
    """Parameters of the whole model, a tied embedding counted once.

    `vocab_size` is the number of rows that belong to the model: padding that we add for the layout is not counted.
    """
    whole = StageLayout(stage=0, chunk=0, layers=range(config.num_layers), has_embedding=True, has_output=True)
    return elements_of_chunk(config, whole, tensor_parallel_size=1, padded_vocab_size=vocab_size, bert=bert)


def elements_of_chunk(
    config: TransformerConfig,
    stage: StageLayout,
    *,
    tensor_parallel_size: int,
    padded_vocab_size: int,
    bert: BertConfig | None = None,
) -> int:
    """Elements of a chunk's parameters on a rank, with padding, keys and values that other ranks hold too, and copies
    of a tied embedding.

    Args:
        bert: of a BERT.
    """
    t, hidden = tensor_parallel_size, config.hidden_size
    norm = 1 if config.normalization == "RMSNorm" else 2
    layer = matrix_elements_of_layer(config, t) + 2 * norm * hidden
    if config.add_bias_linear:
        layer += _projection_rows(config, t) + config.fc1_size // t + 2 * hidden
    elif config.add_qkv_bias:
        layer += _projection_rows(config, t)
    if config.qk_layernorm:
        layer += 2 * norm * config.head_dim
    words = padded_vocab_size // t * hidden
    elements = len(stage.layers) * layer
    if stage.has_embedding:
        elements += words
        if config.position_embedding_type == "learned_absolute":
            assert config.max_position_embeddings is not None
            elements += config.max_position_embeddings * hidden
        if config.layernorm_placement == "post":
            elements += norm * hidden
        if bert is not None:
            elements += bert.num_token_types * hidden
    if stage.has_output:
        shared = config.tied_embeddings and stage.has_embedding
        elements += 0 if shared else words
        if config.layernorm_placement == "pre":
            elements += norm * hidden
        if bert is not None:
            elements += hidden * (hidden + 1) + norm * hidden + padded_vocab_size // t
            elements += hidden * (hidden + 1) + 2 * (hidden + 1) if bert.binary_head else 0
    return elements


def matrix_elements_of_layer(config: TransformerConfig, tensor_parallel_size: int) -> int:
    """Elements of the four matrices of a layer on a rank, with keys and values that other ranks hold too."""
    t = tensor_parallel_size
    attention = _projection_rows(config, t) + config.query_size // t
    return config.hidden_size * (attention + config.fc1_size // t + config.ffn_size // t)


def _projection_rows(config: TransformerConfig, tensor_parallel_size: int) -> int:
    """Of queries, keys and values on a rank, which has a key and value head at least."""
    groups = max(1, config.query_groups // tensor_parallel_size)
    return config.query_size // tensor_parallel_size + 2 * groups * config.head_dim


def built_parameter_count(modules: Iterable[nn.Module]) -> int:
    """Parameters that this rank owns: over all tensor and pipeline ranks the sum is `parameter_count`.

    A tied weight that two modules share, replicated pieces and copies on other stages count once; padding is left out.
    """
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    total = 0
    for shard in map(shard_of, parameters.values()):
        indices = shard.global_shape[shard.split_dim] if shard.global_shape else 1
        per_index = prod(shard.global_shape) // indices
        total += per_index * sum(piece.length for piece in shard.owned_pieces())
    return total
