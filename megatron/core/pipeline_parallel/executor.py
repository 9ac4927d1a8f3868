"""Walks a pipeline plan: calls the model's chunks, moves activations and gradients between them.

Knows no schedule: what runs when is the plan's business, what is sent to whom follows from the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

from megatron.config.pipeline_layout import StageLayout
from megatron.core.comm_group import CommGroup
from megatron.core.pipeline_parallel.p2p_communication import Exchange, PipelineCommunicator
from megatron.core.pipeline_parallel.schedule_plan import Action, Kind, Plan, check_plan

BatchT = TypeVar("BatchT")
# The name of a part of the work -> a context that times it
Timed = Callable[[str], AbstractContextManager[object]]
# The number of a chunk -> a context around a part of its work
AroundChunk = Callable[[int], AbstractContextManager[object]]
# (micro-batch, model chunk, hidden states from the chunk before it) -> hidden states, or sums of loss terms
ChunkForward = Callable[[BatchT, Any, Tensor | None], Tensor | Mapping[str, Tensor]]


class PipelineExecutor:
    """Runs the model chunks of one stage. Made by all stages of a pipeline at the same time.

    Args:
        group: the pipeline group; this rank's position in it is its stage. In a group of one nothing is sent.
        channels: what messages travel on, see `ParallelState`.
        chunks: the model chunks of this stage; only ever handed to the forward step.
        layouts: what each chunk holds, in the same order.
        hidden_shape: shape of the hidden states of a micro-batch on this rank, (s, b, h), or (s/t, b, h) with
            sequence parallelism.
    """

    def __init__(
        self,
        *,
        group: CommGroup,
        channels: Mapping[tuple[int, int], CommGroup],
        chunks: Sequence[object],
        layouts: Sequence[StageLayout],
        hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert len(chunks) == len(layouts), (len(chunks), len(layouts))
        ends = [(group.is_first and c == 0, group.is_last and c == len(layouts) - 1) for c in range(len(layouts))]
        assert [(layout.has_embedding, layout.has_output) for layout in layouts] == ends, layouts
        self._stage = group.rank
        self._chunks = tuple(chunks)
        self._layouts = tuple(layouts)
        self._checked: dict[bool, Plan] = {}  # by `forward_only`: training and evaluation take turns
        self._communicator = PipelineCommunicator(
            group, channels, num_chunks=len(chunks), hidden_shape=hidden_shape, dtype=dtype, device=device
        )

    def run(
        self,
        plans: Plan,
        microbatches: Sequence[BatchT],
        forward_step: ChunkForward[BatchT],
        *,
        divisors: Sequence[Mapping[str, Tensor]] | None,
        loss_scale: float | Tensor = 1.0,
        forward_only: bool = False,
        last_backward: AroundChunk = nullcontext,
        timed: Timed = nullcontext,
    ) -> list[dict[str, Tensor]]:
        """Runs this stage's plan, and accumulates gradients in the chunks' parameters unless `forward_only`.

        Args:
            plans: the plans of all stages, for the chunks and micro-batches given.
            microbatches: what the forward step gets on this stage, for each micro-batch.
            forward_step: gets a micro-batch, a chunk and its hidden states (None for the chunk with the
                embedding); returns hidden states or, from the chunk with the output, for each loss term the
                *sum* over this micro-batch.
            divisors: for each micro-batch and loss term what its sum is divided by before the backward, which
                is the count over the global batch: nothing is divided later. May be None with `forward_only`.
            loss_scale: what the loss is multiplied with before the backward.
            forward_only: compute no gradients, keep no activations; the plans must have no backward.
            last_backward: gets the number of a chunk; a context around the last backward pass of it.
            timed: gets "forward-compute", "backward-compute" and "pipeline-wait" around each such part.

        Returns:
            The undivided, unscaled loss terms of each micro-batch on the stage with the output; else [].

        Raises:
            ValueError: a plan that was not run before does not compute everything once, or can not run to its end. On
                all ranks, before anything is sent.
        """
        communicator = self._communicator
        assert len(plans) == communicator.group.size, (len(plans), communicator.group.size)
        if self._checked.get(forward_only) is not plans:
            num_chunks = len(self._chunks)
            check_plan(plans, num_microbatches=len(microbatches), num_chunks=num_chunks, forward_only=forward_only)
            self._checked[forward_only] = plans
        walk = _Walk(
            chunks=self._chunks,
            layouts=self._layouts,
            microbatches=microbatches,
            forward_step=forward_step,
            divisors=divisors,
            loss_scale=loss_scale,
            forward_only=forward_only,
            last_backwards={action.chunk: action for action in plans[self._stage] if action.kind is Kind.BACKWARD},
            last_backward=last_backward,
            timed=timed,
            hidden_shape=communicator.hidden_shape,
            dtype=communicator.dtype,
            exchange=communicator.exchange(plans),
            live={},
            losses={},
        )
        with torch.set_grad_enabled(not forward_only):
            for position, action in enumerate(plans[self._stage]):
                try:
                    walk.step(position, action)
                except Exception as error:
                    error.add_note(f"in the pipeline: stage {self._stage}, action {action}")
                    raise
        try:
            walk.exchange.finish()
        except Exception as error:
            error.add_note(f"in the pipeline: stage {self._stage}, waiting for neighbours after the last action")
            raise
        assert not walk.live, "the plan left a forward without a backward"
        return [walk.losses[i] for i in range(len(microbatches))] if self._layouts[-1].has_output else []


@dataclass(frozen=True, kw_only=True)
class _Walk(Generic[BatchT]):
    """One walk through a plan. `live` holds what is between forward and backward: (chunk, micro-batch) to its input
    and output."""

    chunks: tuple[object, ...]
    layouts: tuple[StageLayout, ...]
    microbatches: Sequence[BatchT]
    forward_step: ChunkForward[BatchT]
    divisors: Sequence[Mapping[str, Tensor]] | None
    loss_scale: float | Tensor
    forward_only: bool
    last_backwards: Mapping[int, Action]
    last_backward: AroundChunk
    timed: Timed
    hidden_shape: tuple[int, ...]
    dtype: torch.dtype
    exchange: Exchange
    live: dict[tuple[int, int], tuple[Tensor | None, Tensor]]
    losses: dict[int, dict[str, Tensor]]

    def step(self, position: int, action: Action) -> None:
        """Carries out one action."""
        self.exchange.post_receives(position)
        if action.kind is Kind.FORWARD:
            self._forward(action)
        else:
            self._backward(action)

    def _forward(self, action: Action) -> None:
        layout = self.layouts[action.chunk]
        hidden_states = None if layout.has_embedding else self._receive(action)
        if hidden_states is not None and not self.forward_only:
            hidden_states.requires_grad_()
        with self.timed("forward-compute"):
            result = self.forward_step(self.microbatches[action.microbatch], self.chunks[action.chunk], hidden_states)
        if layout.has_output:
            output = self._loss(result, action.microbatch)
        else:
            output = self._hand_on(result, hidden_states, action)
        if not self.forward_only:
            assert output.requires_grad, f"the output of {action} depends on no parameter and no input"
            self.live[action.chunk, action.microbatch] = (hidden_states, output)

    def _receive(self, action: Action) -> Tensor:
        with self.timed("pipeline-wait"):
            return self.exchange.receive(action)

    def _hand_on(self, result: Tensor | Mapping[str, Tensor], hidden_states: Tensor | None, action: Action) -> Tensor:
        """Sends hidden states to the next chunk, and frees them here."""
        if not isinstance(result, Tensor):
            raise TypeError(f"a chunk without the output must return hidden states, not {type(result).__name__}")
        if result.shape != self.hidden_shape or result.dtype != self.dtype:
            raise ValueError(
                f"hidden states of shape {tuple(result.shape)} and {result.dtype} do not fit the next chunk, "
                f"which expects {tuple(self.hidden_shape)} and {self.dtype}"
            )
        # A chunk without layers may return its input itself, which is freed later, by its own sender.
        output = result.view_as(result) if result is hidden_states else result
        self.exchange.send(action, output.detach())
        if not self.forward_only:
            _free_data(output)
        return output

    def _loss(self, result: Tensor | Mapping[str, Tensor], microbatch: int) -> Tensor:
        """Keeps the loss terms; returns what the backward starts from."""
        if isinstance(result, Tensor) or not result:
            raise TypeError(f"the chunk with the output must return a dict of loss sums, not {type(result).__name__}")
        self.losses[microbatch] = {name: term.detach() for name, term in result.items()}
        terms = list(result.values())
        if self.forward_only:
            return terms[0]
        assert self.divisors is not None, "training needs divisors"
        divisors = self.divisors[microbatch]
        if divisors.keys() != result.keys():
            raise ValueError(f"the forward step returned loss terms {list(result)}, divisors are {list(divisors)}")
        return torch.stack([term / divisors[name] for name, term in result.items()]).sum() * self.loss_scale

    def _backward(self, action: Action) -> None:
        hidden_states, output = self.live.pop((action.chunk, action.microbatch))
        if self.layouts[action.chunk].has_output:
            gradient = torch.ones_like(output)
        else:
            gradient = self._receive(action)
        is_last = action == self.last_backwards[action.chunk]
        with self.timed("backward-compute"), self.last_backward(action.chunk) if is_last else nullcontext():
            _run_backward(output, gradient)
        if hidden_states is not None:
            assert hidden_states.grad is not None, f"{action} gave its input no gradient"
            self.exchange.send(action, hidden_states.grad)


def _free_data(output: Tensor) -> None:
    """Gives up the values of a tensor, and keeps its place in the graph.

    The next stage has the values, the backward of this one needs only the graph; see `_run_backward`.
    """
    output.data = torch.empty((), dtype=output.dtype, device=output.device)


def _run_backward(output: Tensor, gradient: Tensor) -> None:
    """`torch.autograd.backward` without its check that output and gradient have the same shape.

    An output whose data were freed has lost its shape; the engine itself compares with the one in the graph.
    """
    Variable._execution_engine.run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
