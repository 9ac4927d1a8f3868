"""Damaged files are found; files made to attack get a clear error, run no code and take no memory."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.checkpointing import CheckpointError, load_checkpoint, save_checkpoint, storage
from tests.checkpointing.layouts import ALONE, bits, whole

VALUES = {
    "model.w": torch.arange(60, dtype=torch.float32).reshape(12, 5),
    "model.b": torch.arange(7, dtype=torch.bfloat16),
    "model.s": torch.tensor(2.5, dtype=torch.float64),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tensors = [whole(key, value) for key, value in VALUES.items()]
    with patch.object(storage, "BLOCK_BYTES", 64):
        save_checkpoint(tmp_path, 10, tensors, {"consumed_samples": 40}, world=ALONE)
    return tmp_path


def load_all(root: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    loaded = {key: torch.zeros_like(value) for key, value in VALUES.items()}
    checkpoint = load_checkpoint(root, world=ALONE)
    checkpoint.load_into([whole(key, value) for key, value in loaded.items()], world=ALONE)
    return loaded, checkpoint.metadata


def is_right(root: Path) -> bool:
    """Whether it loads with the right bits; False when damage is reported; anything else fails the test."""
    try:
        loaded, metadata = load_all(root)
    except CheckpointError:
        return False
    assert metadata == {"consumed_samples": 40}
    for key, value in VALUES.items():
        assert torch.equal(bits(loaded[key]), bits(value)), f"{key} was loaded with wrong values"
    return True


FILES = ["COMPLETE", "index.json", "metadata.json", "shard_00000.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_no_changed_byte_is_loaded_as_if_it_were_right(root: Path, name: str) -> None:
    path = root / "iter_0000010" / name
    data = path.read_bytes()
    rng = random.Random(0)
    found = 0
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        found += not is_right(root)
    # Only the words around the tensors in a safetensors header can change without harm.
    assert found == len(data) if name != "shard_00000.safetensors" else found > 0.9 * len(data)
    path.write_bytes(data)
    assert is_right(root)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_too_long_or_missing_is_found(root: Path, name: str) -> None:
    path = root / "iter_0000010" / name
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert not is_right(root), length
    if name != "COMPLETE":  # JSON may end in a space
        path.write_bytes(data + b" ")
        assert not is_right(root)
    path.unlink()
    assert not is_right(root)
    path.mkdir()
    assert not is_right(root)
    path.rmdir()
    os.mkfifo(path)  # to open it would wait for ever
    assert not is_right(root)


def test_the_file_and_the_tensor_that_are_damaged_are_named(root: Path) -> None:
    path = root / "iter_0000010" / "shard_00000.safetensors"
    data = bytearray(path.read_bytes())
    at = data.index(VALUES["model.w"].numpy().tobytes())
    data[at + 70] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"shard_00000\.safetensors is damaged: wrong checksum of model\.w@0,0, block 1"
    ):
        load_all(root)


def test_two_slices_that_changed_places_are_found(root: Path) -> None:
    path = root / "iter_0000010" / "shard_00000.safetensors"
    data = path.read_bytes()
    rows = VALUES["model.w"].numpy().tobytes()
    path.write_bytes(data.replace(rows, rows[64:128] + rows[:64] + rows[128:]))
    assert not is_right(root)


# ---- attacks: whoever writes the index also writes the marker with its checksums ----


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/checkpoint_payload_ran",)


def _seal(folder: Path) -> None:
    """Make the marker agree with the files as they are now."""
    marker = json.loads((folder / "COMPLETE").read_text()) if (folder / "COMPLETE").exists() else {}
    for name in ("index.json", "metadata.json"):
        text = (folder / name).read_bytes()
        marker["files"][name] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    (folder / "COMPLETE").write_text(json.dumps(marker))


def _attack(root: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    folder = root / "iter_0000010"
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    _seal(folder)
    tracemalloc.start()
    with patch.object(torch, "empty", side_effect=AssertionError("memory was taken")):
        with pytest.raises(CheckpointError, match=message):
            load_all(root)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def _slice(index: dict[str, Any], key: str = "model.w") -> dict[str, Any]:
    part: dict[str, Any] = index["tensors"][key]["slices"][0]
    return part


@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "/etc/passwd", "shard_00000.safetensors/../x", "", ".", "a\0b"]
)
def test_a_path_out_of_the_folder_is_not_followed(root: Path, name: str) -> None:
    def change(index: dict[str, Any]) -> None:
        index["files"][name] = 100
        _slice(index)["file"] = name

    _attack(root, change, "must be a name like shard_00000.safetensors")


def test_a_slice_in_a_file_that_is_not_listed_is_refused(root: Path) -> None:
    _attack(root, lambda index: _slice(index).update(file="/etc/passwd"), "must be one of the files of the index")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([2**40, 2**40], "at most 16 dimensions"),
        ([2**61], "must be an integer from 0"),
        ([10**400], "must be an integer from 0"),
        ([-1, 5], "must be an integer from 0"),
        ([1.5, 5], "must be an integer from 0"),
        ([True, 5], "must be an integer from 0"),
        (["12", 5], "must be an integer from 0"),
        ([1] * 17, "at most 16 dimensions"),
        ({"0": 5}, "must be a list"),
        ([12, 6], "elements are in no slice"),
        ([11, 5], "must be a part of"),
        ([12], "must be a list of 1"),
    ],
)
def test_an_absurd_shape_is_refused(root: Path, shape: object, message: str) -> None:
    _attack(root, lambda index: index["tensors"]["model.w"].update(shape=shape), message)


def test_a_huge_tensor_that_no_file_can_hold_is_refused(root: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        index["tensors"]["model.w"]["shape"] = [2**30, 5]
        _slice(index).update(shape=[2**30, 5], crc32=[])

    _attack(root, change, "the size of a slice of model.w")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=99), "this is format 99; this program reads 2"),
        (lambda index: index.update(block_bytes=2**40), "block_bytes"),
        (lambda index: index.update(block_bytes=1000), "block_bytes is 1000, must be a power of two"),
        (lambda index: index.update(tensors=[]), "tensors is"),
        (lambda index: index.update(iteration="10"), "iteration is '10'"),
        (lambda index: index["tensors"]["model.w"].update(dtype="object"), "dtype of model.w is 'object'"),
        (lambda index: index["tensors"]["model.w"].update(dtype=["x"]), "dtype of model.w"),
        (lambda index: _slice(index).update(crc32=[1]), r"crc32 of a slice of model.w"),
        (lambda index: _slice(index).update(crc32=[2**32] * 4), r"crc32 of a slice of model.w"),
        (lambda index: _slice(index).update(name=3), "name of a slice of model.w is 3, must be a string"),
        (lambda index: _slice(index).update(offset=[1, 0]), "the place of a slice"),
        (lambda index: index["tensors"]["model.w"]["slices"].append(_slice(index)), "overlap"),
        (lambda index: index["tensors"]["model.w"].update(slices=7), "slices of model.w is 7"),
    ],
)
def test_each_entry_of_the_index_is_checked(root: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    _attack(root, change, message)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 200_000, b"9" * 100_000, b"\xff\xfe", b"null", b"[]"])
@pytest.mark.parametrize("name", ["index.json", "metadata.json", "COMPLETE"])
def test_json_made_to_break_the_parser_is_an_error(root: Path, name: str, text: bytes) -> None:
    folder = root / "iter_0000010"
    (folder / name).write_bytes(text)
    if name != "COMPLETE":
        _seal(folder)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_all(root)


@pytest.mark.parametrize("name", [*FILES, "latest_checkpointed_iteration.txt"])
def test_a_pickle_in_the_place_of_a_file_is_not_run(root: Path, name: str) -> None:
    trace = Path("/tmp/checkpoint_payload_ran")
    trace.unlink(missing_ok=True)
    folder = root if name.startswith("latest") else root / "iter_0000010"
    (folder / name).write_bytes(pickle.dumps(Payload()))
    if name in ("index.json", "metadata.json"):
        _seal(folder)
    if name == "shard_00000.safetensors":
        index = json.loads((folder / "index.json").read_text())
        index["files"][name] = (folder / name).stat().st_size
        for tensor in index["tensors"].values():
            tensor["slices"] = tensor["slices"][:1]
        (folder / "index.json").write_text(json.dumps(index))
        _seal(folder)
    with pytest.raises(CheckpointError):
        load_all(root)
    assert not trace.exists()


@pytest.mark.parametrize(
    "header",
    [
        (2**63).to_bytes(8, "little") + b"{}",
        (99_999_999).to_bytes(8, "little") + b"{}",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (2).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        b"\x01",
        b"",
    ],
)
def test_a_crafted_safetensors_header_is_an_error(root: Path, header: bytes) -> None:
    folder = root / "iter_0000010"
    path = folder / "shard_00000.safetensors"
    size = path.stat().st_size
    path.write_bytes(header.ljust(size, b" ") if len(header) > 8 else header)
    index = json.loads((folder / "index.json").read_text())
    index["files"][path.name] = path.stat().st_size
    (folder / "index.json").write_text(json.dumps(index))
    _seal(folder)
    with pytest.raises(CheckpointError, match="damaged"):
        load_all(root)


@pytest.mark.parametrize(
    "offsets",
    [[0, 10**12], [-240, 0], [240, 0], [0, 4], [0], "ab", [0.0, 240.0], [10**12, 10**12 + 240], None],
)
def test_crafted_offsets_read_nothing_outside_of_the_data(root: Path, offsets: object) -> None:
    path = root / "iter_0000010" / "shard_00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.w@0,0"]["data_offsets"] = offsets
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    index = json.loads((path.parent / "index.json").read_text())
    index["files"][path.name] = path.stat().st_size
    (path.parent / "index.json").write_text(json.dumps(index))
    _seal(path.parent)
    with pytest.raises(CheckpointError, match=r"header and the index disagree about model\.w@0,0"):
        load_all(root)


@pytest.mark.parametrize("name", [*FILES, "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("target", ["file", "absent", "itself", "folder"])
def test_a_link_out_of_the_folder_is_not_followed(root: Path, name: str, target: str) -> None:
    """Not even to a file with the right bytes: whoever hands over a checkpoint must not choose what is read."""
    folder = root if name.startswith("latest") else root / "iter_0000010"
    outside = root / "outside"
    outside.mkdir()
    (folder / name).rename(outside / name)
    (folder / name).symlink_to(
        {"file": outside / name, "absent": outside / "absent", "itself": folder / name, "folder": outside}[target]
    )
    with pytest.raises(CheckpointError, match=name if target != "file" else "is not followed out of its folder"):
        load_all(root)


def test_a_checkpoint_that_is_a_link_to_another_disk_and_links_within_it_are_followed(root: Path) -> None:
    folder, archive = root / "iter_0000010", root / "archive"
    folder.rename(archive)
    folder.symlink_to(archive)
    (archive / "shard_00000.safetensors").rename(archive / "data")
    (archive / "shard_00000.safetensors").symlink_to("data")
    assert is_right(root)


@pytest.mark.parametrize(
    "text", ["true", "1e1", "10.0", "1e400", "NaN", "-10", "1" + "0" * 4000, '"10"', "[10]", "null"]
)
@pytest.mark.parametrize("place", ["iteration", "size", "block", "extent", "offset", "crc"])
def test_a_number_that_is_no_count_is_refused_wherever_it_stands(root: Path, place: str, text: str) -> None:
    def change(index: dict[str, Any]) -> None:
        part = _slice(index)
        if place == "iteration":
            index["iteration"] = "HERE"
        elif place == "size":
            index["files"]["shard_00000.safetensors"] = "HERE"
        elif place == "block":
            index["block_bytes"] = "HERE"
        else:
            part[{"extent": "shape", "offset": "offset", "crc": "crc32"}[place]][0] = "HERE"

    folder = root / "iter_0000010"
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index).replace('"HERE"', text))
    _seal(folder)
    with pytest.raises(CheckpointError, match=r"must be an integer from 0 to|must be a power of two"):
        load_all(root)


def test_minus_zero_is_zero(root: Path) -> None:
    folder = root / "iter_0000010"
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text.replace('"offset":[0,0]', '"offset":[-0,-0]'))
    _seal(folder)
    assert is_right(root)


def test_a_marker_that_is_no_small_file_is_not_read(root: Path) -> None:
    os.truncate(root / "iter_0000010" / "COMPLETE", 2**40)  # takes no room, and a terabyte of memory
    with pytest.raises(CheckpointError, match="COMPLETE is damaged: 1099511627776 bytes, at most 4096 are expected"):
        load_all(root)


@pytest.mark.parametrize("name", ["index.json", "metadata.json"])
def test_a_json_file_of_a_terabyte_is_not_read(root: Path, name: str) -> None:
    os.truncate(root / "iter_0000010" / name, 2**40)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: 1099511627776 bytes, at most \d+ are expected"):
        load_all(root)


@pytest.mark.parametrize("hole", [False, True], ids=["whole", "hole"])
def test_a_tensor_in_fifty_thousand_slices_is_opened_in_seconds(root: Path, hole: bool) -> None:
    """All in one row: comparing each with each would take hours."""
    many = 50_000

    def change(index: dict[str, Any]) -> None:
        part = {**_slice(index), "shape": [1, 1]}
        slices = [{**part, "offset": [0, number], "crc32": [0]} for number in range(many - hole)]
        index["tensors"]["model.w"].update(shape=[1, many], slices=slices)

    folder = root / "iter_0000010"
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    _seal(folder)
    if hole:
        with pytest.raises(CheckpointError, match=r"model\.w: its 49999 slices overlap, leave a hole"):
            load_checkpoint(root, world=ALONE)
    else:
        assert len(load_checkpoint(root, world=ALONE).tensors["model.w"].slices) == many


def test_slices_that_share_their_bytes_in_the_file_are_refused_by_their_checksums_or_read_as_they_are(
    root: Path,
) -> None:
    """Two slices may name one tensor of a file: what is loaded is then what the checksums say, and nothing else."""

    def change(index: dict[str, Any]) -> None:
        whole_part = _slice(index)
        index["tensors"]["model.w"]["shape"] = [24, 5]
        index["tensors"]["model.w"]["slices"].append({**whole_part, "offset": [12, 0]})

    folder = root / "iter_0000010"
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    _seal(folder)
    target = torch.zeros(24, 5)
    asked = [whole("model.w", target), *(whole(key, torch.zeros_like(VALUES[key])) for key in ("model.b", "model.s"))]
    load_checkpoint(root, world=ALONE).load_into(asked, world=ALONE)
    assert torch.equal(target, VALUES["model.w"].repeat(2, 1))


@pytest.mark.parametrize(
    "header",
    [
        {"model.w@0,0": []},
        {"model.w@0,0": {"dtype": "F32", "shape": [12, 5], "data_offsets": [True, 240]}},
        {"model.w@0,0": {"dtype": "F32", "shape": [12, 5], "data_offsets": [0, 10**30]}},
        {"model.w@0,0": {"dtype": "F64", "shape": [12, 5], "data_offsets": [0, 240]}},
        {"model.w@0,0": {"dtype": "F32", "shape": [5, 12], "data_offsets": [0, 240]}},
        {"model.w@0,0": {"dtype": "F32", "shape": "12,5", "data_offsets": [0, 240]}},
        {"model.w": {"dtype": "F32", "shape": [12, 5], "data_offsets": [0, 240]}},
        {},
    ],
)
def test_a_header_that_is_not_what_the_index_says_is_refused_with_its_tensor(
    root: Path, header: dict[str, object]
) -> None:
    path = root / "iter_0000010" / "shard_00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    rest = {key: value for key, value in json.loads(data[8 : 8 + length]).items() if key != "model.w@0,0"}
    text = json.dumps({**rest, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    index = json.loads((path.parent / "index.json").read_text())
    index["files"][path.name] = path.stat().st_size
    (path.parent / "index.json").write_text(json.dumps(index))
    _seal(path.parent)
    with pytest.raises(CheckpointError, match=r"header and the index disagree about model\.w@0,0"):
        load_all(root)


def test_a_folder_of_garbage_does_no_harm(root: Path) -> None:
    rng = random.Random(5)
    shutil.rmtree(root / "iter_0000010")
    (root / "iter_0000010").mkdir()
    for name in FILES:
        (root / "iter_0000010" / name).write_bytes(rng.randbytes(1000))
    with pytest.raises(CheckpointError, match="COMPLETE is damaged: not JSON"):
        load_all(root)
