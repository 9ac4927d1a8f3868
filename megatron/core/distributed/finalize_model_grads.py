"""The reductions that turn one rank's gradients into the gradients of the global batch.

Note [Gradient finalization order]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
After the last backward pass of a step, once for each element, and in this order:

1. Partial gradients over the tensor-parallel group. Under sequence parallelism each rank saw only its part of
   the sequence at the norms and row-parallel biases, and only its heads at the norms of queries and keys:
   each has a partial sum.
2. Replicated key and value heads over the tensor-parallel group. With fewer groups of them than ranks, several ranks
   hold a group, each for its own query heads: partial sums again, but of some rows of a parameter that is otherwise
   split.
3. Everything over the data-parallel group, bucket by bucket in place in the buffers. With `overlap_grad_reduce`
   the buckets that 1 and 2 do not touch have begun in the last backward pass; those that they do touch are late, and
   begin here. With slices (Note [Slices]) each rank has the sum in its slice only.
4. Tied embeddings over the embedding group. The first stage has the gradient of looking tokens up, the last one that
   of the output layer: one parameter, two summands. Of slices each rank sums its own: a bucket of tied parameters
   alone, in the order of their names, puts the same elements at the same places on both stages.

All are sums in place in `main_grad`, so none may run twice, nor before the last micro-batch: the second time it would
add up what is summed already. Sums commute but for their rounding, and that decides the place of 4: it adds two
numbers, which gives both stages the same bits, while 3 adds many, in an order that depends on where an element lies
in its buffer. Were 3 the last, the two copies of a tied embedding would differ in their last bit, drift apart, and a
resumed run, which loads one copy into both, would not be the run that was never stopped. The global norm and the
clipping come after all four: before 4 the two copies have different gradients and would be clipped and updated
differently.
tests/parity holds that all holders of an element have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.main_grad import main_grad_of
from megatron.core.shard import shard_of


def finalize_model_grads(
    chunks: Sequence[DistributedDataParallel],
    *,
    tensor: CommGroup,
    embedding: CommGroup | None,
) -> None:
    """Sum gradients over whatever each was split over, the data over each chunk's own `data_group`.

    See Note [Gradient finalization order].

    Args:
        chunks: the model chunks of this rank, in the same order on all ranks of its tensor-parallel group.
        embedding: first and last stage; None on a stage between them.
    """
    if tensor.size > 1:
        _sum_partial_gradients(chunks, tensor)
        _sum_replicated_spans(chunks, tensor)
    for chunk in chunks:
        chunk.reduce_gradients()
    if embedding is not None and embedding.size > 1:
        _sum_tied_gradients(chunks, embedding)


def non_finite_gradients(chunks: Sequence[DistributedDataParallel]) -> list[str]:
    """Parameters whose gradient on this rank holds a NaN or an infinity.

    Call it before `finalize_model_grads`, which spreads them to all ranks. One more pass over the gradients, but for
    those that `DistributedDataParallel.last_backward` has looked at.
    """
    return [name for chunk in chunks for name in chunk.non_finite_gradients()]


def _all_reduce_coalesced_(gradients: Sequence[Tensor], group: CommGroup) -> None:
    """Sum each tensor over the group, all in one collective."""
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    collectives.all_reduce_(flat, group)
    for gradient, summed in zip(gradients, flat.split_with_sizes([gradient.numel() for gradient in gradients])):
        gradient.copy_(summed.view(gradient.shape))


def _sum_partial_gradients(chunks: Sequence[DistributedDataParallel], tensor: CommGroup) -> None:
    parameters = [parameter for chunk in chunks for parameter in chunk.trainable_parameters()]
    partial = [main_grad_of(parameter) for parameter in parameters if shard_of(parameter).partial_gradient]
    _all_reduce_coalesced_(partial, tensor)


def _sum_replicated_spans(chunks: Sequence[DistributedDataParallel], tensor: CommGroup) -> None:
    """Each rank puts its part of a span at its place among all of them, and takes the sum back."""
    replicated = [spans for chunk in chunks for spans in chunk.replicated_spans]
    if not replicated:
        return
    sizes = [prod(spans.shape) for spans in replicated]
    gradient = main_grad_of(replicated[0].parameter)
    flat = torch.zeros(sum(sizes), dtype=gradient.dtype, device=gradient.device)
    concatenations = [part.view(spans.shape) for part, spans in zip(flat.split_with_sizes(sizes), replicated)]
    for spans, concatenation in zip(replicated, concatenations):
        spans.place(concatenation)
    collectives.all_reduce_(flat, tensor)
    for spans, concatenation in zip(replicated, concatenations):
        spans.take_back(concatenation)


def _sum_tied_gradients(chunks: Sequence[DistributedDataParallel], embedding: CommGroup) -> None:
    """Both stages list the tied tensors, or their parts in this rank's slice, in the order of their names, so that the
    same elements meet."""
    copies: dict[str, Tensor] = {}
    for bucket in (bucket for chunk in chunks for bucket in chunk.buckets):
        for part in bucket.slice_entries():
            shard = shard_of(part.parameter)
            if shard.tied:
                assert shard.name not in copies, f"this rank holds two copies of {shard.name}"
                copies[shard.name] = part.view(bucket.slice_of(bucket.gradients))
    _all_reduce_coalesced_([copies[name] for name in sorted(copies)], embedding)
