"""The configuration of a run: its sections, the rules between them, its saved form."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.bert import BertConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig, parse_blend
from megatron.config.data_parallel import DataParallelConfig
from megatron.config.logging import LoggingConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.options import (
    LARGEST_WHOLE,
    MOST_SAMPLES,
    Affects,
    Option,
    read_words,
    section_options,
    shown_value,
    spelled,
)
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import pipeline_layout
from megatron.config.problems import (
    ConfigError,
    Problem,
    UserError,
    counted,
    divisors,
    multiples,
    near,
    nearest_name,
    without_flags_of,
)
from megatron.config.tokenizer import TokenizerConfig, padded_vocab_size
from megatron.config.training import TrainingConfig
from megatron.config.transformer import RESIDUAL_AFTER_NORM, TransformerConfig

if TYPE_CHECKING:
    import torch

# What a program trains, and its program. BERT has every section of GPT, and one of its own.
Task = Literal["gpt", "bert"]
PROGRAMS: Mapping[Task, str] = {"gpt": "pretrain_gpt.py", "bert": "pretrain_bert.py"}

# What a configuration is used for decides which rules it must keep: a training run, a model without training
# (generation, conversion), or only the layout of ranks (printing the groups).
Purpose = Literal["training", "model", "layout"]

# The pipeline split depends on the vocabulary through the cost of the output layer only; until a tokenizer is
# read, GPT-2's size stands for it.
_TYPICAL_VOCABULARY = 50257

# Tokens of a pair of segments of one token each. Samples without pairs leave room for as much, as in Megatron-LM.
SHORTEST_PAIR = 5

# What decides how many replicas of the model there are.
_WORLD_FLAGS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--world-size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field whose value differs between a saved and the present configuration."""

    flag: str
    saved: object
    present: object
    affects: Affects

    def __str__(self) -> str:
        return f"{self.flag}: {self.saved} -> {self.present}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleLengths:
    """Lengths of the learning rate and weight decay schedules, all in samples."""

    warmup: float
    decay: int
    wsd_decay: int | None
    weight_decay_ramp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig:
    """All of a run's configuration. Building one checks nothing; `validate` does, before anything starts."""

    model: TransformerConfig
    parallel: ParallelConfig
    data_parallel: DataParallelConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    bert: BertConfig | None = None

    @property
    def task(self) -> Task:
        """What is trained: that a configuration has the section of BERT says it."""
        return "gpt" if self.bert is None else "bert"

    # ---- derived sizes ----

    def on(self, world_size: int) -> MegatronConfig:
        """The configuration on that many started processes. Raises ConfigError when --world-size names another number.

        The sizes below need it, or --world-size; without either they raise ValueError.
        """
        wanted = self.parallel.world_size
        if wanted not in (None, world_size):
            rule = f"is not the number of processes that the launcher has started, {world_size}"
            works = "leave out --world-size; or start that many processes"
            raise ConfigError([Problem(flags=("--world-size",), value=wanted, rule=rule, works=works)])
        return dataclasses.replace(self, parallel=dataclasses.replace(self.parallel, world_size=world_size))

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model. Raises ConfigError when TP x PP x CP does not divide the processes."""
        size = self.parallel.world_size
        if size is None:
            raise ValueError("the number of processes is not known: give --world-size N, or config.on(N)")
        problems = list(_world_size_problems(self, size))
        if problems:
            raise ConfigError(problems)
        return size // self.parallel.model_parallel_size

    @property
    def global_batch_size(self) -> int:
        """Samples of one step, after any ramp-up."""
        if self.training.global_batch_size is not None:
            return self.training.global_batch_size
        return self.training.micro_batch_size * self.data_parallel_size

    @property
    def train_samples(self) -> int:
        """Samples of the whole run."""
        if self.training.train_samples is not None:
            return self.training.train_samples
        if self.training.train_iters is None:
            raise ValueError("the length of the run is not given: --train-iters N or --train-samples N")
        return self.training.train_iters * self.global_batch_size

    @property
    def schedule_lengths(self) -> ScheduleLengths:
        """Lengths of the schedules in samples; iterations count as full global batches, as in Megatron-LM."""
        optimizer, total = self.optimizer, self.train_samples
        if self.training.train_samples is not None:
            decay = total if optimizer.lr_decay_samples is None else optimizer.lr_decay_samples
            warmup: float = optimizer.lr_warmup_samples
            wsd_decay = optimizer.lr_wsd_decay_samples
        else:
            batch = self.global_batch_size
            decay = total if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters * batch
            warmup = optimizer.lr_warmup_iters * batch
            last = optimizer.lr_wsd_decay_iters
            wsd_decay = None if last is None else last * batch
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        return ScheduleLengths(warmup=warmup, decay=decay, wsd_decay=wsd_decay, weight_decay_ramp=total)

    def model_vocab_size(self, tokenizer_size: int) -> int:
        """Rows of the vocabulary that belong to the model: --padded-vocab-size, else the tokenizer's."""
        padded = self.tokenizer.padded_vocab_size
        return padded if padded is not None else tokenizer_size

    def padded_vocab_size(self, tokenizer_size: int) -> int:
        """Rows of the embedding over all ranks, with those that only fill it up for tensor parallelism."""
        tensor = self.parallel.tensor_model_parallel_size
        if self.tokenizer.padded_vocab_size is not None:
            return padded_vocab_size(self.tokenizer.padded_vocab_size, 1, tensor)
        return padded_vocab_size(tokenizer_size, self.tokenizer.make_vocab_size_divisible_by, tensor)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The type of the residual stream, and of the hidden states that stages send."""
        optimizer = self.optimizer
        return optimizer.main_dtype if self.model.fp32_residual_connection else optimizer.params_dtype

    # ---- rules ----

    def problems(self, *, purpose: Purpose = "training", check_files: bool = True) -> list[Problem]:
        """Every rule that the configuration breaks: those of single values, of the sections and between them.

        A value that is not allowed by itself has the nearest one in its place for the rules that relate it to others,
        so that each of those is computed from sizes within their limits; what they say about that flag is left out.
        """
        sections = section_classes(self.task)
        allowed = MegatronConfig(**{name: _within_limits(name, getattr(self, name)) for name in sections})

        def rules_with(option: Option, value: Any) -> list[Problem]:
            section = dataclasses.replace(getattr(allowed, option.section), **{option.field: value})
            return dataclasses.replace(allowed, **{option.section: section})._rules(purpose, check_files=False)

        found = [problem for name in sections for problem in _value_problems(name, getattr(self, name), rules_with)]
        return found + without_flags_of(found, allowed._rules(purpose, check_files))

    def _rules(self, purpose: Purpose, check_files: bool) -> list[Problem]:
        """The broken rules among values that are each allowed by themselves."""
        found = list(self.parallel.problems())
        if purpose != "layout":
            found += self.model.problems()
            if not found:
                found += _pipeline_problems(self)
            found += _recompute_problems(self, layout_is_right=not found)
            found += _model_layout_problems(self)
            found += _task_problems(self)
            rest = (self.training, self.data, self.tokenizer, self.checkpoint, self.logging)
            for section in (self.data_parallel, self.optimizer, *rest):
                found += section.problems()
            if check_files:
                found += self.tokenizer.file_problems()
        if purpose == "training":
            found += self.data.source_problems(trains=not self.training.skip_train)
            found += self.training.horizon_problems()
            found += _masking_problems(self)
            found += _residual_problems(self)
            found += _gather_problems(self)
            found += _length_problems(self)
            found += _sample_problems(self)
            found += _full_validation_problems(self)
            found += _unavailable(self)
            found += _apex_problems(self)
            if check_files:
                found += self.data.file_problems()
        if (world_size := self.parallel.world_size) is not None:
            world_problems = list(_world_size_problems(self, world_size))
            found += world_problems
            if purpose == "training" and not world_problems:
                found += _batch_problems(self, self.data_parallel_size)
        return found

    def validate(self, *, purpose: Purpose = "training", check_files: bool = True) -> None:
        """Raise ConfigError with every problem, if there is one."""
        problems = self.problems(purpose=purpose, check_files=check_files)
        if problems:
            raise ConfigError(problems)

    # ---- what to know at the start ----

    def start_notes(self) -> list[str]:
        """What a choice costs, for the choices whose price is not plain, and which of them gain nothing."""
        return [*self._attention_notes(), *self._scaling_notes(), *self._state_notes(), *self._recompute_notes()]

    def _attention_notes(self) -> Iterator[str]:
        model, training, dropout = self.model, self.training, self.model.attention_dropout
        if dropout == 0:
            return
        if model.fast_attention_dropout:
            yield (
                f"--attention-dropout {dropout} is drawn by torch's attention kernel (--fast-attention-dropout): its "
                "masks follow from --seed, but depend on --tensor-model-parallel-size and --micro-batch-size; on CPUs "
                "that kernel keeps its attention weights, so only GPUs spare memory"
            )
            return
        heads, length = model.num_attention_heads // self.parallel.tensor_model_parallel_size, self.data.seq_length
        # The softmax and what is left of it after dropout, in the precision of the activations.
        bytes_per_weight = 2 * self.optimizer.params_dtype.itemsize
        kept = heads * length**2 * training.micro_batch_size * bytes_per_weight
        explicit = (
            f"--attention-dropout {dropout} takes the explicit path, so that its masks do not depend on the layout"
        )
        if "core_attn" in model.recomputed_modules or model.recompute_granularity == "full":
            yield f"{explicit}: no flash kernel runs; --attention-dropout 0 or --fast-attention-dropout (GPUs) lets it"
            return
        yield (
            f"{explicit}: no flash kernel runs, and each layer keeps {kept / 1e6:,.1f} MB of attention weights for the "
            f"backward pass of a micro-batch ({heads} heads x {length} x {length} x {training.micro_batch_size} "
            f"samples x {bytes_per_weight} bytes); --attention-dropout 0 or, on GPUs, --fast-attention-dropout spares "
            "both, --recompute-activations the memory"
        )

    def _scaling_notes(self) -> Iterator[str]:
        if self.model.apply_query_key_layer_scaling and self.model.attention_dropout == 0:
            yield (
                "--apply-query-key-layer-scaling takes the explicit path, where scores are divided before they are "
                "rounded: no flash kernel runs, and each layer keeps its attention weights for the backward pass; "
                "flash kernels hold scores in fp32, so --no-query-key-layer-scaling spares both"
            )

    def _state_notes(self) -> Iterator[str]:
        optimizer = self.optimizer
        # A bfloat16 has 8 bits: less than a 512th of it is rounded away, whatever is taken from it.
        if "exp_avg_sq" in optimizer.narrow_states and 1 - optimizer.adam_beta2 < 2**-9:
            yield (
                f"--exp-avg-sq-dtype bf16 with --adam-beta2 {optimizer.adam_beta2}: a second moment never becomes "
                "less, because what a step takes from it is rounded away; --adam-beta2 0.99 or less, or "
                "--exp-avg-sq-dtype fp32, lets it"
            )

    def _recompute_notes(self) -> Iterator[str]:
        """Recomputation that spares nothing, or next to nothing."""
        model, parallel = self.model, self.parallel
        if "core_attn" in model.recomputed_modules and not model.computes_attention_weights(training=True):
            where = "on GPUs runs" if model.fast_attention_dropout else "runs"
            yield (
                f"--recompute-granularity selective computes the core of attention again, which {where} in a fused "
                "kernel: that keeps no attention weights and computes them again by itself, so no more than its output "
                "is spared, for the time of its forward; --recompute-modules layernorm mlp, or --recompute-granularity "
                "full, spare more"
            )
        whole = model.recompute_method == "uniform" and model.num_layers <= (model.recompute_num_layers or 0)
        if whole and parallel.pipeline_model_parallel_size == 1:
            yield (
                f"--recompute-method uniform with --recompute-num-layers {model.recompute_num_layers} spares nothing "
                "without pipeline stages: the backward of the only micro-batch computes all layers again before it "
                "uses the first of them; --recompute-num-layers 1 keeps the activations of one layer at a time"
            )

    # ---- saved form ----

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections and fields as plain JSON values."""
        return {
            section.name: {
                field.name: _plain(getattr(getattr(self, section.name), field.name))
                for field in dataclasses.fields(getattr(self, section.name))
            }
            for section in dataclasses.fields(self)
            if getattr(self, section.name) is not None
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Mapping[str, Any]]) -> MegatronConfig:
        """The inverse of to_dict. Fields that a saved form lacks take their defaults.

        Raises UserError for a section or field that is not known here, with the nearest known one, and for a value that
        no field can have.
        """
        built: dict[str, Any] = {}
        _refuse_unknown("section", saved, section_classes())
        for section, config_class in section_classes("bert" if "bert" in saved else "gpt").items():
            values = saved.get(section, {})
            options = {option.field: option for option in section_options(section, config_class)}
            _refuse_unknown(f"field of {section}", values, options)
            missing = [name for name, option in options.items() if option.required and values.get(name) is None]
            if missing:
                raise UserError(f"the saved configuration lacks {section}.{f', {section}.'.join(missing)}")
            for name, value in values.items():
                if not options[name].can_be(value):
                    raise UserError(f"the saved configuration has {section}.{name} {repr(value)[:80]}")
            built[section] = config_class(
                **{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
            )
        return cls(**built)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def values_of_all_ranks(self) -> dict[str, Any]:
        """What every rank of a run has to be given alike, as JSON values by flag.

        A corpus goes by its last name, since nodes may hold copies of it; what is a node's own is left out.
        """
        values = {}
        for option in all_options(self.task):
            value = _plain(getattr(getattr(self, option.section), option.field))
            if not option.flag.node_local:
                values[option.name] = [_last_name(word) for word in value] if option.flag.same_name else value
        return values


def difference(saved: MegatronConfig, present: MegatronConfig) -> list[Difference]:
    """The fields that both have and whose values differ, each with what the change affects.

    A path that only moved (the same last name in another folder) affects nothing. The global batch is compared where it
    follows from the number of processes, too.
    """
    found = []
    batches = _known_batch(saved), _known_batch(present)
    for option in all_options(saved.task if saved.task == present.task else "gpt"):
        old = getattr(getattr(saved, option.section), option.field)
        new = getattr(getattr(present, option.section), option.field)
        if option.name == "--global-batch-size" and None not in batches:
            old, new = batches
        if old == new or _means_the_same(option, getattr(saved, option.section), getattr(present, option.section)):
            continue
        moved = option.flag.same_name and [_last_name(v) for v in old] == [_last_name(v) for v in new]
        affects: Affects = "free" if moved else option.affects
        if option.name == "--micro-batch-size" and not present.optimizer.calculate_per_token_loss:
            affects = "training"  # a token weighs more in a micro-batch that has few
        found.append(Difference(flag=option.name, saved=old, present=new, affects=affects))
    return found


@functools.cache
def section_classes(task: Task | None = None) -> Mapping[str, type]:
    """The class of each section that a task has, or any task where none is named, by its name."""
    classes: dict[str, type] = typing.get_type_hints(MegatronConfig)
    del classes["bert"]  # which is optional
    return classes if task == "gpt" else {**classes, "bert": BertConfig}


@functools.cache
def all_options(task: Task | None = None) -> tuple[Option, ...]:
    """Every option of every section that a task has, or any task where none is named, in the order of help."""
    return tuple(option for name, section in section_classes(task).items() for option in section_options(name, section))


def _means_the_same(option: Option, saved: object, present: object) -> bool:
    name = option.flag.meaning
    return name != "" and getattr(saved, name) == getattr(present, name)


def _last_name(word: str) -> str:
    return PurePath(word).name


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _refuse_unknown(what: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise UserError(f"the saved configuration has {repr(given)[:80]} in the place of every {what}")
    for name in given:
        if name not in known:
            nearest = nearest_name(name, known)
            hint = f"; nearest: {nearest}" if nearest else ""
            raise UserError(f"the saved configuration has the {what} {name!r}, unknown to this version{hint}")


# ---- rules between sections ----


def section_problems(section: Any) -> list[Problem]:
    """What is wrong within a section that stands alone, as in a tool; its files aside."""
    (name,) = (name for name, section_class in section_classes().items() if type(section) is section_class)
    allowed = _within_limits(name, section)

    def rules_with(option: Option, value: Any) -> list[Problem]:
        return list(dataclasses.replace(allowed, **{option.field: value}).problems())

    found = list(_value_problems(name, section, rules_with))
    return found + without_flags_of(found, allowed.problems())


# The broken rules of a configuration that has a value for an option, and is allowed otherwise.
_RulesWith = Callable[[Option, Any], list[Problem]]


def _within_limits(name: str, section: Any) -> Any:
    """The section with the nearest allowed value in place of each one that is not allowed by itself."""
    options = (option for option in all_options() if option.section == name)
    return dataclasses.replace(
        section, **{option.field: option.nearest(getattr(section, option.field)) for option in options}
    )


def _value_problems(name: str, section: Any, rules_with: _RulesWith) -> Iterator[Problem]:
    """The values of a section that are not allowed by themselves."""
    for option in (option for option in all_options() if option.section == name):
        value = getattr(section, option.field)
        if rule := option.rule(value):
            flags = (option.name, *sorted(option.names - {option.name}))
            works = _what_works(option, option.nearest(value), rules_with)
            yield Problem(flags=flags, value=shown_value(value), rule=rule, works=works)


def _what_works(option: Option, nearest: Any, rules_with: _RulesWith) -> str:
    """The allowed value nearest to a wrong one. Where other rules refuse that, a value that they name, or the default,
    if they take it; else the nearest, with what they advise then."""
    if option.kind == "text":
        return " | ".join(option.choices) or f"{option.name} with a value; or leave it out"

    def refusals(value: Any) -> list[Problem]:
        return [problem for problem in rules_with(option, value) if option.name in problem.flags]

    refused = refusals(nearest)
    if not refused:
        return _given(option, nearest)
    advice = "; ".join(problem.works for problem in refused)
    named = re.findall(rf"(?<!\S){option.name} ([\d_.e+-]*\d)", advice) if option.flag.words == 1 else []
    others = [read_words(option, [word]) for word in named] + ([] if option.required else [option.default])
    for value in others:
        if not option.rule(value) and not refusals(value):
            return _given(option, value)
    return f"{_given(option, nearest)}; and then {advice}"


def _given(option: Option, value: Any) -> str:
    return f"leave out {option.name}" if value is None else f"{option.name} {shown_value(value)}"


def _task_problems(config: MegatronConfig) -> Iterator[Problem]:
    """What has a meaning for GPT alone."""
    if config.bert is None:
        return
    model, data = config.model, config.data
    causal = "what BERT attends to is not what came before: every token sees the whole sample"
    of_gpt = {
        "--window-size": (model.window_size is not None, causal),
        "--position-embedding-type": (model.position_embedding_type == "alibi", f"ALiBi fades with distance; {causal}"),
        "--reset-position-ids": (data.reset_position_ids, "a sample of BERT lies within one document"),
        "--reset-attention-mask": (data.reset_attention_mask, "a sample of BERT lies within one document"),
        "--eod-mask-loss": (data.eod_mask_loss, "BERT predicts masked tokens, and no end of a document is one"),
        "--fim-data": (data.fim_data, "BERT fills in masked tokens anywhere"),
        "--full-validation": (
            config.training.full_validation,
            "its last batch is filled up with samples that no loss is on, and one of BERT has none such",
        ),
        "--cross-entropy-fusion-impl": (
            model.fuses_output_layer,
            "BERT's output layer has a bias, and the operation that fuses it with the loss takes none",
        ),
    }
    for name, (given, rule) in of_gpt.items():
        if given:
            yield Problem(flags=(name,), rule=f"belongs to {PROGRAMS['gpt']}: {rule}", works=f"leave out {name}")
    if data.seq_length < SHORTEST_PAIR:
        yield Problem(
            flags=("--seq-length",),
            value=data.seq_length,
            rule=f"samples of BERT have room for [CLS] A [SEP] B [SEP], at least {SHORTEST_PAIR} tokens",
            works=f"--seq-length {SHORTEST_PAIR} or more",
        )


def _masking_problems(config: MegatronConfig) -> Iterator[Problem]:
    if config.bert is None or config.data.seq_length < SHORTEST_PAIR:
        return
    share, room = config.bert.mask_prob, config.data.seq_length - 3
    if int(share * room) == 0:
        longer = math.ceil(1 / share) + 3 if share * LARGEST_WHOLE > 1 else None
        yield Problem(
            flags=("--mask-prob", "--seq-length"),
            value=f"{share:g} of the {counted(room, 'token')} beside [CLS] and [SEP]s",
            rule="is less than one: no token is to be predicted, and nothing would be learned",
            works=f"--mask-prob {math.ceil(1e4 / room) / 1e4:g} or more"
            + (f"; --seq-length {longer} or more" if longer else ""),
        )


def _unavailable(config: MegatronConfig) -> Iterator[Problem]:
    size = config.parallel.context_parallel_size
    if size > 1:
        yield Problem(
            flags=("--context-parallel-size",),
            value=size,
            rule="training with context parallelism is not available in this version",
            works="--context-parallel-size 1; a long sequence fits with --sequence-parallel and more TP",
        )


def _apex_problems(config: MegatronConfig) -> Iterator[Problem]:
    """What the kernels of NVIDIA Apex do not compute."""
    if config.training.kernels == "apex" and config.optimizer.use_precision_aware_optimizer:
        yield Problem(
            flags=("--kernels", "--use-precision-aware-optimizer"),
            value="apex",
            rule="the Adam of NVIDIA Apex knows whole parameters and moments in fp32 only",
            works="--kernels auto; or leave out --use-precision-aware-optimizer",
        )
    if config.training.kernels == "apex" and config.optimizer.grad_reduce_in_bf16:
        yield Problem(
            flags=("--kernels", "--grad-reduce-in-bf16"),
            value="apex",
            rule="the Adam of NVIDIA Apex takes gradients in fp32 only",
            works="--kernels auto; or leave out --grad-reduce-in-bf16",
        )
    if config.training.kernels == "apex" and config.optimizer.precision == "fp64":
        yield Problem(
            flags=("--kernels", "--fp64"),
            value="apex",
            rule="the Adam of NVIDIA Apex computes in fp32, from fp32",
            works="--kernels auto; --bf16, --fp16 or fp32 without a flag",
        )


def _gather_problems(config: MegatronConfig) -> Iterator[Problem]:
    if config.data_parallel.overlap_param_gather and config.model.fuses_output_layer:
        yield Problem(
            flags=("--overlap-param-gather", "--cross-entropy-fusion-impl"),
            rule="lets a layer wait for its weight when it is called, and with --cross-entropy-fusion-impl linear the "
            "loss reads that of the output layer without calling it",
            works="leave out --overlap-param-gather; or --cross-entropy-fusion-impl native",
        )


def _residual_problems(config: MegatronConfig) -> Iterator[Problem]:
    name, model = "--fp32-residual-connection", config.model
    if not model.fp32_residual_connection:
        return
    if config.optimizer.precision not in ("bf16", "fp16"):
        yield Problem(
            flags=(name, "--bf16"),
            rule=f"widens the residual stream of 16 bits, and the precision is {config.optimizer.precision}",
            works="--bf16 or --fp16; or leave it out",
        )
    if model.residual_is_normed:
        flag = "--layernorm-placement" if model.layernorm_placement == "post" else RESIDUAL_AFTER_NORM
        yield Problem(
            flags=(name, flag),
            rule=f"with {flag} the residual stream comes out of norms, in the precision of the model",
            works="one of the two",
        )


def _model_layout_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Model sizes against tensor parallelism, and the sequence against the table of positions."""
    model, data = config.model, config.data
    yield from _tensor_problems(config, config.parallel.tensor_model_parallel_size)
    yield from _kept_parts_problems(config)
    if model.position_embedding_type == "learned_absolute":
        rows = model.max_position_embeddings
        flags = ("--max-position-embeddings", "--seq-length", "--position-embedding-type")
        if rows is None:
            yield Problem(
                flags=flags,
                rule="learned positions need the number of rows of their table",
                works=f"--max-position-embeddings {data.seq_length} or more",
            )
        elif data.seq_length > rows:
            yield Problem(
                flags=("--seq-length", *flags),
                value=data.seq_length,
                rule=f"must not be more than --max-position-embeddings {rows}: positions are learned",
                works=f"--seq-length {rows}; --max-position-embeddings {data.seq_length}",
            )


def _kept_parts_problems(config: MegatronConfig) -> Iterator[Problem]:
    """What keeps the inputs of recomputed layers from being cut over tensor-parallel ranks."""
    if not config.model.distribute_saved_activations:
        return
    name, parallel = "--distribute-saved-activations", config.parallel
    if parallel.tensor_model_parallel_size == 1:
        yield Problem(
            flags=(name, "--tensor-model-parallel-size"),
            rule="keeps a part on each tensor-parallel rank, and --tensor-model-parallel-size is 1",
            works=f"--tensor-model-parallel-size 2 or more; or leave out {name}",
        )
    elif parallel.sequence_parallel:
        yield Problem(
            flags=(name, "--sequence-parallel"),
            rule="has nothing to do: with --sequence-parallel each rank holds and keeps its part of the sequence only",
            works=f"leave out {name}",
        )


def _pipeline_problems(config: MegatronConfig) -> Iterator[Problem]:
    """The layers against the stages, for sections of model and layout that are right by themselves."""
    try:
        pipeline_layout(config.model, config.parallel, config.model_vocab_size(_vocabulary(config)))
    except ConfigError as error:
        yield from error.problems


def _recompute_problems(config: MegatronConfig, *, layout_is_right: bool) -> Iterator[Problem]:
    """The layers that are recomputed, against those that there are."""
    model = config.model
    number = model.recompute_num_layers
    if model.recompute_granularity != "full" or number is None or number <= model.num_layers:
        return
    most, of = model.num_layers, "which are all"
    if layout_is_right:
        layout = pipeline_layout(config.model, config.parallel, config.model_vocab_size(_vocabulary(config)))
        largest = max(len(chunk.layers) for stage in layout.chunks for chunk in stage)
        if largest < most:
            most, of = largest, f"which are all of a {'stage' if layout.num_chunks == 1 else 'model chunk of a stage'}"
    works = f"--recompute-num-layers {most}, {of}"
    if model.recompute_method == "uniform" and most > 1:
        works += "; or --recompute-num-layers 1, which keeps least"
    yield Problem(
        flags=("--recompute-num-layers", "--num-layers"),
        value=number,
        rule=f"is more than --num-layers {model.num_layers}",
        works=works,
    )


def _vocabulary(config: MegatronConfig) -> int:
    return config.tokenizer.vocab_size or _TYPICAL_VOCABULARY


def _tensor_problems(config: MegatronConfig, tensor: int) -> Iterator[Problem]:
    model, name = config.model, "--tensor-model-parallel-size"
    heads, groups, ffn = model.num_attention_heads, model.query_groups, model.ffn_size
    length = config.data.seq_length if config.parallel.sequence_parallel else 0
    fits = [
        size
        for size in divisors(heads)
        if (groups % size == 0 or size % groups == 0) and ffn % size == 0 and length % size == 0
    ]
    if config.parallel.sequence_parallel:
        fits.remove(1)
    sizes = f"{name} {near(fits, tensor)}" if fits else f"{name} 1 without --sequence-parallel"
    if heads % tensor:
        yield Problem(
            flags=("--num-attention-heads", name),
            value=heads,
            rule=f"must be divisible by {name} {tensor}: each rank holds whole heads",
            works=f"--num-attention-heads {near(multiples(heads, tensor), heads)}; {sizes}",
        )
    elif groups % tensor and tensor % groups:
        yield Problem(
            flags=("--num-query-groups", name, "--num-attention-heads"),
            value=groups,
            rule=f"must be divisible by {name} {tensor}, or divide it",
            works=f"--num-query-groups {near(divisors(tensor) + multiples(groups, tensor), groups)}; {sizes}",
        )
    if ffn % tensor:
        yield Problem(
            flags=("--ffn-hidden-size", name, "--hidden-size"),
            value=ffn,
            rule=f"must be divisible by {name} {tensor}",
            works=f"--ffn-hidden-size {near(multiples(ffn, tensor), ffn)}; {sizes}",
        )
    if length % tensor:
        yield Problem(
            flags=("--seq-length", "--sequence-parallel", name),
            value=length,
            rule=f"must be divisible by {name} {tensor} with --sequence-parallel",
            works=f"--seq-length {near(multiples(length, tensor), length)}; {sizes}",
        )


def _length_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Lengths of the schedules against the unit in which the run counts."""
    training, optimizer = config.training, config.optimizer
    if training.train_iters is not None and training.train_samples is not None:
        return
    in_iters = {
        "--lr-decay-iters": optimizer.lr_decay_iters,
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters,
        "--lr-warmup-iters": optimizer.lr_warmup_iters or None,
    }
    in_samples = {
        "--lr-decay-samples": optimizer.lr_decay_samples,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples,
        "--lr-warmup-samples": optimizer.lr_warmup_samples or None,
    }
    if training.train_iters is not None:
        unit, lengths, wrong, total = "iters", in_iters, in_samples, training.train_iters
    elif training.train_samples is not None:
        unit, lengths, wrong, total = "samples", in_samples, in_iters, training.train_samples
    else:
        return
    for name, value in wrong.items():
        if value is not None:
            right = name.rsplit("-", 1)[0] + "-" + unit
            yield Problem(
                flags=(name, f"--train-{unit}"),
                value=value,
                rule=f"the run counts in {unit} (--train-{unit} {total}), so must its schedules",
                works=f"{right} N",
            )
    if not any(value is not None for value in wrong.values()):
        yield from _schedule_order_problems(lengths, unit, total, optimizer.lr_warmup_fraction or 0.0)


def _schedule_order_problems(
    lengths: Mapping[str, int | None], unit: str, total: int, warmup_fraction: float
) -> Iterator[Problem]:
    decay_name, wsd_name, warmup_name = lengths
    given, last, warmup = (lengths[name] for name in (decay_name, wsd_name, warmup_name))
    decay = total if given is None else given
    horizon = f"{decay_name} {decay}" if given is not None else f"--train-{unit} {total}"
    if warmup is not None and decay <= warmup:
        most = "0" if decay <= 1 else f"{decay - 1} or less"
        yield Problem(
            flags=(warmup_name, decay_name, f"--train-{unit}"),
            value=warmup,
            rule=f"must be less than the length of the decay, {horizon}",
            works=f"{warmup_name} {most}; {decay_name} {warmup + 1} or more",
        )
        return
    warming = warmup if warmup is not None else warmup_fraction * decay
    if last is not None and last + warming > decay:
        room = math.floor(decay - warming)
        yield Problem(
            flags=(wsd_name, warmup_name, "--lr-warmup-fraction", decay_name, f"--train-{unit}"),
            value=last,
            rule=f"the last part and the warm-up together are longer than the decay, {horizon}",
            works=f"{wsd_name} {room} or less" if room >= 1 else f"{decay_name} {last + decay} or more",
        )


def _sample_problems(config: MegatronConfig) -> Iterator[Problem]:
    """The samples of a run whose batch is known: enough for one step, and no more than an index could hold."""
    training = config.training
    batch = _known_batch(config)
    if batch is None or (training.train_iters is None) == (training.train_samples is None):
        return
    batch_flags = ("--global-batch-size", "--micro-batch-size", *_WORLD_FLAGS)
    first = training.rampup_batch_size[0] if training.rampup_batch_size is not None else batch
    if training.train_iters is not None and training.train_iters * batch > MOST_SAMPLES:
        yield Problem(
            flags=("--train-iters", *batch_flags),
            value=spelled(training.train_iters),
            rule=f"x {batch} samples of a global batch are more than {spelled(MOST_SAMPLES)} samples",
            works=f"--train-iters {spelled(MOST_SAMPLES // batch)} or less",
        )
    elif training.train_samples is not None and training.train_samples < first and not training.skip_train:
        yield Problem(
            flags=("--train-samples", "--rampup-batch-size", *batch_flags),
            value=training.train_samples,
            rule=f"is less than the first global batch of {first} samples, so nothing would be trained",
            works=f"--train-samples {first} or more",
        )
    evaluations = training.evaluations(training.train_iters or (training.train_samples or 0) // first)
    if evaluations * training.eval_iters * batch > MOST_SAMPLES:
        yield Problem(
            flags=("--eval-iters", "--eval-interval", "--train-iters", "--train-samples", *batch_flags),
            value=spelled(training.eval_iters),
            rule=f"x {batch} samples of a global batch x {spelled(evaluations)} evaluations are more than "
            f"{spelled(MOST_SAMPLES)} samples",
            works=f"--eval-iters {spelled(MOST_SAMPLES // batch // evaluations)} or less",
        )


def _full_validation_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Whether there is an end of the validation data."""
    data = config.data
    name, words = (
        ("--valid-data-path", data.valid_data_path) if data.valid_data_path else ("--data-path", data.data_path)
    )
    try:
        blend = parse_blend(words)
    except ValueError:  # which is reported already
        return
    if config.training.full_validation and blend is not None and blend.weights is not None:
        yield Problem(
            flags=("--full-validation", name),
            rule=f"reads each sample once, and {name} has weights, which repeat some samples and leave out others",
            works="--valid-data-path PREFIX ... without weights",
        )


def _known_batch(config: MegatronConfig) -> int | None:
    """Samples of the global batch; None where that needs a number of processes that is not known, or does not fit."""
    try:
        return config.global_batch_size
    except ValueError:
        return None


def _world_size_problems(config: MegatronConfig, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    product = parallel.model_parallel_size
    if world_size % product:
        fits = near(multiples(world_size, product), world_size)
        yield Problem(
            flags=_WORLD_FLAGS,
            value=f"{sizes[0]} x pipeline {sizes[1]} x context {sizes[2]}",
            rule=f"one replica takes {product} processes, which do not divide the {world_size} started",
            works=f"start {fits} processes; or sizes whose product is {near(divisors(world_size), product)}",
        )


def _batch_problems(config: MegatronConfig, replicas: int) -> Iterator[Problem]:
    """Batch sizes against the number of data-parallel replicas."""
    training = config.training
    unit = training.micro_batch_size * replicas
    batches = {"--global-batch-size": training.global_batch_size}
    if training.rampup_batch_size is not None:
        batches["--rampup-batch-size START"], batches["--rampup-batch-size INCREMENT"] = training.rampup_batch_size[:2]
    for name, value in batches.items():
        if value is None or value % unit == 0:
            continue
        head, _, word = name.partition(" ")
        yield Problem(
            flags=(head, "--micro-batch-size", *_WORLD_FLAGS),
            value=f"{word} {value}".strip(),
            rule=f"must be divisible by --micro-batch-size {training.micro_batch_size} x "
            f"data-parallel size {replicas} = {unit}",
            works=_batch_advice(head, value, unit, replicas, training.micro_batch_size),
        )


def _batch_advice(name: str, value: int, unit: int, replicas: int, micro: int) -> str:
    works = f"{near(multiples(value, unit), value)}"
    works = f"{name} {works}" if name == "--global-batch-size" else works
    if value % replicas == 0:
        works += f"; --micro-batch-size {near(divisors(value // replicas), micro)}"
    return works
