"""`config.json` of Hugging Face, and the settings in it that families share or have for themselves.

A setting is a function from the file to fields of ours and one back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.bert import BertConfig
from megatron.config.megatron_config import Task
from megatron.config.problems import listing, words_or
from megatron.config.transformer import TransformerConfig
from megatron.conversion.portable import ConversionError

_REQUIRED: Any = object()
# Of the rotary positions of Llama 3.1, what `--use-rope-scaling` scales with.
_LLAMA3: Mapping[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class ConfigJson:
    """The values of a `config.json`, and which of them have been read."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values, self._source = values, source
        self._unread = set(values)

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A value; `default` where the file has none, or null.

        Raises:
            ConversionError: it is missing, or of another kind.
        """
        self._unread.discard(key)
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ConversionError(f"{self._source}: {key} is missing, and has no default")
            return default
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise self.refusal(key, value, f"is no {_KINDS[kind]}")
        if kind in (int, float) and not abs(value) <= sys.float_info.max:  # which NaN is not
            raise self.refusal(key, value, "is no number to compute with")
        return float(value) if kind is float else value

    def speaks_of(self, key: str) -> bool:
        """Whether the file has the key, be it with null."""
        return key in self._values

    def refusal(self, key: str, value: object, rule: str) -> ConversionError:
        return ConversionError(f"{self._source}: {key} {_shown(value)} {rule}")

    def refusals(self, texts: Sequence[str]) -> ConversionError:
        """What is wrong with values in it."""
        return ConversionError(
            f"{self._source}: {texts[0]}" if len(texts) == 1 else f"{self._source}:\n{listing(texts)}"
        )

    def refuse_unread(self, neutral: Collection[str] = ()) -> None:
        """Refuse what nobody has asked for, and says something: what is not null, and none of the `neutral` keys."""
        for key in sorted(self._unread.difference(neutral)):
            if self._values[key] is not None:
                rule = "is a setting that this program does not know, and the model may differ by it"
                raise self.refusal(key, self._values[key], rule)

    def inner(self, key: str) -> ConfigJson:
        """The values of an object within; of an empty one where there is none."""
        return ConfigJson(self.get(key, dict, {}), f"{self._source}: {key}")


_KINDS: Mapping[type, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "word",
    dict: "object",
    list: "list",
}


def _shown(value: object) -> str:
    """A value as the file has it, shortened."""
    endless = isinstance(value, int) and abs(value) > sys.float_info.max  # Python does not print it
    return "a number of hundreds of digits" if endless else json.dumps(value)[:200]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """What a `config.json` says.

    Attributes:
        model: our configuration.
        bert: what it says besides of a BERT; None for a GPT.
        vocab_size: rows of the embedding.
        seq_length: tokens of the context.
    """

    model: TransformerConfig
    bert: BertConfig | None = None
    vocab_size: int
    seq_length: int

    @property
    def task(self) -> Task:
        return "gpt" if self.bert is None else "bert"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A part of `config.json`.

    Attributes:
        read: to fields of `TransformerConfig`, `vocab_size` and `seq_length`, and of a BERT `binary_head`.
        write: back.
        keys: of fields that have the value of a key, that key: what is wrong with one is wrong with the other.
    """

    read: Callable[[ConfigJson], Mapping[str, Any]]
    write: Callable[[HuggingFaceConfig], Mapping[str, Any]]
    keys: Mapping[str, str] = field(default_factory=dict)


def _of_model(
    read: Callable[[ConfigJson], Mapping[str, Any]], write: Callable[[TransformerConfig], Any], **keys: str
) -> Setting:
    return Setting(read=read, write=lambda config: write(config.model), keys=keys)


def same_value(key: str, kind: type, field_name: str, default: Any = _REQUIRED, *, meaning: str = "") -> Setting:
    """A value that is a field of ours, written from the property `meaning` where that may be implied."""
    return _of_model(
        lambda given: {field_name: given.get(key, kind, default)},
        lambda model: {key: getattr(model, meaning or field_name)},
        **{field_name: key},
    )


