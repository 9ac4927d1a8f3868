"""The index of Megatron-LM's `torch_dist` layout: chunks, older forms, and what a changed one is refused for."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.conversion.megatron_lm.pickles import _Storage
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.portable import ConversionError
from tests.conversion.megatron_files import CHECKPOINTS, contents, read_all
from tests.helpers.numerics import assert_bitwise

PLAIN = "llama_gqa/torch_dist"
FLAT = "distributed_optimizer_dp2/torch_dist_distributed_optimizer"
EMBEDDING = "embedding.word_embeddings.weight"
BUFFER = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0."


def copied(name: str, target: Path, change: Callable[[Metadata], None] = lambda index: None) -> Path:
    """A copy of a checkpoint whose index is changed; its folder. The index is one of ours, so it is unpickled."""
    (source,) = (CHECKPOINTS / name).glob("iter_*")
    shutil.copytree(source, target)
    index = pickle.loads((target / ".metadata").read_bytes())
    change(index)
    (target / ".metadata").write_bytes(pickle.dumps(index))
    return target


def place(index: Metadata, key: str, **values: Any) -> None:
    """Change where the first chunk of a key is."""
    found = next(entry for entry in index.storage_data if entry.fqn == key)
    index.storage_data[found] = replace(index.storage_data[found], **values)


def tensor(index: Metadata, key: str) -> TensorStorageMetadata:
    entry = index.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def test_a_copied_index_reads_like_the_first_one(tmp_path: Path) -> None:
    one, found = (read_all(read_megatron(path)) for path in (CHECKPOINTS / PLAIN, copied(PLAIN, tmp_path / "copy")))
    assert sorted(one) == sorted(found)
    for key, value in one.items():
        assert_bitwise(found[key], value, key)


def reshape(index: Metadata, key: str, *shape: int) -> None:
    """Give a tensor of one chunk another shape."""
    entry = tensor(index, key)
    entry.size, entry.chunks = torch.Size(shape), [replace(entry.chunks[0], sizes=torch.Size(shape))]


def rename(index: Metadata, old: str, new: str) -> None:
    index.state_dict_metadata[new] = index.state_dict_metadata.pop(old)
    for entry in [entry for entry in index.storage_data if entry.fqn == old]:
        index.storage_data[replace(entry, fqn=new)] = index.storage_data.pop(entry)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_layers_under_their_numbers_are_read_like_stacked_ones(tmp_path: Path) -> None:
    """As models have them whose layers are not alike; written by torch itself."""
    one = read_megatron(CHECKPOINTS / PLAIN)
    tensors = read_all(one)
    names = {"model.": "", "optimizer.": "optimizer.state."}
    state = {names[f"{key.split('.')[0]}."] + key.partition(".")[2]: value for key, value in tensors.items()}
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path)
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    torch.save(contents_of(CHECKPOINTS / PLAIN, "common_state/shard_0_1", tmp_path)[0], tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    found = read_all(read_megatron(tmp_path))
    assert sorted(found) == sorted(tensors)
    for key, value in tensors.items():
        assert_bitwise(found[key], value, key)


def test_a_layer_of_a_stack_is_read_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = _Storage.fill

    def fill(storage: _Storage, numbers: torch.Tensor, first: int) -> None:
        read.append(numbers.nbytes)
        plain(storage, numbers, first)

    lazy = read_megatron(CHECKPOINTS / PLAIN).tensors["model.decoder.layers.1.mlp.linear_fc1.weight"]
    monkeypatch.setattr(_Storage, "fill", fill)
    assert sum(read) == 0 and lazy.read().nbytes == sum(read)


def test_what_all_ranks_have_alike_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    copy = copied(PLAIN, tmp_path / "copy", lambda index: remove(index, "common_state/shard_0_1"))
    with pytest.raises(ConversionError, match="has no common_state"):
        read_megatron(copy)
    state = contents_of(CHECKPOINTS / PLAIN, "common_state/shard_0_1", tmp_path)
    torch.save(state[0], copy / "common.pt")
    found = read_megatron(copy)
    assert found.training is not None and found.training.optimizer["num_updates"] == 6


def remove(index: Metadata, key: str) -> None:
    del index.state_dict_metadata[key]
    del index.storage_data[next(entry for entry in index.storage_data if entry.fqn == key)]


def contents_of(folder: Path, key: str, scratch: Path) -> Any:
    """What is stored under the key of an object, as a file of its own would hold it."""
    (checkpoint,) = folder.glob("iter_*")
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    info = index.storage_data[next(entry for entry in index.storage_data if entry.fqn == key)]
    file = scratch / "object.pt"
    file.write_bytes((checkpoint / info.relative_path).read_bytes()[info.offset : info.offset + info.length])
    return contents(file)


CHANGES: dict[str, tuple[str, Callable[[Metadata], None], str]] = {
    "a file outside of the folder": (
        PLAIN,
        lambda index: place(index, EMBEDDING, relative_path="../../secrets.distcp"),
        "names the file '../../secrets.distcp', which is not the plain name of one in the folder",
    ),
    "an absolute path": (
        PLAIN,
        lambda index: place(index, EMBEDDING, relative_path="/etc/passwd"),
        "which is not the plain name",
    ),
    "a file that is not there": (
        PLAIN,
        lambda index: place(index, EMBEDDING, relative_path="__9_0.distcp"),
        r"__9_0\.distcp is missing",
    ),
    "a negative place": (PLAIN, lambda index: place(index, EMBEDDING, offset=-1), "is no number of bytes"),
    "a place past the end": (PLAIN, lambda index: place(index, EMBEDDING, offset=10**12), "are asked for, and it has"),
    "the place of another tensor": (
        PLAIN,
        lambda index: place(index, EMBEDDING, offset=0, length=30_000),
        "can not be read as a file of torch.save|is not the chunk|holds 0 files|reaches past",
    ),
    "a place too short for its chunk": (
        PLAIN,
        lambda index: place(index, EMBEDDING, length=100),
        "should fit into 100 bytes",
    ),
    "a transformed file": (
        PLAIN,
        lambda index: place(index, EMBEDDING, transform_descriptors=["zstd"]),
        "compressed or otherwise transformed",
    ),
    "an absurd shape": (
        PLAIN,
        lambda index: setattr(tensor(index, EMBEDDING), "size", torch.Size([10**12, 32])),
        "elements are in no slice",
    ),
    "an absurd chunk": (
        PLAIN,
        lambda index: tensor(index, EMBEDDING).chunks.__setitem__(
            0, replace(tensor(index, EMBEDDING).chunks[0], sizes=torch.Size([10**12, 32]))
        ),
        "should fit into",
    ),
    "a chunk of more dimensions than any has": (
        PLAIN,
        lambda index: tensor(index, EMBEDDING).chunks.__setitem__(
            0, replace(tensor(index, EMBEDDING).chunks[0], sizes=torch.Size([2**50] * 2000))
        ),
        "has a chunk that is none",
    ),
    "a shape of more dimensions than any has": (
        PLAIN,
        lambda index: setattr(tensor(index, EMBEDDING), "size", torch.Size([2**50] * 2000)),
        "has no shape or type",
    ),
    "a chunk twice": (
        PLAIN,
        lambda index: tensor(index, EMBEDDING).chunks.append(tensor(index, EMBEDDING).chunks[0]),
        "overlap",
    ),
    "a chunk less": (
        PLAIN,
        lambda index: tensor(index, "decoder.layers.mlp.linear_fc2.weight").chunks.pop(),
        "elements are in no slice",
    ),
    "a chunk that is nowhere": (
        PLAIN,
        lambda index: index.storage_data.pop(next(e for e in index.storage_data if e.fqn == EMBEDDING)),
        "not where it is",
    ),
    "a tensor less": (
        PLAIN,
        lambda index: index.state_dict_metadata.pop("output_layer.weight"),
        r"model\.output_layer\.weight \[160, 32\] is missing",
    ),
    "a moment less": (
        PLAIN,
        lambda index: index.state_dict_metadata.pop("optimizer.state.exp_avg.output_layer.weight"),
        r"optimizer\.exp_avg\.output_layer\.weight \[160, 32\] is missing",
    ),
    "a moment in flat parts": (
        PLAIN,
        lambda index: reshape(index, "optimizer.state.exp_avg.output_layer.weight", 1, 160 * 32),
        "kept flat parts of tensors, which are not read; --weights-only leaves",
    ),
    "a buffer less": (
        FLAT,
        lambda index: index.state_dict_metadata.pop(f"{BUFFER}exp_avg"),
        "should hold 8576 elements of exp_avg, and does not",
    ),
    "a buffer of another form": (
        FLAT,
        lambda index: rename(index, f"{BUFFER}exp_avg", "optimizer.distributed.dp_group_idx_0.per_parameter"),
        "belongs to a form of the optimizer that is not known",
    ),
    "no tensors": (PLAIN, lambda index: setattr(index, "state_dict_metadata", None), "is no index of"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_index_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint, change, text = CHANGES[name]
    with pytest.raises(ConversionError, match=text):
        read_all(read_megatron(copied(checkpoint, tmp_path / "copy", change)))


def test_an_index_that_calls_something_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    copy = copied(PLAIN, tmp_path / "copy")
    (copy / ".metadata").write_bytes(b"cposix\nsystem\n(X\x0c\x00\x00\x00touch calledtR.")
    with pytest.raises(ConversionError, match=r"'posix\.system', which has no place in a checkpoint"):
        read_megatron(copy)


def test_a_cut_file_of_chunks_is_refused(tmp_path: Path) -> None:
    copy = copied(PLAIN, tmp_path / "copy")
    path = copy / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(ConversionError, match=r"__0_0\.distcp: bytes .* are asked for, and it has 100000"):
        read_all(read_megatron(copy))


def test_a_layout_that_is_not_finished_or_not_known_is_refused(tmp_path: Path) -> None:
    copy = copied(PLAIN, tmp_path / "copy")
    (copy / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(ConversionError, match=r"the layout is 'zarr', which can not be read; torch_dist can"):
        read_megatron(copy)
    (copy / "metadata.json").write_text("{")
    with pytest.raises(ConversionError, match="names no sharded_backend"):
        read_megatron(copy)
    (copy / "metadata.json").unlink()
    with pytest.raises(ConversionError, match=r"has no metadata\.json, which Megatron-LM writes last"):
        read_megatron(copy)
