"""How Megatron-LM calls the tensors of GPT, from its oldest spelling to its newest, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron.conversion.portable import ConversionError

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")

# Dictionaries in each other, and entries of all with the ends of the dictionaries: ten times what the largest have.
_MOST_LEVELS, _MOST_ENTRIES = 32, 2_000_000

# Before Megatron core there was a language model in the model; its parts kept these names for years, with two words
# for some. On the last stage the tied word embeddings lay beside it.
_BEFORE_CORE = (
    (r"^language_model\.", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"^word_embeddings_for_head\.", "output_layer."),
    (r"\.attention\.", ".self_attention."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
)
# Transformer Engine joins a norm with the linear layer after it.
_ENGINE = "transformer_engine"
_JOINED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
# State of an implementation, and tables that follow from the configuration.
_NO_PARAMETER = re.compile(r"(\._extra_state(/.*)?|\.inv_freq)$")
_OF_BERT = (
    *("lm_head.", "binary_head.", "pooler.", "embedding.tokentype_embeddings."),
    *("language_model.pooler.", "language_model.embedding.tokentype_embeddings."),
)

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


def native_name(name: str) -> str | None:
    """Our name of a tensor that Megatron-LM calls so; None for what is no parameter.

    Layers keep their number. A name that no spelling knows is returned as it is.

    Raises:
        ConversionError: it is a part of BERT.
    """
    if _NO_PARAMETER.search(name):
        return None
    if name.startswith(_OF_BERT):
        raise ConversionError(f"{name}: the model is BERT, which is not available in this version; GPT is")
    if name.startswith(("language_model.", "word_embeddings_for_head.")):
        for pattern, ours in _BEFORE_CORE:
            name = re.sub(pattern, ours, name, count=1)
    for ours, theirs in _JOINED.items():
        name = name.replace(theirs, ours)
    return name


def core_name(name: str, transformer_impl: str) -> str:
    """What Megatron core with this implementation calls the tensor that we call so."""
    if transformer_impl == _ENGINE:
        for ours, theirs in _JOINED.items():
            name = name.replace(ours, theirs)
    return name


def layer_of(name: str) -> int | None:
    """The number of the layer in a name, if there is one."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def with_layer(name: str, shift: int) -> str:
    """The name with its layer counted from another one on."""
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + shift}.", name)


def chunk_names(
    names: Iterable[str], num_layers: int, *, first: bool, last: bool, tied: bool, transformer_impl: str
) -> list[str]:
    """Of a model's parameters those of one of its chunks, in the order in which Megatron core registers them.

    Args:
        num_layers: of the chunk, counted from 0.
        first, last: whether the chunk has the embeddings, and the final norm and the output layer.
        tied: the output layer has the weight of the word embeddings, of which a chunk without these has a copy.
        transformer_impl: of the model, by the flag of Megatron-LM.
    """
    modules = ["embedding.word_embeddings", "embedding.position_embeddings"] if first else []
    parts = _IN_JOINED_LAYER if transformer_impl == _ENGINE else _IN_LAYER
    modules += [f"decoder.layers.{layer}.{part}" for layer in range(num_layers) for part in parts]
    modules += ["decoder.final_layernorm", "output_layer"] if last else []
    present = {*names, OUTPUT} if tied and not first else set(names)
    every = (f"{module}.{kind}" for module in modules for kind in ("weight", "bias"))
    return [name for name in every if name in present]
