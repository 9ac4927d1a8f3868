"""The memory account of a run: what each pipeline stage needs on a rank, from the configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import PipelineLayout, StageLayout, pipeline_layout
from megatron.config.transformer import TransformerConfig
from megatron.core.pipeline_parallel.schedule_plan import Kind, StagePlan, build_plan
from megatron.planning.activations import chunk_bytes, recomputed_bytes


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage.

    Attributes:
        parameters: weights as the model uses them.
        gradients: the buffers in which they are summed.
        optimizer: main weights and moments.
        activations: the most that is kept at one time between forward and backward passes.
        recomputed: the most that a backward computes again on top of that.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(config: MegatronConfig, *, padded_vocab_size: int) -> tuple[StageMemory, ...]:
    """What each stage needs on its first tensor-parallel rank.

    Args:
        config: with the number of processes, see `MegatronConfig.on`.

    Raises:
        ConfigError: the layers do not fit the stages.
    """
    layout = pipeline_layout(config.model, config.parallel, padded_vocab_size)
    plans = plans_of_step(config, layout)
    optimizer = config.optimizer
    sharing = config.parallel.context_parallel_size * config.data_parallel_size
    owners = sharing if config.data_parallel.use_distributed_optimizer else 1
    stages = []
    for stage, plan in enumerate(plans):
        chunks = layout.stage(stage)
        elements = sum(
            elements_of_chunk(
                config.model,
                chunk,
                tensor_parallel_size=config.parallel.tensor_model_parallel_size,
                padded_vocab_size=padded_vocab_size,
            )
            for chunk in chunks
        )
        matrices = sum(len(chunk.layers) for chunk in chunks) * matrix_elements_of_layer(
            config.model, config.parallel.tensor_model_parallel_size
        )
        state = matrices * optimizer.state_bytes_per_parameter
        state += (elements - matrices) * optimizer.state_bytes_outside_layers
        stages.append(
            StageMemory(
                parameters=elements * optimizer.params_dtype.itemsize,
                gradients=elements * optimizer.grad_dtype.itemsize,
                optimizer=state // owners,
                activations=peak_of_plan(plan, [chunk_bytes(config, chunk, padded_vocab_size) for chunk in chunks]),
                recomputed=max(recomputed_bytes(config, chunk) for chunk in chunks),
            )
        )
    return tuple(stages)


def plans_of_step(config: MegatronConfig, layout: PipelineLayout) -> tuple[StagePlan, ...]:
    """What each stage does in a step of the whole global batch."""
    batch = config.training.micro_batch_size * config.data_parallel_size
    return build_plan(
        config.parallel.pipeline_schedule,
        num_stages=layout.num_stages,
        num_microbatches=config.global_batch_size // batch,
        num_chunks=layout.num_chunks,
        group_size=config.parallel.microbatch_group_size_per_virtual_pipeline_stage,
    )


def peak_of_plan(plan: StagePlan, bytes_of_chunk: Sequence[int]) -> int:
    """The most that is kept at one time, when each forward of a chunk keeps so much until its backward."""
    kept = peak = 0
    for action in plan:
        kept += bytes_of_chunk[action.chunk] * (1 if action.kind is Kind.FORWARD else -1)
        peak = max(peak, kept)
    return peak


def matrix_elements_of_layer(model: TransformerConfig, tensor_parallel_size: int) -> int:
    """Elements of the four matrices of a layer on a rank, with keys and values that other ranks hold too."""
    t = tensor_parallel_size
    queries, groups = model.query_size // t, max(1, model.query_groups // t)
    projection = queries + 2 * groups * model.head_dim
    return model.hidden_size * (projection + queries + model.fc1_size // t + model.ffn_size // t)


def elements_of_chunk(
    model: TransformerConfig, stage: StageLayout, *, tensor_parallel_size: int, padded_vocab_size: int
) -> int:
    """Elements of a chunk's parameters on a rank, with padding, keys and values that other ranks hold too, and copies
    of a tied embedding."""
    t, hidden = tensor_parallel_size, model.hidden_size
    norm = 1 if model.normalization == "RMSNorm" else 2
    queries, groups = model.query_size // t, max(1, model.query_groups // t)
    projection, fc1 = queries + 2 * groups * model.head_dim, model.fc1_size // t
    layer = matrix_elements_of_layer(model, t) + 2 * norm * hidden
    if model.add_bias_linear:
        layer += projection + fc1 + 2 * hidden
    elif model.add_qkv_bias:
        layer += projection
    if model.qk_layernorm:
        layer += 2 * norm * model.head_dim
    words = padded_vocab_size // t * hidden
    elements = len(stage.layers) * layer
    if stage.has_embedding:
        elements += words
        if model.position_embedding_type == "learned_absolute":
            elements += (model.max_position_embeddings or 0) * hidden
    if stage.has_output:
        shared = model.tied_embeddings and stage.has_embedding
        elements += norm * hidden + (0 if shared else words)
    return elements


def memory_table(predicted: Sequence[StageMemory] | None, measured: Sequence[StageMemory] | None = None) -> str:
    """A line for each stage, in MB: what is predicted, what was measured, and by how much that is more.

    What a backward computes again is predicted only: it is in memory for a moment, and in no saved tensor.
    """
    names = [field.name for field in fields(StageMemory)]
    rows = [["stage", *names, "total"]]
    for stage in range(len(predicted or measured or ())):
        row = [str(stage)]
        for name in (*names, "total"):
            wanted = None if predicted is None else getattr(predicted[stage], name)
            found = None if measured is None else getattr(measured[stage], name)
            if name == "recomputed":
                found = None
            elif name == "total" and wanted is not None and predicted is not None:
                wanted -= predicted[stage].recomputed if found is not None else 0
            row.append(_cell(wanted, found))
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def _cell(predicted: int | None, measured: int | None) -> str:
    if measured is None:
        return "-" if predicted is None else f"{predicted / 1e6:,.1f}"
    if predicted is None:
        return f"{measured / 1e6:,.1f}"
    more = f" ({measured / predicted - 1:+.1%})" if predicted else ""
    return f"{predicted / 1e6:,.1f} -> {measured / 1e6:,.1f}{more}"
