"""Building a run from its configuration: vocabulary, model chunks, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import PipelineLayout, StageLayout, pipeline_layout
from megatron.config.problems import UserError
from megatron.core.collectives import all_reduce
from megatron.core.distributed.bucket_contents import numbers_of_buckets
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.schedule_plan import Plan, build_plan
from megatron.core.shard import Init, Shard, has_shard, name_parameters, set_shard, shard_of, whole_pieces
from megatron.model.flops import built_parameter_count
from megatron.model.init import initialize_weights
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training.initialize import MegatronContext
from megatron.training.microbatches import BatchSizeSchedule


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer and the rows that the model has for it.

    Attributes:
        size: rows that belong to the model.
        padded_size: rows in memory: those from `size` on are there so that tensor parallelism divides them, and take no
            part in the softmax.
    """

    tokenizer: Tokenizer
    size: int
    padded_size: int


def build_vocabulary(config: MegatronConfig) -> Vocabulary:
    """The tokenizer's vocabulary, padded; an explicit `--padded-vocab-size` makes its rows part of the model.

    Raises:
        UserError: the tokenizer's files are missing or damaged, or it has more tokens than `--padded-vocab-size`.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    size = config.model_vocab_size(tokenizer.vocab_size)
    if size < tokenizer.vocab_size:
        raise UserError(f"--padded-vocab-size ({size}) must not be below the tokenizer's {tokenizer.vocab_size} tokens")
    return Vocabulary(tokenizer=tokenizer, size=size, padded_size=config.padded_vocab_size(tokenizer.vocab_size))


def build_schedule(config: MegatronConfig) -> tuple[BatchSizeSchedule, int]:
    """The batch sizes of a run, and its number of iterations."""
    training = config.training
    batch_sizes = BatchSizeSchedule(
        global_batch_size=config.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        data_parallel_size=config.data_parallel_size,
        rampup=training.rampup_batch_size,
    )
    if training.train_samples is not None:
        return batch_sizes, batch_sizes.iterations_for(training.train_samples)
    assert training.train_iters is not None  # the rules of a configuration demand one of the two
    return batch_sizes, training.train_iters


# Builds one pipeline chunk: (context, which layers, vocabulary) -> module
ModelProvider = Callable[[MegatronContext, StageLayout, Vocabulary], nn.Module]


# What a model may say of itself, besides being a module; GPTModel and BertModel say it all. Each is asked of one chunk.


@runtime_checkable
class HasLayersToCompile(Protocol):
    """A model that `--torch-compile` can be used with."""

    def layers_to_compile(self) -> Iterable[nn.Module]:
        """The modules of this chunk that are compiled, each by itself."""


@runtime_checkable
class HasImpliedParameterCount(Protocol):
    """A model that knows without being built how large it is, so that a lost layer is noticed."""

    def implied_parameter_count(self) -> int | None:
        """Parameters of the whole model, over all chunks and ranks; None: not known."""


@runtime_checkable
class HasFlopsPerSample(Protocol):
    """A model whose throughput can be given in TFLOP/s."""

    def flops_per_sample(self, sequence_length: int) -> float | None:
        """Floating-point operations of forward and backward of the whole model over one sample; None: not known."""


def build_chunks(
    context: MegatronContext, layout: PipelineLayout, vocabulary: Vocabulary, provider: ModelProvider
) -> list[DistributedDataParallel]:
    """This stage's model chunks with their first weights, each wrapped with its gradient buffer."""
    config, state = context.config, context.state
    modules = []
    for stage in layout.stage(state.pipeline.rank):
        module = provider(context, stage, vocabulary)
        _adopt_plain_parameters(module, context)
        initialize_weights(module, config.training.seed)
        if config.training.torch_compile:
            _compile_layers(module)
        modules.append(module)
    choices, matrices_apart = config.data_parallel, config.optimizer.updates_matrices_apart
    if matrices_apart:
        _check_matrices(context, modules)
    numbers: Sequence[Sequence[int] | None] = [None] * len(modules)
    if choices.ddp_num_buckets is not None:
        numbers = numbers_of_buckets(modules, choices.ddp_num_buckets, matrices_apart=matrices_apart)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=choices.use_distributed_optimizer,
        overlap_grad_reduce=choices.overlap_grad_reduce,
        overlap_param_gather=choices.overlap_param_gather,
        bucket_size=choices.bucket_size(ranks=state.data_context.size),
        average_in_collective=choices.ddp_average_in_collective,
        pad_buckets_for_high_nccl_busbw=choices.ddp_pad_buckets_for_high_nccl_busbw,
        matrices_apart=matrices_apart,
    )
    return [
        DistributedDataParallel(
            module,
            data_group=state.data_context,
            grad_dtype=config.optimizer.grad_dtype,
            config=ddp_config,
            num_buckets=num_buckets,
        )
        for module, num_buckets in zip(modules, numbers, strict=True)
    ]


def _compile_layers(module: nn.Module) -> None:
    if not isinstance(module, HasLayersToCompile):
        raise UserError(
            f"--torch-compile: {type(module).__name__} does not say which of its modules to compile; give it a method "
            f"layers_to_compile() that returns them, or leave the flag out"
        )
    for layer in module.layers_to_compile():
        # The places where all linear layers and collectives break the graph compile once for each of their uses.
        layer.compile(recompile_limit=64)


