"""How the model and the batch are spread over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron.config.options import LARGEST_BATCH, MOST_HEADS, MOST_LAYERS, MOST_PROCESSES, flag
from megatron.config.pipeline_layout import not_interleaved
from megatron.config.problems import Problem

# Tensor-parallel ranks, which talk most, are neighbours on one node.
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA_ORDER = "tp-cp-ep-pp-dp"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel dimensions, and choices of the pipeline. Data parallelism takes what is left."""

    tensor_model_parallel_size: int = field(
        default=1,
        metadata=flag(
            "Ranks that share each layer.", aliases=("--model-parallel-size",), at_least=1, at_most=MOST_HEADS
        ),
    )
    pipeline_model_parallel_size: int = field(
        default=1, metadata=flag("Pipeline stages.", at_least=1, at_most=MOST_LAYERS)
    )
    context_parallel_size: int = field(
        default=1,
        metadata=flag(
            "Ranks that share each sequence (in this version 1, except to print groups).",
            at_least=1,
            at_most=MOST_PROCESSES,
        ),
    )
    sequence_parallel: bool = field(
        default=False,
        metadata=flag("Split norms, dropouts and residuals along the sequence over the tensor-parallel ranks."),
    )
    num_layers_per_virtual_pipeline_stage: int | None = field(
        default=None, metadata=flag("Interleave: layers of each model chunk.", at_least=1, at_most=MOST_LAYERS)
    )
    num_virtual_stages_per_pipeline_rank: int | None = field(
        default=None, metadata=flag("Interleave: model chunks of each stage.", at_least=1, at_most=MOST_LAYERS)
    )
    decoder_first_pipeline_num_layers: int | None = field(
        default=None,
        metadata=flag("Layers on the first stage; the others share the rest.", at_least=1, at_most=MOST_LAYERS),
    )
    decoder_last_pipeline_num_layers: int | None = field(
        default=None,
        metadata=flag("Layers on the last stage; the others share the rest.", at_least=1, at_most=MOST_LAYERS),
    )
    pipeline_model_parallel_layout: str | None = field(
        default=None,
        metadata=flag(
            "Every stage spelled out: E embedding, t layer, L output, | next stage: 'Et*3|(tt|)*29,L'; more parts than "
            "stages interleave.",
            metavar="LAYOUT",
        ),
    )
    pipeline_schedule: Literal["1f1b", "gpipe"] = field(
        default="1f1b", metadata=flag("Order of forward and backward passes.")
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = field(
        default=None,
        metadata=flag(
            "Interleave: micro-batches a chunk takes in a row; the number of stages when not given.",
            at_least=1,
            at_most=LARGEST_BATCH,
        ),
    )
    use_tp_pp_dp_mapping: bool = field(
        default=False, metadata=flag(f"Order ranks {PIPELINE_BEFORE_DATA_ORDER} instead of {DEFAULT_ORDER}.")
    )
    distributed_backend: Literal["nccl", "gloo"] | None = field(
        default=None, metadata=flag("Communication library; nccl on GPUs and gloo on CPUs when not given.")
    )
    distributed_timeout_minutes: int = field(
        default=10, metadata=flag("Longest wait of a collective, in minutes.", at_least=1, at_most=1_000_000)
    )
    world_size: int | None = field(
        default=None,
        metadata=flag(
            "Number of processes; taken from the launcher when not given.", at_least=1, at_most=MOST_PROCESSES
        ),
    )
    print_parallel_groups: bool = field(
        default=False,
        metadata=flag("Print the map of ranks and groups; with --world-size needs no launcher."),
    )

    @property
    def rank_order(self) -> str:
        """The axes of the ranks, from the one that changes fastest to the slowest."""
        return PIPELINE_BEFORE_DATA_ORDER if self.use_tp_pp_dp_mapping else DEFAULT_ORDER

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model and one sequence: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def interleaved(self) -> bool:
        """Whether a flag of its own asks for several model chunks of each stage; a layout string may also."""
        return (
            self.num_layers_per_virtual_pipeline_stage is not None
            or self.num_virtual_stages_per_pipeline_rank is not None
        )

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section."""
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield Problem(
                flags=("--sequence-parallel", "--tensor-model-parallel-size"),
                rule="splits the sequence over tensor-parallel ranks, and --tensor-model-parallel-size is 1",
                works="--tensor-model-parallel-size 2 or more; or leave out --sequence-parallel",
            )
        yield from self._pipeline_problems()

    def _pipeline_problems(self) -> Iterator[Problem]:
        stages = self.pipeline_model_parallel_size
        per_chunk, chunks = (
            self.num_layers_per_virtual_pipeline_stage,
            self.num_virtual_stages_per_pipeline_rank,
        )
        both = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
        if per_chunk is not None and chunks is not None:
            yield Problem(
                flags=both,
                value=per_chunk,
                rule=f"says the same as --num-virtual-stages-per-pipeline-rank {chunks} in another way",
                works="one of the two",
            )
        virtual = both[0] if per_chunk is not None else both[1]
        if self.interleaved and stages == 1:
            yield Problem(
                flags=(virtual, "--pipeline-model-parallel-size"),
                value=per_chunk if per_chunk is not None else chunks,
                rule="interleaves pipeline stages, and --pipeline-model-parallel-size is 1",
                works=f"--pipeline-model-parallel-size 2 or more; or leave out {virtual}",
            )
        if self.interleaved and self.pipeline_schedule == "gpipe":
            yield Problem(
                flags=("--pipeline-schedule", virtual),
                value="gpipe",
                rule="does not interleave",
                works=f"--pipeline-schedule 1f1b; or leave out {virtual}",
            )
        group = self.microbatch_group_size_per_virtual_pipeline_stage
        if group is not None:
            name = "--microbatch-group-size-per-virtual-pipeline-stage"
            if not self.interleaved and self.pipeline_model_parallel_layout is None:
                yield not_interleaved(group)
            elif group < stages:
                yield Problem(
                    flags=(name, "--pipeline-model-parallel-size"),
                    value=group,
                    rule=f"must be at least --pipeline-model-parallel-size {stages}, or stages deadlock",
                    works=f"{name} {stages} or more",
                )
        yield from self._uneven_problems(virtual if self.interleaved else "")

    def _uneven_problems(self, virtual: str) -> Iterator[Problem]:
        ends = {
            "--decoder-first-pipeline-num-layers": self.decoder_first_pipeline_num_layers,
            "--decoder-last-pipeline-num-layers": self.decoder_last_pipeline_num_layers,
        }
        for name, value in ends.items():
            if value is None:
                continue
            if self.pipeline_model_parallel_layout is not None:
                yield Problem(
                    flags=(name, "--pipeline-model-parallel-layout"),
                    value=value,
                    rule="contradicts --pipeline-model-parallel-layout, which spells out every stage",
                    works="one of the two",
                )
            if self.pipeline_model_parallel_size == 1:
                yield Problem(
                    flags=(name, "--pipeline-model-parallel-size"),
                    value=value,
                    rule="has an effect only with --pipeline-model-parallel-size 2 or more",
                    works=f"leave out {name}",
                )
        if self.pipeline_model_parallel_layout is not None and virtual:
            yield Problem(
                flags=(virtual, "--pipeline-model-parallel-layout"),
                rule="is already said by --pipeline-model-parallel-layout: its parts divided by the stages",
                works="one of the two",
            )
