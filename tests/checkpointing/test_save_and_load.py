"""What a user meets: folders, the tracker, metadata, and messages about what is not there."""

from __future__ import annotations

import json
import os
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import (
    CheckpointBelowError,
    CheckpointError,
    NoCheckpointError,
    list_checkpoints,
    load_checkpoint,
    read_tracker,
    save_checkpoint,
)
from megatron.core.kernels.float_halves import narrow_
from tests.checkpointing.layouts import ALONE, whole


def save(root: Path, iteration: int, value: float = 1.0, metadata: dict[str, Any] | None = None) -> Path:
    tensors = [
        whole("model.w", torch.full((4, 3), float(value))),
        whole("model.scale", torch.tensor(float(value))),
    ]
    return save_checkpoint(root, iteration, tensors, metadata if metadata is not None else {}, world=ALONE)


def load(root: Path, step: int | None = None) -> float:
    w, scale = torch.zeros(4, 3), torch.zeros(())
    checkpoint = load_checkpoint(root, step=step, world=ALONE)
    checkpoint.load_into([whole("model.w", w), whole("model.scale", scale)], world=ALONE)
    assert (w == scale).all()
    return float(scale)


def test_the_folder_is_laid_out_as_described(tmp_path: Path) -> None:
    folder = save(tmp_path, 100)
    assert folder == tmp_path / "iter_0000100"
    assert sorted(os.listdir(tmp_path)) == ["iter_0000100", "latest_checkpointed_iteration.txt"]
    assert sorted(os.listdir(folder)) == [
        "COMPLETE",
        "index.json",
        "metadata.json",
        "shard_00000.safetensors",
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"100"
    index = json.loads((folder / "index.json").read_text())
    part = index["tensors"]["model.w"]["slices"][0]
    assert index["tensors"]["model.w"]["shape"] == [4, 3]
    assert (part["file"], part["name"]) == ("shard_00000.safetensors", "model.w@0,0")
    assert (part["offset"], part["shape"]) == ([0, 0], [4, 3])


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    for path in save(tmp_path, 1).iterdir():
        data = path.read_bytes()
        assert data[8:9] == b"{" if path.suffix == ".safetensors" else data[:1] == b"{"


def test_metadata_comes_back_as_it_was(tmp_path: Path) -> None:
    metadata = {
        "config": {"model": {"num_layers": 2, "window_size": (1, -1), "name": "größe"}},
        "consumed_samples": 2**53 + 1,
        "lr": 0.1 + 0.2,
        "loss_scale": None,
        "flags": [True, False, []],
    }
    save(tmp_path, 1, metadata=metadata)
    expected = {**metadata, "config": {"model": {**metadata["config"]["model"], "window_size": [1, -1]}}}  # type: ignore[index,dict-item]
    checkpoint = load_checkpoint(tmp_path, world=ALONE)
    assert checkpoint.metadata == expected
    assert checkpoint.iteration == 1


@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ({"config": {"dtype": torch.bfloat16}}, r"metadata\['config'\]\['dtype'\]: dtype is no JSON value"),
        ({"a": [1, {2: 3}]}, r"metadata\['a'\]\[1\]: the key 2 is not a string"),
        ({"a": {1, 2}}, r"metadata\['a'\]: set is no JSON value"),
        ({"a": torch.tensor(1)}, r"metadata\['a'\]: Tensor is no JSON value"),
        ({"a": namedtuple("P", "x")(b"")}, r"metadata\['a'\]\[0\]: bytes is no JSON value"),
    ],
)
def test_metadata_that_json_would_change_is_refused_with_its_place(
    tmp_path: Path, metadata: dict[str, Any], place: str
) -> None:
    with pytest.raises(CheckpointError, match=place):
        save(tmp_path, 1, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_the_tracker_picks_the_newest_and_a_step_can_be_picked(tmp_path: Path) -> None:
    for iteration in (0, 10, 20):
        save(tmp_path, iteration, value=iteration + 1)
    assert read_tracker(tmp_path) == 20
    assert list_checkpoints(tmp_path) == (0, 10, 20)
    assert load(tmp_path) == 21
    assert load(tmp_path, step=0) == 1
    assert load(tmp_path, step=10) == 11


def test_a_run_taken_back_replaces_what_it_saves_again(tmp_path: Path) -> None:
    save(tmp_path, 10, value=1)
    save(tmp_path, 20, value=2)
    save(tmp_path, 10, value=3)
    assert read_tracker(tmp_path) == 10
    assert load(tmp_path) == 3
    assert load(tmp_path, step=20) == 2
    assert sorted(os.listdir(tmp_path)) == [
        "iter_0000010",
        "iter_0000020",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_folder_of_another_kind_is_never_replaced(tmp_path: Path) -> None:
    foreign = tmp_path / "iter_0000010" / "mp_rank_00"
    foreign.mkdir(parents=True)
    (foreign / "model_optim_rng.pt").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint that this program may replace"):
        save(tmp_path, 10)
    assert (foreign / "model_optim_rng.pt").read_bytes() == b"precious"
    save(tmp_path, 20)
    assert (foreign / "model_optim_rng.pt").read_bytes() == b"precious"


def test_a_link_is_never_replaced(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "elsewhere", 10)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "iter_0000010").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="a link"):
        save(tmp_path / "run", 10)
    assert load(tmp_path / "elsewhere") == 1


