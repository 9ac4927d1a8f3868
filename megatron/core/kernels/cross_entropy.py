"""Softmax cross entropy over a part of the columns of its logits: numbers of each row, and the gradient of the part.

What a rank of a group, or a chunk of the vocabulary, has to know of its own columns. Each logit is read once in forward
and once in backward, nothing of the size of the logits is made besides the gradient, and that may be written over them.
Below float32 the computation is in float32, and only the gradient is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.kernels.dispatch import compiled_for, compute_dtype, tensor_argument

# Logits that plain torch handles at a time. On a CPU, by each thread: a block of exponentials stays in the last-level
# cache. Smaller blocks are no faster, and each of their operations is a parallel region of its own, at the end of which
# threads of a busy machine wait for each other. On a GPU, the single-precision copy of a block stays small.
_CPU_BLOCK = 1 << 21
_ACCELERATOR_BLOCK = 1 << 26

_REFERENCE_COST = "2 to 4 times the time of the cross entropy"


class LogitStatistics(NamedTuple):
    """Of each row, all [n] in the `compute_dtype` of the logits, each in memory of its own: not all are kept.

    Attributes:
        maximum: of the valid columns; -inf without any.
        sum: of exp(x - maximum) over the valid columns; 0 without any, NaN if one of them is.
        target_logit: x of the target, 0 where it is in none of the valid columns.
        logit_sum: sum of the valid columns; None where it was not asked for.
    """

    maximum: Tensor
    sum: Tensor
    target_logit: Tensor
    logit_sum: Tensor | None


@dataclass(frozen=True, kw_only=True)
class LogitGradient:
    """What the gradient of logits needs besides them: scale * (softmax - on_each - on_target at the target).

    Attributes:
        maximum, sum: [n] of the softmax, over all columns of all parts.
        scale: [n]
    """

    maximum: Tensor
    sum: Tensor
    scale: Tensor
    on_target: float
    on_each: float


def logit_statistics(logits: Tensor, target: Tensor, *, valid: int, with_logit_sum: bool) -> LogitStatistics:
    """Statistics of the first `valid` columns of logits [n, w].

    Args:
        target: [n] int64, column of each row's target; outside of the valid ones it is in another part.
    """
    compiled = compiled_for("logit_statistics", logits, reference_cost=_REFERENCE_COST)
    if compiled is None:
        return logit_statistics_reference(logits, target, valid=valid, with_logit_sum=with_logit_sum)
    return logit_statistics_compiled(compiled, logits, target, valid=valid, with_logit_sum=with_logit_sum)


def logit_gradient(logits: Tensor, target: Tensor, gradient: LogitGradient, *, valid: int, out: Tensor) -> None:
    """Write the gradient of logits [n, w] to `out`, of the same shape and type: the logits themselves, maybe.

    It is zero from column `valid` on. Other arguments as for `logit_statistics`.
    """
    compiled = compiled_for("logit_gradient", logits, reference_cost=_REFERENCE_COST)
    if compiled is None:
        logit_gradient_reference(logits, target, gradient, valid=valid, out=out)
    else:
        logit_gradient_compiled(compiled, logits, target, gradient, valid=valid, out=out)


def _input_arguments(logits: Tensor, target: Tensor, valid: int) -> dict[str, Any]:
    assert target.shape == logits.shape[:1], (target.shape, logits.shape)
    assert target.dtype == torch.int64, target.dtype
    assert target.is_contiguous(), target.stride()
    assert 0 <= valid <= logits.shape[1], (valid, logits.shape)
    return {
        "logits": tensor_argument(logits),
        "rows": logits.shape[0],
        "width": logits.shape[1],
        "valid": valid,
        "targets": target.data_ptr(),
    }


def logit_statistics_compiled(
    compiled: Callable[..., Any],
    logits: Tensor,
    target: Tensor,
    *,
    valid: int,
    with_logit_sum: bool,
) -> LogitStatistics:
    """The same by a kernel of `compiled_for`."""
    maximum, total, target_logit, logit_sum = (
        torch.empty(logits.shape[0], dtype=compute_dtype(logits), device=logits.device) for _ in range(4)
    )
    compiled(
        **_input_arguments(logits, target, valid),
        maximum=maximum.data_ptr(),
        sum=total.data_ptr(),
        target_logit=target_logit.data_ptr(),
        logit_sum=logit_sum.data_ptr() if with_logit_sum else 0,
    )
    return LogitStatistics(maximum, total, target_logit, logit_sum if with_logit_sum else None)


def logit_gradient_compiled(
    compiled: Callable[..., Any],
    logits: Tensor,
    target: Tensor,
    gradient: LogitGradient,
    *,
    valid: int,
    out: Tensor,
) -> None:
    """The same by a kernel of `compiled_for`."""
    of_rows = (gradient.maximum, gradient.sum, gradient.scale)
    for tensor in of_rows:
        assert tensor.dtype == compute_dtype(logits), tensor.dtype
        assert tensor.shape == target.shape, tensor.shape
        assert tensor.is_contiguous(), tensor.stride()
    assert (out.shape, out.dtype, out.is_contiguous()) == (logits.shape, logits.dtype, True)
    maximum, total, scale = (tensor.data_ptr() for tensor in of_rows)
    compiled(
        **_input_arguments(logits, target, valid),
        maximum=maximum,
        sum=total,
        scale=scale,
        on_target=gradient.on_target,
        on_each=gradient.on_each,
        gradient=out.data_ptr(),
    )


def logit_statistics_reference(logits: Tensor, target: Tensor, *, valid: int, with_logit_sum: bool) -> LogitStatistics:
    """The same in plain torch. A column that is NaN makes the maximum NaN too."""
    dtype, rows = compute_dtype(logits), logits.shape[0]
    column, here = _own_targets(target, valid)
    maximum = torch.full((rows,), -torch.inf, dtype=dtype, device=logits.device)
    total, target_logit, logit_sum = (torch.zeros(rows, dtype=dtype, device=logits.device) for _ in range(3))
    step = _rows_per_block(logits)
    for start in range(0, rows if valid else 0, step):
        part = slice(start, start + step)
        block = logits[part, :valid].to(dtype)
        torch.amax(block, dim=1, out=maximum[part])
        target_logit[part] = block.gather(1, column[part, None]).squeeze(1).masked_fill(~here[part], 0.0)
        if with_logit_sum:
            torch.sum(block, dim=1, out=logit_sum[part])
        shift = maximum[part].masked_fill(maximum[part] == -torch.inf, 0.0)
        torch.sum((block - shift.unsqueeze(1)).exp_(), dim=1, out=total[part])
    return LogitStatistics(maximum, total, target_logit, logit_sum if with_logit_sum else None)


def logit_gradient_reference(
    logits: Tensor, target: Tensor, gradient: LogitGradient, *, valid: int, out: Tensor
) -> None:
    """The same in plain torch."""
    dtype, rows = compute_dtype(logits), logits.shape[0]
    column, here = _own_targets(target, valid)
    subtract = (here.to(dtype) * -gradient.on_target).unsqueeze(1)
    step = _rows_per_block(logits)
    for start in range(0, rows if valid else 0, step):
        part = slice(start, start + step)
        block = logits[part, :valid].to(dtype) - gradient.maximum[part, None]
        block.exp_().div_(gradient.sum[part, None])
        if gradient.on_each:
            block -= gradient.on_each
        block.scatter_add_(1, column[part, None], subtract[part])
        out[part, :valid] = block.mul_(gradient.scale[part, None])
    out[:, valid:] = 0.0


def _own_targets(target: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """Column of each target and whether it is one of the valid ones; column 0 where it is not."""
    here = (target >= 0) & (target < valid)
    return target.masked_fill(~here, 0), here


def _rows_per_block(logits: Tensor) -> int:
    width = max(1, logits.shape[-1])
    if logits.device.type == "cpu":  # as many rows for each thread
        return max(1, _CPU_BLOCK // width) * torch.get_num_threads()
    return max(1, _ACCELERATOR_BLOCK // width)
