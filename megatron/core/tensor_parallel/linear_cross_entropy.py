"""The output layer and its cross entropy in one. The logits exist for a chunk of the vocabulary at a time.

Chunks are of the vocabulary and not of the tokens. A chunk of tokens adds to the gradient of the whole output weight,
the largest matrix of the model, which would be read and written once for each chunk; a chunk of the vocabulary writes
its own rows of it once, and what it adds to is the gradient of the hidden states, which is small.

Backward makes the logits again, for a third of the output layer's time. Gradients made in forward would spare that, but
they would have to be those of a loss that is not known yet: a token's share in it (a mask, the count of tokens of
all micro-batches, a loss scale) comes with the gradient, and the sum over tokens in the weight's gradient can not be
scaled token by token afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import all_gather, all_reduce_, reduce_scatter
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.cross_entropy import (
    LogitGradient,
    LogitStatistics,
    logit_gradient,
    logit_statistics,
)
from megatron.core.kernels.dispatch import compute_dtype
from megatron.core.main_grad import main_grad_if_any, summed
from megatron.core.tensor_parallel.async_linear import accumulate_weight_gradient, add_product_
from megatron.core.tensor_parallel.cross_entropy import (
    VocabularyColumns,
    token_losses,
    token_scale,
    vocabulary_columns,
)
from megatron.core.tensor_parallel.mappings import apply_eagerly
from megatron.core.tensor_parallel.placement import Placement

# Logits of a chunk: enough for the products to run at their full rate, few enough to be small beside the model.
_CPU_CHUNK = 1 << 23
_ACCELERATOR_CHUNK = 1 << 26
# Rows of the weight in a chunk, at least.
_LEAST_ROWS = 512


def _chunks(tokens: Tensor, valid: int) -> Iterator[slice]:
    """Rows of the weight, `valid` in all."""
    logits = _CPU_CHUNK if tokens.device.type == "cpu" else _ACCELERATOR_CHUNK
    rows = max(_LEAST_ROWS, logits // max(1, tokens.shape[0]) // 64 * 64)
    for start in range(0, valid, rows):
        yield slice(start, min(start + rows, valid))


def _merged(a: LogitStatistics, b: LogitStatistics) -> LogitStatistics:
    """The statistics of the columns of both."""
    maximum = torch.maximum(a.maximum, b.maximum)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)  # no number in either yet
    total = a.sum * torch.exp(a.maximum - shift) + b.sum * torch.exp(b.maximum - shift)
    logit_sum = None if a.logit_sum is None or b.logit_sum is None else a.logit_sum + b.logit_sum
    return LogitStatistics(maximum, total, a.target_logit + b.target_logit, logit_sum)


def _statistics(tokens: Tensor, weight: Tensor, target: Tensor, columns: VocabularyColumns) -> LogitStatistics:
    """Statistics of the logits of tokens [n, h] in this rank's valid columns."""
    with_logit_sum = bool(columns.on_each)
    nothing = tokens.new_empty(tokens.shape[0], 0)
    merged = logit_statistics(nothing, target, valid=0, with_logit_sum=with_logit_sum)
    for rows in _chunks(tokens, columns.valid):
        logits = tokens @ weight[rows].t()  # [n, c]
        chunk = logit_statistics(logits, target - rows.start, valid=logits.shape[1], with_logit_sum=with_logit_sum)
        merged = _merged(merged, chunk)
    return merged


class _LinearCrossEntropy(torch.autograd.Function):
    """forward: logits of a chunk, their statistics; backward: the logits again, their gradient, and those it makes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        group: CommGroup,
        sequence_parallel: bool,
        columns: VocabularyColumns,
    ) -> Tensor:
        whole = all_gather(x, group) if sequence_parallel else x  # [s, b, h]
        own_target = target.flatten() - columns.start  # [n]
        statistics = _statistics(whole.flatten(0, -2), weight, own_target, columns)
        result = token_losses(statistics, own_target, columns=columns, group=group)
        ctx.save_for_backward(x, weight, own_target, result.maximum, result.sum)
        # Kept by itself: what comes out of the saved tensors may be a detached alias.
        ctx.main_grad = main_grad_if_any(weight)
        ctx.group, ctx.sequence_parallel, ctx.columns = group, sequence_parallel, columns
        return result.losses.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, own_target, maximum, total = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        columns: VocabularyColumns = ctx.columns
        whole = all_gather(x, ctx.group) if ctx.sequence_parallel else x  # [s, b, h]
        tokens = whole.flatten(0, -2)  # [n, h]
        needed = LogitGradient(
            maximum=maximum,
            sum=total,
            scale=token_scale(gradient, compute_dtype(x)),
            on_target=columns.on_target,
            on_each=columns.on_each,
        )
        # The sum over the chunks is wide; on CPUs each term is rounded.
        x_gradient = torch.zeros_like(tokens, dtype=compute_dtype(x)) if needs_x else None
        weight_gradient = torch.zeros_like(weight) if needs_weight and ctx.main_grad is None else None
        accumulated = summed(ctx.main_grad) if needs_weight and weight_gradient is None else weight_gradient
        for rows in _chunks(tokens, columns.valid):
            logits = tokens @ weight[rows].t()  # [n, c]
            logit_gradient(logits, own_target - rows.start, needed, valid=logits.shape[1], out=logits)
            if x_gradient is not None:
                add_product_(x_gradient, logits, weight[rows])
            if accumulated is not None:
                accumulate_weight_gradient(accumulated[rows], logits, tokens)
        if x_gradient is not None:
            x_gradient = x_gradient.to(x.dtype).view(whole.shape)  # [s, b, h], a partial sum
            if ctx.sequence_parallel:
                x_gradient = reduce_scatter(x_gradient, ctx.group)  # [s/t, b, h]
            else:
                all_reduce_(x_gradient, ctx.group)
        return x_gradient, weight_gradient, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    placement: Placement,
    vocab_size: int,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`vocab_parallel_cross_entropy` of the logits x W^T, which are never whole; kept for backward is x alone.

    Args:
        x: [s, b, h], or [s/t, b, h] under sequence parallelism.
        weight: [v/t, h], this rank's rows; with a `main_grad`, see Note [Weight gradients in main_grad].
        target: [s, b] global token numbers.
        placement: over whose group the vocabulary is split.
        vocab_size: rows from here on are padding.

    Returns:
        Loss per token [s, b] in fp32, equal on all ranks of the group; fp64 for an fp64 x.
    """
    columns = vocabulary_columns(
        weight.shape[0], group=placement.group, vocab_size=vocab_size, label_smoothing=label_smoothing
    )
    return apply_eagerly(_LinearCrossEntropy, x, weight, target, placement.group, placement.sequence_parallel, columns)
