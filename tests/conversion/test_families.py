"""`config.json` and our configuration say the same, or the difference is refused by name and value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from megatron.config.problems import UserError
from megatron.config.transformer import TransformerConfig
from megatron.conversion.families import (
    Family,
    family_called,
    family_of_file,
    family_of_model,
)
from megatron.conversion.portable import ConversionError
from megatron.conversion.settings import HuggingFaceConfig
from tests.conversion.models import LLAMA_SIZES

LLAMA = LLAMA_SIZES | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0}
_NOT_OF_BAICHUAN = ("num_key_value_heads", "rope_theta", "max_position_embeddings")
# Files as they were before transformers 5.
FILES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 61,
        "n_positions": 40,
        "n_ctx": 40,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama": LLAMA | {"rope_scaling": None, "pretraining_tp": 1, "attention_bias": False},
    "mistral": LLAMA | {"sliding_window": 5},
    "qwen2": LLAMA | {"use_sliding_window": False, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": LLAMA | {"head_dim": 16, "use_sliding_window": False, "attention_bias": False},
    "baichuan": {
        **{key: LLAMA[key] for key in LLAMA if key not in _NOT_OF_BAICHUAN},
        "model_max_length": 40,
        "z_loss_weight": 0,
    },
    "bert": {
        "vocab_size": 61,
        "max_position_embeddings": 40,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 52,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.3,
        "type_vocab_size": 2,
        "initializer_range": 0.01,
        "position_embedding_type": "absolute",
        "pooler_type": "first_token_transform",
    },
}
THEIR_CLASSES = {
    "bert": BertConfig,
    "gpt2": GPT2Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(family: str, *without: str, **changes: Any) -> HuggingFaceConfig:
    values = {key: value for key, value in (FILES[family] | changes).items() if key not in without}
    return family_called(family).read(values, "config.json")


@pytest.mark.parametrize("family", THEIR_CLASSES)
def test_a_missing_key_means_what_transformers_takes_it_for(family: str) -> None:
    needed = {"vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size"}
    needed |= {"num_hidden_layers", "num_attention_heads", "n_embd", "n_layer", "n_head"}
    for key in [None, *(key for key in FILES[family] if key not in needed)]:
        given = {name: value for name, value in FILES[family].items() if name != key}
        if family == "qwen3" and key == "head_dim":
            given["hidden_size"] = 512  # 128 a head
        theirs = THEIR_CLASSES[family](**given).to_diff_dict()
        table = family_called(family)
        if "num_key_value_heads" in theirs and theirs["num_attention_heads"] % theirs["num_key_value_heads"]:
            with pytest.raises(UserError, match=r"num_key_value_heads .* must divide num_attention_heads"):
                table.read(given, "config.json")
            continue
        assert table.read(given, "config.json") == table.read(theirs, "config.json"), key


@pytest.mark.parametrize(
    ("family", "key", "changes"),
    [
        ("mistral", "sliding_window", {}),
        ("mistral", "head_dim", {}),
        ("llama", "rope_scaling", {}),
        ("llama", "num_key_value_heads", {}),
        ("qwen2", "num_key_value_heads", {}),
        ("qwen2", "sliding_window", {}),
        ("gpt2", "n_inner", {}),
    ],
)
def test_null_means_what_transformers_takes_it_for(family: str, key: str, changes: dict[str, Any]) -> None:
    given = FILES[family] | changes | {key: None}
    theirs = THEIR_CLASSES[family](**given).to_diff_dict()
    table = family_called(family)
    assert table.read(given, "config.json") == table.read(theirs, "config.json")


@pytest.mark.parametrize("family", FILES)
def test_a_written_file_says_the_same(family: str) -> None:
    config, table = read(family), family_called(family)
    assert table.read(table.write(config), "config.json") == config
    assert table.differences(config) == []
    assert family_of_file(table.write(config), "config.json") is table


@pytest.mark.parametrize(
    ("before", "now", "fields"),
    [
        ({}, {"rope_type": "default"}, {}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}, {"linear": 4.0}),
        ({"rope_type": "llama3", **LLAMA3}, {"rope_type": "llama3", **LLAMA3}, {"llama3": 8.0}),
    ],
)
def test_rotary_settings_of_transformers_5_and_before(
    before: dict[str, Any], now: dict[str, Any], fields: dict[str, float]
) -> None:
    old = read("llama", rope_scaling=before or None).model
    new = read("llama", "rope_theta", "rope_scaling", rope_parameters={"rope_theta": 500000.0, **now}).model
    assert old == new
    assert new.rotary_base == 500000
    assert new.rotary_seq_len_interpolation_factor == fields.get("linear")
    assert (new.use_rope_scaling, new.rope_scaling_factor) == ("llama3" in fields, fields.get("llama3", 8.0))
    theirs = LlamaConfig(**(FILES["llama"] | {"rope_scaling": before or None})).to_diff_dict()
    assert family_called("llama").read(theirs, "config.json").model == old


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r'rope_type "dynamic" is not supported'),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r'rope_type "yarn" is not supported'),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing, and has no default$"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 2.0}}, r"low_freq_factor 2\.0"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "extra": 1}},
            "rope_scaling: extra 1 is a setting",
        ),
        ("llama", {"rope_theta": 10000.5}, r"rope_theta 10000\.5 is no whole number"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        ("llama", {"attention_bias": True}, "attention_bias true with mlp_bias false is not supported"),
        ("llama", {"mlp_bias": True}, "attention_bias false with mlp_bias true is not supported"),
        ("llama", {"hidden_act": "gelu"}, r'hidden_act "gelu" is not supported for this family; "silu" is'),
        ("llama", {"quantization_config": {"bits": 4}}, r'quantization_config \{"bits": 4\} is a setting that this'),
        ("llama", {"logits_scaling": 2}, "logits_scaling 2 is a setting that this program does not know"),
        ("llama", {"hidden_size": "48"}, r'hidden_size "48" is no whole number'),
        ("llama", {"hidden_size": 10**400}, "hidden_size a number of hundreds of digits is no number to compute with"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta Infinity is no number to compute with"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta NaN is no number to compute with"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0 is no window"),
        ("llama", {"hidden_size": True}, "hidden_size true is no whole number"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        (
            "llama",
            {"num_hidden_layers": 10**9},
            "^config.json: num_hidden_layers 1_000_000_000: must be at least 1 and",
        ),
        ("llama", {"num_key_value_heads": 3}, "^config.json: num_key_value_heads 3: must divide num_attention_heads 4"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1.0}}, r"^config.json: factor -1\.0: must be"),
        ("gpt2", {"n_embd": 0, "n_inner": 4}, "^config.json: n_embd 0: must be at least 1"),
        (
            "gpt2",
            {"resid_pdrop": 1.5, "embd_pdrop": 1.5},
            r"^config.json: resid_pdrop 1\.5: must be at least 0 and less",
        ),
        ("gpt2", {"n_layer": 0, "n_inner": 0}, "^config.json:\n  n_layer 0: .*\n.*\n  n_inner 0: must be"),
        (
            "bert",
            {"num_attention_heads": 5},
            "^config.json: hidden_size 48: must be divisible by num_attention_heads 5",
        ),
        ("bert", {"num_hidden_layers": 0}, "^config.json: num_hidden_layers 0: must be at least 1"),
        ("bert", {"hidden_dropout_prob": 1.5}, r"^config.json: hidden_dropout_prob 1\.5: must be at least 0 and less"),
        ("bert", {"layer_norm_eps": 0}, r"^config.json: layer_norm_eps 0\.0: must be more than 0"),
        ("bert", {"max_position_embeddings": 4}, "^config.json: max_position_embeddings 4 must be from 5 to"),
        ("llama", {"max_position_embeddings": 0}, "^config.json: max_position_embeddings 0 must be from 1 to"),
        ("llama", {"vocab_size": 0}, "vocab_size 0 must be from 1"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings 1 is no true or false"),
        ("gpt2", {"activation_function": "relu"}, r'activation_function "relu" is not supported; gelu_new'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true is not supported"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights false is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention true is not supported"),
        ("gpt2", {"embd_pdrop": 0.0}, r"embd_pdrop 0\.0 differs from resid_pdrop 0\.1"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_window 6 of some layers only"),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "of some layers only is not supported",
        ),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, r'layer_types "chunked_attention" is not supported'),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "is of 3 layers, and num_hidden_layers is 2"),
        ("qwen2", {"layer_types": []}, r"layer_types \[\] is of 0 layers"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": None},
            "sliding_window null contradicts use_sliding_window true",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias true is not supported"),
        ("qwen2", {"use_mrope": True}, "use_mrope true is not supported"),
        ("baichuan", {"max_position_embeddings": 4096}, "max_position_embeddings 4096 is a setting of Baichuan 2 7B"),
        ("baichuan", {"vocab_size": 64000}, "vocab_size 64000 is that of Baichuan 1"),
    ],
)
def test_what_the_model_has_not_is_refused_by_name_and_value(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(family, **changes)


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"architectures": ["LlamaForCausalLM", "GPT2LMHeadModel"]},
        {"architectures": 7},
        {"architectures": ["BertForSequenceClassification"], "model_type": "bert"},
        {},
    ],
)
def test_other_architectures_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConversionError, match="is not a model that this program converts; GPT2LMHeadModel"):
        family_of_file(values, "config.json")


def test_a_file_that_names_two_families_is_refused() -> None:
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}
    with pytest.raises(ConversionError, match=r'"qwen2" contradicts .*Llama.*, whose model_type is "llama"'):
        family_of_file(values, "config.json")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rotary_percent": 0.5}, r"llama, which differs:\n  --rotary-percent: 0\.5, and 1\.0 in llama"),
        ("qwen3", {"add_qkv_bias": True}, "--qk-layernorm: True, and False in qwen2"),
        ("gpt2", {"kv_channels": 16}, "--kv-channels: 16, and 12 in gpt2"),
        ("gpt2", {"normalization": "RMSNorm"}, "--normalization: RMSNorm, and LayerNorm in gpt2"),
        ("baichuan", {"window_size": (4, 0)}, r"--window-size: \(4, 0\), and None in baichuan"),
    ],
)
def test_a_model_of_no_family_is_refused_with_what_the_nearest_lacks(
    family: str, changes: dict[str, Any], message: str
) -> None:
    config = read(family)
    with pytest.raises(
        ConversionError, match=f"(?s)no family of Hugging Face has this model; the nearest is .*{message}"
    ):
        family_of_model(replace(config, model=replace(config.model, **changes)))


@pytest.mark.parametrize("family", FILES)
def test_a_model_is_written_as_the_first_family_that_has_it(family: str) -> None:
    assert family_of_model(read(family)).name == family


def test_a_mistral_without_a_window_is_a_llama_too() -> None:
    config = read("mistral", sliding_window=None)
    families: list[Family] = [family_of_model(config), family_called("mistral")]
    assert [family.name for family in families] == ["llama", "mistral"]
    assert all(family.differences(config) == [] for family in families)


def test_values_that_mean_the_same_are_no_difference() -> None:
    model = TransformerConfig(
        num_layers=2,
        hidden_size=48,
        num_attention_heads=4,
        max_position_embeddings=40,
        group_query_attention=True,
        num_query_groups=4,
        ffn_hidden_size=192,
        kv_channels=12,
        window_size=(-1, 0),
        add_qkv_bias=True,
    )
    assert family_called("gpt2").differences(HuggingFaceConfig(model=model, vocab_size=61, seq_length=20)) == []
