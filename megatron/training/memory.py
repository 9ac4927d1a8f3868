"""The memory of a run: `--log-memory`, and what is said when there is not enough of it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.config.megatron_config import MegatronConfig
from megatron.core.collectives import all_gather_object
from megatron.core.parallel_state import ParallelState
from megatron.model.language_model import LanguageModel
from megatron.planning.memory import StageMemory, memory_table, predict_memory
from megatron.planning.options import cheapest_that_fit
from megatron.planning.saved_tensors import SavedBytes
from megatron.training.failures import OutOfMemory
from megatron.training.initialize import MegatronContext
from megatron.training.metrics import StepReport
from megatron.training.run import Hook, Run
from megatron.training.saving import Saving
from megatron.training.setup import Vocabulary, build_vocabulary, implied_parameter_count


class MemoryAccount(Hook):
    """What each pipeline stage needs, predicted at the start and measured in the second iteration of this process.

    By then all lasting tensors exist. Of each stage the rank is measured that shares a pipeline with the one that
    speaks; others differ by nothing but which ends of the vocabulary they hold.
    """

    def __init__(self) -> None:
        self._steps = 0
        self.saved: SavedBytes | None = None

    def on_start(self, run: Run) -> None:
        predicted = predicted_memory(run)
        if predicted is not None:
            run.say(f"memory of a rank of each stage, predicted (MB):\n{memory_table(predicted)}")

    def after_step(self, run: Run, report: StepReport) -> None:
        self._steps += 1
        if self._steps == 1:
            lasting = [parameter for chunk in run.chunks for parameter in chunk.module.parameters()]
            self.saved = SavedBytes(lasting)
            self.saved.__enter__()
        elif self.saved is not None:
            mine = measured_memory(run, self.saved.peak)
            self.close()
            stages = all_gather_object(mine, run.state.pipeline)
            # The parts of inputs that ranks keep are held by the recomputation itself, and are no saved tensors.
            parts = run.config.model.distribute_saved_activations
            table = memory_table(predicted_memory(run), stages, as_predicted={"activations"} if parts else ())
            title = f"memory of a rank of each stage, predicted -> measured in iteration {report.iteration} (MB)"
            run.say(f"{title}{', activations as predicted' if parts else ''}:\n{table}")

    def close(self) -> None:
        if self.saved is not None:
            self.saved.__exit__(None, None, None)
            self.saved = None


def predicted_memory(run: Run) -> tuple[StageMemory, ...] | None:
    """The account of the run's model; None for a user's own, of which the formulas know nothing."""
    model = run.chunks[0].module
    if not isinstance(model, LanguageModel) or implied_parameter_count(model) is None:
        return None
    return predict_memory(run.config, padded_vocab_size=model.padded_vocab_size)


def measured_memory(run: Run, activations: int) -> StageMemory:
    """What this rank holds.

    Args:
        activations: the most that autograd kept at once.
    """
    buffers = [buffer for chunk in run.chunks for buffer in chunk.grad_buffers]
    parameters = [buffer.parameters for buffer in buffers]
    state = [tensor for part in run.optimizer.parts for tensor in part.lasting_tensors()]
    return StageMemory(
        parameters=_bytes(parameters),
        gradients=_bytes(buffer.gradients for buffer in buffers),
        optimizer=_bytes([*parameters, *state]) - _bytes(parameters),
        activations=activations,
        staging=sum(hook.staging_bytes for hook in run.hooks if isinstance(hook, Saving)),
    )


def _bytes(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    """Of the storages, each once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@contextmanager
def explaining_out_of_memory(context: MegatronContext, when: Callable[[], str]) -> Iterator[None]:
    """Say, of an allocation that fails inside the block, what needs the memory and what would spare enough of it.

    Args:
        when: when it was, in words.

    Raises:
        OutOfMemory: on the rank that has run out; the others lose it, see `MegatronContext.exiting`.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        on_cpu = context.device.type == "cpu"
        advice = out_of_memory_advice(context.config, bytes_for_a_rank(context), on_cpu=on_cpu)
        why = OutOfMemory(f"rank {context.state.rank} ran out of memory {when()}: {first_line}")
        why.add_note(advice)
        raise why from error


def is_out_of_memory(error: BaseException) -> bool:
    """Torch has an exception for GPUs; on CPUs its allocator raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def out_of_memory_advice(config: MegatronConfig, available: int, *, on_cpu: bool) -> str:
    """The account of the configuration, and the three cheapest changes that need no more than `available` bytes."""
    vocabulary = build_vocabulary(config)
    predicted = predict_memory(config, padded_vocab_size=vocabulary.padded_size)
    largest = max(stage.needed(on_cpu=on_cpu) for stage in predicted)
    stage = f"the largest stage{', with its staging,' if on_cpu and any(stage.staging for stage in predicted) else ''}"
    # Less than what has just not fitted, also where the account knows of too little: temporaries, fragments, others.
    enough = min(available, int(0.9 * largest))
    options = cheapest_that_fit(config, vocab_size=vocabulary.size, available=enough, on_cpu=on_cpu)
    fits = bool(options) and options[0].bytes <= enough
    bound = "all there is" if enough == available else "nine tenths of what it needs now, which did not fit"
    found = "The cheapest changes that would fit" if fits else "No two changes make it fit; those that spare most"
    lines = [
        f"What the {config.task.upper()} of these flags needs on a rank of each stage, predicted (MB):",
        memory_table(predicted),
        f"A rank has {available / 1e6:,.1f} MB, of which libraries, temporaries and fragments take some too. "
        f"A change is taken to fit if {stage} then needs no more than {enough / 1e6:,.1f} MB: {bound}.",
        f"{found}, in place of other flags for the same:" if options else "No two changes spare any of it.",
        *(f"  {number}. {option}" for number, option in enumerate(options, start=1)),
    ]
    return "\n".join(lines)


def warn_of_too_little_memory(context: MegatronContext, vocabulary: Vocabulary) -> None:
    """Say at the start of a run on CPUs what its ranks need, where their node has no room for it."""
    if context.device.type != "cpu":
        return
    stages = predict_memory(context.config, padded_vocab_size=vocabulary.padded_size)
    if warning := _memory_warning(context.state, stages, _bytes_of_memory()):
        context.say(f"warning: {warning}")


def _memory_warning(state: ParallelState, stages: Sequence[StageMemory], available: int) -> str:
    """What the ranks of this node need by the account of memory, where the node has no room for it; else "".

    Args:
        available: bytes of memory that the node has.
    """
    here = [rank for rank, node in enumerate(state.nodes) if node == state.nodes[state.rank]]
    mine = [stages[state.grid.coordinates(rank)["pp"]] for rank in here]
    needed = sum(stage.needed(on_cpu=True) for stage in mine)
    if needed <= available:
        return ""
    return (
        f"the {len(here)} rank(s) of this node need about {needed / 1e9:,.1f} GB or more, and it has "
        f"{available / 1e9:,.1f} GB of memory; a rank of each stage (MB):\n{memory_table(stages)}"
    )


def _bytes_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_for_a_rank(context: MegatronContext) -> int:
    """Memory of its GPU, or a rank's share of that of its node, or what the shell allows a process."""
    if context.device.type == "cuda":
        return int(torch.cuda.mem_get_info(context.device)[1])
    nodes = context.state.nodes
    share = _bytes_of_memory() // nodes.count(nodes[context.state.rank])
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return share if allowed == resource.RLIM_INFINITY else min(share, allowed)
