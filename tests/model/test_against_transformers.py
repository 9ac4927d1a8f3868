"""Logits, losses and every gradient, in float64, against the models of Hugging Face `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron.config.transformer import TransformerConfig
from tests.conversion.models import LLAMA3_SCALING, in_float64, rope
from tests.helpers.numerics import assert_all_parity, assert_parity
from tests.model.tiny import VOCAB, batch, build, tiny_config

LLAMA_LIKE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "activation": "swiglu",
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_implementation": "sdpa",  # the eager path rounds its softmax to float32
}


def noisy(model: PreTrainedModel) -> nn.Module:
    """The model in float64 with noise on every parameter, so that no bias is zero and no norm is one."""
    model = in_float64(model.double().train())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def by_group(query: Tensor, key: Tensor, value: Tensor, config: TransformerConfig) -> Tensor:
    """Rows [q…q, k, v] of each query group, from all queries, all keys, all values."""
    dim, groups = config.head_dim, config.query_groups
    parts = (tensor.reshape(groups, -1, dim, *tensor.shape[1:]) for tensor in (query, key, value))
    return torch.cat(tuple(parts), dim=1).flatten(0, 2)


def from_gpt2(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Weights or gradients of a GPT-2 under our names. Its linear layers store the transpose."""
    ours = {
        "embedding.word_embeddings.weight": tensors["transformer.wte.weight"],
        "embedding.position_embeddings.weight": tensors["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": tensors["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": tensors["transformer.ln_f.bias"],
    }
    names = {
        "input_layernorm": "ln_1",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    for layer in range(config.num_layers):
        mine, theirs = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            for name, other in names.items():
                ours[f"{mine}{name}.{kind}"] = tensors[f"{theirs}{other}.{kind}"].t()
            query, key, value = tensors[f"{theirs}attn.c_attn.{kind}"].t().chunk(3)
            ours[f"{mine}self_attention.linear_qkv.{kind}"] = by_group(query, key, value, config)
    return ours


def from_llama(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Weights or gradients of a Llama, Mistral, Qwen2 or Qwen3 under our names."""
    ours = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
    }
    names = {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc2": "mlp.down_proj",
    }
    for layer in range(config.num_layers):
        mine, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, other in names.items():
            ours[f"{mine}{name}.weight"] = tensors[f"{theirs}{other}.weight"]
        gate, up = (tensors[f"{theirs}mlp.{part}_proj.weight"] for part in ("gate", "up"))
        ours[f"{mine}mlp.linear_fc1.weight"] = torch.cat((gate, up))
        for kind in ("weight", "bias") if config.add_qkv_bias else ("weight",):
            parts = [tensors[f"{theirs}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            ours[f"{mine}self_attention.linear_qkv.{kind}"] = by_group(*parts, config)
        for part in "qk" if config.qk_layernorm else "":
            ours[f"{mine}self_attention.{part}_layernorm.weight"] = tensors[f"{theirs}self_attn.{part}_norm.weight"]
    return ours


def gpt2(activation: str) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=24,
            n_layer=2,
            n_head=4,
            n_inner=40,
            activation_function=activation,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
        )
    )


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (lambda: gpt2("gelu_new"), {}),
    "gpt2 with exact GELU": (lambda: gpt2("gelu"), {"activation": "gelu"}),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-6, **rope())), LLAMA_LIKE),
    "llama 3 rope scaling": (
        lambda: LlamaForCausalLM(
            LlamaConfig(**SIZES, rms_norm_eps=1e-6, **rope(500000.0, **(LLAMA3_SCALING | {"factor": 8.0})))
        ),
        LLAMA_LIKE | {"rotary_base": 500000, "use_rope_scaling": True},
    ),
    "llama linear rope scaling": (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-6, **rope(rope_type="linear", factor=4.0))),
        LLAMA_LIKE | {"rotary_seq_len_interpolation_factor": 4.0},
    ),
    "qwen2": (
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, rms_norm_eps=1e-6, **rope())),
        LLAMA_LIKE | {"add_qkv_bias": True},
    ),
    "qwen3": (
        lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, rms_norm_eps=1e-6, **rope())),
        LLAMA_LIKE | {"qk_layernorm": True, "kv_channels": 8},
    ),
    "mistral": (
        lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5, rms_norm_eps=1e-6, **rope())),
        LLAMA_LIKE | {"window_size": (4, 0)},  # theirs counts the token itself
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_losses_and_gradients(case: str) -> None:
    make, changes = CASES[case]
    config = tiny_config(**changes)
    reference = noisy(make())
    convert = from_gpt2 if case.startswith("gpt2") else from_llama
    model = build(config)
    weights = convert(reference.state_dict(), config)
    model.load_state_dict(weights)  # strict: every name of ours is there and no other

    tokens, position_ids, labels = batch()
    expected = reference(tokens).logits
    assert expected.dtype == torch.float64
    assert_parity(model(tokens, position_ids), expected, "logits")

    losses = model(tokens, position_ids, labels=labels)
    expected_losses = F.cross_entropy(expected.transpose(1, 2), labels, reduction="none")
    assert_parity(losses, expected_losses, "losses")

    losses.mean().backward()
    expected_losses.mean().backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_all_parity(ours, convert(theirs, config))