def fixed(key: str, value: Any, *, written: bool = True) -> Setting:
    """A value that has to be this one: any other makes a model that we have not."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        found = given.get(key, type(value), value)
        if found != value:
            raise given.refusal(key, found, f"is not supported for this family; {json.dumps(value)} is")
        return {}

    return Setting(read=read, write=lambda config: {key: value} if written else {})


def choice(key: str, field_name: str, values: Mapping[str, str], default: str) -> Setting:
    """A word that is a choice of ours. Of several words for one choice the first is written."""
    written = {ours: theirs for theirs, ours in reversed(list(values.items()))}

    def read(given: ConfigJson) -> Mapping[str, Any]:
        word = given.get(key, str, default)
        if word not in values:
            raise given.refusal(key, word, f"is not supported; {words_or(values)} is")
        return {field_name: values[word]}

    return _of_model(read, lambda model: {key: written.get(getattr(model, field_name))})


def tied(default: bool) -> Setting:
    return _of_model(
        lambda given: {
            "untie_embeddings_and_output_weights": not given.get("tie_word_embeddings", bool, default),
        },
        lambda model: {"tie_word_embeddings": model.tied_embeddings},
    )


def key_value_heads(default: int | None) -> Setting:
    """Groups of query heads. `default` where the file says nothing; None, as null: keys and values for each head."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        heads = given.get("num_attention_heads", int)
        missing = heads if default is None or given.speaks_of("num_key_value_heads") else default
        groups = given.get("num_key_value_heads", int, missing)
        return {} if groups == heads else {"group_query_attention": True, "num_query_groups": groups}

    return _of_model(
        read, lambda model: {"num_key_value_heads": model.query_groups}, num_query_groups="num_key_value_heads"
    )


def head_width(default: int | None) -> Setting:
    """Columns of a head. `default` where the file says nothing; None: hidden / heads."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        width = given.get("head_dim", int, default)
        hidden, heads = given.get("hidden_size", int), given.get("num_attention_heads", int)
        return {} if width is None or width * heads == hidden else {"kv_channels": width}

    return _of_model(read, lambda model: {"head_dim": model.head_dim}, kv_channels="head_dim")


def rotary() -> Setting:
    """Rotary positions: `rope_parameters` as transformers 5 writes them, `rope_theta` and `rope_scaling` as before.

    Both are written, so that either program reads them.
    """

    def read(given: ConfigJson) -> Mapping[str, Any]:
        theta = given.get("rope_theta", float, 10000.0)
        now = given.inner("rope_parameters")
        parameters = (
            given.inner("rope_scaling") if given.get("rope_scaling", dict, {}) else now
        )  # as transformers has it
        kind = parameters.get("rope_type", str, parameters.get("type", str, "default"))
        base = parameters.get("rope_theta", float, now.get("rope_theta", float, theta))
        if base != int(base):
            raise given.refusal("rope_theta", base, "is no whole number, as --rotary-base is")
        for each in (given, parameters):
            if (part := each.get("partial_rotary_factor", float, 1.0)) != 1.0:
                raise each.refusal("partial_rotary_factor", part, "is not supported for this family; 1.0 is")
        fields = {"rotary_base": int(base)}
        if kind == "linear":
            fields["rotary_seq_len_interpolation_factor"] = parameters.get("factor", float)
        elif kind == "llama3":
            fields |= {"use_rope_scaling": True, "rope_scaling_factor": parameters.get("factor", float)}
            for key, value in _LLAMA3.items():
                if (found := parameters.get(key, type(value))) != value:
                    raise parameters.refusal(key, found, f"is not what --use-rope-scaling scales with, {value}")
        elif kind != "default":
            raise parameters.refusal("rope_type", kind, "is not supported; default, linear or llama3 is")
        parameters.refuse_unread()
        return fields

    def write(model: TransformerConfig) -> Mapping[str, Any]:
        scaling: dict[str, Any] = {"rope_type": "default"}
        if model.use_rope_scaling:
            scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
        elif model.rotary_seq_len_interpolation_factor is not None:
            scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
        theta = float(model.rotary_base)
        before = None if scaling["rope_type"] == "default" else {**scaling, "type": scaling["rope_type"]}
        return {
            "rope_theta": theta,
            "rope_scaling": before,
            "rope_parameters": {"rope_theta": theta, **scaling},
        }

    return _of_model(
        read,
        write,
        rotary_base="rope_theta",
        rotary_seq_len_interpolation_factor="factor",
        rope_scaling_factor="factor",
    )


def _window(given: ConfigJson, size: int | None) -> Mapping[str, Any]:
    """Theirs counts the token itself, ours the tokens before it."""
    if size is not None and size < 1:
        raise given.refusal("sliding_window", size, "is no window: of 1 a token looks at itself")
    return {} if size is None else {"window_size": (size - 1, 0)}


def window_of(model: TransformerConfig) -> int | None:
    return None if model.window_size is None or model.window_size[0] < 0 else model.window_size[0] + 1


def sliding_window() -> Setting:
    """The window of all layers. A file that does not speak of it means 4096, null that there is none."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        return _window(given, given.get("sliding_window", int, None) if given.speaks_of("sliding_window") else 4096)

    return _of_model(read, lambda model: {"sliding_window": window_of(model)})


