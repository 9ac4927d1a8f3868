"""Bytes on disk: names, durable writes, and safetensors files written and read block by block.

The safetensors format (a length, a JSON header, the data) is written and read here and not through its
library, because that holds all tensors of a file at once, does not sync, and maps the file when it reads: a
file that is cut short while mapped kills the process. Here one or two blocks of 16 MiB are in
flight, their checksums are taken on the way, and the descriptor that wrote is synced. The files are ordinary
safetensors files that the library reads.

The checksum is CRC-32 of zlib: it is there against torn writes and bad disks, not against forgery, is in the
standard library, and is faster than SHA-256 by half and than any disk (1.6 GB/s a core).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.index import DTYPE_NAMES, StoredSlice, parse_json
from megatron.checkpointing.slices import Box, flat_bounds, flat_range_boxes
from megatron.core.kernels.float_halves import Halves, Numbers
from megatron.core.whole_file import sync_folder, whole_file

BLOCK_BYTES = 16 * 2**20

TRACKER_FILE = "latest_checkpointed_iteration.txt"
INDEX_FILE = "index.json"
METADATA_FILE = "metadata.json"
COMPLETE_FILE = "COMPLETE"

_READERS = 2  # a core checks 1.6 GB/s and disks are faster; read, check and copy all let go of the interpreter lock
_MAX_JSON = 2**28
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_ITERATION_FOLDER = re.compile(r"iter_([0-9]{7,18})")
_TEMPORARY_FOLDER = re.compile(r"\.tmp-iter_[0-9]{7,18}")
_REPLACED_FOLDER = re.compile(r"\.replaced-(iter_[0-9]{7,18})")
_DELETED_FOLDER = re.compile(r"\.deleted-iter_[0-9]{7,18}")


# ---- names ----


def iteration_folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def temporary_folder(root: Path, iteration: int) -> Path:
    return root / f".tmp-iter_{iteration:07d}"


def replaced_folder(root: Path, iteration: int) -> Path:
    return root / f".replaced-iter_{iteration:07d}"


def deleted_folder(root: Path, iteration: int) -> Path:
    return root / f".deleted-iter_{iteration:07d}"


def shard_file(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


def index_file(rank: int) -> str:
    """The index of one rank's share, until the first rank has merged them."""
    return f"index_{rank:05d}.json"


def failure_file(rank: int) -> str:
    """Why a rank that writes in the background has not written its share."""
    return f"failed_{rank:05d}.txt"


def iterations_present(root: Path) -> list[int]:
    """Iterations that have a folder, in order, also one that a killed save had set aside to replace it."""
    found = set()
    for entry in root.iterdir() if root.is_dir() else ():
        replaced = _REPLACED_FOLDER.fullmatch(entry.name)
        match = _ITERATION_FOLDER.fullmatch(replaced[1] if replaced else entry.name)
        if match and entry.is_dir():
            found.add(int(match[1]))
    return sorted(found)


def is_temporary(entry: Path) -> bool:
    """Whether this is the folder of a save that has not ended."""
    return _TEMPORARY_FOLDER.fullmatch(entry.name) is not None


