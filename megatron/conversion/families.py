"""The families of Hugging Face that can be converted: of each, one table of settings and one of names.

A setting is a function of `config.json` to fields of ours and one back. What a file says and no setting of its family
speaks of is refused, unless it says nothing about the model: so nothing is dropped in silence. A model belongs to a
family that says the same of it: whose `config.json`, written and read again, gives the same configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.megatron_config import section_problems
from megatron.config.options import Option, section_options
from megatron.config.problems import ConfigError, listing, words_or
from megatron.config.transformer import TransformerConfig
from megatron.conversion.portable import ConversionError
from megatron.conversion.transforms import (
    GATE_AND_UP,
    PACKED_QUERY_KEY_VALUE,
    QUERY_KEY_VALUE,
    SAME,
    Match,
    Transform,
    transposed,
)

_REQUIRED: Any = object()
# What says nothing about the function that the model computes.
_NEUTRAL = frozenset(
    {
        *("architectures", "model_type", "_name_or_path", "auto_map", "transformers_version", "tokenizer_class"),
        *("torch_dtype", "dtype", "use_cache", "gradient_checkpointing", "pretraining_tp", "task_specific_params"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "_from_model_config"),
        *("output_hidden_states", "output_attentions", "return_dict", "use_return_dict", "attn_implementation"),
        *("_attn_implementation", "id2label", "label2id", "num_labels", "problem_type", "chunk_size_feed_forward"),
        *("torchscript", "keys_to_ignore_at_inference", "is_decoder", "prefix", "finetuning_task"),
        *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty"),
        *("num_return_sequences", "suppress_tokens", "begin_suppress_tokens", "generation_config"),
    }
)


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
                raise ConversionError(f"{self._source}: {key} is missing, which says how large the model is")
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
        vocab_size: rows of the embedding.
        seq_length: tokens of the context.
    """

    model: TransformerConfig
    vocab_size: int
    seq_length: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A part of `config.json`.

    Attributes:
        read: to fields of `TransformerConfig`, `vocab_size` and `seq_length`.
        write: back.
    """

    read: Callable[[ConfigJson], Mapping[str, Any]]
    write: Callable[[HuggingFaceConfig], Mapping[str, Any]]


def _model_setting(
    read: Callable[[ConfigJson], Mapping[str, Any]], write: Callable[[TransformerConfig], Any]
) -> Setting:
    return Setting(read=read, write=lambda config: write(config.model))


def _value(key: str, kind: type, field_name: str, default: Any = _REQUIRED, *, meaning: str = "") -> Setting:
    """A value that is a field of ours, written from the property `meaning` where that may be implied."""
    return _model_setting(
        lambda given: {field_name: given.get(key, kind, default)},
        lambda model: {key: getattr(model, meaning or field_name)},
    )


def _fixed(key: str, value: Any, default: Any = None, *, written: bool = True) -> Setting:
    """A value that has to be this one: any other makes a model that we have not."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        found = given.get(key, type(value), value if default is None else default)
        if found != value:
            raise given.refusal(key, found, f"is not supported for this family; {json.dumps(value)} is")
        return {}

    return Setting(read=read, write=lambda config: {key: value} if written else {})


def _choice(key: str, field_name: str, values: Mapping[str, str], default: str) -> Setting:
    """A word that is a choice of ours. Of several words for one choice the first is written."""
    written = {ours: theirs for theirs, ours in reversed(list(values.items()))}

    def read(given: ConfigJson) -> Mapping[str, Any]:
        word = given.get(key, str, default)
        if word not in values:
            raise given.refusal(key, word, f"is not supported; {words_or(values)} is")
        return {field_name: values[word]}

    return _model_setting(read, lambda model: {key: written.get(getattr(model, field_name))})


def _tied(default: bool) -> Setting:
    return _model_setting(
        lambda given: {
            "untie_embeddings_and_output_weights": not given.get("tie_word_embeddings", bool, default),
        },
        lambda model: {"tie_word_embeddings": model.tied_embeddings},
    )