def sliding_window_by_layer() -> Setting:
    """The window of Qwen, of none of the layers or of all."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        layers = given.get("num_hidden_layers", int)
        size = given.get("sliding_window", int, None if given.speaks_of("sliding_window") else 4096)
        first, kinds = given.get("max_window_layers", int, 28), given.get("layer_types", list, None)
        if not given.get("use_sliding_window", bool, False):
            size = None
        elif size is None:
            raise given.refusal("sliding_window", None, "contradicts use_sliding_window true: give its size, or false")
        if kinds is not None and len(kinds) != layers:
            raise given.refusal("layer_types", kinds, f"is of {len(kinds)} layers, and num_hidden_layers is {layers}")
        if kinds is None:
            slides = {size is not None and layer >= first for layer in {0, layers - 1}}
        else:
            slides = {size is not None and kind == "sliding_attention" for kind in kinds}
            if unknown := sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"}):
                raise given.refusal(
                    "layer_types", unknown[0], "is not supported; full_attention or sliding_attention is"
                )
        if len(slides) > 1:
            raise given.refusal("sliding_window", size, "of some layers only is not supported; of all or none is")
        return _window(given, size if slides == {True} else None)

    def write(model: TransformerConfig) -> Mapping[str, Any]:
        size = window_of(model)
        return {
            "use_sliding_window": size is not None,
            "sliding_window": size,
            "max_window_layers": model.num_layers if size is None else 0,
            "layer_types": ["full_attention" if size is None else "sliding_attention"] * model.num_layers,
        }

    return _of_model(read, write)


def biases() -> Setting:
    """Biases of all linear layers, or of none."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        attention, mlp = (given.get(key, bool, False) for key in ("attention_bias", "mlp_bias"))
        if attention != mlp:
            raise given.refusal("attention_bias", attention, f"with mlp_bias {json.dumps(mlp)} is not supported")
        return {"add_bias_linear": attention}

    return _of_model(read, lambda model: {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear})


def gpt2_dropout() -> Setting:
    """That of the embedding and of the residual branches is one with us."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        hidden, embedding = (given.get(key, float, 0.1) for key in ("resid_pdrop", "embd_pdrop"))
        if hidden != embedding:
            rule = f"differs from resid_pdrop {hidden}: --hidden-dropout is both. It acts in training only, so set both"
            raise given.refusal("embd_pdrop", embedding, f"{rule} to one value")
        return {"hidden_dropout": hidden}

    return _of_model(
        read,
        lambda model: {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout},
        hidden_dropout="resid_pdrop",
    )


def gpt2_width() -> Setting:
    return _of_model(
        lambda given: {"ffn_hidden_size": given.get("n_inner", int, 4 * given.get("n_embd", int))},
        lambda model: {"n_inner": model.ffn_size},
        ffn_hidden_size="n_inner",
    )


def vocabulary() -> Setting:
    return Setting(
        read=lambda given: {"vocab_size": given.get("vocab_size", int)},
        write=lambda config: {"vocab_size": config.vocab_size},
        keys={"vocab_size": "vocab_size"},
    )


def context_length(key: str, default: Any = _REQUIRED) -> Setting:
    """Of a model without a table of positions: how long its context was in training."""
    return Setting(
        read=lambda given: {"seq_length": given.get(key, int, default)},
        write=lambda config: {key: config.seq_length},
        keys={"seq_length": key},
    )


def learned_positions(key: str, default: int) -> Setting:
    """The rows of the table, which are the context."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        rows = given.get(key, int, default)
        return {"seq_length": rows, "max_position_embeddings": rows}

    return _of_model(
        read, lambda model: {key: model.max_position_embeddings}, seq_length=key, max_position_embeddings=key
    )


def not_with(key: str, rule: str) -> Setting:
    """A key that a relative of the family has, which is another model."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        if (value := given.get(key, int, None)) is not None:
            raise given.refusal(key, value, rule)
        return {}

    return Setting(read=read, write=lambda config: {})


def not_of_size(key: str, size: int, rule: str) -> Setting:
    def read(given: ConfigJson) -> Mapping[str, Any]:
        if given.get(key, int) == size:
            raise given.refusal(key, size, rule)
        return {}

    return Setting(read=read, write=lambda config: {})


def token_types() -> Setting:
    """The types of tokens: two for a model that has seen pairs of segments, one for a model without pairs."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        types = given.get("type_vocab_size", int, 2)
        if types not in (1, 2):
            raise given.refusal(
                "type_vocab_size", types, "is not supported; 2 is, for pairs of segments, or 1, for none"
            )
        return {"binary_head": types == 2}

    def write(config: HuggingFaceConfig) -> Mapping[str, Any]:
        assert config.bert is not None
        if config.bert.binary_head:
            return {"type_vocab_size": 2}
        return {"type_vocab_size": 1, "architectures": ["BertForMaskedLM"]}

    return Setting(read=read, write=write)
