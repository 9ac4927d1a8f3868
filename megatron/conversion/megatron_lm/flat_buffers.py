"""The flat buffers of Megatron-LM's distributed optimizer: where in one each parameter of a model chunk lies.

Parameters lie in reverse order of their registration, each start at a multiple of 64 elements, in buckets that are
closed when they are large enough. A word embedding that two stages share has a bucket of its own on both. What is
stored of a bucket ends with its last parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.conversion.megatron_lm.names import EMBEDDING, OUTPUT

_ALIGNMENT = 64
# The states that are kept so.
IN_BUFFERS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class FlatBucket:
    """Of each parameter in a bucket its first element and its shape; the number of elements that are stored."""

    places: Mapping[str, tuple[int, tuple[int, ...]]]
    length: int


def bucket_limit(arguments: Mapping[str, Any], chunk: int) -> int | None:
    """Elements after which a bucket is closed; None where there is one for all."""
    if not arguments.get("overlap_grad_reduce") or chunk > 0:
        return None
    given = arguments.get("ddp_bucket_size")
    return int(given) if given is not None else max(40_000_000, 1_000_000 * int(arguments["data_parallel_size"]))


def flat_buckets(shapes: Mapping[str, Sequence[int]], *, limit: int | None, shared_embedding: bool) -> list[FlatBucket]:
    """The buckets of a model chunk.

    Args:
        shapes: of its parameters on this rank, in the order of their registration.
        limit: see `bucket_limit`.
        shared_embedding: whether two stages share the word embeddings.
    """
    buckets: list[FlatBucket] = []
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    length = 0
    for name, shape in reversed(list(shapes.items())):
        apart = shared_embedding and name in (EMBEDDING, OUTPUT)
        first = -(-length // _ALIGNMENT) * _ALIGNMENT
        if apart and places:
            buckets.append(FlatBucket(places=places, length=first))
            places, first = {}, 0
        places[name] = (first, tuple(shape))
        length = first + math.prod(shape)
        if apart or (limit is not None and length >= limit):
            buckets.append(FlatBucket(places=places, length=length))
            places, length = {}, 0
    return [*buckets, FlatBucket(places=places, length=length)] if places else buckets
