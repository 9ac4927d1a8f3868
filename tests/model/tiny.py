"""Tiny GPT models and batches for the tests of this folder."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.pipeline_layout import StageLayout
from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.model.gpt_model import GPTModel
from megatron.model.init import initialize_weights
from megatron.model.language_model import LanguageModel
from tests.tensor_parallel.ranks import placed

VOCAB = 61  # a prime: no tensor-parallel size divides it
SEQUENCE = 24


def tiny_config(**changes: Any) -> TransformerConfig:
    """A model of two layers, with weights large enough that no term of it is lost in rounding."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "ffn_hidden_size": 40,
        "max_position_embeddings": 32,
        "init_method_std": 0.2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**(settings | changes))


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "group_query_attention": True,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "alibi": {"position_embedding_type": "alibi", "activation": "gelu"},
    "window": {"position_embedding_type": "none", "window_size": (5, 0), "activation": "squared_relu"},
    "qk_norm": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "qk_layernorm": True,
        "kv_channels": 8,
        "add_bias_linear": False,
        "add_qkv_bias": True,
    },
}


def whole(config: TransformerConfig) -> StageLayout:
    """The layout of one stage that has everything."""
    return StageLayout(stage=0, chunk=0, layers=range(config.num_layers), has_embedding=True, has_output=True)


def build(
    config: TransformerConfig,
    *,
    group: CommGroup | None = None,
    stage: StageLayout | None = None,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    vocab_size: int = VOCAB,
    padded_vocab_size: int | None = None,
    seed: int = 7,
) -> GPTModel:
    """An initialised model chunk, by default the whole model on one rank."""
    group = CommGroup.single("tensor") if group is None else group
    model = GPTModel(
        config,
        stage=whole(config) if stage is None else stage,
        vocab_size=vocab_size,
        padded_vocab_size=-(-vocab_size // group.size) * group.size if padded_vocab_size is None else padded_vocab_size,
        placement=placed(group, sequence_parallel, dtype),
    )
    initialize_weights(model, seed)
    return model


class Batch(NamedTuple):
    tokens: Tensor
    position_ids: Tensor
    labels: Tensor


def batch(size: int = 2, sequence: int = SEQUENCE, vocab_size: int = VOCAB, seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, vocab_size, (size, sequence + 1), generator=generator)
    return Batch(text[:, :-1], torch.arange(sequence).expand(size, -1), text[:, 1:].contiguous())


def jitter(model: LanguageModel, seed: int = 11) -> None:
    """Add noise to every parameter of a whole model, so that biases and norms are not trivial."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
