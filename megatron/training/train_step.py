"""One iteration: zero, forward-backward, finalize, step, schedule."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

import torch
from torch import Tensor, nn

from megatron.core.collectives import all_reduce, all_reduce_
from megatron.core.comm_group import CommGroup
from megatron.core.device import to_device
from megatron.core.distributed.finalize_model_grads import finalize_model_grads, non_finite_gradients
from megatron.core.pipeline_parallel.executor import ChunkForward
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.optimizer.optimizer import UpdateReport
from megatron.training.metrics import StepReport
from megatron.training.microbatches import BatchSize
from megatron.training.run import Loader, Microbatch, Run

# What runs through the chunks: a micro-batch, and its dropout unless it is evaluated.
Fed = tuple[Microbatch, DropoutStream | None]


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What an iteration begins with.

    Attributes:
        start: a reading of `time.perf_counter`.
        counts: of each loss term the tokens in the global batch.
        divisors: of each micro-batch what its loss sums are divided by.
        learning_rate, weight_decay, loss_scale: those that this iteration uses.
    """

    start: float
    batch: BatchSize
    microbatches: Sequence[Fed]
    counts: Mapping[str, Tensor]
    divisors: Sequence[Mapping[str, Tensor]]
    learning_rate: float
    weight_decay: float
    loss_scale: float

    @property
    def has_all_terms(self) -> bool:
        """Whether each loss term has a token. The host waits for it, and for all that it has queued on a GPU."""
        return not self.counts or bool((torch.stack(list(self.counts.values())) > 0).all())


def train_step(run: Run) -> StepReport:
    """Train on the next global batch and count it in `run.progress`."""
    begun = _begin(run)
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    with run.timers("forward-backward"):
        sums = run.executor.run(
            run.plans(begun.batch.num_microbatches, False),
            begun.microbatches,
            _forward_step(run),
            divisors=begun.divisors,
            loss_scale=begun.loss_scale * run.chunks[0].loss_factor,
            last_backward=lambda chunk: run.chunks[chunk].last_backward(look_for_nan=run.looks_for_nan),
            forward_only=False,
            timed=partial(run.timers, level=2),
        )
    faults = non_finite_gradients(run.chunks) if run.looks_for_nan else []
    with run.timers("grads-reduce"):
        finalize_model_grads(run.chunks, tensor=run.state.tensor, embedding=run.state.embedding)
    for hook in run.hooks:
        hook.before_update(run)
    update = _update(run, begun)
    if update.applied:
        run.scheduler.step(increment=begun.batch.global_batch_size)
    return _report(run, begun, sums, update, faults)


def _begin(run: Run) -> Begun:
    """Read the next global batch."""
    start, consumed = time.perf_counter(), run.progress.consumed_train_samples
    batch = run.batch_sizes.at(consumed)
    assert run.loaders.train is not None  # without it nothing is trained
    with run.timers("batch-generator"):
        read = run.loaders.train.microbatches(consumed, batch.num_microbatches)
        counts = global_counts(read, run.state.data_context, run.device)
        return Begun(
            start=start,
            batch=batch,
            microbatches=[_with_dropout(run, microbatch) for microbatch in read],
            counts=counts,
            divisors=_divisors(run, read, counts),
            learning_rate=run.scheduler.lr,
            weight_decay=run.scheduler.weight_decay,
            loss_scale=run.optimizer.loss_scale,
        )


def _update(run: Run, begun: Begun) -> UpdateReport:
    """The optimizer's step. A mean without a token is not known, so nothing is learnt from such a batch."""
    if not begun.has_all_terms:
        return run.optimizer.skip_step()
    run.optimizer.set_schedule(begun.learning_rate, begun.weight_decay)
    with run.timers("optimizer"):
        return run.optimizer.step()


def _report(
    run: Run, begun: Begun, sums: Sequence[Mapping[str, Tensor]], update: UpdateReport, faults: Sequence[str]
) -> StepReport:
    """Count the batch, and tell of it."""
    progress, size = run.progress, begun.batch.global_batch_size
    progress.iteration += 1
    progress.consumed_train_samples += size
    losses = mean_losses(_total(sums), begun.counts, run.state.data_context) if begun.has_all_terms else {}
    return StepReport(
        iteration=progress.iteration,
        losses=losses,
        applied=update.applied,
        nan=not (update.overflow or isfinite(update.grad_norm)) or _any_is_not_finite(losses, run),
        faults=faults,
        grad_norm=update.grad_norm,
        num_zeros=update.num_zeros,
        params_norm=run.optimizer.params_norm() if run.config.logging.log_params_norm else None,
        loss_scale=begun.loss_scale,
        learning_rate=begun.learning_rate,
        next_learning_rate=run.scheduler.lr,
        weight_decay=begun.weight_decay,
        global_batch_size=size,
        consumed_samples=progress.consumed_train_samples,
        tokens=size * run.config.data.seq_length,
        seconds=time.perf_counter() - begun.start,
    )


