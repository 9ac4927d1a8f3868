"""A record of the collectives that a block of code issues, for tests that count them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

# Name in torch.distributed -> position of the argument whose size the papers count (the whole, not the part).
_COLLECTIVES = {
    "all_reduce": 0,
    "all_gather_single": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_single": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 0,
    "all_gather": 1,
    "reduce_scatter": 0,
    "reduce": 0,
    "broadcast": 0,
}
_PLAIN = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}


@contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, int]]]:
    """Yields a list that grows by (kind, number of elements of the whole tensor) with each collective."""
    log: list[tuple[str, int]] = []
    patches = []
    for name, position in _COLLECTIVES.items():
        original = getattr(dist, name)

        def recording(
            *args: Any, _name: str = name, _position: int = position, _call: Any = original, **kwargs: Any
        ) -> Any:
            log.append((_PLAIN.get(_name, _name), args[_position].numel()))
            return _call(*args, **kwargs)

        patches.append(patch.object(dist, name, recording))
    for active in patches:
        active.start()
    try:
        yield log
    finally:
        for active in patches:
            active.stop()


def kinds(log: list[tuple[str, int]]) -> list[str]:
    return [kind for kind, _ in log]
