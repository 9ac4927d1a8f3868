"""Cross entropy over a vocabulary that is split over the tensor-parallel group. Shoeybi et al. 2019, section 3.

Each rank sees only its own columns of the logits. Two all-reduces of numbers per token, the maximum of the log-sum-exp
and a sum of three terms, make the loss; backward needs none. Nothing of the size of the logits is stored besides the
logits themselves: the softmax is recomputed in backward, straight into the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import all_reduce_
from megatron.core.comm_group import CommGroup
from megatron.core.tensor_parallel.mappings import apply_eagerly

# Logits handled at a time. On a CPU, by each thread: a block of exponentials stays in the last-level cache. Smaller
# blocks are no faster, and each of their operations is a parallel region of its own, at the end of which threads of a
# busy machine wait for each other. On a GPU, the single-precision copy of a block stays small beside the logits.
_CPU_BLOCK = 1 << 21
_ACCELERATOR_BLOCK = 1 << 26


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """This rank's columns: `length` valid ones of the vocabulary from `start` on; what follows is padding."""

    start: int
    length: int
    vocab_size: int
    # The weights of Megatron's label smoothing: loss = lse - on_target * x[target] - on_each * sum(x).
    on_target: float
    on_each: float


def _columns(local_size: int, group: CommGroup, vocab_size: int, label_smoothing: float) -> _Columns:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label smoothing ({label_smoothing}) must be at least 0 and less than 1")
    if not 0 < vocab_size <= local_size * group.size:
        raise ValueError(f"vocabulary size ({vocab_size}) exceeds the {local_size * group.size} logits")
    start = group.rank * local_size
    length = min(max(vocab_size - start, 0), local_size)
    # A target keeps 1 - a, every other token gets a/(v-1); written as a share of all v tokens.
    smoothing = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
    return _Columns(
        start=start,
        length=length,
        vocab_size=vocab_size,
        on_target=1.0 - smoothing,
        on_each=smoothing / vocab_size,
    )


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _rows_per_block(logits: Tensor) -> int:
    if logits.device.type == "cpu":  # as many rows for each thread
        return max(1, _CPU_BLOCK // logits.shape[-1]) * torch.get_num_threads()
    return max(1, _ACCELERATOR_BLOCK // logits.shape[-1])


def _own_targets(target: Tensor, columns: _Columns) -> tuple[Tensor, Tensor]:
    """Local column of each target and whether it is on this rank; column 0 where it is not."""
    local = target - columns.start
    here = (local >= 0) & (local < columns.length)
    return local.masked_fill(~here, 0), here


def _local_statistics(logits: Tensor, target: Tensor, columns: _Columns) -> tuple[Tensor, Tensor]:
    """Over this rank's columns of logits [n, v/t]: log-sum-exp [n], target and smoothing terms [n]."""
    dtype = _compute_dtype(logits)
    rows = logits.shape[0]
    if columns.length == 0:
        return (
            torch.full((rows,), -torch.inf, dtype=dtype, device=logits.device),
            torch.zeros(rows, dtype=dtype, device=logits.device),
        )
    valid = logits[:, : columns.length]
    local, here = _own_targets(target, columns)
    predicted = valid.gather(1, local.unsqueeze(1)).squeeze(1).to(dtype) * columns.on_target
    predicted = predicted.masked_fill(~here, 0.0)
    lse = torch.empty(rows, dtype=dtype, device=logits.device)
    step = _rows_per_block(logits)
    for start in range(0, rows, step):
        block = valid[start : start + step].to(dtype)
        torch.logsumexp(block, dim=1, out=lse[start : start + step])
        if columns.on_each:
            predicted[start : start + step] += block.sum(dim=1) * columns.on_each
    return lse, predicted


def _local_gradient(logits: Tensor, target: Tensor, lse: Tensor, scale: Tensor, columns: _Columns) -> Tensor:
    """scale * (softmax - target distribution) [n, v/t] for this rank's columns, zero for padding."""
    dtype = _compute_dtype(logits)
    gradient = torch.empty_like(logits)
    gradient[:, columns.length :] = 0.0
    if columns.length == 0:
        return gradient
    local, here = _own_targets(target, columns)
    subtract = (here.to(dtype) * -columns.on_target).unsqueeze(1)
    step = _rows_per_block(logits)
    scratch = None
    if logits.dtype != dtype:
        scratch = torch.empty(min(step, logits.shape[0]), columns.length, dtype=dtype, device=logits.device)
    for start in range(0, logits.shape[0], step):
        part = slice(start, start + step)
        target_rows = gradient[part, : columns.length]
        block = target_rows if scratch is None else scratch[: target_rows.shape[0]]
        torch.sub(logits[part, : columns.length], lse[part, None], out=block).exp_()
        if columns.on_each:
            block -= columns.on_each
        block.scatter_add_(1, local[part, None], subtract[part])
        block *= scale[part, None]
        if scratch is not None:
            target_rows.copy_(block)
    return gradient


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """forward: all-reduce a maximum, then sums; backward: softmax minus target distribution, alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: CommGroup, columns: _Columns) -> Tensor:
        flat_logits, flat_target = logits.flatten(0, -2), target.flatten()  # [n, v/t], [n]
        local_lse, predicted = _local_statistics(flat_logits, flat_target, columns)
        lse = local_lse
        if group.size > 1:
            maximum = local_lse.clone()
            all_reduce_(maximum, group, "max")
            sums = torch.stack((torch.exp(local_lse - maximum), predicted))  # [2, n]
            all_reduce_(sums, group)
            lse, predicted = sums[0].log().add_(maximum), sums[1]
        ctx.save_for_backward(logits, flat_target, lse)
        ctx.columns = columns
        return (lse - predicted).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, lse = ctx.saved_tensors
        scale = gradient.flatten()
        logits_gradient = _local_gradient(logits.flatten(0, -2), target, lse, scale, ctx.columns)
        return logits_gradient.view(logits.shape), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, *, group: CommGroup, vocab_size: int, label_smoothing: float = 0.0
) -> Tensor:
    """Loss per token, equal on all ranks of the group.

    Args:
        logits: [s, b, v/t], this rank's columns of the (padded) vocabulary.
        target: [s, b] global token numbers; for one outside the vocabulary the loss has no target term and must be
            masked.
        vocab_size: columns from here on are padding: no part in the softmax, and no gradient.
        label_smoothing: the share a that Megatron-LM moves from the target to the other v - 1 tokens. For losses of
            users: no flag sets it.

    Returns:
        [s, b] in fp32; fp64 for fp64 logits.
    """
    columns = _columns(logits.shape[-1], group, vocab_size, label_smoothing)
    return apply_eagerly(_VocabParallelCrossEntropy, logits, target, group, columns)


def cross_entropy_reference(logits: Tensor, target: Tensor, *, vocab_size: int, label_smoothing: float = 0.0) -> Tensor:
    """The same in plain torch over the whole vocabulary, logits [s, b, v]: what the above must equal."""
    dtype = _compute_dtype(logits)
    log_probability = F.log_softmax(logits[..., :vocab_size].to(dtype), dim=-1)  # [s, b, v]
    loss = -log_probability.gather(-1, target.unsqueeze(-1)).squeeze(-1)  # [s, b]
    if label_smoothing == 0.0:
        return loss
    smoothing = label_smoothing * vocab_size / (vocab_size - 1)
    return (1.0 - smoothing) * loss - smoothing * log_probability.mean(dim=-1)
