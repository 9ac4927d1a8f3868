"""The memory account of a run: what each pipeline stage needs on a rank, from the configuration alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import PipelineLayout, pipeline_layout
from megatron.core.pipeline_parallel.schedule_plan import Kind, StagePlan, build_plan
from megatron.model.flops import elements_of_chunk, matrix_elements_of_layer
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
        staging: memory of the host for what `--async-save` writes; on CPUs it is the same memory. Not in the total.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int = 0
    staging: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in _COUNTED)

    def needed(self, *, on_cpu: bool) -> int:
        """Of the memory that the training itself is in: on CPUs with the staging."""
        return self.total + self.staging if on_cpu else self.total


_COUNTED = tuple(field.name for field in fields(StageMemory) if field.name != "staging")


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
                bert=config.bert,
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
                staging=_saved_bytes(config, elements, state) // sharing,
            )
        )
    return tuple(stages)


def _saved_bytes(config: MegatronConfig, elements: int, state: int) -> int:
    """What a rank and its replicas save in the background: main weights, and the rest of the optimizer's state."""
    if not config.checkpoint.async_save:
        return 0
    optimizer = config.optimizer
    moments = state - elements * optimizer.main_bytes_per_parameter if config.checkpoint.save_optim else 0
    return elements * optimizer.main_dtype.itemsize + moments


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


def memory_table(
    predicted: Sequence[StageMemory] | None,
    measured: Sequence[StageMemory] | None = None,
    *,
    as_predicted: Collection[str] = (),
) -> str:
    """A line for each stage, in MB: what is predicted, what was measured, and by how much that is more.

    What a backward computes again is in memory for a moment, and in no saved tensor: it is predicted only, and left out
    of the totals beside measured ones. What `--async-save` needs of the host stands behind the total, where it is used.

    Args:
        as_predicted: columns that lasting memory has and no measurement finds; measured totals have what is predicted.
    """
    names = list(_COUNTED)
    counted = [name for name in names if name != "recomputed"]
    staged = any(stage.staging for stage in (*(predicted or ()), *(measured or ())))
    rows = [["stage", *names, "total", *(["staging"] if staged else [])]]
    for stage in range(len(predicted or measured or ())):
        wanted = None if predicted is None else predicted[stage]
        found = None if measured is None else measured[stage]
        row = [_cell(wanted, found if name in counted and name not in as_predicted else None, [name]) for name in names]
        if found is not None:
            found = replace(found, **{name: getattr(wanted, name, 0) for name in as_predicted})
        row.append(_cell(wanted, found, names if found is None else counted))
        rows.append([str(stage), *row, *([_cell(wanted, found, ["staging"])] if staged else [])])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def _cell(predicted: StageMemory | None, measured: StageMemory | None, names: Sequence[str]) -> str:
    """The sum of the attributes `names`."""
    wanted, found = (
        None if memory is None else sum(getattr(memory, name) for name in names) for memory in (predicted, measured)
    )
    if found is None:
        return "-" if wanted is None else f"{wanted / 1e6:,.1f}"
    if wanted is None:
        return f"{found / 1e6:,.1f}"
    more = f" ({found / wanted - 1:+.1%})" if wanted else ""
    return f"{wanted / 1e6:,.1f} -> {found / 1e6:,.1f}{more}"