def _any_is_not_finite(losses: Mapping[str, float], run: Run) -> bool:
    """Whether a loss is NaN or infinite. Only the stage with the output knows the losses, and all must know this."""
    flag = torch.tensor(not all(map(isfinite, losses.values())), dtype=torch.int32, device=run.device)
    all_reduce_(flag, run.state.pipeline, "max")
    return bool(flag)


def _with_dropout(run: Run, microbatch: Microbatch) -> Fed:
    """The micro-batch on the run's device, and the dropout of this iteration over its samples."""
    seed, iteration = run.config.training.seed, run.progress.iteration
    dropout = DropoutStream(seed=seed, iteration=iteration, sample_ids=microbatch.sample_ids, device=run.device)
    return microbatch.to(run.device), dropout


def _forward_step(run: Run) -> ChunkForward[Fed]:
    """The user's forward step over what a micro-batch comes with."""

    def forward_step(fed: Fed, chunk: nn.Module, hidden_states: Tensor | None) -> Tensor | Mapping[str, Tensor]:
        microbatch, dropout = fed
        return run.forward_step(microbatch, chunk, hidden_states, dropout)

    return forward_step


def global_counts(microbatches: Sequence[Microbatch], data: CommGroup, device: torch.device) -> dict[str, Tensor]:
    """The number of tokens (or sequences) of each loss term in the global batch: known before the first forward.

    Each loss of a micro-batch is divided by it before its backward, so gradients are means over the global batch
    whatever the number of micro-batches and data-parallel ranks, and nothing is divided later.

    Returns:
        By name, on `device`; one collective for all terms.
    """
    return _sum_over(_total([microbatch.loss_counts() for microbatch in microbatches]), data, device)


def _total(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of each term the float64 sum over the parts that are not empty; empty where there are none."""
    full = [part for part in parts if part]
    return {name: torch.stack([part[name].double() for part in full]).sum() for name in (full[0] if full else ())}


def _sum_over(terms: Mapping[str, Tensor], group: CommGroup, device: torch.device) -> dict[str, Tensor]:
    """The terms summed over a group, all in one collective: by name, as the order of a user's dict may differ."""
    if not terms:
        return {}
    names = sorted(terms)
    return dict(zip(names, all_reduce(to_device(torch.stack([terms[name] for name in names]), device), group)))


def _divisors(run: Run, microbatches: Sequence[Microbatch], counts: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
    """What the loss sums of each micro-batch are divided by: the global count of tokens.

    With `--no-calculate-per-token-loss`, Megatron-LM's mean of the means of micro-batches: then a token of a
    micro-batch with few unmasked tokens weighs more. What has no token at all counts as zero.
    """
    if run.config.optimizer.calculate_per_token_loss:
        return [{name: count.clamp(min=1.0) for name, count in counts.items()}] * len(microbatches)
    number = len(microbatches) * run.state.data_context.size
    return [
        {name: count.double().clamp(min=1.0) * number for name, count in microbatch.loss_counts().items()}
        for microbatch in microbatches
    ]


def mean_losses(sums: Mapping[str, Tensor], counts: Mapping[str, Tensor], data: CommGroup) -> dict[str, float]:
    """Sum over the tokens of the global batch by their number; without a term that has none.

    Empty where the sums are not known. The host waits once for all terms.
    """
    if not sums:
        return {}
    device = next(iter(counts.values())).device
    totals = _sum_over(sums, data, device)
    known = torch.stack([torch.stack([totals[name], count]) for name, count in counts.items()]).tolist()
    return {name: total / count for name, (total, count) in zip(counts, known) if count > 0}


def evaluate(run: Run, loader: Loader, split: str, iterations: int, consumed: int) -> dict[str, float] | None:
    """Losses over `iterations` global batches of a loader, from a position on, without dropout.

    Returns:
        The mean of each loss over all the tokens, empty on ranks without the output; None when the run was asked to
        stop before the last iteration.
    """
    batch_size = run.batch_sizes.global_batch_size
    num_microbatches = batch_size // (run.batch_sizes.micro_batch_size * run.batch_sizes.data_parallel_size)
    counts: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    for done in range(iterations):
        if run.stop_reason is not None:
            run.say(f"evaluation on {split} data given up after {done} of {iterations} iterations")
            return None
        read = loader.microbatches(consumed + done * batch_size, num_microbatches)
        losses = run.executor.run(
            run.plans(num_microbatches, True),
            [(microbatch.to(run.device), None) for microbatch in read],
            _forward_step(run),
            divisors=None,
            loss_scale=1.0,
            forward_only=True,
        )
        counts = _total([counts, *[microbatch.loss_counts() for microbatch in read]])
        sums = _total([sums, *losses])
        for hook in run.hooks:
            hook.during_evaluation(run, split, done + 1, iterations)
    data = run.state.data_context
    return mean_losses(sums, _sum_over(counts, data, run.device), data)
