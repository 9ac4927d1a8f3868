"""The index of a checkpoint: which slice of which global tensor lies in which file.

It is read as if an attacker wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.slices import Box, tiling_fault

VERSION = 2
SHARD_FILE = re.compile(r"shard_[0-9]{5,9}\.safetensors")

# The names are those of safetensors.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_MAX_DIMENSIONS = 16
_MAX_ELEMENTS = 2**60
_MIN_BLOCK, _MAX_BLOCK = 64, 2**28


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSlice:
    """A box of a global tensor, stored as one safetensors tensor.

    Attributes:
        file: name of the safetensors file, without folder.
        name: name of the tensor in that file.
        box: the part of the global tensor.
        checksums: CRC-32 of each `block_bytes` of the slice's bytes, so that whoever reads a part checks what
            it reads.
    """

    file: str
    name: str
    box: Box
    checksums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A global tensor. Its slices cover it, each element once; they do not say how it was split in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True, kw_only=True)
class Index:
    """All tensors of a checkpoint, or of one rank's share of it (there the slices need not cover)."""

    iteration: int
    block_bytes: int
    files: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]

    def to_json(self) -> str:
        tensors = {
            key: {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": tensor.shape,
                "slices": [
                    {
                        "file": part.file,
                        "name": part.name,
                        "offset": part.box.offset,
                        "shape": part.box.shape,
                        "crc32": part.checksums,
                    }
                    for part in tensor.slices
                ],
            }
            for key, tensor in sorted(self.tensors.items())
        }
        return json.dumps(
            {
                "version": VERSION,
                "iteration": self.iteration,
                "block_bytes": self.block_bytes,
                "files": dict(sorted(self.files.items())),
                "tensors": tensors,
            },
            separators=(",", ":"),
        )


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `text`; nesting and numbers that break the parser are errors like any other."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is damaged: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} is damaged: not a JSON object")
    return value


def parse_index(text: bytes, source: str) -> Index:
    """The index of one rank's share, each entry checked by itself.

    Raises:
        CheckpointError: naming `source` and the entry.
    """
    value = parse_json(text, source)
    check_version(value, source)
    reader = _Reader(source)
    iteration = reader.count(value.get("iteration"), "iteration", 2**60)
    block = reader.count(value.get("block_bytes"), "block_bytes", _MAX_BLOCK)
    if block < _MIN_BLOCK or block & (block - 1):
        raise reader.error("block_bytes", block, f"a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}")
    files: dict[str, int] = {}
    for name, size in reader.mapping(value.get("files"), "files").items():
        if not SHARD_FILE.fullmatch(name):
            raise reader.error("files", name, "a name like shard_00000.safetensors")
        files[name] = reader.count(size, f"size of {name}", 2**60)
    tensors = {
        key: reader.tensor(key, entry, files, block)
        for key, entry in reader.mapping(value.get("tensors"), "tensors").items()
    }
    return Index(iteration=iteration, block_bytes=block, files=files, tensors=tensors)


def check_version(value: Mapping[str, Any], source: str) -> None:
    """Refuse what another version of this program wrote in another form."""
    version = value.get("version")
    if version != VERSION:
        raise CheckpointError(f"{source}: this is format {str(version)[:40]}; this program reads {VERSION}")


def check_cover(index: Index, source: str) -> None:
    """Each tensor's slices must cover it, each element once."""
    for key, tensor in index.tensors.items():
        fault = tiling_fault(tensor.shape, [part.box for part in tensor.slices])
        if fault is not None:
            raise CheckpointError(f"{source}: {key}: {fault}")


