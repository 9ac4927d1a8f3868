"""What only a bug can cause is no `UserError`: a program ends with its traceback."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megatron.config.problems import UserError
from megatron.core.parallel_state import grid_of_world
from megatron.core.rank_grid import RankGrid
from megatron.data.index_builder import build_blend_index, plan_epochs
from megatron.data.indexed_dataset import IndexedDatasetWriter

MISUSES: dict[str, tuple[str, Callable[[], object]]] = {
    "order": ("rank order 'tp-pp'", lambda: RankGrid(order="tp-pp")),
    "axis": ("size of axis tp is 0", lambda: RankGrid(tp=0)),
    "world": ("world size 3 is not divisible", lambda: grid_of_world(3, tensor=2, pipeline=1)),
    "type": ("the format knows", lambda: IndexedDatasetWriter("never", dtype=np.complex64)),
    "blend": ("each must be a positive number", lambda: build_blend_index([1.0, 0.0], 3)),
    "samples": (
        "documents that hold no token",
        lambda: plan_epochs(tokens_per_epoch=0, sequence_length=4, requested=1, extra_tokens=1, keep_last=False),
    ),
}


@pytest.mark.parametrize("said, misuse", MISUSES.values(), ids=MISUSES)
def test_a_misuse_is_taken_for_a_bug(said: str, misuse: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        misuse()
    assert not isinstance(caught.value, UserError)
