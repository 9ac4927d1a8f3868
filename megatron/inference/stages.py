"""A model over the ranks that hold it together: what goes in at the first stage comes out at the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.comm_group import CommGroup
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.schedule_plan import build_plan
from megatron.inference.kv_cache import KeyValueCache
from megatron.model.gpt_model import GPTModel


@dataclass(frozen=True, kw_only=True)
class ModelRanks:
    """The ranks that hold one model, seen from one of them.

    Attributes:
        tensor, pipeline: its groups along these axes.
        channels: what messages between stages travel on, see `ParallelState`.
        world: all of them.
    """

    tensor: CommGroup
    pipeline: CommGroup
    channels: Mapping[tuple[int, int], CommGroup]
    world: CommGroup

    @classmethod
    def single(cls) -> ModelRanks:
        """One process that holds the whole model."""
        return cls(
            tensor=CommGroup.single("tensor"),
            pipeline=CommGroup.single("pipeline"),
            channels={},
            world=CommGroup.single("world"),
        )


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """What `GPTModel.forward` takes of a micro-batch; each rank has the same."""

    tokens: Tensor
    position_ids: Tensor
    document_ids: Tensor | None = None
    labels: Tensor | None = None


class StagedModel:
    """This rank's part of a model, which runs together with the parts of the others."""

    def __init__(self, model: GPTModel, ranks: ModelRanks) -> None:
        self.part = model
        self.ranks = ranks
        self._executors: dict[torch.Size, PipelineExecutor] = {}

    @property
    def has_output(self) -> bool:
        """Whether what comes out of the model comes out here."""
        return self.part.stage.has_output

    @property
    def device(self) -> torch.device:
        return self.part.placement.device

    def run(self, inputs: Sequence[ModelInput], *, cache: KeyValueCache | None = None) -> list[Tensor]:
        """Forward of micro-batches of one shape, without gradients; a collective over the ranks of the model.

        Args:
            cache: of the tokens before those of the only micro-batch, which takes those of it.

        Returns:
            Where the output is, for each micro-batch its logits [b, s, v], or with labels its losses [b, s], or with a
            cache the logits of its last token [b, 1, v]; elsewhere nothing.
        """
        assert cache is None or len(inputs) == 1, "a cache is that of one batch"
        shape = inputs[0].tokens.shape
        if shape not in self._executors:
            self._executors[shape] = self._executor(*shape)
        outputs = self._executors[shape].run(
            build_plan("forward_only", num_stages=self.ranks.pipeline.size, num_microbatches=len(inputs), num_chunks=1),
            inputs,
            lambda batch, model, hidden_states: self._forward(batch, model, hidden_states, cache),
            divisors=None,
            forward_only=True,
        )
        if cache is not None:
            cache.advance(shape[1])
        return [output["output"] for output in outputs]

    def _forward(
        self, batch: ModelInput, model: GPTModel, hidden_states: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor | Mapping[str, Tensor]:
        result = model(
            batch.tokens,
            batch.position_ids,
            document_ids=batch.document_ids,
            labels=batch.labels,
            hidden_states=hidden_states,
            store=cache,
            last_only=cache is not None,
        )
        return {"output": result} if self.has_output else result

    def _executor(self, batch_size: int, length: int) -> PipelineExecutor:
        config, placement = self.part.config, self.part.placement
        return PipelineExecutor(
            group=self.ranks.pipeline,
            channels=self.ranks.channels,
            chunks=[self.part],
            layouts=[self.part.stage],
            hidden_shape=(length, batch_size, config.hidden_size),
            dtype=placement.dtype,
            device=placement.device,
        )