def _key_value_heads(default: int | None) -> Setting:
    """Groups of query heads. `default` where the file says nothing; None: a key and value for each query head."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        heads = given.get("num_attention_heads", int)
        groups = given.get("num_key_value_heads", int, heads if default is None else default)
        return {} if groups == heads else {"group_query_attention": True, "num_query_groups": groups}

    return _model_setting(read, lambda model: {"num_key_value_heads": model.query_groups})


def _head_width(default: int | None) -> Setting:
    """Columns of a head. `default` where the file says nothing; None: hidden / heads."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        width = given.get("head_dim", int, default)
        hidden, heads = given.get("hidden_size", int), given.get("num_attention_heads", int)
        return {} if width is None or width * heads == hidden else {"kv_channels": width}

    return _model_setting(read, lambda model: {"head_dim": model.head_dim})


def _rotary() -> Setting:
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

    return _model_setting(read, write)


_LLAMA3: Mapping[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _window(given: ConfigJson, size: int | None) -> Mapping[str, Any]:
    """Theirs counts the token itself, ours the tokens before it."""
    if size is not None and size < 1:
        raise given.refusal("sliding_window", size, "is no window: of 1 a token looks at itself")
    return {} if size is None else {"window_size": (size - 1, 0)}


def _window_of(model: TransformerConfig) -> int | None:
    return None if model.window_size is None or model.window_size[0] < 0 else model.window_size[0] + 1


def _sliding_window() -> Setting:
    """The window of all layers. A file that does not speak of it means 4096, null that there is none."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        return _window(given, given.get("sliding_window", int, None) if given.speaks_of("sliding_window") else 4096)

    return _model_setting(read, lambda model: {"sliding_window": _window_of(model)})


def _sliding_window_by_layer() -> Setting:
    """The window of Qwen, of none of the layers or of all."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        layers, size = given.get("num_hidden_layers", int), given.get("sliding_window", int, 4096)
        first, kinds = given.get("max_window_layers", int, 28), given.get("layer_types", list, None)
        if not given.get("use_sliding_window", bool, False):
            size = None
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
        size = _window_of(model)
        return {
            "use_sliding_window": size is not None,
            "sliding_window": size,
            "max_window_layers": model.num_layers if size is None else 0,
            "layer_types": ["full_attention" if size is None else "sliding_attention"] * model.num_layers,
        }

    return _model_setting(read, write)


def _llama_biases() -> Setting:
    """Biases of all linear layers, or of none."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        attention, mlp = (given.get(key, bool, False) for key in ("attention_bias", "mlp_bias"))
        if attention != mlp:
            raise given.refusal("attention_bias", attention, f"with mlp_bias {json.dumps(mlp)} is not supported")
        return {"add_bias_linear": attention}

    return _model_setting(
        read, lambda model: {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    )


def _gpt2_dropout() -> Setting:
    """That of the embedding and of the residual branches is one with us."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        hidden, embedding = (given.get(key, float, 0.1) for key in ("resid_pdrop", "embd_pdrop"))
        if hidden != embedding:
            rule = f"differs from resid_pdrop {hidden}: --hidden-dropout is both. It acts in training only, so set both"
            raise given.refusal("embd_pdrop", embedding, f"{rule} to one value")
        return {"hidden_dropout": hidden}

    return _model_setting(read, lambda model: {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout})


def _gpt2_width() -> Setting:
    return _model_setting(
        lambda given: {"ffn_hidden_size": given.get("n_inner", int, 4 * given.get("n_embd", int))},
        lambda model: {"n_inner": model.ffn_size},
    )


def _vocabulary() -> Setting:
    return Setting(
        read=lambda given: {"vocab_size": given.get("vocab_size", int)},
        write=lambda config: {"vocab_size": config.vocab_size},
    )


def _context(key: str, default: Any = _REQUIRED) -> Setting:
    """Of a model without a table of positions: how long its context was in training."""
    return Setting(
        read=lambda given: {"seq_length": given.get(key, int, default)},
        write=lambda config: {key: config.seq_length},
    )


def _learned_positions(key: str) -> Setting:
    """The rows of the table, which are the context."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        rows = given.get(key, int, 1024)
        return {"seq_length": rows, "max_position_embeddings": rows}

    return _model_setting(read, lambda model: {key: model.max_position_embeddings})


def _not_with(key: str, rule: str) -> Setting:
    """A key that a relative of the family has, which is another model."""

    def read(given: ConfigJson) -> Mapping[str, Any]:
        if (value := given.get(key, int, None)) is not None:
            raise given.refusal(key, value, rule)
        return {}

    return Setting(read=read, write=lambda config: {})


def _not_of_size(key: str, size: int, rule: str) -> Setting:
    def read(given: ConfigJson) -> Mapping[str, Any]:
        if given.get(key, int) == size:
            raise given.refusal(key, size, rule)
        return {}

    return Setting(read=read, write=lambda config: {})


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model of Hugging Face.

    Attributes:
        name: its `model_type`.
        architecture: its class with an output head.
        settings: how `config.json` and our configuration say the same.
        fields: of our configuration, what all models of the family have.
        matches: how tensors and our parameters are the same.
        prefix: of all names but that of the head; files of the model without a head leave it out.
        ignored: patterns of names that hold no weight: tables that follow from the settings.
        neutral: keys of `config.json` that, in this family, say nothing about the function that the model computes.
    """

    name: str
    architecture: str
    settings: tuple[Setting, ...]
    fields: Mapping[str, Any]
    matches: tuple[Match, ...]
    prefix: str
    ignored: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()

    def read(self, values: Mapping[str, Any], source: str) -> HuggingFaceConfig:
        """What a `config.json` says.

        Raises:
            ConversionError: it says something that our model has not.
            ConfigError: its sizes do not fit each other.
        """
        given = ConfigJson(values, source)
        fields = dict(self.fields)
        for setting in self.settings:
            fields |= setting.read(given)
        given.refuse_unread({*_NEUTRAL, *self.neutral})
        vocab_size, seq_length = fields.pop("vocab_size"), fields.pop("seq_length")
        for key, value in (("vocab_size", vocab_size), ("the context", seq_length)):
            if not 1 <= value <= 10**9:
                raise given.refusal(key, value, "must be from 1 to 10^9")
        model = TransformerConfig(**fields)
        if problems := section_problems(model):
            raise ConfigError(problems)
        return HuggingFaceConfig(model=model, vocab_size=vocab_size, seq_length=seq_length)

    def write(self, config: HuggingFaceConfig) -> dict[str, Any]:
        """The `config.json` of a model that the family has."""
        values: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for setting in self.settings:
            values |= setting.write(config)
        return values

    def differences(self, config: HuggingFaceConfig) -> list[str]:
        """What a model has that the family has not, a line for each flag."""
        try:
            again = self.read(self.write(config), "config.json").model
        except (ConversionError, ConfigError) as error:
            return [str(error)]
        model = _effective(config.model)
        lines = []
        for option in section_options("model", TransformerConfig):
            ours, theirs = (_meaning(option, each) for each in (model, _effective(again)))
            if option.flag.affects != "free" and ours != theirs:
                lines.append(f"{option.name}: {ours}, and {theirs} in {self.name}")
        return lines


def _effective(model: TransformerConfig) -> TransformerConfig:
    """The same model, where two values of a field mean the same with one of them."""
    return replace(
        model,
        window_size=None if _window_of(model) is None else model.window_size,
        add_qkv_bias=model.add_qkv_bias or model.add_bias_linear,
    )


def _meaning(option: Option, model: TransformerConfig) -> Any:
    return getattr(model, option.flag.meaning or option.field)


def family_called(name: str) -> Family:
    """The family of this name.

    Raises:
        ConversionError: there is none.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ConversionError(f"{name} is not a family that this program converts; {words_or(f.name for f in FAMILIES)} is")


def family_of_file(values: Mapping[str, Any], source: str) -> Family:
    """The family that a `config.json` names.

    Raises:
        ConversionError: it names none, or one that is not in the table.
    """
    known = {family.architecture: family for family in FAMILIES}
    # A file of a model without its head; one that was written before the key has none.
    bare = {name.replace("ForCausalLM", "Model").replace("LMHead", ""): family for name, family in known.items()}
    names, model_type = values.get("architectures"), values.get("model_type")
    if not names:
        named = {family.name: family for family in FAMILIES}.get(str(model_type))
    else:
        named = (known | bare).get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None
    if named is not None:
        return named
    raise ConversionError(
        f"{source}: architectures {json.dumps(names)[:100]}, model_type {json.dumps(model_type)[:50]} is not a model "
        f"that this program converts; {words_or(known)} is"
    )


def family_of_model(config: HuggingFaceConfig) -> Family:
    """The first family of the table that has a model.

    Raises:
        ConversionError: none has; lists what the nearest one lacks.
    """
    differences = {family.name: family.differences(config) for family in FAMILIES}
    for family in FAMILIES:
        if not differences[family.name]:
            return family
    nearest = min(differences, key=lambda name: len(differences[name]))
    raise ConversionError(
        f"no family of Hugging Face has this model; the nearest is {nearest}, which differs:\n"
        f"{listing(differences[nearest])}"
    )


# ---- the tables ----

_LLAMA_SIZES = (
    _vocabulary(),
    _value("num_hidden_layers", int, "num_layers"),
    _value("hidden_size", int, "hidden_size"),
    _value("num_attention_heads", int, "num_attention_heads"),
    _value("intermediate_size", int, "ffn_hidden_size", meaning="ffn_size"),
    _value("rms_norm_eps", float, "norm_epsilon", 1e-6),
    _value("initializer_range", float, "init_method_std", 0.02),
    _fixed("hidden_act", "silu"),
    _tied(default=False),
)
_ROTARY = (
    _context("max_position_embeddings"),
    _value("attention_dropout", float, "attention_dropout", 0.0),
    _rotary(),
)
_RMS_NORM_AND_SWIGLU: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}
_ROTARY_MODEL = {**_RMS_NORM_AND_SWIGLU, "position_embedding_type": "rope"}


def _llama_names(
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"), transform: Transform = QUERY_KEY_VALUE
) -> tuple[Match, ...]:
    """The names of Llama, which the others have taken over."""
    ours, theirs = "decoder.layers.{layer}.", "model.layers.{layer}."
    projections = tuple(f"{theirs}self_attn.{name}." + "{kind}" for name in attention)
    gate_and_up = tuple(f"{theirs}mlp.{name}_proj." + "{kind}" for name in ("gate", "up"))
    return (
        Match(ours="embedding.word_embeddings.weight", theirs=("model.embed_tokens.weight",)),
        Match(ours=ours + "input_layernorm.weight", theirs=(theirs + "input_layernorm.weight",)),
        Match(ours=ours + "self_attention.linear_qkv.{kind}", theirs=projections, transform=transform),
        Match(ours=ours + "self_attention.q_layernorm.weight", theirs=(theirs + "self_attn.q_norm.weight",)),
        Match(ours=ours + "self_attention.k_layernorm.weight", theirs=(theirs + "self_attn.k_norm.weight",)),
        Match(ours=ours + "self_attention.linear_proj.{kind}", theirs=(theirs + "self_attn.o_proj.{kind}",)),
        Match(ours=ours + "pre_mlp_layernorm.weight", theirs=(theirs + "post_attention_layernorm.weight",)),
        Match(ours=ours + "mlp.linear_fc1.{kind}", theirs=gate_and_up, transform=GATE_AND_UP),
        Match(ours=ours + "mlp.linear_fc2.{kind}", theirs=(theirs + "mlp.down_proj.{kind}",)),
        Match(ours="decoder.final_layernorm.weight", theirs=("model.norm.weight",)),
        Match(ours="output_layer.weight", theirs=("lm_head.weight",)),
    )


def _gpt2_names() -> tuple[Match, ...]:
    """The names of GPT-2, whose linear layers keep [in, out]."""
    ours, theirs, turned = "decoder.layers.{layer}.", "transformer.h.{layer}.", transposed(SAME)
    packed = transposed(PACKED_QUERY_KEY_VALUE)
    return (
        Match(ours="embedding.word_embeddings.weight", theirs=("transformer.wte.weight",)),
        Match(ours="embedding.position_embeddings.weight", theirs=("transformer.wpe.weight",)),
        Match(ours=ours + "input_layernorm.{kind}", theirs=(theirs + "ln_1.{kind}",)),
        Match(
            ours=ours + "self_attention.linear_qkv.{kind}", theirs=(theirs + "attn.c_attn.{kind}",), transform=packed
        ),
        Match(
            ours=ours + "self_attention.linear_proj.{kind}", theirs=(theirs + "attn.c_proj.{kind}",), transform=turned
        ),
        Match(ours=ours + "pre_mlp_layernorm.{kind}", theirs=(theirs + "ln_2.{kind}",)),
        Match(ours=ours + "mlp.linear_fc1.{kind}", theirs=(theirs + "mlp.c_fc.{kind}",), transform=turned),
        Match(ours=ours + "mlp.linear_fc2.{kind}", theirs=(theirs + "mlp.c_proj.{kind}",), transform=turned),
        Match(ours="decoder.final_layernorm.{kind}", theirs=("transformer.ln_f.{kind}",)),
        Match(ours="output_layer.weight", theirs=("lm_head.weight",)),
    )


_BAICHUAN_PROGRAM = {
    "AutoConfig": "configuration_baichuan.BaichuanConfig",
    "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
}
_ROTARY_TABLES = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"(model\.)?rotary_emb\.inv_freq")

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    settings=(
        _vocabulary(),
        _learned_positions("n_positions"),
        _value("n_layer", int, "num_layers"),
        _value("n_embd", int, "hidden_size"),
        _value("n_head", int, "num_attention_heads"),
        _gpt2_width(),
        _value("layer_norm_epsilon", float, "norm_epsilon", 1e-5),
        _value("initializer_range", float, "init_method_std", 0.02),
        _choice(
            "activation_function",
            "activation",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "squared_relu"},
            "gelu_new",
        ),
        _gpt2_dropout(),
        _value("attn_pdrop", float, "attention_dropout", 0.1),
        _tied(default=True),
        _fixed("scale_attn_weights", True),
        _fixed("scale_attn_by_inverse_layer_idx", False),
        _fixed("add_cross_attention", False, written=False),
    ),
    fields={"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
    matches=_gpt2_names(),
    prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    # Of numerics, of other heads than that of a language model, or what another key says too.
    neutral=(
        *("reorder_and_upcast_attn", "n_ctx", "output_past", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
)
LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    settings=(
        *(*_LLAMA_SIZES, *_ROTARY, _key_value_heads(None), _llama_biases()),
        _head_width(None),
    ),
    fields=_ROTARY_MODEL,
    matches=_llama_names(),
    prefix="model.",
    ignored=_ROTARY_TABLES,
)
MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    settings=(
        *(*_LLAMA_SIZES, *_ROTARY, _key_value_heads(8), _sliding_window()),
        _head_width(None),
    ),
    fields=_ROTARY_MODEL,
    matches=_llama_names(),
    prefix="model.",
    ignored=_ROTARY_TABLES,
)
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    settings=(
        *(*_LLAMA_SIZES, *_ROTARY, _key_value_heads(32), _sliding_window_by_layer()),
        _head_width(None),
        _fixed("use_mrope", False, written=False),
    ),
    fields={**_ROTARY_MODEL, "add_qkv_bias": True},
    matches=_llama_names(),
    prefix="model.",
    ignored=_ROTARY_TABLES,
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    settings=(
        *(*_LLAMA_SIZES, *_ROTARY, _key_value_heads(32), _sliding_window_by_layer()),
        _head_width(128),
        _fixed("attention_bias", False),
    ),
    fields={**_ROTARY_MODEL, "qk_layernorm": True},
    matches=_llama_names(),
    prefix="model.",
    ignored=_ROTARY_TABLES,
)
# Of Baichuan 2 the model of 13B; that of 7B has rotary positions. transformers lacks both, and runs the program that
# lies beside the files.
BAICHUAN2 = Family(
    name="baichuan",
    architecture="BaichuanForCausalLM",
    settings=(
        *(*_LLAMA_SIZES, _context("model_max_length", 4096)),
        _not_with("max_position_embeddings", "is a setting of Baichuan 2 7B, whose rotary positions are not supported"),
        _not_of_size("vocab_size", 64000, "is that of Baichuan 1, whose output head is not supported"),
        Setting(read=lambda given: {}, write=lambda config: {"auto_map": _BAICHUAN_PROGRAM}),
    ),
    fields={
        **_RMS_NORM_AND_SWIGLU,
        "position_embedding_type": "alibi",
        "attention_dropout": 0.0,
        "normalize_output_weights": True,
    },
    matches=_llama_names(("W_pack",), PACKED_QUERY_KEY_VALUE),
    prefix="model.",
    neutral=("z_loss_weight",),
)

FAMILIES = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, BAICHUAN2)