def test_leftovers_of_a_killed_save_are_removed_and_nothing_else_is(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for name in (".tmp-iter_0000015", ".tmp-iter_0000020"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard_00000.safetensors").write_bytes(b"half")
    kept = {"notes.txt", "iter_0000005_backup", ".tmp-mine", "tensorboard"}
    for name in kept:
        (tmp_path / name).mkdir()
    save(tmp_path, 20, value=2)
    expected = {*kept, "iter_0000010", "iter_0000020", "latest_checkpointed_iteration.txt"}
    assert set(os.listdir(tmp_path)) == expected
    assert load(tmp_path) == 2


def test_a_tensor_without_elements_and_a_rank_without_pieces_are_fine(tmp_path: Path) -> None:
    tensors = [whole("model.none", torch.zeros(0, 5)), whole("model.w", torch.ones(2))]
    save_checkpoint(tmp_path, 1, tensors, {}, world=ALONE)
    checkpoint = load_checkpoint(tmp_path, world=ALONE)
    assert checkpoint.tensors["model.none"].slices == ()
    checkpoint.load_into([whole("model.none", torch.zeros(0, 5)), whole("model.w", torch.zeros(2))], world=ALONE)


def test_a_save_without_any_tensor_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no rank has any tensor to write"):
        save_checkpoint(tmp_path, 1, [], {}, world=ALONE)
    assert list(tmp_path.iterdir()) == []


def test_two_tensors_with_one_key_are_an_error(tmp_path: Path) -> None:
    tensors = [whole("model.w", torch.ones(2)), whole("model.w", torch.ones(2))]
    with pytest.raises(CheckpointError, match=r"model\.w: two tensors of this rank have this key"):
        save_checkpoint(tmp_path, 1, tensors, {}, world=ALONE)


def test_a_dtype_that_has_no_place_in_the_format_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.w: cannot save torch\.complex64"):
        save_checkpoint(
            tmp_path,
            1,
            [whole("model.w", torch.zeros(2, dtype=torch.complex64))],
            {},
            world=ALONE,
        )


# ---- what is said when there is nothing to load ----


def test_only_a_folder_without_any_checkpoint_is_a_reason_to_start_anew(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="there is no such folder"):
        load_checkpoint(tmp_path / "absent", world=ALONE)
    with pytest.raises(NoCheckpointError, match="no checkpoint in"):
        load_checkpoint(tmp_path, world=ALONE)
    (tmp_path / ".tmp-iter_0000010").mkdir()
    with pytest.raises(NoCheckpointError, match=r"\.tmp-iter_0000010 is a save that was never completed"):
        load_checkpoint(tmp_path, world=ALONE)
    assert read_tracker(tmp_path) is None
    assert list_checkpoints(tmp_path) == ()
    assert list_checkpoints(tmp_path / "absent") == ()


def _not_nothing(root: Path, text: str, step: int | None = None) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        load_checkpoint(root, step=step, world=ALONE)
    assert not isinstance(error.value, NoCheckpointError)


def test_a_tracker_that_names_a_missing_or_broken_one_offers_the_newest_good_one(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000030" / "COMPLETE").unlink()
    _not_nothing(tmp_path, r"iter_0000030 is incomplete: it has no COMPLETE.*iteration 20: --ckpt-step 20 loads it")
    os.truncate(tmp_path / "iter_0000020" / "shard_00000.safetensors", 100)
    _not_nothing(tmp_path, "the newest good one is iteration 10: --ckpt-step 10 loads it")
    _not_nothing(tmp_path, r"shard_00000\.safetensors is damaged: cut short, 100 bytes of \d+", step=20)
    _not_nothing(tmp_path, "--ckpt-step asks for iteration 15, which is not there", step=15)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    _not_nothing(tmp_path, "names iteration 40, which is not there.*--ckpt-step 10")
    (tmp_path / "iter_0000010" / "index.json").unlink()
    _not_nothing(tmp_path, "there is no good one in that folder")


@pytest.mark.parametrize("text", ["", "latest", "-5", "1e3", "10 20", "\x00", "9" * 5000])
def test_a_damaged_tracker_is_an_error_that_offers_a_good_checkpoint(tmp_path: Path, text: str) -> None:
    save(tmp_path, 10)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    _not_nothing(tmp_path, "is damaged.*--ckpt-step 10 loads it")


def test_without_a_tracker_the_newest_complete_checkpoint_is_opened(tmp_path: Path) -> None:
    save(tmp_path, 10, value=1)
    save(tmp_path, 20, value=2)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert load(tmp_path) == 2


def test_the_folder_of_one_checkpoint_and_megatron_lm_folders_are_told_apart(tmp_path: Path) -> None:
    _not_nothing(save(tmp_path / "run", 10), "is a single checkpoint: give its parent folder")
    legacy = tmp_path / "legacy"
    (legacy / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    _not_nothing(legacy, "holds a checkpoint of Megatron-LM")
    (legacy / "latest_checkpointed_iteration.txt").write_text("release")
    _not_nothing(legacy, "'release': that is a checkpoint of Megatron-LM")
    (legacy / "latest_checkpointed_iteration.txt").write_text("10")
    _not_nothing(legacy, _conversion("megatron", legacy))
    (tmp_path / "file").write_text("")
    _not_nothing(tmp_path / "file", "it is not a folder")


def _conversion(form: str, folder: Path) -> str:
    return re.escape(f"python tools/convert_checkpoint.py --from {form} --to native {folder} OUT")


@pytest.mark.parametrize(
    ("form", "files"),
    [
        ("hf", ("config.json", "model-00001-of-00002.safetensors")),
        ("megatron", ("iter_0000010/mp_rank_00/model_optim_rng.pt",)),
        ("megatron", ("release/mp_rank_00_001/model_optim_rng.pt",)),
        ("megatron", ("iter_0000010/.metadata", "iter_0000010/metadata.json")),
        ("megatron", (".metadata", "metadata.json")),
    ],
)
def test_a_model_of_another_form_is_named_with_the_command_that_converts_it(
    tmp_path: Path, form: str, files: tuple[str, ...]
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    _not_nothing(tmp_path, f"^no checkpoint in .*: it holds a .*{_conversion(form, tmp_path)}$")


@pytest.mark.parametrize("place", ["checkpoints", "run-1/checkpoints"])
def test_a_folder_below_that_has_a_checkpoint_is_named(tmp_path: Path, place: str) -> None:
    save(tmp_path / place, 10)
    with pytest.raises(CheckpointBelowError, match=rf"no checkpoint in .*; {tmp_path / place} has one$"):
        load_checkpoint(tmp_path, world=ALONE)
    (tmp_path / place / "iter_0000010" / "COMPLETE").unlink()
    with pytest.raises(NoCheckpointError, match=rf"no checkpoint in {tmp_path}$"):
        load_checkpoint(tmp_path, world=ALONE)


def test_a_renamed_checkpoint_is_not_taken_for_another_iteration(tmp_path: Path) -> None:
    save(tmp_path, 10).rename(tmp_path / "iter_0000020")
    _not_nothing(tmp_path, "was saved as iteration 10: the folder was renamed", step=20)


def test_a_checkpoint_of_another_form_is_refused(tmp_path: Path) -> None:
    marker = save(tmp_path, 10) / "COMPLETE"
    marker.write_text(marker.read_text().replace('"version":2', '"version":1'))
    _not_nothing(tmp_path, "this is format 1; this program reads 2")


def test_weights_are_loaded_as_a_training_rounds_them_and_state_to_the_nearest_even(tmp_path: Path) -> None:
    """A half is rounded to the number that is larger in size, as `narrow_` has it."""
    values = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 1 + 2**-9])
    keys = ("model.w", "optimizer.exp_avg.w")
    save_checkpoint(tmp_path, 1, [whole(key, values) for key in keys], {}, world=ALONE)
    loaded = {key: torch.zeros(4, dtype=torch.bfloat16) for key in keys}
    load_checkpoint(tmp_path, world=ALONE).load_into([whole(key, t) for key, t in loaded.items()], world=ALONE)
    trained = torch.zeros(4, dtype=torch.bfloat16)
    narrow_(values, trained)
    assert loaded["model.w"].tolist() == trained.tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6, 1.0]
    assert loaded["optimizer.exp_avg.w"].tolist() == [1.0, -1.0, 1 + 2**-6, 1.0]
