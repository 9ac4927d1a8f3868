"""Saved under one split and loaded under another, every tensor has the same bits."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatron.checkpointing import CheckpointError, load_checkpoint, save_checkpoint, storage
from megatron.checkpointing.index import DTYPES
from megatron.core.kernels.float_halves import narrow_
from megatron.core.shard import Init, NamedTensor, Piece, Shard
from tests.checkpointing.layouts import (
    ALONE,
    Spec,
    bits,
    local_tensors,
    poisoned,
    random_bits,
    random_layout,
    save_simulated,
    whole,
)

specs = st.lists(
    st.builds(
        lambda dtype, shape: (dtype, tuple(shape)),
        st.sampled_from(list(DTYPES.values())),
        st.lists(st.integers(0, 9), min_size=0, max_size=3),
    ),
    min_size=1,
    max_size=6,
).map(lambda drawn: [Spec(key=f"model.layers.{i}.w", dtype=d, shape=s) for i, (d, s) in enumerate(drawn)])


def _check_reshard(tensors: list[Spec], seed: int, block_bytes: int) -> None:
    rng = random.Random(seed)
    values = {spec.key: random_bits(spec, seed % 1000 + i) for i, spec in enumerate(tensors)}
    writers, readers = random_layout(tensors, rng), random_layout(tensors, rng)
    with tempfile.TemporaryDirectory() as folder, patch.object(storage, "BLOCK_BYTES", block_bytes):
        root = Path(folder)
        ranks = [local_tensors(writers, values, rank) for rank in range(len(writers))]
        save_simulated(root, 7, ranks, {"seed": seed})
        checkpoint = load_checkpoint(root, world=ALONE)
        assert set(checkpoint.tensors) == set(values)
        for rank in range(len(readers)):
            loaded = poisoned(readers, values, rank)
            checkpoint.load_into(loaded, world=ALONE, ignore=("",))
            for actual, expected in zip(loaded, local_tensors(readers, values, rank), strict=True):
                assert torch.equal(bits(actual.tensor), bits(expected.tensor)), (rank, actual.key)
        # The library's own reader finds the same slices in the files: they are safetensors files.
        for key, stored in checkpoint.tensors.items():
            for part in stored.slices:
                with safe_open(checkpoint.folder / part.file, framework="pt") as file:
                    other = file.get_tensor(part.name)
                assert other.dtype == values[key].dtype
                assert torch.equal(bits(other), bits(values[key][part.box.index])), part.name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs, st.integers(0, 2**32), st.sampled_from([64, 256, 2**24]))
def test_any_split_loads_into_any_other_with_the_same_bits(tensors: list[Spec], seed: int, block_bytes: int) -> None:
    _check_reshard(tensors, seed, block_bytes)


@pytest.mark.full
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs, st.integers(0, 2**32), st.sampled_from([64, 256, 2**24]))
def test_any_split_loads_into_any_other_with_the_same_bits_many_times(
    tensors: list[Spec], seed: int, block_bytes: int
) -> None:
    _check_reshard(tensors, seed, block_bytes)


def test_views_that_are_not_contiguous_are_saved_and_filled(tmp_path: Path) -> None:
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    save_checkpoint(tmp_path, 1, [whole("model.w", base.t())], {}, world=ALONE)
    target = torch.zeros(6, 8)
    load_checkpoint(tmp_path, world=ALONE).load_into([whole("model.w", target.t())], world=ALONE)
    assert torch.equal(target, base)


def test_parameters_that_require_a_gradient_are_saved_and_filled(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    save_checkpoint(tmp_path, 1, [whole("model.w", weight)], {}, world=ALONE)
    target = torch.nn.Parameter(torch.zeros(4, 3))
    load_checkpoint(tmp_path, world=ALONE).load_into([whole("model.w", target)], world=ALONE)
    assert torch.equal(target, weight)
    assert target.requires_grad
    assert target.grad is None


def test_padding_of_the_vocabulary_is_not_saved(tmp_path: Path) -> None:
    spec = Spec(key="model.embedding.word_embeddings.weight", dtype=torch.float32, shape=(5, 2))
    values = {spec.key: random_bits(spec, 1)}
    layout = random_layout([spec], random.Random(0))
    save_simulated(tmp_path, 1, [local_tensors(layout, values, rank) for rank in range(len(layout))], {})
    stored = load_checkpoint(tmp_path, world=ALONE).tensors[spec.key]
    assert stored.shape == (5, 2)
    assert sum(part.box.volume for part in stored.slices) == 10


def test_only_the_blocks_that_are_wanted_are_read(tmp_path: Path) -> None:
    value = torch.arange(4096, dtype=torch.float32).reshape(64, 64)  # 256 bytes a row, 4 rows a block
    with patch.object(storage, "BLOCK_BYTES", 1024):
        save_checkpoint(tmp_path, 1, [whole("model.w", value)], {}, world=ALONE)
    pieces = (Piece(local=0, start=3, length=2), Piece(local=2, start=40, length=8))
    shard = Shard(global_shape=(64, 64), dim=0, pieces=pieces, group=ALONE, init=Init.zeros())
    part = torch.zeros(10, 64)
    named = NamedTensor(key="model.w", tensor=part, shard=shard)
    summary = load_checkpoint(tmp_path, world=ALONE).load_into([named], world=ALONE)
    assert torch.equal(part, torch.cat([value[3:5], value[40:48]]))
    assert summary.bytes_read == (2 + 2) * 1024


@pytest.mark.parametrize("first, rows", [(0, 64), (4, 8), (3, 9), (5, 1), (60, 4)])
def test_blocks_are_read_in_their_place_where_they_lie_there_as_in_the_file(
    tmp_path: Path, first: int, rows: int
) -> None:
    """The first and the last block may be wanted in part only."""
    value = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    with patch.object(storage, "BLOCK_BYTES", 1024):  # 4 rows
        save_checkpoint(tmp_path, 1, [whole("model.w", value)], {}, world=ALONE)
    room = torch.full((rows + 2, 64), -1.0)
    shard = Shard(
        global_shape=(64, 64), dim=0, pieces=(Piece(local=1, start=first, length=rows),), group=ALONE, init=Init.zeros()
    )
    load_checkpoint(tmp_path, world=ALONE).load_into(
        [NamedTensor(key="model.w", tensor=room, shard=shard)], world=ALONE, ignore=("",)
    )
    assert torch.equal(room[1:-1], value[first : first + rows])
    assert (room[[0, -1]] == -1).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_floating_point_kinds_are_converted_and_said_to_be(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    value = torch.linspace(-3, 3, 50).to(stored)
    save_checkpoint(tmp_path, 1, [whole("model.w", value)], {}, world=ALONE)
    target = torch.zeros(50, dtype=wanted)
    summary = load_checkpoint(tmp_path, world=ALONE).load_into([whole("model.w", target)], world=ALONE)
    rounded = torch.empty_like(target)
    narrow_(value, rounded)  # as an optimizer rounds the weights of a model
    assert torch.equal(target, rounded)
    line = f"1 tensor: {stored} in the checkpoint, converted to {wanted}"
    assert summary.casts == (() if stored == wanted else (line,))


def test_a_weight_of_the_same_kind_keeps_the_bits_of_what_is_not_a_number(tmp_path: Path) -> None:
    value = torch.tensor([-124, 0x7F81, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    save_checkpoint(tmp_path, 1, [whole("model.w", value)], {}, world=ALONE)
    target = torch.zeros_like(value)
    load_checkpoint(tmp_path, world=ALONE).load_into([whole("model.w", target)], world=ALONE)
    assert torch.equal(target.view(torch.int16), value.view(torch.int16))


def test_all_tensors_that_do_not_fit_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    saved = [
        whole("model.a", torch.ones(4, 3)),
        whole("model.b", torch.ones(50257, 1)),
        whole("model.step", torch.ones(2, dtype=torch.int64)),
        *(whole(f"model.surplus.{number:02d}", torch.ones(2)) for number in range(30)),
    ]
    save_checkpoint(tmp_path, 1, saved, {}, world=ALONE)
    good = torch.zeros(4, 3)
    asked = [
        whole("model.a", good),
        whole("model.b", torch.zeros(50304, 1)),
        whole("model.step", torch.zeros(2)),
        whole("model.c", torch.zeros(7)),
    ]
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path, world=ALONE).load_into(asked, world=ALONE)
    text = str(error.value)
    assert "33 tensors of model and checkpoint do not match" in text
    assert "model.b: (50257, 1) in the checkpoint, (50304, 1) in the model" in text
    assert "model.step: torch.int64 in the checkpoint, torch.float32 in the model" in text
    assert "model.c (7,): not in the checkpoint" in text
    assert "model.surplus.19 (2,): in the checkpoint only\n  ... and 10 more" in text
    assert not good.any()


def test_what_a_pattern_names_may_differ_and_keeps_its_values(tmp_path: Path) -> None:
    names = ("head.w", "head.old", "layer.w")
    saved = [whole(f"{kind}.{name}", torch.ones(4)) for kind in ("model", "optimizer.exp_avg") for name in names]
    save_checkpoint(tmp_path, 1, saved, {}, world=ALONE)
    shapes = {"head.w": 5, "head.new": 2, "layer.w": 4}
    asked = [
        whole(f"{kind}.{name}", torch.zeros(shape))
        for kind in ("model", "optimizer.exp_avg")
        for name, shape in shapes.items()
    ]
    checkpoint = load_checkpoint(tmp_path, world=ALONE)
    summary = checkpoint.load_into(asked, world=ALONE, partial=["model.head.*", "model.layer.w"])
    assert {each.key for each in asked if each.tensor.all()} == {"model.layer.w", "optimizer.exp_avg.layer.w"}
    assert not any(each.tensor.any() for each in asked if "head" in each.key)
    assert sorted(summary.left) == [
        "model.head.new (2,): not in the checkpoint",
        "model.head.old (4,): in the checkpoint only",
        "model.head.w: (4,) in the checkpoint, (5,) in the model",
        "optimizer.exp_avg.head.new (2,): not in the checkpoint",
        "optimizer.exp_avg.head.old (4,): in the checkpoint only",
        "optimizer.exp_avg.head.w: (4,) in the checkpoint, (5,) in the model",
    ]


@pytest.mark.parametrize(
    "patterns, message",
    [
        (["model.head.new", "*.head.w"], r"2 tensors of .* match:\n.*head\.old \(4,\): in the checkpoint only"),
        (
            ["model.head.[wo]*"],
            r"1 tensor of .* match:\n  model\.head\.new \(2,\): not in the checkpoint\n--load-partial",
        ),
        (["model.head.*", "model.haed.*"], r"'model\.haed\.\*' names no tensor of the model or of the checkpoint"),
        (["MODEL.HEAD.*"], "names no tensor"),
        (["head"], "names no tensor"),
    ],
)
def test_what_no_pattern_names_and_a_pattern_that_names_nothing_are_errors(
    tmp_path: Path, patterns: list[str], message: str
) -> None:
    saved = [whole(key, torch.ones(4)) for key in ("model.head.w", "model.head.old", "optimizer.exp_avg.head.old")]
    save_checkpoint(tmp_path, 1, saved, {}, world=ALONE)
    asked = [whole("model.head.w", torch.zeros(4)), whole("model.head.new", torch.zeros(2))]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, world=ALONE).load_into(asked, world=ALONE, partial=patterns)
    assert not any(named.tensor.any() for named in asked)


def test_a_tied_copy_on_the_same_rank_is_saved_once_and_both_are_filled(tmp_path: Path) -> None:
    first = whole("model.embedding", torch.arange(6.0))
    copy = replace(first, tensor=torch.zeros(6), shard=replace(first.shard, owned=False))
    save_checkpoint(tmp_path, 1, [copy, first, copy], {}, world=ALONE)
    targets = [replace(first, tensor=torch.zeros(6)), replace(copy, tensor=torch.zeros(6))]
    load_checkpoint(tmp_path, world=ALONE).load_into(targets, world=ALONE)
    assert all(torch.equal(named.tensor, first.tensor) for named in targets)


def test_a_surplus_tensor_is_an_error_unless_it_is_to_be_ignored(tmp_path: Path) -> None:
    saved = [whole("model.a", torch.ones(4)), whole("optimizer.exp_avg.a", torch.ones(4))]
    save_checkpoint(tmp_path, 1, saved, {}, world=ALONE)
    target = torch.zeros(4)
    with pytest.raises(CheckpointError, match=r"optimizer\.exp_avg\.a \(4,\): in the checkpoint only"):
        load_checkpoint(tmp_path, world=ALONE).load_into([whole("model.a", target)], world=ALONE)
    assert not target.any()
    load_checkpoint(tmp_path, world=ALONE).load_into([whole("model.a", target)], world=ALONE, ignore=("optimizer.",))
    assert target.all()


def test_a_tensor_that_no_rank_owns_in_full_is_not_saved_as_if_it_were(tmp_path: Path) -> None:
    spec = Spec(key="model.w", dtype=torch.float32, shape=(6, 2))
    values = {spec.key: random_bits(spec, 1)}
    for seed in range(100):  # some rank of some layout owns a part: lose it
        layout = random_layout([spec], random.Random(seed))
        ranks = [local_tensors(layout, values, rank) for rank in range(len(layout))]
        owners = [r for r, t in enumerate(ranks) if t and t[0].shard.owned_pieces() and t[0].shard.dim == 0]
        if len(owners) > 1:
            ranks[owners[0]] = []
            break
    with pytest.raises(CheckpointError, match=r"model\.w: \d+ of 12 elements are in no slice"):
        save_simulated(tmp_path, 1, ranks, {})


def test_a_part_that_two_ranks_own_is_not_saved(tmp_path: Path) -> None:
    ranks = [[whole("model.w", torch.ones(3))], [whole("model.w", torch.ones(3))]]
    with pytest.raises(CheckpointError, match=r"model\.w: slices \[0:3\] and \[0:3\] overlap"):
        save_simulated(tmp_path, 1, ranks, {})


def test_ranks_that_disagree_about_a_tensor_do_not_save_it(tmp_path: Path) -> None:
    ranks = [[whole("model.w", torch.ones(3))], [whole("model.w", torch.ones(4))]]
    text = r"model\.w is torch\.float32 \(4,\) here and torch\.float32 \(3,\) on another"
    with pytest.raises(CheckpointError, match=text):
        save_simulated(tmp_path, 1, ranks, {})