def merge(indices: Iterable[tuple[str, Index]]) -> Index:
    """The index of the checkpoint from those of all ranks' shares (each with its source, for messages).

    Raises:
        CheckpointError: the ranks disagree about a tensor, or their slices overlap or leave a hole.
    """
    indices = list(indices)
    files: dict[str, int] = {}
    merged: dict[str, StoredTensor] = {}
    first = indices[0][1]
    for source, index in indices:
        if (index.iteration, index.block_bytes) != (first.iteration, first.block_bytes):
            raise CheckpointError(f"{source} belongs to another save: iteration {index.iteration}")
        files.update(index.files)
        for key, tensor in index.tensors.items():
            known = merged.get(key)
            if known is None:
                merged[key] = tensor
            elif (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{source}: {key} is {tensor.dtype} {tensor.shape} here and "
                    f"{known.dtype} {known.shape} on another rank"
                )
            else:
                slices = known.slices + tensor.slices
                merged[key] = StoredTensor(dtype=known.dtype, shape=known.shape, slices=slices)
    whole = Index(iteration=first.iteration, block_bytes=first.block_bytes, files=files, tensors=merged)
    check_cover(whole, "the tensors to save")
    return whole


@dataclass(frozen=True)
class _Reader:
    """Takes values out of untrusted JSON."""

    source: str

    def error(self, what: str, value: object, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.source} is damaged: {what[:200]} is {repr(value)[:80]}, must be {rule}")

    def mapping(self, value: object, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(what, value, "an object")
        return value

    def count(self, value: object, what: str, limit: int) -> int:
        if type(value) is not int or not 0 <= value <= limit:
            raise self.error(what, value, f"an integer from 0 to {limit}")
        return value

    def counts(self, value: object, what: str, limit: int, length: int | None = None) -> tuple[int, ...]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise self.error(what, value, "a list" if length is None else f"a list of {length}")
        return tuple(self.count(item, what, limit) for item in value)

    def tensor(self, key: str, value: object, files: Mapping[str, int], block: int) -> StoredTensor:
        entry = self.mapping(value, key)
        dtype = DTYPES.get(str(entry.get("dtype")))
        if dtype is None:
            raise self.error(f"dtype of {key}", entry.get("dtype"), f"one of {', '.join(DTYPES)}")
        shape = self.counts(entry.get("shape"), f"shape of {key}", _MAX_ELEMENTS)
        if len(shape) > _MAX_DIMENSIONS or prod(max(extent, 1) for extent in shape) > _MAX_ELEMENTS:
            raise self.error(f"shape of {key}", shape, f"at most {_MAX_DIMENSIONS} dimensions, 2**60 elements")
        slices = entry.get("slices")
        if not isinstance(slices, list):
            raise self.error(f"slices of {key}", slices, "a list")
        parts = tuple(self.slice(key, part, shape, dtype, files, block) for part in slices)
        return StoredTensor(dtype=dtype, shape=shape, slices=parts)

    def slice(
        self,
        key: str,
        value: object,
        whole: tuple[int, ...],
        dtype: torch.dtype,
        files: Mapping[str, int],
        block: int,
    ) -> StoredSlice:
        what = f"a slice of {key}"
        entry = self.mapping(value, what)
        file, name = entry.get("file"), entry.get("name")
        if not isinstance(file, str) or file not in files:
            raise self.error(f"file of {what}", file, "one of the files of the index")
        if not isinstance(name, str):
            raise self.error(f"name of {what}", name, "a string")
        offset = self.counts(entry.get("offset"), f"offset of {what}", _MAX_ELEMENTS, len(whole))
        shape = self.counts(entry.get("shape"), f"shape of {what}", _MAX_ELEMENTS, len(whole))
        box = Box(offset=offset, shape=shape)
        if not Box.whole(whole).contains(box) or not box.volume:
            raise self.error(f"the place of {what}", str(box), f"a part of {whole}")
        size = box.volume * dtype.itemsize
        if size > files[file]:
            raise self.error(f"the size of {what}", size, f"at most that of {file}, {files[file]} bytes")
        checksums = self.counts(entry.get("crc32"), f"crc32 of {what}", 2**32 - 1, -(-size // block))
        return StoredSlice(file=file, name=name, box=box, checksums=checksums)
