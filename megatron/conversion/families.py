"""The families of Hugging Face that can be converted: of each, one table of settings and one of names.

A setting is a function of `config.json` to fields of ours and one back. What a file says and no setting of its family
speaks of is refused, unless it says nothing about the model: so nothing is dropped in silence. A model belongs to a
family that says the same of it: whose `config.json`, written and read again, gives the same configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.bert import BertConfig
from megatron.config.megatron_config import SHORTEST_PAIR, Task, section_problems
from megatron.config.options import Option, flag_name, section_options
from megatron.config.problems import Problem, listing, words_or
from megatron.config.transformer import TransformerConfig
from megatron.conversion.portable import ConversionError
from megatron.conversion.settings import (
    ConfigJson,
    HuggingFaceConfig,
    Setting,
    biases,
    choice,
    context_length,
    fixed,
    gpt2_dropout,
    gpt2_width,
    head_width,
    key_value_heads,
    learned_positions,
    not_of_size,
    not_with,
    rotary,
    same_value,
    sliding_window,
    sliding_window_by_layer,
    tied,
    token_types,
    vocabulary,
    window_of,
)
from megatron.conversion.transforms import (
    GATE_AND_UP,
    IN_HALVES,
    PACKED_QUERY_KEY_VALUE,
    QUERY_KEY_VALUE,
    SAME,
    Match,
    Transform,
    transposed,
)

_HEAD = "lm_head.weight"
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


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model of Hugging Face.

    Attributes:
        name: its `model_type`.
        architecture: its class with an output head.
        settings: how `config.json` and our configuration say the same.
        fields: of our configuration, what all models of the family have.
        matches: how tensors and our parameters are the same.
        prefix: of all names but those of heads; files of the model without a head leave it out.
        copies: with tied embeddings, tensors that need not be there, and of which each is a copy.
        ignored: patterns of names that hold no weight: tables that follow from the settings.
        neutral: keys of `config.json` that, in this family, say nothing about the function that the model computes.
        task: what the models are trained for.
        other_architectures: its classes with fewer heads, besides those whose names follow from the `architecture`.
        old_names: ends of names in older files, and what they are now.
        heads: by what it is for a pattern of our names of a head that files may lack, as a whole.
        built_on: of a head the one that it takes its input from, which files that have it may not lack.
        zeros: of a configuration the shapes, by name, of tensors that our model has not and that must be zero.
    """

    name: str
    architecture: str
    settings: tuple[Setting, ...]
    fields: Mapping[str, Any]
    matches: tuple[Match, ...]
    prefix: str
    copies: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    task: Task = "gpt"
    other_architectures: tuple[str, ...] = ()
    old_names: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    built_on: Mapping[str, str] = field(default_factory=dict)
    zeros: Callable[[HuggingFaceConfig], Mapping[str, tuple[int, ...]]] = lambda config: {}

    def read(self, values: Mapping[str, Any], source: str) -> HuggingFaceConfig:
        """What a `config.json` says.

        Raises:
            ConversionError: it says something that our model has not, or its sizes do not fit each other.
        """
        given = ConfigJson(values, source)
        fields = dict(self.fields)
        for setting in self.settings:
            fields |= setting.read(given)
        given.refuse_unread({*_NEUTRAL, *self.neutral})
        vocab_size, seq_length = fields.pop("vocab_size"), fields.pop("seq_length")
        bert = BertConfig(binary_head=fields.pop("binary_head")) if self.task == "bert" else None
        keys = {name: key for setting in self.settings for name, key in setting.keys.items()}
        shortest = 1 if bert is None else SHORTEST_PAIR
        for name, value, least in (("vocab_size", vocab_size, 1), ("seq_length", seq_length, shortest)):
            if not least <= value <= 10**9:
                raise given.refusal(keys[name], value, f"must be from {least} to 10^9")
        model = TransformerConfig(**fields)
        if problems := section_problems(model):
            raise given.refusals([_in_words_of(keys, problem) for problem in problems])
        return HuggingFaceConfig(model=model, bert=bert, vocab_size=vocab_size, seq_length=seq_length)

    def write(self, config: HuggingFaceConfig) -> dict[str, Any]:
        """The `config.json` of a model that the family has."""
        values: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for setting in self.settings:
            values |= setting.write(config)
        return values

    def differences(self, config: HuggingFaceConfig) -> list[str]:
        """What a model has that the family has not, a line for each flag."""
        if config.task != self.task:
            return [f"the model is a {config.task.upper()}, and {self.name} is a {self.task.upper()}"]
        try:
            again = self.read(self.write(config), "config.json").model
        except ConversionError as error:
            return [str(error)]
        model = _effective(config.model)
        lines = []
        for option in section_options("model", TransformerConfig):
            ours, theirs = (_meaning(option, each) for each in (model, _effective(again)))
            if option.of_model and ours != theirs:
                lines.append(f"{option.name}: {ours}, and {theirs} in {self.name}")
        return lines

    def ignores(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def present_name(self, name: str) -> str:
        """What a tensor that a file calls so is called now."""
        for old, new in self.old_names.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name


def _in_words_of(keys: Mapping[str, str], problem: Problem) -> str:
    """A problem of our configuration with the keys of a file, by our fields, for the flags that have one."""
    names = {flag_name(name): key for name, key in keys.items()}
    return re.sub(r"--[a-z0-9-]+", lambda flag: names.get(flag[0], flag[0]), str(problem))


def _effective(model: TransformerConfig) -> TransformerConfig:
    """The same model, where two values of a field mean the same with one of them.

    Which channels of a head turn together is where its weights lie, and all families with rotary positions have them
    put in order (`IN_HALVES`).
    """
    return replace(
        model,
        rotary_interleaved=False,
        window_size=None if window_of(model) is None else model.window_size,
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
        ConversionError: it names none, one that is not in the table, or two.
    """
    known = {family.architecture: family for family in FAMILIES}
    # A file of a model without its head; one that was written before the key has none.
    others = {name.replace("ForCausalLM", "Model").replace("LMHead", ""): family for name, family in known.items()}
    others |= {name: family for family in FAMILIES for name in family.other_architectures}
    names, model_type = values.get("architectures"), values.get("model_type")
    if not names:
        named = {family.name: family for family in FAMILIES}.get(str(model_type))
    else:
        named = (known | others).get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None
    if named is not None:
        if model_type not in (None, named.name):
            raise ConversionError(
                f"{source}: model_type {json.dumps(model_type)[:50]} contradicts architectures {json.dumps(names)}, "
                f"whose model_type is {json.dumps(named.name)}"
            )
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
    families = [family for family in FAMILIES if family.task == config.task]
    differences = {family.name: family.differences(config) for family in families}
    for family in families:
        if not differences[family.name]:
            return family
    nearest = min(differences, key=lambda name: len(differences[name]))
    raise ConversionError(
        f"no family of Hugging Face has this model; the nearest is {nearest}, which differs:\n"
        f"{listing(differences[nearest])}"
    )


# ---- the tables ----

_LLAMA_SIZES = (
    vocabulary(),
    same_value("num_hidden_layers", int, "num_layers"),
    same_value("hidden_size", int, "hidden_size"),
    same_value("num_attention_heads", int, "num_attention_heads"),
    same_value("intermediate_size", int, "ffn_hidden_size", meaning="ffn_size"),
    same_value("rms_norm_eps", float, "norm_epsilon", 1e-6),
    same_value("initializer_range", float, "init_method_std", 0.02),
    fixed("hidden_act", "silu"),
    tied(default=False),
)
_ROTARY = (
    context_length("max_position_embeddings"),
    same_value("attention_dropout", float, "attention_dropout", 0.0),
    rotary(),
)
_LLAMA_COPIES = {_HEAD: "model.embed_tokens.weight"}
_RMS_NORM_AND_SWIGLU: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}


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
        Match(
            ours=ours + "self_attention.q_layernorm.weight",
            theirs=(theirs + "self_attn.q_norm.weight",),
            transform=IN_HALVES,
        ),
        Match(
            ours=ours + "self_attention.k_layernorm.weight",
            theirs=(theirs + "self_attn.k_norm.weight",),
            transform=IN_HALVES,
        ),
        Match(ours=ours + "self_attention.linear_proj.{kind}", theirs=(theirs + "self_attn.o_proj.{kind}",)),
        Match(ours=ours + "pre_mlp_layernorm.weight", theirs=(theirs + "post_attention_layernorm.weight",)),
        Match(ours=ours + "mlp.linear_fc1.{kind}", theirs=gate_and_up, transform=GATE_AND_UP),
        Match(ours=ours + "mlp.linear_fc2.{kind}", theirs=(theirs + "mlp.down_proj.{kind}",)),
        Match(ours="decoder.final_layernorm.weight", theirs=("model.norm.weight",)),
        Match(ours="output_layer.weight", theirs=(_HEAD,)),
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
        Match(ours="output_layer.weight", theirs=(_HEAD,)),
    )


_BERT_WORDS, _BERT_POSITIONS, _BERT_TYPES = (
    f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")
)
_BERT_BIAS = "cls.predictions.bias"
_POOLER, _PAIRS = "the first token (pooler)", "pairs of segments"


def _bert_names() -> tuple[Match, ...]:
    """The names of BERT."""
    ours, theirs = "encoder.layers.{layer}.", "bert.encoder.layer.{layer}."
    projections = tuple(f"{theirs}attention.self.{name}." + "{kind}" for name in ("query", "key", "value"))
    transform = "cls.predictions.transform."
    return (
        Match(ours="embedding.word_embeddings.weight", theirs=(_BERT_WORDS,)),
        Match(ours="embedding.position_embeddings.weight", theirs=(_BERT_POSITIONS,)),
        Match(ours="embedding.tokentype_embeddings.weight", theirs=(_BERT_TYPES,)),
        Match(ours="embedding.layernorm.{kind}", theirs=("bert.embeddings.LayerNorm.{kind}",)),
        Match(ours=ours + "self_attention.linear_qkv.{kind}", theirs=projections, transform=QUERY_KEY_VALUE),
        Match(ours=ours + "self_attention.linear_proj.{kind}", theirs=(theirs + "attention.output.dense.{kind}",)),
        Match(ours=ours + "post_attention_layernorm.{kind}", theirs=(theirs + "attention.output.LayerNorm.{kind}",)),
        Match(ours=ours + "mlp.linear_fc1.{kind}", theirs=(theirs + "intermediate.dense.{kind}",)),
        Match(ours=ours + "mlp.linear_fc2.{kind}", theirs=(theirs + "output.dense.{kind}",)),
        Match(ours=ours + "post_mlp_layernorm.{kind}", theirs=(theirs + "output.LayerNorm.{kind}",)),
        Match(ours="lm_head.dense.{kind}", theirs=(transform + "dense.{kind}",)),
        Match(ours="lm_head.layernorm.{kind}", theirs=(transform + "LayerNorm.{kind}",)),
        Match(ours="output_layer.bias", theirs=(_BERT_BIAS,)),
        Match(ours="pooler.dense.{kind}", theirs=("bert.pooler.dense.{kind}",)),
        Match(ours="binary_head.{kind}", theirs=("cls.seq_relationship.{kind}",)),
    )


def _one_token_type(config: HuggingFaceConfig) -> Mapping[str, tuple[int, ...]]:
    """The table of token types of a model without pairs: ours has none, and theirs adds a row of it to each token."""
    assert config.bert is not None
    return {} if config.bert.binary_head else {_BERT_TYPES: (1, config.model.hidden_size)}


_BAICHUAN_PROGRAM = {
    "AutoConfig": "configuration_baichuan.BaichuanConfig",
    "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
}


def _llama_like(name: str, architecture: str, *settings: Setting, **fields: Any) -> Family:
    """Llama but for some settings, and for fields of our configuration that are not as by default."""
    return Family(
        name=name,
        architecture=architecture,
        settings=(*_LLAMA_SIZES, *_ROTARY, *settings),
        fields={**_RMS_NORM_AND_SWIGLU, "position_embedding_type": "rope", **fields},
        matches=_llama_names(),
        prefix="model.",
        copies=_LLAMA_COPIES,
        ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"(model\.)?rotary_emb\.inv_freq"),
    )


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    settings=(
        vocabulary(),
        learned_positions("n_positions", 1024),
        same_value("n_layer", int, "num_layers"),
        same_value("n_embd", int, "hidden_size"),
        same_value("n_head", int, "num_attention_heads"),
        gpt2_width(),
        same_value("layer_norm_epsilon", float, "norm_epsilon", 1e-5),
        same_value("initializer_range", float, "init_method_std", 0.02),
        choice(
            "activation_function",
            "activation",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "squared_relu"},
            "gelu_new",
        ),
        gpt2_dropout(),
        same_value("attn_pdrop", float, "attention_dropout", 0.1),
        tied(default=True),
        fixed("scale_attn_weights", True),
        fixed("scale_attn_by_inverse_layer_idx", False),
        fixed("add_cross_attention", False, written=False),
    ),
    fields={"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
    matches=_gpt2_names(),
    prefix="transformer.",
    copies={_HEAD: "transformer.wte.weight"},
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    # Of numerics, of other heads than that of a language model, or what another key says too.
    neutral=(
        *("reorder_and_upcast_attn", "n_ctx", "output_past", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
)
LLAMA = _llama_like("llama", "LlamaForCausalLM", key_value_heads(None), biases(), head_width(None))
MISTRAL = _llama_like("mistral", "MistralForCausalLM", key_value_heads(8), sliding_window(), head_width(None))
QWEN2 = _llama_like(
    "qwen2",
    "Qwen2ForCausalLM",
    *(key_value_heads(32), sliding_window_by_layer(), head_width(None), fixed("use_mrope", False, written=False)),
    add_qkv_bias=True,
)
QWEN3 = _llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    *(key_value_heads(32), sliding_window_by_layer(), head_width(128), fixed("attention_bias", False)),
    qk_layernorm=True,
)
# Of Baichuan 2 the model of 13B; that of 7B has rotary positions. transformers lacks both, and runs the program that
# lies beside the files.
BAICHUAN2 = Family(
    name="baichuan",
    architecture="BaichuanForCausalLM",
    settings=(
        *(*_LLAMA_SIZES, context_length("model_max_length", 4096)),
        not_with("max_position_embeddings", "is a setting of Baichuan 2 7B, whose rotary positions are not supported"),
        not_of_size("vocab_size", 64000, "is that of Baichuan 1, whose output head is not supported"),
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
    copies=_LLAMA_COPIES,
    neutral=("z_loss_weight",),
)
# Settings of BERT's first program, which no other reads.
_POOLER_OF_TENSORFLOW = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
# As it was published: with a norm after the embeddings, after attention and after the MLP.
BERT = Family(
    name="bert",
    architecture="BertForPreTraining",
    settings=(
        vocabulary(),
        learned_positions("max_position_embeddings", 512),
        same_value("num_hidden_layers", int, "num_layers"),
        same_value("hidden_size", int, "hidden_size"),
        same_value("num_attention_heads", int, "num_attention_heads"),
        same_value("intermediate_size", int, "ffn_hidden_size", meaning="ffn_size"),
        same_value("layer_norm_eps", float, "norm_epsilon", 1e-12),
        same_value("initializer_range", float, "init_method_std", 0.02),
        same_value("hidden_dropout_prob", float, "hidden_dropout", 0.1),
        same_value("attention_probs_dropout_prob", float, "attention_dropout", 0.1),
        fixed("hidden_act", "gelu"),  # also in the head for masked tokens, which has the exact one here in any case
        fixed("tie_word_embeddings", True),
        fixed("is_decoder", False, written=False),
        fixed("add_cross_attention", False, written=False),
        fixed("position_embedding_type", "absolute", written=False),
        token_types(),
    ),
    fields={
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "activation": "gelu",
        "layernorm_placement": "post",
    },
    matches=_bert_names(),
    prefix="bert.",
    copies={"cls.predictions.decoder.weight": _BERT_WORDS, "cls.predictions.decoder.bias": _BERT_BIAS},
    ignored=(r"(bert\.)?embeddings\.(position_ids|token_type_ids)",),
    # Of other heads than those of pretraining.
    neutral=("classifier_dropout", "directionality", *(f"pooler_{what}" for what in _POOLER_OF_TENSORFLOW)),
    task="bert",
    other_architectures=("BertForMaskedLM", "BertModel"),
    old_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    heads={
        "masked tokens": r"lm_head\..*|output_layer\.bias",
        _POOLER: r"pooler\..*",
        _PAIRS: r"binary_head\..*",
    },
    built_on={_PAIRS: _POOLER},
    zeros=_one_token_type,
)

FAMILIES = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, BAICHUAN2, BERT)
