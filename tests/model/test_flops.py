"""FLOPs value for value as Megatron-LM counts them, and parameter counts against models that were built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.transformer import TransformerConfig
from megatron.model.flops import built_parameter_count, flops_per_batch, parameter_count
from tests.model.tiny import ARCHITECTURES, VOCAB, build, tiny_config

TABLE = json.loads((Path(__file__).parents[1] / "fixtures/tables/flops.json").read_text())
DENSE = {entry["name"]: entry for entry in TABLE if "--num-experts" not in entry["arguments"]}


def config_of(arguments: list[str]) -> tuple[TransformerConfig, int]:
    """The model that a command line describes, and its sequence length."""

    def number(name: str) -> int | None:
        return int(arguments[arguments.index(name) + 1]) if name in arguments else None

    sizes: dict[str, Any] = {
        "num_layers": number("--num-layers"),
        "hidden_size": number("--hidden-size"),
        "num_attention_heads": number("--num-attention-heads"),
        "ffn_hidden_size": number("--ffn-hidden-size"),
        "kv_channels": number("--kv-channels"),
        "num_query_groups": number("--num-query-groups"),
        "max_position_embeddings": number("--max-position-embeddings"),
    }
    config = TransformerConfig(
        **sizes,
        group_query_attention="--group-query-attention" in arguments,
        activation="swiglu" if "--swiglu" in arguments else "gelu",
    )
    sequence_length = number("--seq-length")
    assert sequence_length is not None
    return config, sequence_length


@pytest.mark.parametrize("name", DENSE)
def test_flops_of_a_global_batch(name: str) -> None:
    entry = DENSE[name]
    config, sequence_length = config_of(entry["arguments"])
    assert config.ffn_size == entry["ffn_hidden_size"]
    flops = flops_per_batch(
        config,
        batch_size=entry["batch_size"],
        sequence_length=sequence_length,
        padded_vocab_size=entry["padded_vocab_size"],
    )
    assert float(flops) == entry["flops"]


def test_flops_of_the_plain_transformer_are_those_of_the_paper() -> None:
    layers, hidden, sequence, vocab, size = 24, 1024, 2048, 51200, 8
    config = TransformerConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=16)
    per_layer = 1 + sequence / (12 * hidden) + vocab / (12 * layers * hidden)
    expected = 72 * size * sequence * layers * hidden**2 * per_layer
    flops = flops_per_batch(config, batch_size=size, sequence_length=sequence, padded_vocab_size=vocab)
    assert flops == pytest.approx(expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_of_the_configuration_are_those_of_the_model(name: str) -> None:
    config = tiny_config(**ARCHITECTURES[name])
    model = build(config, padded_vocab_size=VOCAB + 3)
    padding = 3 * config.hidden_size * (1 if config.tied_embeddings else 2)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(config, VOCAB) == built_parameter_count([model]) == held - padding


def test_parameters_of_known_models() -> None:
    llama2_7b = TransformerConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        ffn_hidden_size=11008,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    )
    assert parameter_count(llama2_7b, 32000) == 6_738_415_616
    gpt2 = TransformerConfig(num_layers=12, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024)
    assert parameter_count(gpt2, 50257) == 124_439_808
