"""A run as one value: what `pretrain` has built and the loop and its hooks work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.config.megatron_config import MegatronConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.schedule_plan import Plan
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.data.sample_dataset import TokenSource
from megatron.optimizer.optimizer import MegatronOptimizer
from megatron.optimizer.param_scheduler import ParamScheduler
from megatron.training.initialize import MegatronContext
from megatron.training.metrics import StepReport
from megatron.training.microbatches import BatchSizeSchedule
from megatron.training.progress import Progress
from megatron.training.timers import Timers


class Microbatch(Protocol):
    """One micro-batch, of any content. `GPTBatch` is one; a user's own needs these members only."""

    @property
    def sample_ids(self) -> Tensor:
        """[b] the global numbers of the samples: dropout masks are a function of them. On the host, before `to`."""

    def loss_counts(self) -> Mapping[str, Tensor]:
        """For each loss term the number of tokens (or sequences) that it is a mean over, in this micro-batch."""

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device; a copy need not be complete on return, see `megatron.core.device.to_device`."""


class Loader(Protocol):
    """The micro-batches of this data-parallel rank, as a function of the position in the data."""

    def microbatches(self, consumed: int, num_microbatches: int) -> Sequence[Microbatch]:
        """Those of the step that begins after `consumed` samples of the whole run."""

    def close(self) -> None:
        """Stop reading ahead."""


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """Validation data that has losses of its own.

    Attributes:
        split: what it is called: "validation", or "validation NAME" where it is one of several.
        iterations: global batches of an evaluation on it.
    """

    split: str
    loader: Loader
    iterations: int


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """Of the three splits; none where there is no data or nothing asks for it, as for training with `--skip-train`.

    Attributes:
        sources: what the training samples are cut from.
    """

    train: Loader | None
    valid: Sequence[ValidationSet] = ()
    test: Loader | None = None
    sources: Sequence[TokenSource] = ()

    def close(self) -> None:
        for loader in (self.train, *(each.loader for each in self.valid), self.test):
            if loader is not None:
                loader.close()


# (micro-batch, model chunk, hidden states of the chunk before or None, dropout or None when evaluating)
# -> hidden states, or on the chunk with the output: each loss term summed over the tokens of the micro-batch
ForwardStep = Callable[[Any, nn.Module, Tensor | None, DropoutStream | None], Tensor | dict[str, Tensor]]


@dataclass(kw_only=True)
class Run:
    """Everything of a run on this rank. Only `progress` and `stop_reason` change while it trains."""

    context: MegatronContext
    chunks: Sequence[DistributedDataParallel]
    executor: PipelineExecutor
    forward_step: ForwardStep
    optimizer: MegatronOptimizer
    scheduler: ParamScheduler
    batch_sizes: BatchSizeSchedule
    plans: Callable[[int, bool], Plan]
    loaders: Loaders
    tokenizer_fingerprint: str
    train_iters: int
    flops_per_sample: float | None
    timers: Timers
    progress: Progress
    hooks: Sequence[Hook] = ()
    stop_reason: str | None = None

    @property
    def config(self) -> MegatronConfig:
        return self.context.config

    @property
    def state(self) -> ParallelState:
        return self.context.state

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def looks_for_nan(self) -> bool:
        """Whether to look for the rank and the parameters of a NaN. An overflow of a dynamic loss scale is none."""
        return self.config.training.check_for_nan_in_loss_and_grad and not self.optimizer.scaler.absorbs_overflow

    def teraflops_per_second(self, samples: int, seconds: float) -> float | None:
        """Throughput of one rank, recomputation not counted; None when the model does not know its operations."""
        if self.flops_per_sample is None:
            return None
        return self.flops_per_sample * samples / (seconds * 1e12 * self.state.world.size)

    def say(self, text: str) -> None:
        """Print on the rank that speaks for the run."""
        self.context.say(text)

    def stop(self, reason: str) -> None:
        """Ask the loop to end after this iteration. Each rank must ask for it in the same iteration."""
        self.stop_reason = self.stop_reason or reason


class Hook:
    """Called on each rank. A hook that communicates must do so on all ranks in the same iteration."""

    def on_start(self, run: Run) -> None:
        """Before the first iteration."""

    def before_update(self, run: Run) -> None:
        """In each iteration once its gradients are there. Weights and optimizer are still those of the one before."""

    def after_step(self, run: Run, report: StepReport) -> None:
        """After each iteration.

        With `--overlap-param-gather` a hook that reads weights otherwise than by calling the model must first wait for
        them, by `chunk.wait_for_parameters()` for each of `run.chunks`. One that changes them must stand before the one
        that saves, which may copy them until the next update.
        """

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        """After an evaluation on "validation" or "test" data; the losses are known on ranks with the output.

        With `--multiple-validation-sets` it is called for each of them, as "validation NAME".
        """

    def during_evaluation(self, run: Run, split: str, done: int, iterations: int) -> None:
        """After each iteration of an evaluation, `done` of `iterations` being over."""

    def after_timing(self, run: Run, milliseconds: Mapping[str, Sequence[float]]) -> None:
        """After a table of timers: of each timer the mean of an iteration, on each rank."""

    def on_end(self, run: Run) -> None:
        """After the last iteration of this process: the run is complete, or it was asked to stop. Weights are whole."""

    def close(self) -> None:
        """At the very end, also when an error ends the run: let go of files and signals."""
