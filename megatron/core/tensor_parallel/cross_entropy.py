"""Cross entropy over a vocabulary that is split over the tensor-parallel group. Shoeybi et al. 2019, section 3.

Each rank sees only its own columns of the logits. Two all-reduces of numbers per token, the maximum and a sum of two
terms, make the loss; backward needs none. Nothing of the size of the logits is stored besides the logits themselves:
the softmax is recomputed in backward, straight into the gradient, and where the logits are given away the gradient is
written over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import all_reduce, all_reduce_
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.cross_entropy import (
    LogitGradient,
    LogitStatistics,
    logit_gradient,
    logit_statistics,
)
from megatron.core.kernels.dispatch import compute_dtype
from megatron.core.tensor_parallel.mappings import apply_eagerly


@dataclass(frozen=True, kw_only=True)
class VocabularyColumns:
    """This rank's columns: `valid` ones of the vocabulary from `start` on; what follows is padding.

    Attributes:
        on_target, on_each: the weights of label smoothing, loss = lse - on_target * x[target] - on_each * sum(x).
    """

    start: int
    valid: int
    on_target: float
    on_each: float


def vocabulary_columns(
    local_size: int, *, group: CommGroup, vocab_size: int, label_smoothing: float
) -> VocabularyColumns:
    """Those of this rank among `local_size` columns of each rank of the group.

    Raises:
        ValueError: the vocabulary is not in the columns, or the label smoothing is no share.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label smoothing ({label_smoothing}) must be at least 0 and less than 1")
    if not 0 < vocab_size <= local_size * group.size:
        raise ValueError(f"vocabulary size ({vocab_size}) exceeds the {local_size * group.size} logits")
    start = group.rank * local_size
    # A target keeps 1 - a, every other token gets a/(v-1); written as a share of all v tokens.
    smoothing = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
    return VocabularyColumns(
        start=start,
        valid=min(max(vocab_size - start, 0), local_size),
        on_target=1.0 - smoothing,
        on_each=smoothing / vocab_size,
    )


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """The losses of n tokens, and what the gradient of their logits needs.

    Attributes:
        losses: [n]
        maximum, sum: [n] over the whole vocabulary, see `LogitStatistics`.
    """

    losses: Tensor
    maximum: Tensor
    sum: Tensor


def token_losses(
    local: LogitStatistics, target: Tensor, *, columns: VocabularyColumns, group: CommGroup
) -> TokenLosses:
    """The losses from the statistics of each rank's columns.

    Args:
        target: [n], counted from this rank's first column.
    """
    maximum = all_reduce(local.maximum, group, "max")
    here = (target >= 0) & (target < columns.valid)
    # Relative to the maximum, so that large logits with small losses lose no digits.
    predicted = ((local.target_logit - maximum) * columns.on_target).masked_fill(~here, 0.0)
    if local.logit_sum is not None:
        predicted += (local.logit_sum - columns.valid * maximum) * columns.on_each
    total = local.sum
    if group.size > 1:
        sums = torch.stack((local.sum * torch.exp(local.maximum - maximum), predicted))  # [2, n]
        all_reduce_(sums, group)
        total, predicted = sums[0].clone(), sums[1]  # the first is kept, by itself
    return TokenLosses(losses=total.log() - predicted, maximum=maximum, sum=total)


def token_scale(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of losses [s, b] as the kernels take it: [n]."""
    return gradient.flatten().to(dtype).contiguous()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """forward: all-reduce a maximum, then sums; backward: softmax minus target distribution, alone."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: CommGroup, columns: VocabularyColumns, overwrite: bool
    ) -> Tensor:
        flat_logits = logits.contiguous().flatten(0, -2)  # [n, v/t]
        own_target = target.flatten() - columns.start  # [n]
        statistics = logit_statistics(
            flat_logits, own_target, valid=columns.valid, with_logit_sum=bool(columns.on_each)
        )
        result = token_losses(statistics, own_target, columns=columns, group=group)
        ctx.save_for_backward(logits, own_target, result.maximum, result.sum)
        ctx.columns, ctx.overwrite, ctx.written = columns, overwrite, False
        return result.losses.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        # Autograd tells by versions of tensors, which it does not compare where hooks on saved tensors are at work.
        if ctx.written:
            raise RuntimeError("the logits were modified by an inplace operation: their gradient is written over them")
        ctx.written = ctx.overwrite
        logits, own_target, maximum, total = ctx.saved_tensors
        flat_logits = logits.contiguous().flatten(0, -2)  # [n, v/t]
        needed = LogitGradient(
            maximum=maximum,
            sum=total,
            scale=token_scale(gradient, compute_dtype(logits)),
            on_target=ctx.columns.on_target,
            on_each=ctx.columns.on_each,
        )
        out = flat_logits.detach() if ctx.overwrite else torch.empty_like(flat_logits)
        logit_gradient(flat_logits, own_target, needed, valid=ctx.columns.valid, out=out)
        if ctx.overwrite:
            # Whoever saved the logits for a backward of his own is told by autograd that they are gone.
            torch.autograd.graph.increment_version(logits)
        return out.view(logits.shape), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: CommGroup,
    vocab_size: int,
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
) -> Tensor:
    """Loss per token, equal on all ranks of the group.

    Args:
        logits: [s, b, v/t], this rank's columns of the (padded) vocabulary.
        target: [s, b] global token numbers; the loss of one outside the vocabulary means nothing and must be masked.
        vocab_size: columns from here on are padding: no part in the softmax, and no gradient.
        label_smoothing: the share a that Megatron-LM moves from the target to the other v - 1 tokens. For losses of
            users: no flag sets it.
        overwrite_logits: whether backward may write the gradient over the logits: only for one who made them and
            reads them nowhere else. It saves memory of their size. A second backward is an error then.

    Returns:
        [s, b] in fp32; fp64 for fp64 logits.

    Raises:
        ValueError: logits that are to be overwritten are a leaf of autograd, so whoever made them keeps them.
    """
    if overwrite_logits and logits.is_leaf and logits.requires_grad:
        raise ValueError("logits that are a leaf of autograd can not be overwritten: their gradient would lie in them")
    columns = vocabulary_columns(logits.shape[-1], group=group, vocab_size=vocab_size, label_smoothing=label_smoothing)
    return apply_eagerly(_VocabParallelCrossEntropy, logits, target, group, columns, overwrite_logits)


def cross_entropy_reference(logits: Tensor, target: Tensor, *, vocab_size: int, label_smoothing: float = 0.0) -> Tensor:
    """The same in plain torch over the whole vocabulary, logits [s, b, v]: what the above must equal."""
    log_probability = F.log_softmax(logits[..., :vocab_size].to(compute_dtype(logits)), dim=-1)  # [s, b, v]
    loss = -log_probability.gather(-1, target.unsqueeze(-1)).squeeze(-1)  # [s, b]
    if label_smoothing == 0.0:
        return loss
    smoothing = label_smoothing * vocab_size / (vocab_size - 1)
    return (1.0 - smoothing) * loss - smoothing * log_probability.mean(dim=-1)
