"""One iteration: zero, forward-backward, finalize, step, schedule."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite

import torch
from torch import Tensor, nn

from megatron.core.collectives import all_reduce, all_reduce_
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.finalize_model_grads import finalize_model_grads, non_finite_gradients
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.training.metrics import StepReport
from megatron.training.run import Batch, Loader, Run


def train_step(run: Run) -> StepReport:
    """Train on the next global batch and count it in `run.progress`."""
    start = time.perf_counter()
    progress, state, optimizer, scheduler = run.progress, run.state, run.optimizer, run.scheduler
    batch = run.batch_sizes.at(progress.consumed_train_samples)

    with run.timers("batch-generator"):
        batches = run.loaders.train.microbatches(progress.consumed_train_samples, batch.num_microbatches)
        microbatches = [each.to(run.device) for each in batches]
        counts = global_counts(microbatches, state.data_context)

    learning_rate, weight_decay, loss_scale = scheduler.lr, scheduler.weight_decay, optimizer.loss_scale
    losses: dict[str, float] = {}
    update = optimizer.skip_step()
    faults: list[str] = []
    if all(float(count) > 0 for count in counts.values()):
        optimizer.set_schedule(learning_rate, weight_decay)
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        with run.timers("forward-backward"):
            sums = run.executor.run(
                run.plans(batch.num_microbatches, False),
                microbatches,
                _forward_step(run, training=True),
                divisors=_divisors(run, microbatches, counts),
                loss_scale=loss_scale,
                forward_only=False,
                timed=partial(run.timers, level=2),
            )
        if run.looks_for_nan:
            faults = non_finite_gradients(run.chunks)
        with run.timers("grads-reduce"):
            finalize_model_grads(run.chunks, tensor=state.tensor, embedding=state.embedding)
        with run.timers("optimizer"):
            update = optimizer.step()
        losses = mean_losses(sums, counts, state.data_context)
    if update.applied:
        scheduler.step(increment=batch.global_batch_size)

    progress.iteration += 1
    progress.consumed_train_samples += batch.global_batch_size
    nan = not (update.overflow or isfinite(update.grad_norm)) or _any_is_not_finite(losses, run)
    return StepReport(
        iteration=progress.iteration,
        losses=losses,
        applied=update.applied,
        nan=nan,
        faults=faults,
        grad_norm=update.grad_norm,
        num_zeros=update.num_zeros,
        params_norm=optimizer.params_norm() if run.config.logging.log_params_norm else None,
        loss_scale=loss_scale,
        learning_rate=learning_rate,
        next_learning_rate=scheduler.lr,
        weight_decay=weight_decay,
        global_batch_size=batch.global_batch_size,
        consumed_samples=progress.consumed_train_samples,
        tokens=batch.global_batch_size * run.config.data.seq_length,
        seconds=time.perf_counter() - start,
    )


def _any_is_not_finite(losses: Mapping[str, float], run: Run) -> bool:
    """Whether a loss is NaN or infinite. Only the stage with the output knows the losses, and all must know this."""
    flag = torch.tensor(not all(map(isfinite, losses.values())), dtype=torch.int32, device=run.device)
    all_reduce_(flag, run.state.pipeline, "max")
    return bool(flag)


def _forward_step(run: Run, *, training: bool):  # type: ignore[no-untyped-def]
    """The user's forward step with the dropout of this iteration, or with none for evaluation."""
    seed, iteration = run.config.training.seed, run.progress.iteration
    draws = training and run.config.model.fast_attention_dropout and run.config.model.attention_dropout > 0

    def forward_step(batch: Batch, chunk: nn.Module, hidden_states: Tensor | None) -> Tensor | dict[str, Tensor]:
        dropout = DropoutStream(seed=seed, iteration=iteration, sample_ids=batch.sample_ids) if training else None
        if draws:  # torch's attention draws from its global generator, which so has the seed of this very forward
            number = [each.module for each in run.chunks].index(chunk)
            place = (iteration, int(batch.sample_ids[0]), run.state.model.rank, number)
            torch.manual_seed(int.from_bytes(hashlib.sha256(str((seed, *place)).encode()).digest()[:8]) >> 1)
        return run.forward_step(batch, chunk, hidden_states, dropout)

    return forward_step


def global_counts(microbatches: Sequence[Batch], data: CommGroup) -> dict[str, Tensor]:
    """The number of tokens (or sequences) of each loss term in the global batch: known before the first forward.

    Each loss of a micro-batch is divided by it before its backward, so gradients are means over the global batch
    whatever the number of micro-batches and data-parallel ranks, and nothing is divided later.
    """
    counts = [batch.loss_counts() for batch in microbatches]
    return {name: all_reduce(torch.stack([count[name].double() for count in counts]).sum(), data) for name in counts[0]}


def _divisors(run: Run, microbatches: Sequence[Batch], counts: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
    """What the loss sums of each micro-batch are divided by: the global count of tokens.

    With `--no-calculate-per-token-loss`, Megatron-LM's mean of the means of micro-batches: then a token of a
    micro-batch with few unmasked tokens weighs more. (A micro-batch without any counts as zero.)
    """
    if run.config.optimizer.calculate_per_token_loss:
        return [counts] * len(microbatches)
    number = len(microbatches) * run.state.data_context.size
    return [
        {name: count.double().clamp(min=1.0) * number for name, count in batch.loss_counts().items()}
        for batch in microbatches
    ]


def mean_losses(
    sums: Sequence[Mapping[str, Tensor]], counts: Mapping[str, Tensor], data: CommGroup
) -> dict[str, float]:
    """Sum over the tokens of the global batch by their number; empty where the sums are not known."""
    if not sums:
        return {}
    totals = {name: torch.stack([part[name].double() for part in sums]).sum() for name in sums[0]}
    return {name: float(all_reduce(total, data) / counts[name]) for name, total in totals.items()}


def evaluate(run: Run, loader: Loader, iterations: int, consumed: int) -> dict[str, float]:
    """Losses over `iterations` global batches of a loader, from a position on, without dropout.

    Returns:
        The mean of each loss over all the tokens; empty on ranks without the output.
    """
    batch_size = run.batch_sizes.global_batch_size
    num_microbatches = batch_size // (run.batch_sizes.micro_batch_size * run.batch_sizes.data_parallel_size)
    sums: list[dict[str, Tensor]] = []
    totals: dict[str, Tensor] = {}
    for index in range(iterations):
        batches = loader.microbatches(consumed + index * batch_size, num_microbatches)
        microbatches = [batch.to(run.device) for batch in batches]
        for term, count in global_counts(microbatches, run.state.data_context).items():
            totals[term] = totals.get(term, torch.zeros_like(count)) + count
        sums += run.executor.run(
            run.plans(num_microbatches, True),
            microbatches,
            _forward_step(run, training=False),
            divisors=None,
            loss_scale=1.0,
            forward_only=True,
        )
    return mean_losses(sums, totals, run.state.data_context)
