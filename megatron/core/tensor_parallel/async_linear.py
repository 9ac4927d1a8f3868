"""The linear product of tensor-parallel layers: communication behind the weight gradient, kept in `main_grad`.

Note [Weight gradients in main_grad]
A parameter that has a buffer `main_grad` (a view of the data-parallel gradient buffer, often of higher
precision) gets its gradient added there by the backward pass itself, and autograd is given None: `.grad`
stays None and no gradient of the parameter's size is allocated. So there is one rule for whoever owns the
buffers, and no mark on the parameter: after a backward pass, what is in `.grad` (from operations that know
nothing of `main_grad`) is still to be added, and nothing else. A tied embedding may receive both. Hooks
registered with `register_post_accumulate_grad_hook` run in either case.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import all_gather, all_gather_async, all_reduce_, reduce_scatter_async
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.choice import kernel_choice
from megatron.core.main_grad import begin_if_forgotten, main_grad_if_any
from megatron.core.tensor_parallel.mappings import apply_eagerly

# Elements of the scratch of a weight gradient on a CPU, as large as the weights of small models, and those that each
# thread adds at a time.
_SCRATCH, _PART = 1 << 22, 1 << 16


def accumulate_weight_gradient(main_grad: Tensor, gradient: Tensor, x: Tensor) -> None:
    """main_grad += gradient^T x, for gradient [n, out] and x [n, in]; written there if it is the first of a step."""
    first = begin_if_forgotten(main_grad)
    if not kernel_choice().weight_gradients_apart:
        add_product_(main_grad, gradient.t(), x, over=first)
    elif first:
        main_grad.copy_(gradient.t().mm(x))
    else:
        main_grad.add_(gradient.t().mm(x))


def add_product_(total: Tensor, left: Tensor, right: Tensor, *, over: bool = False) -> None:
    """total [m, n] += left [m, k] right [k, n], in the dtype of `total`, which may be wider than that of the others.

    On CPUs the product itself is rounded to theirs first.

    Args:
        over: total = left right, whatever it was.
    """
    if total.dtype == right.dtype:
        total.addmm_(left, right, beta=0 if over else 1)
    elif right.is_cpu:
        _add_rounded_product_(total, left, right, over=over)
    else:
        torch.addmm(total, left, right, beta=0 if over else 1, out_dtype=total.dtype, out=total)


def _add_rounded_product_(total: Tensor, left: Tensor, right: Tensor, *, over: bool) -> None:
    """The same on CPUs, for which torch has no wide product of narrow operands.

    To widen the operands takes four times as long on a CPU that multiplies bfloat16 itself. The product goes through
    one scratch by runs of rows, and is added by parts that stay in the cache while they are widened: with the layers
    of hidden 384 and 768 that adds 4 and 14 % to the time of the products, a whole product and a whole sum 8 and 57 %.
    """
    rows = max(1, min(total.shape[0], _SCRATCH // total.shape[1]))
    part = _PART * torch.get_num_threads()
    scratch = right.new_empty(rows, right.shape[1])  # [rows, n]
    for run, target in zip(torch.split(left, rows), torch.split(total, rows)):
        product = torch.mm(run, right, out=scratch[: target.shape[0]])
        for sums, terms in zip(torch.split(target.view(-1), part), torch.split(product.view(-1), part)):
            if over:
                sums.copy_(terms)
            else:
                sums.add_(terms)


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """y = x W^T + bias, with the collectives of its input as part of it.

    forward: with `sequence_parallel` all-gather x along the sequence, then the product; the gathered x is
    not stored.
    backward: with `sequence_parallel` gather x again while dx = dy W is computed, and reduce-scatter dx while
    dW = dy^T x is computed; else, with `input_gradient_reduce`, all-reduce dx while dW is computed.
    Korthikanti et al. 2022, section 4.2.2 (gathering twice instead of storing).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: CommGroup,
        sequence_parallel: bool,
        input_gradient_reduce: bool,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        # Kept by itself: what comes out of the saved tensors may be a detached alias (recomputation, offloading).
        ctx.main_grad = main_grad_if_any(weight)
        ctx.group, ctx.sequence_parallel, ctx.reduce = group, sequence_parallel, input_gradient_reduce
        return F.linear(all_gather(x, group) if sequence_parallel else x, weight, bias)  # [s, b, out/t]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, weight = ctx.saved_tensors
        gather = scatter = None
        if needs_weight and ctx.sequence_parallel:
            x, gather = all_gather_async(x, ctx.group)  # [s, b, in]
        x_gradient = weight_gradient = bias_gradient = None
        if needs_x:
            x_gradient = full_gradient = gradient.matmul(weight)  # [s, b, in], a partial sum
            if ctx.sequence_parallel:
                x_gradient, scatter = reduce_scatter_async(full_gradient, ctx.group)  # [s/t, b, in]
            elif ctx.reduce:
                scatter = all_reduce_(full_gradient, ctx.group, async_op=True)
        if needs_weight:
            if gather is not None:
                gather.wait()
            rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)  # [n, out/t], [n, in]
            if ctx.main_grad is None:
                weight_gradient = rows.t().mm(columns)
            else:
                accumulate_weight_gradient(ctx.main_grad, rows, columns)
        if needs_bias:
            bias_gradient = gradient.flatten(0, -2).sum(dim=0)
        if scatter is not None:
            scatter.wait()
        return x_gradient, weight_gradient, bias_gradient, None, None, None


def parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    group: CommGroup,
    sequence_parallel: bool,
    input_gradient_reduce: bool,
) -> Tensor:
    """x W^T + bias by `LinearWithGradAccumulationAndAsyncCommunication`; a caller under `torch.compile` breaks here.

    Args:
        x: [s, b, in], or [s/t, b, in] with `sequence_parallel`.
        weight: [out/t, in]; with a `main_grad`, see Note [Weight gradients in main_grad].
        bias: [out/t] or None.
        sequence_parallel: gather x along dimension 0 first, and reduce-scatter its gradient.
        input_gradient_reduce: sum the gradient of x over the group: for an x that is whole on each rank.

    Returns:
        [s, b, out/t]
    """
    assert not (sequence_parallel and input_gradient_reduce), "the gradient of x would be summed twice"
    return apply_eagerly(
        LinearWithGradAccumulationAndAsyncCommunication,
        x,
        weight,
        bias,
        group,
        sequence_parallel,
        input_gradient_reduce,
    )
