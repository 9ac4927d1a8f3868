"""Real ranks: saved by some and loaded by others, and a failure on one is an error on all of them."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.checkpointing import CheckpointError, load_checkpoint, save_checkpoint
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import narrow_
from megatron.core.shard import Init, NamedTensor, Shard, blocked_pieces, even_pieces, whole_pieces
from tests.checkpointing.layouts import ALONE
from tests.helpers.distributed import run_distributed

SHAPES = {
    "model.vocabulary": (101, 3),
    "model.gate_up": (24, 4),
    "model.columns": (5, 12),
    "model.norm": (7,),
}


def world_group(rank: int, world_size: int) -> CommGroup:
    if world_size == 1:
        return CommGroup.single("world")
    return CommGroup(name="world", ranks=tuple(range(world_size)), rank=rank, process_group=dist.group.WORLD)


def value(key: str, dtype: torch.dtype) -> torch.Tensor:
    count = int(torch.Size(SHAPES[key]).numel())
    wide = torch.arange(count, dtype=torch.float32).reshape(SHAPES[key]) + 1000 * sorted(SHAPES).index(key)
    rounded = torch.empty_like(wide, dtype=dtype)
    narrow_(wide, rounded)  # as an optimizer rounds the weights of a model
    return rounded


def shard(key: str, group: CommGroup) -> tuple[Shard, tuple[int, ...]]:
    """As the layers of a model have them: padded vocabulary rows, [gate; up], columns, a whole norm."""
    size = group.size
    shape = SHAPES[key]
    if key == "model.vocabulary":
        padded = -(-shape[0] // (4 * size)) * 4 * size
        pieces, dim, local = even_pieces(shape[0], group, padded=padded), 0, (padded // size, shape[1])
    elif key == "model.gate_up":
        pieces, dim, local = blocked_pieces((12, 12), group), 0, (24 // size, shape[1])
    elif key == "model.columns":
        pieces, dim, local = even_pieces(12, group), 1, (5, 12 // size)
    else:
        pieces, dim, local = whole_pieces(shape[0], group), None, shape
    return Shard(name=key, global_shape=shape, dim=dim, pieces=pieces, group=group, init=Init.zeros()), local


def model(group: CommGroup, *, filled: bool, dtype: torch.dtype = torch.float32) -> list[NamedTensor]:
    """This rank's tensors; padding, and all of it when not filled, is -1."""
    named = []
    for key in SHAPES:
        placed, local_shape = shard(key, group)
        local = torch.full(local_shape, -1.0, dtype=dtype)
        if filled:
            for piece in placed.pieces:
                part = value(key, dtype).narrow(placed.split_dim, piece.start, piece.length)
                local.narrow(placed.split_dim, piece.local, piece.length).copy_(part)
        named.append(NamedTensor(key=key, tensor=local, shard=placed))
    return named


def _save(rank: int, world_size: int, root: Path) -> None:
    world = world_group(rank, world_size)
    save_checkpoint(root, 5, model(world, filled=True), {"by": world_size}, world=world)


def _load(rank: int, world_size: int, root: Path, dtype: torch.dtype) -> None:
    world = world_group(rank, world_size)
    loaded = model(world, filled=False, dtype=dtype)
    checkpoint = load_checkpoint(root, world=world)
    summary = checkpoint.load_into(loaded, world=world)
    assert checkpoint.iteration == 5
    assert len(summary.casts) == (0 if dtype == torch.float32 else 1)
    for actual, expected in zip(loaded, model(world, filled=True, dtype=dtype), strict=True):
        assert torch.equal(actual.tensor, expected.tensor), (rank, actual.key)


@pytest.mark.parametrize("writers, readers", [(2, 3), (4, 1), (1, 4), (3, 2)])
def test_what_some_ranks_saved_others_load(tmp_path: Path, writers: int, readers: int) -> None:
    run_distributed(_save, writers, tmp_path)
    run_distributed(_load, readers, tmp_path, torch.float32)


def test_what_was_saved_in_one_precision_loads_in_another(tmp_path: Path) -> None:
    run_distributed(_save, 2, tmp_path)
    run_distributed(_load, 1, tmp_path, torch.bfloat16)


def test_the_same_model_has_the_same_tensors_whoever_saved_it(tmp_path: Path) -> None:
    found = []
    for writers in (1, 2):
        run_distributed(_save, writers, tmp_path / str(writers))
        stored = load_checkpoint(tmp_path / str(writers), world=ALONE).tensors
        found.append({key: (tensor.dtype, tensor.shape) for key, tensor in stored.items()})
    assert found[0] == found[1]


def _save_replicas(rank: int, world_size: int, root: Path, tensor_size: int) -> None:
    """The ranks of a tensor-parallel group are neighbours."""
    world = world_group(rank, world_size)
    groups = {}
    for name, ranks_of in {
        "tensor": [list(range(first, first + tensor_size)) for first in range(0, world_size, tensor_size)],
        "data": [list(range(first, world_size, tensor_size)) for first in range(tensor_size)],
    }.items():
        for ranks in ranks_of:
            communicator = dist.new_group(ranks)
            if rank in ranks:
                groups[name] = CommGroup(
                    name=name, ranks=tuple(ranks), rank=ranks.index(rank), process_group=communicator
                )
    save_checkpoint(root, 5, model(groups["tensor"], filled=True), {}, world=world, replicas=groups["data"])


