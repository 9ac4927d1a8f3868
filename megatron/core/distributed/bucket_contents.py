"""Which parameters lie in which bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megatron.config.problems import UserError, counted
from megatron.core.distributed.grad_buffer import BucketContent
from megatron.core.shard import shard_of

Named = tuple[str, nn.Parameter]


def parameters_by_buffer(module: nn.Module, *, matrices_apart: bool) -> list[list[Named]]:
    """The trainable parameters of each buffer, about in the order in which a backward pass finishes their gradients.

    Args:
        matrices_apart: the matrices inside layers have buffers of their own.
    """
    buffers: dict[tuple[torch.dtype, bool], list[Named]] = {}
    for name, parameter in reversed(list(module.named_parameters())):
        if parameter.requires_grad:
            apart = matrices_apart and bool(shard_of(parameter).matrices)
            buffers.setdefault((parameter.dtype, apart), []).append((name, parameter))
    return list(buffers.values())


def one_bucket(named: Sequence[Named]) -> list[BucketContent]:
    """All of a buffer in one bucket: without slices and overlap."""
    return [BucketContent(named_parameters=named)]


def several_buckets(
    named: Sequence[Named], *, bucket_size: int | None = None, number: int | None = None
) -> list[BucketContent]:
    """The parameters of a buffer in buckets for slices and overlap.

    Tied parameters have a bucket of their own, in the order of their names: on both stages the same elements lie at the
    same places, so that slices of the same elements meet. And so have those whose gradients are sums over the
    tensor-parallel group, which are complete after the backward only. The others, the ordinary ones, are cut.

    Args:
        bucket_size: elements with which a bucket of ordinary parameters is closed; None: it never is.
        number: of buckets of ordinary parameters, instead of a size.
    """
    ordinary = ordinary_parameters(named)
    tied = sorted((pair for pair in named if shard_of(pair[1]).tied), key=lambda pair: shard_of(pair[1]).name)
    late = [pair for pair in named if _is_late(pair[1]) and not shard_of(pair[1]).tied]
    runs = _closed_at(ordinary, bucket_size) if number is None else _cut_into(ordinary, number)
    contents = [
        *(BucketContent(named_parameters=run) for run in runs),
        BucketContent(named_parameters=tied, late=any(_is_late(parameter) for _, parameter in tied)),
        BucketContent(named_parameters=late, late=True),
    ]
    return [content for content in contents if content.named_parameters]


def ordinary_parameters(named: Sequence[Named]) -> list[Named]:
    """Those that are neither tied nor late."""
    return [pair for pair in named if not (shard_of(pair[1]).tied or _is_late(pair[1]))]


def numbers_of_buckets(modules: Sequence[nn.Module], number: int, *, matrices_apart: bool) -> list[tuple[int, ...]]:
    """How many of a rank's buckets of ordinary parameters each buffer of each chunk has, about by their sizes.

    Raises:
        UserError: so many whole parameters there are not, or more buffers that have some.
    """
    chunks = [parameters_by_buffer(module, matrices_apart=matrices_apart) for module in modules]
    buffers = [ordinary_parameters(named) for chunk in chunks for named in chunk]
    most, least = sum(map(len, buffers)), sum(map(bool, buffers))
    if most and not least <= number <= most:
        raise UserError(
            f"--ddp-num-buckets {number}: a bucket holds whole parameters of one type and model chunk, and not those "
            f"that are tied or summed over tensor-parallel ranks, and a rank of this layout has "
            f"{counted(most, 'parameter')} for them; from {least} to {most} can be had"
        )
    numbers = iter(_shares(number, buffers))
    return [tuple(next(numbers) for _ in chunk) for chunk in chunks]


def _shares(number: int, buffers: Sequence[Sequence[Named]]) -> Iterator[int]:
    """Parts of `number` as large as the buffers are, of each one at least and no more than its parameters."""
    for i, named in enumerate(buffers):
        behind = [len(other) for other in buffers[i + 1 :]]
        least = max(min(1, len(named)), number - sum(behind))
        most = min(len(named), number - sum(map(bool, behind)))
        share = round(number * _elements(named) / max(1, sum(map(_elements, buffers[i:]))))
        share = min(most, max(least, share))
        yield share
        number -= share


def _elements(named: Sequence[Named]) -> int:
    return sum(parameter.numel() for _, parameter in named)


def _is_late(parameter: nn.Parameter) -> bool:
    shard = shard_of(parameter)
    return shard.group.size > 1 and (shard.partial_gradient or shard.replicated_pieces)


def _closed_at(named: Sequence[Named], bucket_size: int | None) -> Iterator[list[Named]]:
    """Runs of parameters, each closed when it has `bucket_size` elements or more."""
    run: list[Named] = []
    size = 0
    for pair in named:
        run.append(pair)
        size += pair[1].numel()
        if bucket_size is not None and size >= bucket_size:
            yield run
            run, size = [], 0
    yield run


def _cut_into(named: Sequence[Named], number: int) -> list[list[Named]]:
    """So many runs of parameters, about as large as each other."""
    assert number <= len(named), f"{len(named)} parameters do not make {number} buckets"
    runs: list[list[Named]] = [[]]
    before, elements = 0, _elements(named)
    for i, pair in enumerate(named):
        is_full = before * number >= elements * len(runs)
        if runs[-1] and (is_full or len(named) - i == number - len(runs)):
            runs.append([])
        runs[-1].append(pair)
        before += pair[1].numel()
    return runs
