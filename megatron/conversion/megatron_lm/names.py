"""How Megatron-LM calls the tensors of GPT and BERT, from its oldest spelling to its newest, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron.config.megatron_config import Task
from megatron.conversion.portable import ConversionError

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT, OUTPUT_BIAS = "output_layer.weight", "output_layer.bias"
# What has a row for each token of the vocabulary.
OF_VOCABULARY = (EMBEDDING, OUTPUT, OUTPUT_BIAS)
# The parts that only a first or a last model chunk has.
OF_FIRST, OF_LAST = ("embedding.",), ("decoder.final_layernorm.", "encoder.final_layernorm.", "lm_head.")
# The layers, as both programs call them.
LAYERS: Mapping[Task, str] = {"gpt": "decoder", "bert": "encoder"}
_LAYER = re.compile(r"^(decoder|encoder)\.layers\.(\d+)\.")
# What each BERT has, and no GPT.
_HEAD_OF_BERT = "lm_head."

# Dictionaries in each other, and entries of all with the ends of the dictionaries: ten times what the largest have.
_MOST_LEVELS, _MOST_ENTRIES = 32, 2_000_000

# Before Megatron core there was a language model in the model; its parts kept these names for years, with two words
# for some. On the last stage the tied word embeddings lay beside it.
_BEFORE_CORE = (
    (r"^language_model\.", ""),
    (r"^word_embeddings_for_head\.", "output_layer."),
    (r"\.attention\.", ".self_attention."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
    (r"\.final_norm\.", ".final_layernorm."),
)
_LAYERS_BEFORE_CORE = r"^(encoder|transformer)\."
# The head of BERT for masked tokens had its bias in it, and calls its norm otherwise to this day.
_IN_HEAD_OF_BERT = ((r"^lm_head\.bias$", OUTPUT_BIAS), (r"^lm_head\.(layer_norm|norm)\.", "lm_head.layernorm."))
# Transformer Engine joins a norm with the linear layer after it.
_ENGINE = "transformer_engine"
_JOINED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
# State of an implementation, and tables that follow from the configuration.
_NO_PARAMETER = re.compile(r"(\._extra_state(/.*)?|\.inv_freq)$")

# The parts of a layer in the order of their registration, which is that of the optimizer's states.
_IN_LAYER = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
# The same with Transformer Engine: a norm is registered with the linear layer after it.
_IN_JOINED_LAYER = (_IN_LAYER[1], _IN_LAYER[0], *_IN_LAYER[2:])
# What follows the last layer's norm, in that order: the output layer of GPT, and what BERT has around it.
_HEADS = ("lm_head.dense", "lm_head.layernorm", "output_layer", "binary_head", "pooler.dense")


def flat_names(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of nested dictionaries, with names joined by dots, in their order.

    Raises:
        ConversionError: a name is no text, or the entries are without end, as those of a dictionary that holds itself.
    """
    open_ = [("", iter(state.items()))]
    for _ in range(_MOST_ENTRIES):
        prefix, entries = open_[-1]
        entry = next(entries, None)
        if entry is None:
            open_.pop()
            if not open_:
                return
            continue
        name, value = entry
        if type(name) is not str:
            raise ConversionError(f"a tensor is named by a {type(name).__name__}")
        elif isinstance(value, Mapping):
            open_.append((f"{prefix}{name}.", iter(value.items())))
            if len(open_) > _MOST_LEVELS:
                break
        else:
            yield f"{prefix}{name}", value
    raise ConversionError("its dictionaries hold each other, deeper or more often than those of any model")


def task_of(names: Iterable[str]) -> Task:
    """What a model is whose tensors Megatron-LM calls so, in all its parts together."""
    return "bert" if any(name.startswith(_HEAD_OF_BERT) for name in names) else "gpt"


def is_before_core(names: Iterable[str]) -> bool:
    """Whether a model with these names of Megatron-LM is of the time before its core."""
    return any(name.startswith("language_model.") for name in names)


def native_name(name: str, task: Task) -> str | None:
    """Our name of a tensor that Megatron-LM calls so; None for what is no parameter.

    Layers keep their number. A name that no spelling knows is returned as it is.
    """
    if _NO_PARAMETER.search(name):
        return None
    if name.startswith(("language_model.", "word_embeddings_for_head.")):
        for pattern, ours in _BEFORE_CORE:
            name = re.sub(pattern, ours, name, count=1)
        name = re.sub(_LAYERS_BEFORE_CORE, f"{LAYERS[task]}.", name)
    for pattern, ours in _IN_HEAD_OF_BERT:
        name = re.sub(pattern, ours, name)
    for ours, theirs in _JOINED.items():
        name = name.replace(theirs, ours)
    return name


def core_name(name: str, transformer_impl: str) -> str:
    """What Megatron core with this implementation calls the tensor that we call so."""
    if transformer_impl == _ENGINE:
        for ours, theirs in _JOINED.items():
            name = name.replace(ours, theirs)
    return name.replace("lm_head.layernorm.", "lm_head.layer_norm.")


def layer_of(name: str) -> int | None:
    """The number of the layer in a name, if there is one."""
    match = _LAYER.match(name)
    return int(match[2]) if match else None


def with_layer(name: str, shift: int) -> str:
    """The name with its layer counted from another one on."""
    return _LAYER.sub(lambda match: f"{match[1]}.layers.{int(match[2]) + shift}.", name)


def chunk_names(
    names: Iterable[str], num_layers: int, *, first: bool, last: bool, tied: bool, transformer_impl: str
) -> list[str]:
    """Of a model's parameters those of one of its chunks, in the order in which Megatron core registers them.

    Args:
        names: our names of all parameters.
        num_layers: of the chunk, counted from 0.
        first, last: whether the chunk has the embeddings, and the final norm and the heads.
        tied: the output layer has the weight of the word embeddings, of which a chunk without these has a copy.
        transformer_impl: of the model, by the flag of Megatron-LM.
    """
    present = {*names, OUTPUT} if tied and not first else set(names)
    block = LAYERS[task_of(present)]
    modules = [f"embedding.{table}_embeddings" for table in ("word", "position", "tokentype")] if first else []
    parts = _IN_JOINED_LAYER if transformer_impl == _ENGINE else _IN_LAYER
    modules += [f"{block}.layers.{layer}.{part}" for layer in range(num_layers) for part in parts]
    modules += [f"{block}.final_layernorm", *_HEADS] if last else []
    every = (f"{module}.{kind}" for module in modules for kind in ("weight", "bias"))
    return [name for name in every if name in present]