def _check_matrices(context: MegatronContext, modules: Sequence[nn.Module]) -> None:
    """Refuse Muon for a model that has none of the matrices that it is for; a collective over the model's ranks."""
    trainable = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    mine = sum(bool(shard_of(parameter).matrices) for parameter in trainable)
    if int(all_reduce(torch.tensor(mine, device=context.device), context.state.model)) == 0:
        raise UserError(
            f"--optimizer muon: {type(modules[0]).__name__} marks no trainable parameter as a matrix inside a layer, "
            f"so that all would be updated by AdamW; mark them with set_matrices() of megatron.core.shard, or use "
            f"--optimizer adam"
        )


def _adopt_plain_parameters(module: nn.Module, context: MegatronContext) -> None:
    """Parameters of a user's plain torch layers are whole on each rank and keep the values of their constructor."""
    for parameter in module.parameters():
        if not has_shard(parameter):
            set_shard(
                parameter,
                Shard(
                    global_shape=tuple(parameter.shape),
                    dim=None,
                    pieces=whole_pieces(parameter.shape[0] if parameter.dim() else 1, context.state.tensor),
                    group=context.state.tensor,
                    init=Init.given(),
                ),
            )
    name_parameters(module)


def implied_parameter_count(module: nn.Module) -> int | None:
    return module.implied_parameter_count() if isinstance(module, HasImpliedParameterCount) else None


def flops_per_sample(module: nn.Module, sequence_length: int) -> float | None:
    return module.flops_per_sample(sequence_length) if isinstance(module, HasFlopsPerSample) else None


def check_parameter_count(context: MegatronContext, chunks: Sequence[DistributedDataParallel]) -> int:
    """Parameters built over all ranks of one model; they must be those that the model implies, if it implies any.

    Raises:
        RuntimeError: they differ: a layer was dropped or built twice.
    """
    mine = torch.tensor(
        built_parameter_count(chunk.module for chunk in chunks), dtype=torch.int64, device=context.device
    )
    built = int(all_reduce(mine, context.state.model))
    implied = implied_parameter_count(chunks[0].module)
    if implied is not None and built != implied:
        raise RuntimeError(
            f"the ranks have built {built:,} parameters, but the configuration implies {implied:,}: this is a bug "
            f"in the layout of the layers over the stages; please report it with the output of --print-config"
        )
    return built


def build_executor(
    context: MegatronContext, layout: PipelineLayout, chunks: Sequence[DistributedDataParallel]
) -> PipelineExecutor:
    config, state = context.config, context.state
    sequence = config.data.seq_length // (state.tensor.size if config.parallel.sequence_parallel else 1)
    return PipelineExecutor(
        group=state.pipeline,
        channels=state.channels,
        chunks=[chunk.module for chunk in chunks],
        layouts=layout.stage(state.pipeline.rank),
        hidden_shape=(sequence, config.training.micro_batch_size, config.model.hidden_size),
        dtype=config.hidden_dtype,
        device=context.device,
    )


def plan_builder(config: MegatronConfig, layout: PipelineLayout) -> Callable[[int, bool], Plan]:
    """(number of micro-batches, forward only) -> the plan of every stage."""
    build = partial(
        build_plan,
        num_stages=layout.num_stages,
        num_chunks=layout.num_chunks,
        group_size=config.parallel.microbatch_group_size_per_virtual_pipeline_stage,
    )

    def plans(num_microbatches: int, forward_only: bool) -> Plan:
        schedule = "forward_only" if forward_only else config.parallel.pipeline_schedule
        return build(schedule, num_microbatches=num_microbatches)

    return plans


def build_layout(config: MegatronConfig, vocabulary: Vocabulary) -> PipelineLayout:
    return pipeline_layout(config.model, config.parallel, vocabulary.padded_size)


def describe(
    context: MegatronContext, layout: PipelineLayout, vocabulary: Vocabulary, model: nn.Module, parameters: int
) -> str:
    """What is about to be trained and how it is spread, in a few lines."""
    state: ParallelState = context.state
    config = context.config
    sizes = f"tensor {state.tensor.size} × pipeline {state.pipeline.size} × data {state.data.size}"
    lines = [
        f"{parameters:,} parameters, {config.optimizer.precision}",
        f"{state.world.size} {context.device.type} rank(s) = {sizes}",
        f"vocabulary: {vocabulary.tokenizer.name}, {vocabulary.size:,} tokens"
        + (f" padded to {vocabulary.padded_size:,}" if vocabulary.padded_size > vocabulary.size else ""),
    ]
    if layout.num_stages > 1:
        lines.append(layout.describe())
    lines += [f"note: {note}" for note in (*config.start_notes(), *_unknown_of(context, model))]
    return "\n".join(lines)


def _unknown_of(context: MegatronContext, model: nn.Module) -> Iterator[str]:
    """What is left out as the model does not say what it needs."""
    name = type(model).__name__
    if implied_parameter_count(model) is None:
        yield f"{name} gives no implied_parameter_count(): the number of parameters is not checked"
    if context.config.logging.log_throughput and flops_per_sample(model, context.config.data.seq_length) is None:
        yield f"{name} gives no flops_per_sample(): no TFLOP/s is logged"