@pytest.mark.parametrize("world_size, tensor_size", [(4, 2), (3, 1), (6, 2), (6, 3)])
def test_data_parallel_ranks_share_out_what_they_all_hold(tmp_path: Path, world_size: int, tensor_size: int) -> None:
    run_distributed(_save_replicas, world_size, tmp_path, tensor_size)
    run_distributed(_load, 1, tmp_path, torch.float32)
    written = [0] * world_size
    for tensor in load_checkpoint(tmp_path, world=ALONE).tensors.values():
        for part in tensor.slices:
            written[int(part.file[6:11])] += part.box.volume
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert sum(written) == total
    for first in range(tensor_size):
        group = written[first::tensor_size]
        assert max(group) - min(group) <= 2 * 12, group  # no more than a row, at each end


# ---- failures on one rank ----


def save_rows(root: Path, iteration: int, world: CommGroup, rows: int = 8) -> None:
    """A tensor of which each rank holds some rows, and that says of which iteration it is."""
    start = world.rank * rows // world.size
    stop = (world.rank + 1) * rows // world.size
    group = CommGroup(name="t", ranks=world.ranks, rank=world.rank, process_group=world.process_group)
    padded = -(-rows // world.size) * world.size
    pieces = even_pieces(rows, group, padded=padded)
    local = torch.full((padded // world.size, 50), float(iteration))
    placed = Shard(global_shape=(rows, 50), dim=0, pieces=pieces, group=group, init=Init.zeros())
    assert start <= stop
    named = NamedTensor(key="model.rows", tensor=local, shard=placed)
    save_checkpoint(root, iteration, [named], {"iteration": iteration}, world=world)


def load_rows(root: Path, world: CommGroup, rows: int = 8) -> int:
    """The iteration of the newest checkpoint; all its values must be of it."""
    checkpoint = load_checkpoint(root, world=world)
    loaded = torch.zeros(rows, 50)
    placed = Shard(global_shape=(rows, 50), dim=None, pieces=whole_pieces(rows, ALONE), group=ALONE, init=Init.zeros())
    checkpoint.load_into([NamedTensor(key="model.rows", tensor=loaded, shard=placed)], world=world)
    assert (loaded == float(checkpoint.iteration)).all()
    assert checkpoint.metadata == {"iteration": checkpoint.iteration}
    return checkpoint.iteration


def _error_of_save(rank: int, world_size: int, root: Path, how: str, victim: int) -> str:
    world = world_group(rank, world_size)
    save_rows(root, 1, world)
    folder = root
    if rank == victim and how == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    if rank == victim and how == "not shared":
        folder = root / "node-local"
        folder.mkdir()
    try:
        save_rows(folder, 2, world)
    except CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert load_rows(root, world) == 1
        save_rows(root, 3, world)
        assert load_rows(root, world) == 3
        return str(error)
    raise AssertionError("the save went through")


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "how, reason", [("full", "File too large"), ("not shared", "must be a file system that all nodes share")]
)
def test_a_failure_to_write_on_one_rank_is_raised_on_all(
    tmp_path: Path, world_size: int, victim: int, how: str, reason: str
) -> None:
    texts = run_distributed(_error_of_save, world_size, tmp_path, how, victim, timeout=30)
    for text in texts:
        assert "saving iteration 2" in text
        assert f"rank {victim} on {os.uname().nodename}" in text or victim == 0
        assert reason in text


def _error_of_load(rank: int, world_size: int, root: Path, how: str) -> str:
    world = world_group(rank, world_size)
    tensors = model(world, filled=False)
    folder = root
    if how == "missing" and rank == 1:
        tensors.append(NamedTensor(key="model.extra", tensor=torch.zeros(7), shard=tensors[-1].shard))
    if how == "elsewhere" and rank == 1:
        folder = root / "copy"
    if how == "absent" and rank == 1:
        folder = root / "absent"
    if how == "surplus":
        tensors = [named for named in tensors if named.key != "model.columns"]
    try:
        load_checkpoint(folder, world=world).load_into(tensors, world=world)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("the load went through")


@pytest.mark.parametrize(
    "how, reason",
    [
        ("missing", r"model.extra (7,): not in the checkpoint"),
        ("surplus", r"model.columns (5, 12): in the checkpoint only"),
        ("absent", "there is no such folder"),
        ("elsewhere", "rank 0 sees iteration 5, rank 1 iteration 6"),
        ("damaged", "is damaged: wrong checksum of model.columns"),
    ],
)
def test_a_failure_to_load_on_one_rank_is_raised_on_all(tmp_path: Path, how: str, reason: str) -> None:
    world_size = 2
    run_distributed(_save, world_size, tmp_path)
    save_rows(tmp_path / "copy", 6, ALONE)
    if how == "damaged":
        path = tmp_path / "iter_0000005" / "shard_00001.safetensors"
        data = bytearray(path.read_bytes())
        at = data.index(value("model.columns", torch.float32)[:, 6:].contiguous().numpy().tobytes())
        data[at] ^= 1
        path.write_bytes(data)
    texts = run_distributed(_error_of_load, world_size, tmp_path, how, timeout=30)
    for text in texts:
        assert reason in text
