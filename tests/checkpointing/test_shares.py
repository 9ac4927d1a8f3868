"""What all data-parallel ranks hold is written once, in shares of equal size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpointing import CheckpointError, load_checkpoint
from megatron.checkpointing.save import Save, writers_of
from megatron.checkpointing.shares import rows_of_share, share_of
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import Halves, split_
from megatron.core.shard import FlatRange, NamedTensor
from tests.checkpointing.layouts import ALONE, whole

tables = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 500)), max_size=8)


def replicas(rank: int, size: int) -> CommGroup:
    return CommGroup(name="data", ranks=tuple(range(size)), rank=rank, process_group=Mock())


def save_replicas(root: Path, ranks: list[list[NamedTensor]]) -> None:
    """As if each list belonged to a data-parallel rank of its own."""
    saves = [
        Save(root=root, iteration=1, rank=rank).prepare(share_of(tensors, replicas(rank, len(ranks))), {})
        for rank, tensors in enumerate(ranks)
    ]
    for save in saves:
        save.write()
    for save in saves:
        save.publish(writers_of([save.plan for save in saves]))


def files_of(root: Path) -> dict[str, set[str]]:
    """Of each tensor the files that it is in."""
    stored = load_checkpoint(root, world=ALONE).tensors
    return {key: {part.file for part in tensor.slices} for key, tensor in stored.items()}


@given(tables, st.integers(1, 9))
def test_each_row_is_written_by_one_rank_and_the_shares_differ_by_a_row_at_each_end(
    held: list[tuple[int, int]], size: int
) -> None:
    shares = [rows_of_share(held, rank, size) for rank in range(size)]
    for number, (rows, _) in enumerate(held):
        assert [row for share in shares for row in share[number]] == list(range(rows))
    written = [sum(len(rows) * held[i][1] for i, rows in enumerate(share)) for share in shares]
    widest = max((row_bytes for rows, row_bytes in held if rows), default=0)
    assert max(written) - min(written) <= 2 * widest


def everything(value: float) -> list[NamedTensor]:
    """Of many kinds: wide rows, no dimension, no element, one row, main weights in halves."""
    upper, lower = torch.empty(6, 5, dtype=torch.bfloat16), torch.empty(6, 5, dtype=torch.int16)
    split_(torch.linspace(0, value, 30).reshape(6, 5), upper, lower)
    halves = whole("model.halves", torch.empty(6, 5))
    return [
        whole("model.none", torch.full((0, 5), value)),
        whole("model.wide", torch.full((3, 1000), value)),
        whole("model.scale", torch.tensor(value)),
        whole("model.row", torch.full((1, 70), value, dtype=torch.float64)),
        replace(halves, tensor=Halves(upper, lower)),
    ]


@pytest.mark.parametrize("size, writers", [(1, 1), (2, 2), (3, 2), (5, 3), (16, 3)])
def test_shares_of_all_kinds_of_tensors_are_the_whole(tmp_path: Path, size: int, writers: int) -> None:
    save_replicas(tmp_path, [everything(1.5)] * size)
    expected = everything(1.5)
    loaded = [
        replace(named, tensor=torch.zeros(named.shard.global_shape, dtype=named.tensor.dtype)) for named in expected
    ]
    load_checkpoint(tmp_path, world=ALONE).load_into(loaded, world=ALONE)
    for actual, named in zip(loaded, expected, strict=True):
        values = named.tensor.joined() if isinstance(named.tensor, Halves) else named.tensor
        assert torch.equal(actual.tensor, values), named.key  # type: ignore[arg-type]
    files = files_of(tmp_path)
    assert files["model.none"] == set()
    assert len(files["model.wide"]) == writers


def test_slices_of_a_distributed_optimizer_stay_with_the_ranks_that_have_them(tmp_path: Path) -> None:
    values = torch.arange(12.0).reshape(4, 3)
    ranks = []
    for first, stop in ((0, 5), (5, 5), (5, 12)):
        elements = FlatRange(shape=(4, 3), first=first, stop=stop)
        slices = replace(whole("model.w", values), tensor=values.view(-1)[first:stop], elements=elements)
        ranks.append([slices, whole("model.frozen", torch.ones(3, 8))])
    save_replicas(tmp_path, ranks)
    first, second, third = (f"shard_{rank:05d}.safetensors" for rank in range(3))
    assert files_of(tmp_path) == {"model.w": {first, third}, "model.frozen": {first, second, third}}
    loaded = torch.zeros(4, 3)
    checkpoint = load_checkpoint(tmp_path, world=ALONE)
    checkpoint.load_into([whole("model.w", loaded)], world=ALONE, ignore=("model.frozen",))
    assert torch.equal(loaded, values)


def test_a_rank_speaks_of_the_tensors_that_it_writes(tmp_path: Path) -> None:
    """So that the index of a share is no larger for it, however many ranks there are."""
    tensors = [whole(f"model.{i}", torch.ones(8)) for i in range(10)]
    keys: list[Any] = [list(share_of(tensors, replicas(rank, 5)).tensors) for rank in range(5)]
    assert len(keys[0]) == 10
    assert keys[1:] == [[f"model.{i}", f"model.{i + 1}"] for i in (2, 4, 6, 8)]


def test_ranks_that_do_not_hold_the_same_are_found_out(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.w is torch\.float32 \(4,\) here and torch\.float32 \(3,\)"):
        save_replicas(tmp_path, [[whole("model.w", torch.ones(3))], [whole("model.w", torch.ones(4))]])
