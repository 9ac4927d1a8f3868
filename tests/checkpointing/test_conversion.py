"""What a converter needs: tensors written when their turn comes, and read back whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing import LazySlice, load_checkpoint, save_checkpoint, save_converted
from megatron.checkpointing.slices import Box
from tests.checkpointing.layouts import ALONE, whole

VALUES = {
    "model.w": torch.arange(12.0).view(4, 3),
    "model.b": torch.arange(3, dtype=torch.bfloat16),
    "model.s": torch.tensor(7.0),
}


def test_tensors_are_read_one_after_the_other_and_give_the_same_checkpoint(tmp_path: Path) -> None:
    events: list[str] = []

    def lazy(key: str, values: Tensor) -> LazySlice:
        def read() -> Tensor:
            events.append(key)
            return values

        return LazySlice(key=key, box=Box.whole(tuple(values.shape)), dtype=values.dtype, read=read)

    metadata = {"config": {"model": {}}}
    folder = save_converted(tmp_path / "lazy", 0, [lazy(key, values) for key, values in VALUES.items()], metadata)
    assert sorted(events) == sorted(VALUES)
    usual = save_checkpoint(
        tmp_path / "usual", 0, [whole(key, values) for key, values in VALUES.items()], metadata, world=ALONE
    )
    for path in usual.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    checkpoint = load_checkpoint(tmp_path / "lazy", world=ALONE)
    for key, values in VALUES.items():
        assert torch.equal(checkpoint.read(key), values)
