"""What Megatron-LM's arguments, which its checkpoints hold, say of a model and of its training; and the other way."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.config.bert import BertConfig
from megatron.config.megatron_config import all_options
from megatron.config.megatron_flags import known_flag
from megatron.config.options import Option, flag_name, section_options
from megatron.config.transformer import TransformerConfig
from megatron.conversion.megatron_lm.pickles import StandIn
from megatron.conversion.portable import ConversionError, PortableModel

# What changes the model and is not available here, with the values that ask for nothing.
_LACKING: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (False, None),
    "experimental_attention_variant": (None,),
    "apply_layernorm_1p": (False, None),
    "layernorm_zero_centered_gamma": (False, None),
    "qk_l2_norm": (False, None),
    "softmax_type": ("vanilla", None),
    "attention_output_gate": (False, None),
    "window_attn_skip_freq": (None,),
    "no_rope_freq": (None,),
    "rope_type": (None, "rope"),
    "mtp_num_layers": (None, 0),
    "use_mup": (False, None),
    "glu_linear_offset": (0.0, None),
    "activation_func_clamp_value": (None,),
    "quick_geglu": (False, None),
    "enable_mhc_connections": (False, None),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "is_hybrid_model": (False, None),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "retro_add_retriever": (False, None),
}
# The flag of an argument that has another name.
_FLAGS = {"layernorm_zero_centered_gamma": "--apply-layernorm-1p"}
_RESIDUAL = "apply_residual_connection_post_layernorm"
# Its norm and the linear layer after it are one operation with Transformer Engine, of which the norm does not come out.
_RESIDUAL_IN_CORE = f"{flag_name(_RESIDUAL)}: the layers of Megatron core add to what goes into a norm nevertheless"
_ROTARY = ("rotary_percent", "rotary_base", "rotary_interleaved", "rotary_seq_len_interpolation_factor")
# Of the model, fields that are read as they are; besides, those that decide about its training.
_PLAIN = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "max_position_embeddings"),
    *("normalization", "norm_epsilon", "add_bias_linear", "qk_layernorm", "untie_embeddings_and_output_weights"),
    *("hidden_dropout", "attention_dropout", "init_method_std", "embedding_init_method_std", "window_size"),
)
# The same of what BERT has besides, by its name there and ours.
_OF_BERT = {"bert_binary_head": "binary_head", "mask_prob": "mask_prob", "short_seq_prob": "short_seq_prob"}
# Stands for a value that a field can not have.
_MISFIT = object()
# Families of arguments by the start of their names, and when they mean something.
_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "fim_": lambda given: bool(given.get("fim_data")),
    "tiktoken_": lambda given: given.get("tokenizer_type") == "TikTokenizer",
}
_TRAINING_SECTIONS = ("optimizer", "training", "data", "tokenizer")


def arguments_of(content: Any) -> dict[str, Any]:
    """Megatron-LM's arguments, by name, in what it has saved.

    Raises:
        ConversionError: there are none.
    """
    arguments = content.get("args") if isinstance(content, Mapping) else None
    if not isinstance(arguments, StandIn) or not arguments.fields:
        raise ConversionError("holds no arguments (args), which say what the model is")
    return dict(arguments.fields)


def read_config(arguments: Mapping[str, Any], *, before_core: bool = False) -> TransformerConfig:
    """The model that the arguments of a checkpoint describe.

    Args:
        before_core: the model is of the time before Megatron core.

    Raises:
        ConversionError: it has what is not available here, or arguments that make no model.
    """
    refused = list(_refusals(arguments, before_core=before_core))
    if refused:
        raise ConversionError("\n".join(["the model can not be one of this version:", *refused]))
    given = {"norm_epsilon": arguments.get("layernorm_epsilon"), **arguments}
    values = {name: given[name] for name in _PLAIN if given.get(name) is not None}
    values["activation"] = _activation(arguments)
    values["position_embedding_type"] = _positions(arguments)
    if arguments.get("group_query_attention"):
        values |= {"group_query_attention": True, "num_query_groups": arguments.get("num_query_groups")}
    if not arguments.get("add_bias_linear", True):
        values["add_qkv_bias"] = bool(arguments.get("add_qkv_bias"))
    if arguments.get(_RESIDUAL):
        values[_RESIDUAL] = True
    if values["position_embedding_type"] == "rope":
        values |= {name: arguments[name] for name in _ROTARY if arguments.get(name) is not None}
        if arguments.get("use_rope_scaling"):
            values["use_rope_scaling"] = True
            values["rope_scaling_factor"] = arguments.get("rope_scaling_factor", 8.0)
    options = {option.field: option for option in section_options("model", TransformerConfig)}
    fitting = {name: _fitted(options[name], value) for name, value in values.items()}
    misfits = [name for name, value in fitting.items() if value is _MISFIT]
    wrong = [f"  {flag_name(name)} {_shown(values[name])} is no value of it" for name in misfits]
    wrong += [
        f"  {option.name} is missing" for option in options.values() if option.required and option.field not in values
    ]
    if wrong:
        raise ConversionError("\n".join(["the arguments that it was saved with make no model:", *wrong]))
    config = TransformerConfig(**fitting)
    problems = [f"  {problem}" for problem in config.problems()]
    if problems:
        raise ConversionError("\n".join(["the arguments that it was saved with make no model:", *problems]))
    return config


def read_bert(arguments: Mapping[str, Any]) -> BertConfig:
    """What the arguments of a checkpoint say of a BERT.

    Raises:
        ConversionError: a value is none of it.
    """
    options = {option.field: option for option in section_options("bert", BertConfig)}
    given = {ours: arguments[theirs] for theirs, ours in _OF_BERT.items() if arguments.get(theirs) is not None}
    values = {name: _fitted(options[name], value) for name, value in given.items()}
    if wrong := [f"  {options[name].name} {_shown(given[name])}" for name in values if values[name] is _MISFIT]:
        raise ConversionError("\n".join(["the arguments that it was saved with make no BERT:", *wrong]))
    return BertConfig(**values)


def _refusals(arguments: Mapping[str, Any], *, before_core: bool) -> Iterator[str]:
    if arguments.get(_RESIDUAL) and not before_core:
        yield f"  {_RESIDUAL_IN_CORE}"
    for name, neutral in _LACKING.items():
        value = arguments.get(name, neutral[0])
        if value not in neutral:
            flag = _FLAGS.get(name, flag_name(name))
            known = known_flag(flag)
            shown = "" if value is True else f" {_shown(value)}"
            yield f"  {flag}{shown}: {known.reason if known is not None else 'is not available in this version'}"


def _activation(arguments: Mapping[str, Any]) -> str:
    """Its GELU is the tanh form where it is fused with the bias, which is the default, and else the exact one.

    Megatron-LM's `tools/checkpoint/convert.py` turns the fusion off in whatever it writes, and the initialisation with
    it, which a training needs: so without that the arguments do not tell, and the default is taken.
    """
    if arguments.get("swiglu"):
        return "swiglu"
    if arguments.get("squared_relu"):
        return "squared_relu"
    told = arguments.get("perform_initialization", True)
    fused = arguments.get("bias_gelu_fusion", True) if told else arguments.get("add_bias_linear", True)
    return "gelu_tanh" if fused or arguments.get("openai_gelu") else "gelu"


def _positions(arguments: Mapping[str, Any]) -> Any:
    if arguments.get("use_rotary_position_embeddings"):
        return "rope"
    kind = arguments.get("position_embedding_type", "learned_absolute")
    return "none" if kind == "learned_absolute" and not arguments.get("add_position_embedding", True) else kind


def _shown(value: Any) -> str:
    """A plain value in an error; of any other, which can be as large as it likes, the type."""
    return str(value)[:80] if isinstance(value, int | float | str) else f"of type {type(value).__name__}"


def _fitted(option: Option, value: Any) -> Any:
    """The value as a field has it; `_MISFIT` for one that it can not have."""
    fitted = tuple(map(_whole, value)) if isinstance(value, list | tuple) else _whole(value)
    return fitted if option.can_be(fitted) and not option.rule(fitted) else _MISFIT


def _whole(value: Any) -> Any:
    """A whole number as such, also when it was given as a fraction."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def training_flags(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a training's own flags, by our fields, as far as these can have them.

    Megatron-LM keeps what follows from other flags among them: that is left out, and with it the padded vocabulary,
    which the tensors tell. So is what it always has and only another flag gives a meaning.
    """
    given = {**arguments, "precision": "bf16" if arguments.get("bf16") else "fp16" if arguments.get("fp16") else "fp32"}
    given.pop("padded_vocab_size", None)
    if given.get("weight_decay_incr_style", "constant") == "constant":
        given.pop("start_weight_decay", None)
        given.pop("end_weight_decay", None)
    asleep = tuple(prefix for prefix, wakes in _FAMILIES.items() if not wakes(given))
    given = {name: value for name, value in given.items() if not name.startswith(asleep)}
    options = [option for option in all_options() if option.section in _TRAINING_SECTIONS]
    told = [option for option in options if given.get(option.field) is not None]
    values = {option.field: _fitted(option, given[option.field]) for option in told}
    return {name: value for name, value in values.items() if value is not _MISFIT}


def write_arguments(
    model: PortableModel,
    *,
    tensor: int,
    pipeline: int,
    virtual: int,
    padded_vocab_size: int,
    divisible_by: int,
    transformer_impl: str,
) -> argparse.Namespace:
    """The arguments with which Megatron-LM would have made a model, of builtin values alone.

    Raises:
        ConversionError: it can not make it.
    """
    config = model.config
    if config.layernorm_placement == "post":
        raise ConversionError("--layernorm-placement post: Megatron-LM has norms before attention and MLP only")
    if config.apply_residual_connection_post_layernorm:
        raise ConversionError(_RESIDUAL_IN_CORE)
    if config.position_embedding_type == "alibi":
        raise ConversionError("--position-embedding-type alibi: Megatron-LM has no ALiBi")
    if config.normalize_output_weights:
        raise ConversionError("--normalize-output-weights: Megatron-LM has no normalised output layer")
    if config.activation == "gelu_tanh" and not config.add_bias_linear:
        raise ConversionError(
            "--disable-bias-linear: Megatron-LM has the tanh GELU fused with a bias only; --activation gelu is exact"
        )
    return argparse.Namespace(
        num_layers=config.num_layers,
        encoder_num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_size,
        num_attention_heads=config.num_attention_heads,
        kv_channels=config.head_dim,
        group_query_attention=config.group_query_attention,
        num_query_groups=config.query_groups,
        seq_length=model.seq_length,
        encoder_seq_length=model.seq_length,
        max_position_embeddings=config.max_position_embeddings or model.seq_length,
        position_embedding_type=config.position_embedding_type,
        add_position_embedding=config.position_embedding_type == "learned_absolute",
        use_rotary_position_embeddings=False,
        rotary_base=config.rotary_base,
        rotary_percent=config.rotary_percent,
        rotary_interleaved=config.rotary_interleaved,
        rotary_seq_len_interpolation_factor=config.rotary_seq_len_interpolation_factor,
        use_rope_scaling=config.use_rope_scaling,
        rope_scaling_factor=config.rope_scaling_factor,
        normalization=config.normalization,
        norm_epsilon=config.norm_epsilon,
        layernorm_epsilon=config.norm_epsilon,
        apply_layernorm_1p=False,
        swiglu=config.gated,
        squared_relu=config.activation == "squared_relu",
        openai_gelu=False,
        quick_geglu=False,
        bias_gelu_fusion=config.activation == "gelu_tanh",
        bias_swiglu_fusion=config.gated,
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_bias_linear or config.add_qkv_bias,
        qk_layernorm=config.qk_layernorm,
        window_size=config.window_size,
        untie_embeddings_and_output_weights=config.untie_embeddings_and_output_weights,
        apply_query_key_layer_scaling=False,
        apply_residual_connection_post_layernorm=False,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        init_method_std=config.init_method_std,
        embedding_init_method_std=config.embedding_init_method_std,
        num_experts=None,
        make_vocab_size_divisible_by=divisible_by,
        padded_vocab_size=padded_vocab_size,
        vocab_size=model.vocab_size,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_layers_per_virtual_pipeline_stage=config.num_layers // (pipeline * virtual) if virtual > 1 else None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        transformer_impl=transformer_impl,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        iteration=0,
        **({theirs: getattr(model.bert, ours) for theirs, ours in _OF_BERT.items()} if model.bert else {}),
    )
