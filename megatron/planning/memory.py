"""The memory account of a run: what each pipeline stage needs on a rank, from the configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import torch

from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import PipelineLayout, StageLayout, pipeline_layout
from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.pipeline_parallel.schedule_plan import Kind, StagePlan, build_plan
from megatron.core.tensor_parallel.placement import Placement
from megatron.model.gpt_model import GPTModel
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


def predict_memory(config: MegatronConfig, *, vocab_size: int, padded_vocab_size: int) -> tuple[StageMemory, ...]:
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
            _elements(config.model, chunk, config.parallel.tensor_model_parallel_size, vocab_size, padded_vocab_size)
            for chunk in chunks
        )
        stages.append(
            StageMemory(
                parameters=elements * optimizer.params_dtype.itemsize,
                gradients=elements * optimizer.grad_dtype.itemsize,
                optimizer=elements * optimizer.state_bytes_per_parameter // owners,
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


@lru_cache(maxsize=256)
def _elements(
    model: TransformerConfig, stage: StageLayout, tensor: int, vocab_size: int, padded_vocab_size: int
) -> int:
    """Elements of a chunk's parameters on a rank: of the chunk itself, built without memory."""
    group = CommGroup(name="tensor", ranks=tuple(range(tensor)), rank=0, process_group=None)
    placement = Placement(group=group, sequence_parallel=False, dtype=torch.float32, device=torch.device("meta"))
    chunk = GPTModel(
        model, stage=stage, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, placement=placement
    )
    return sum(parameter.numel() for parameter in chunk.parameters())
