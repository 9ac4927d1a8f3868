"""Activation recomputation: keep less from the forward pass, and compute it again in the backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174); what to recompute: Korthikanti et
al. 2022, section 5. `torch.utils.checkpoint` does the work. It stops a recomputation at the last tensor that the
backward needs, so the last product of a layer and its collective are not run again; and it runs no second graph, so
weight gradients are added to `main_grad` once.

Note [What a recomputed forward draws]
The framework's own dropout is a function of positions, the same whenever it is computed. What draws from torch's
generator gets the state of the first forward back, and so does a `RngStateTracker` that is handed over; both go on from
where they were when the recomputation is over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from megatron.core.collectives import all_gather
from megatron.core.comm_group import CommGroup
from megatron.core.tensor_parallel.mappings import eagerly
from megatron.core.tensor_parallel.random import RngStateTracker


def recompute(
    function: Callable[..., Tensor],
    *kept: Tensor,
    distributed_over: CommGroup | None = None,
    tracker: RngStateTracker | None = None,
) -> Tensor:
    """`function(*kept)`, of which the backward pass finds only `kept` in memory.

    Args:
        function: computes the same from the same arguments; what else it holds stays in memory as it is.
        distributed_over: the ranks that have the same `kept`, to keep a part of it each and gather it again.
        tracker: the generator states that a user's `function` draws from, see Note [What a recomputed forward draws].
    """
    if not torch.is_grad_enabled():
        return function(*kept)
    return eagerly(_recompute, function, *kept, distributed_over=distributed_over, tracker=tracker)


def _recompute(
    function: Callable[..., Tensor], *kept: Tensor, distributed_over: CommGroup | None, tracker: RngStateTracker | None
) -> Tensor:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        assert tracker is not None
        return nullcontext(), tracker.replaying(tracker.states())

    with nullcontext() if distributed_over is None else _parts_over(distributed_over):
        output: Tensor = checkpoint(
            function, *kept, use_reentrant=False, context_fn=noop_context_fn if tracker is None else contexts
        )
    return output


def _parts_over(group: CommGroup) -> saved_tensors_hooks:
    """Keeps of each tensor that is saved the part of this rank, padded so that all parts are as long."""

    def own_part(whole: Tensor) -> tuple[Tensor, torch.Size]:
        length = -(-whole.numel() // group.size)
        part = whole.new_zeros(length)
        mine = whole.detach().flatten()[group.rank * length : (group.rank + 1) * length]
        part[: mine.numel()] = mine
        return part, whole.shape

    def gathered(kept: tuple[Tensor, torch.Size]) -> Tensor:
        part, shape = kept
        return all_gather(part, group)[: shape.numel()].view(shape)

    return saved_tensors_hooks(own_part, gathered)


def with_input_again(function: Callable[[Tensor], Tensor], x: Tensor, again: Callable[[], Tensor] | None) -> Tensor:
    """`function(x)`, whose backward gets `x` by `again()` instead of keeping it: for an `x` that is cheap to compute.

    Unlike `recompute` this runs nothing of `function` a second time. Only a tensor that `function` saves as `x` itself
    is left out; if anybody else keeps `x`, nothing is spared.

    Args:
        again: see `computed_again`; None keeps `x`.
    """
    if again is None or not torch.is_grad_enabled():
        return function(x)
    return eagerly(_with_input_again, function, x, again)


def _with_input_again(function: Callable[[Tensor], Tensor], x: Tensor, again: Callable[[], Tensor]) -> Tensor:
    place, shape = x.data_ptr(), x.shape

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        return again if (saved.data_ptr(), saved.shape) == (place, shape) else saved

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    with saved_tensors_hooks(pack, unpack):
        return function(x)


def computed_again(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """For `with_input_again`: `function(x)` without a graph."""
    return partial(_without_graph, function, x.detach())


@torch.no_grad()
def _without_graph(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)
