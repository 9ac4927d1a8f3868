"""Sizes that follow from the configuration alone: floating-point operations and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import nn

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
    layer = config.attention_weights + config.mlp_weights
    weights = config.num_layers * layer + config.hidden_size * padded_vocab_size
    scores = config.num_layers * config.query_size * sequence_length
    return 6 * tokens * (weights + scores)


def parameter_count(config: TransformerConfig, vocab_size: int) -> int:
    """Parameters of the whole model, a tied embedding counted once.

    `vocab_size` is the number of rows that belong to the model: padding that we add for the layout is not counted.
    """
    hidden = config.hidden_size
    embeddings = vocab_size * hidden * (1 if config.tied_embeddings else 2)
    if config.position_embedding_type == "learned_absolute":
        assert config.max_position_embeddings is not None
        embeddings += config.max_position_embeddings * hidden
    return embeddings + config.num_layers * _layer_parameters(config) + _norm_parameters(config, hidden)


def _layer_parameters(config: TransformerConfig) -> int:
    biases = config.qkv_size if config.add_bias_linear or config.add_qkv_bias else 0
    if config.add_bias_linear:
        biases += config.fc1_size + 2 * config.hidden_size
    norms = 2 * _norm_parameters(config, config.hidden_size)
    if config.qk_layernorm:
        norms += 2 * _norm_parameters(config, config.head_dim)
    return config.attention_weights + config.mlp_weights + biases + norms


def _norm_parameters(config: TransformerConfig, size: int) -> int:
    return size if config.normalization == "RMSNorm" else 2 * size


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