def locate(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is, if it is anywhere."""
    folder, replaced = iteration_folder(root, iteration), replaced_folder(root, iteration)
    return replaced if replaced.is_dir() and not folder.is_dir() else folder


# ---- durable writes: what a name points to after a crash has been on the disk before ----


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all bytes: a single write stops at 2 GiB, or where the disk fills up."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_file(path: Path, data: bytes) -> None:
    """Create a new file with these bytes, on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, memoryview(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tracker(root: Path, iteration: int) -> None:
    """Make the tracker name this iteration: the old text or the new one, never a part."""
    with whole_file(root / TRACKER_FILE) as file:
        file.write(str(iteration).encode())


def publish(root: Path, iteration: int) -> None:
    """Give the finished temporary folder its name, then move the tracker to it.

    A folder cannot be replaced by a rename. A checkpoint of the same iteration, saved before the run was
    taken back to an earlier one, is set aside first; `locate` finds it there if the process dies between the
    two renames.
    """
    folder, replaced = iteration_folder(root, iteration), replaced_folder(root, iteration)
    sync_folder(temporary_folder(root, iteration))
    if os.path.lexists(folder):
        os.rename(folder, replaced)
    os.rename(temporary_folder(root, iteration), folder)
    sync_folder(root)
    write_tracker(root, iteration)
    shutil.rmtree(replaced, ignore_errors=True)  # the next save tries again


def clear_leftovers(root: Path) -> None:
    """Remove what killed saves have left; put back a checkpoint that one has set aside. Nothing else."""
    for entry in list(root.iterdir()):
        replaced = _REPLACED_FOLDER.fullmatch(entry.name)
        if replaced and not os.path.lexists(root / replaced[1]):
            os.rename(entry, root / replaced[1])
        elif replaced or is_temporary(entry) or _DELETED_FOLDER.fullmatch(entry.name):
            shutil.rmtree(entry)


def check_replaceable(root: Path, iteration: int) -> None:
    """Refuse to replace anything but a checkpoint of this form.

    Raises:
        CheckpointError: there is something else of this name.
    """
    folder = iteration_folder(root, iteration)
    if os.path.lexists(folder) and (folder.is_symlink() or not (folder / COMPLETE_FILE).is_file()):
        raise CheckpointError(
            f"cannot save iteration {iteration}: {folder} exists and is not a checkpoint that this "
            f"program may replace (a link, or without {COMPLETE_FILE}); move it away or choose another --save"
        )


# ---- reading small files ----


def file_size(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        CheckpointError: it is missing, not visible, not a regular file, or a link out of its folder.
    """
    try:
        status = path.stat()
        outside = path.is_symlink() and path.resolve().parent != path.parent.resolve()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if outside:
        raise CheckpointError(f"{path} is a link to {path.resolve()}: it is not followed out of its folder")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def read_file(path: Path, limit: int = _MAX_JSON) -> bytes:
    """All bytes of a small file.

    Raises:
        CheckpointError: it cannot be read, or is larger than any that this program writes.
    """
    if file_size(path) > limit:
        raise CheckpointError(f"{path} is damaged: {file_size(path)} bytes, at most {limit} are expected")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


# ---- safetensors ----


class Part(Protocol):
    """What is to be written under a name. Its values are asked for when all before it are written, and not kept."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def tensor(self) -> Numbers: ...


SomePart = TypeVar("SomePart", bound=Part)


def size_of(part: Part) -> int:
    """Bytes of its values."""
    return prod(part.shape) * part.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice to be written, and its place in the global tensor."""

    key: str
    box: Box

    @property
    def name(self) -> str:
        return f"{self.key}@{','.join(map(str, self.box.offset))}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape


@dataclass(frozen=True, kw_only=True)
class PendingSlice(Slice):
    """A slice in memory: the view of a local tensor that holds it."""

    tensor: Numbers

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def cut(self, rows: range) -> PendingSlice:
        """Some rows of it."""
        inside = Box(offset=(rows.start, *[0] * (len(self.box.shape) - 1)), shape=(len(rows), *self.box.shape[1:]))
        return PendingSlice(key=self.key, tensor=self.tensor[inside.index], box=inside.moved_by(self.box.offset))


@dataclass(frozen=True, kw_only=True)
class LazySlice(Slice):
    """A slice elsewhere: `read` gives its values, each time anew."""

    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def tensor(self) -> Tensor:
        return self.read()


def in_file_order(pending: Iterable[SomePart]) -> list[SomePart]:
    """Widest elements first, so that each tensor starts at a multiple of its element size, as the library has it."""
    return sorted(pending, key=lambda part: (-part.dtype.itemsize, part.name))


def write_shard(path: Path, pending: Sequence[Part], block_bytes: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Write slices, or whole tensors, to a new safetensors file, on the disk when this returns.

    Returns: the size of the file, and for each name the CRC-32 of each block.
    """
    ordered = in_file_order(pending)
    header = _header(ordered)
    checksums = {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # zlib and write both let go of the interpreter lock: the checksum costs no time beside the write.
        with ThreadPoolExecutor(max_workers=1) as pool:
            write_all(descriptor, memoryview(header))
            for part in ordered:
                sums = []
                for block in _blocks(part.tensor, block_bytes):
                    data = _bytes_of(block)
                    checksum = pool.submit(zlib.crc32, data)
                    write_all(descriptor, data)
                    sums.append(checksum.result())
                checksums[part.name] = tuple(sums)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return len(header) + sum(map(size_of, ordered)), checksums


def _header(ordered: Sequence[Part]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for part in ordered:
        entries[part.name] = {
            "dtype": DTYPE_NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [position, position + size_of(part)],
        }
        position += size_of(part)
    assert len(entries) == len(ordered) + 1, "two slices of one file have the same name"
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensor: Numbers, block_bytes: int) -> Iterator[Tensor]:
    """The elements in row-major order, `block_bytes` at a time, as flat CPU tensors."""
    tensor = tensor.detach()
    length = block_bytes // tensor.element_size()
    total = tensor.numel()
    if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.is_contiguous():
        for first in range(0, total, length):
            yield tensor.view(-1)[first : first + length]
        return
    staging = torch.empty(min(length, total), dtype=tensor.dtype)
    for first in range(0, total, length):
        block = staging[: min(length, total - first)]
        _copy_range(tensor, first, block)
        yield block


def copy_elements(tensor: Numbers, flat: Tensor) -> None:
    """Copy all elements, in row-major order, to a flat CPU tensor of their dtype."""
    if isinstance(tensor, Tensor):
        flat.view(tensor.shape).copy_(tensor.detach())
        return
    length = BLOCK_BYTES // tensor.element_size()  # joined halves are a temporary copy
    for first in range(0, flat.numel(), length):
        _copy_range(tensor.detach(), first, flat[first : first + length])


def _copy_range(tensor: Numbers, first: int, flat: Tensor) -> None:
    """Fill `flat` with the elements from `first` on, in row-major order."""
    position = 0
    for box in flat_range_boxes(tuple(tensor.shape), first, first + flat.numel()):
        values = tensor[box.index]
        values = values.joined() if isinstance(values, Halves) else values
        flat[position : position + box.volume].view(box.shape).copy_(values)
        position += box.volume


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat CPU tensor."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)


# Writes values, on the CPU in the dtype of the file, to a tensor of their shape.
Store = Callable[[Tensor, Numbers], None]


class ShardReader:
    """Reads checked blocks of slices from one safetensors file. A context manager."""

    def __init__(self, path: Path, size: int, block_bytes: int) -> None:
        """`size` is what the index says that the file has.

        Raises:
            CheckpointError: the file or its header is missing, cut short or damaged.
        """
        check_size(path, size)
        self.path = path
        self._size = size
        self._block_bytes = block_bytes
        self._staging: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(_READERS):
            self._staging.put(torch.empty(min(block_bytes, size), dtype=torch.uint8))
        self._pool = ThreadPoolExecutor(max_workers=_READERS)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        try:
            self._entries, self._data_start = self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._descriptor)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self._read(0, 8, "its header"), "little")
        if length > min(_MAX_HEADER, self._size - 8):
            raise CheckpointError(f"{self.path} is damaged: a header of {length} bytes in a file of {self._size}")
        text = self._read(8, length, "its header")
        return parse_json(bytes(text), f"{self.path}: its header"), 8 + length

    def _read(self, offset: int, length: int, what: str) -> memoryview:
        buffer = memoryview(bytearray(length))
        self._read_into(buffer, offset, what)
        return buffer

    def _read_into(self, buffer: memoryview, offset: int, what: str) -> None:
        position = 0
        while position < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[position:]], offset + position)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {error.strerror} while reading {what}") from error
            if count == 0:
                raise CheckpointError(f"{self.path} is damaged: it ends within {what}")
            position += count

    def _start_of(self, part: StoredSlice, dtype: torch.dtype) -> int:
        """Where the slice begins in the file, once the header agrees with the index about it."""
        entry = self._entries.get(part.name)
        size = part.box.volume * dtype.itemsize
        if isinstance(entry, dict):
            expected = DTYPE_NAMES[dtype], list(part.box.shape)
            if (entry.get("dtype"), entry.get("shape")) == expected and _is_pair(entry.get("data_offsets")):
                first, last = entry["data_offsets"]
                if first >= 0 and last - first == size and self._data_start + last <= self._size:
                    return int(self._data_start + first)
        raise CheckpointError(f"{self.path} is damaged: its header and the index disagree about {part.name}")

    def copy_into(self, target: Numbers, part: StoredSlice, dtype: torch.dtype, wanted: Box, *, store: Store) -> int:
        """As `start_copy`, to its end. Returns: the number of bytes read."""
        return sum(block.result() for block in self.start_copy(target, part, dtype, wanted, store=store))

    def start_copy(
        self, target: Numbers, part: StoredSlice, dtype: torch.dtype, wanted: Box, *, store: Store
    ) -> list[Future[int]]:
        """Begin to copy the elements `wanted`, a box of the global tensor within the slice, to a tensor of its shape.

        Only blocks that hold wanted elements are read, two at a time over all copies of the file. Each is checked
        before it is copied by `store`, or where it lies in the target as in the file, in its place.

        Returns: of each block the number of bytes read, when it is copied; or CheckpointError, naming the file and the
            tensor, when they are damaged.

        Raises:
            CheckpointError: the header of the file is damaged.
        """
        start = self._start_of(part, dtype)
        inside = wanted.seen_from(part.box.offset)
        length = self._block_bytes // dtype.itemsize
        lowest, highest = flat_bounds(part.box.shape, inside)
        in_place = highest - lowest == inside.volume and _is_flat_memory(target, dtype)

        def read_block(number: int, block: Tensor) -> None:
            self._read_into(_bytes_of(block), start + number * length * dtype.itemsize, part.name)
            if zlib.crc32(_bytes_of(block)) != part.checksums[number]:
                raise CheckpointError(f"{self.path} is damaged: wrong checksum of {part.name}, block {number}")

        def copy_block(number: int) -> int:
            first, stop = number * length, min((number + 1) * length, part.box.volume)
            if in_place and lowest <= first and stop <= highest:
                assert isinstance(target, Tensor)
                read_block(number, target.detach().view(-1)[first - lowest : stop - lowest])
                return (stop - first) * dtype.itemsize
            staging = self._staging.get()
            try:
                block = staging[: (stop - first) * dtype.itemsize]
                read_block(number, block)
                _copy_overlap(target, inside, block.view(dtype), part.box.shape, first, store)
            finally:
                self._staging.put(staging)
            return block.numel()

        return [self._pool.submit(copy_block, number) for number in range(lowest // length, -(-highest // length))]


def _is_flat_memory(target: Numbers, dtype: torch.dtype) -> bool:
    """Whether bytes of a file can be read into it as they are."""
    return (
        isinstance(target, Tensor) and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
    )


def _copy_overlap(
    target: Numbers, wanted: Box, block: Tensor, shape: tuple[int, ...], first: int, store: Store
) -> None:
    """Copy what `target` wants out of a block: row-major elements from `first` on of a tensor of `shape`."""
    position = 0
    for box in flat_range_boxes(shape, first, first + block.numel()):
        overlap = box.intersect(wanted)
        if overlap is not None:
            values = block[position : position + box.volume].view(box.shape)[overlap.seen_from(box.offset).index]
            store(values, target[overlap.seen_from(wanted.offset).index])
        position += box.volume


def check_size(path: Path, size: int) -> None:
    """Raise unless the file has exactly the size that the index says."""
    actual = file_size(path)
    if actual != size:
        state = "cut short" if actual < size else "too long"
        raise CheckpointError(f"{path} is damaged: {state}, {actual} bytes of {size}")
