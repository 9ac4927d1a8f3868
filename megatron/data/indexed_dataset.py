"""Token files, byte for byte Megatron-LM's: ids in `<prefix>.bin`, where sequences begin in `<prefix>.idx`.

`.bin`: ids one after another, no header. `.idx`, little-endian::

    9 bytes   b"MMIDIDX\\x00\\x00"
    <Q        version, 1
    <B        code of the ids' type, see DTYPE_CODES
    <Q        N, number of sequences
    <Q        D, number of documents + 1
    N int32   tokens of each sequence
    N int64   byte offset of each sequence in .bin
    D int64   first sequence of each document, then N
    N int8    modes, in multimodal files only

A document without tokens has no sequence: its entry repeats the one before it.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError
from megatron.core.whole_file import WholeFile
from megatron.data.sample_dataset import TokenArray, check_vocabulary

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), start=1)
}
_CODES = {dtype: code for code, dtype in DTYPE_CODES.items()}
_HEADER = struct.Struct("<9sQBQQ")
_INT32_MAX = np.iinfo(np.int32).max


def optimal_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The type that Megatron-LM stores ids in: uint16 below 65,500 entries, else int32."""
    return np.dtype(np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """`<prefix>.bin`; a prefix may itself hold dots."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """`<prefix>.idx`."""
    return Path(f"{prefix}.idx")


# A read brings in the pages that it needs and, of those that are in the system's cache, the ones around it.
_MAPPED_AROUND, _MAPPED_AT_MOST = 1 << 16, 1 << 28
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 16, 4096
_VERIFIED_AT_ONCE = 1 << 20


class IndexedDatasetError(UserError):
    """A token file is missing, truncated, or is not what its other half says."""


def _damaged(path: Path, what: str) -> IndexedDatasetError:
    return IndexedDatasetError(f"{path}: {what}; copy .bin and .idx again, or make them again from the texts")


class IndexedDataset:
    """Reads `<prefix>.bin/.idx`. Safe to share between threads and with forked processes.

    Args:
        prefix: path without the endings.
        mmap: map `.bin` into memory; otherwise read each sequence with a positioned read, which some parallel
            file systems serve better.
        random_order: whether sequences are read in random order. Of a mapped file the system then reads what is asked
            for; otherwise also what lies around it, megabytes on some machines, which only helps to read it in order.

    Raises:
        IndexedDatasetError: a file is missing, unreadable, truncated or garbage, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path, *, mmap: bool = True, random_order: bool = False) -> None:
        self.prefix = str(prefix)
        self._random_order = random_order
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        try:
            self._open(mmap)
        except OSError as error:
            raise IndexedDatasetError(f"{error.filename or self.prefix}: {error.strerror}") from error

    def _open(self, mapped: bool) -> None:
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise IndexedDatasetError(
                    f"{path}: no such file; a dataset is given by its prefix, the path without .bin and .idx"
                )
        self._read_index()
        self._check_sizes()
        self._map: TokenArray | None = None
        self._mapping: mmap.mmap | None = None
        self._mapped = 0  # bytes that reads have brought into the memory of this process
        self._file: IO[bytes] | None = None
        if not mapped:
            self._file = self._bin.open("rb", buffering=0)
        elif self._bin.stat().st_size > 0:
            with self._bin.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if self._random_order:
                self._mapping.madvise(mmap.MADV_RANDOM)
            self._map = np.frombuffer(self._mapping, dtype=self.dtype)
        else:
            self._map = np.empty(0, dtype=self.dtype)

    def _read_index(self) -> None:
        size = self._idx.stat().st_size
        with self._idx.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise _damaged(self._idx, f"{size} bytes, less than the {_HEADER.size} of a header")
        magic, version, code, num_sequences, num_documents = _HEADER.unpack(header)
        if magic != MAGIC:
            raise _damaged(self._idx, f"begins with {magic!r}, an index begins with {MAGIC!r}")
        if version != VERSION:
            raise _damaged(self._idx, f"version {version}, only {VERSION} is known")
        if code not in DTYPE_CODES:
            raise _damaged(self._idx, f"type code {code}, known are {sorted(DTYPE_CODES)}")
        if num_documents < 1:
            raise _damaged(self._idx, "no document index, not even the first entry")
        expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
        if size not in (expected, expected + num_sequences):
            raise _damaged(
                self._idx,
                f"{size} bytes, but {num_sequences} sequences and {num_documents - 1} documents take {expected}; "
                "the file is truncated or damaged",
            )
        self.dtype = DTYPE_CODES[code]
        raw = np.asarray(np.memmap(self._idx, dtype=np.uint8, mode="r"))  # a plain array: a memmap is slow to slice
        offset = _HEADER.size
        self.sequence_lengths: npt.NDArray[np.int32] = raw[offset : offset + 4 * num_sequences].view("<i4")
        offset += 4 * num_sequences
        self.pointers: npt.NDArray[np.int64] = raw[offset : offset + 8 * num_sequences].view("<i8")
        offset += 8 * num_sequences
        self.document_indices: npt.NDArray[np.int64] = raw[offset : offset + 8 * num_documents].view("<i8")
        offset += 8 * num_documents
        self.sequence_modes: npt.NDArray[np.int8] | None = (
            raw[offset:].view(np.int8) if num_sequences and size > expected else None
        )

    def _check_sizes(self) -> None:
        """What can be known without reading the arrays; `verify` reads them all."""
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if (first, last) != (0, len(self)):
            raise _damaged(self._idx, f"documents cover sequences {first} to {last}, the file has 0 to {len(self)}")
        expected = 0
        if len(self):
            expected = int(self.pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        actual = self._bin.stat().st_size
        if actual != expected:
            raise _damaged(
                self._bin,
                f"{actual} bytes, but {self._idx} describes {expected}; the file is truncated or belongs to "
                "another index",
            )

    def verify(self, checked: Callable[[int], object] = lambda entries: None) -> None:
        """Check every entry of the index, a part of it at a time.

        Args:
            checked: gets the number of entries after each step, of all sequences and documents together.

        Raises:
            IndexedDatasetError: a length is negative, sequences do not follow each other, or documents go
                backwards.
        """
        ended = 0
        for begin in range(0, len(self), _VERIFIED_AT_ONCE):
            lengths = self.sequence_lengths[begin : begin + _VERIFIED_AT_ONCE].astype(np.int64)
            if (lengths < 0).any():
                wrong = int(np.argmax(lengths < 0))
                raise _damaged(self._idx, f"sequence {begin + wrong} has a negative length, {lengths[wrong]}")
            ends = ended + np.cumsum(lengths * self.dtype.itemsize)
            expected = ends - lengths * self.dtype.itemsize
            pointers = self.pointers[begin : begin + _VERIFIED_AT_ONCE]
            if not np.array_equal(expected, pointers):
                wrong = int(np.argmax(expected != pointers))
                raise _damaged(
                    self._idx,
                    f"sequence {begin + wrong} begins at byte {pointers[wrong]}, the sequences before it end at "
                    f"byte {expected[wrong]}",
                )
            ended = int(ends[-1])
            checked(lengths.size)
        for begin in range(0, self.num_documents, _VERIFIED_AT_ONCE):
            bounds = self.document_indices[begin : begin + _VERIFIED_AT_ONCE + 1]
            if (backwards := bounds[1:] < bounds[:-1]).any():
                wrong = int(np.argmax(backwards))
                raise _damaged(
                    self._idx,
                    f"document {begin + wrong} begins at sequence {bounds[wrong]} and ends at {bounds[wrong + 1]}, the "
                    "documents are not in ascending order",
                )
            checked(bounds.size - 1)

    def require_ids(self, vocab_size: int | None = None) -> None:
        """See that the numbers in `.bin`, of which the format knows all types, are ids, and of a vocabulary.

        For that, some are looked at, all over the file, so that most other vocabularies are noticed before a training;
        each is looked at when it is read.

        Raises:
            IndexedDatasetError: they are no whole numbers.
            UserError: an id is outside the vocabulary.
        """
        if not np.issubdtype(self.dtype, np.integer):
            raise IndexedDatasetError(
                f"{self.prefix}: holds {self.dtype}, and ids are whole numbers; name a dataset of ids"
            )
        if vocab_size is not None:
            _, extremes = self._sampled
            check_vocabulary(extremes, vocab_size, self.prefix)

    def __len__(self) -> int:
        """Number of sequences."""
        return int(self.sequence_lengths.shape[0])

    @property
    def num_documents(self) -> int:
        """Documents, those without tokens included."""
        return int(self.document_indices.shape[0]) - 1

    def __getitem__(self, index: int) -> TokenArray:
        """All ids of sequence `index`."""
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> TokenArray:
        """Ids `offset` to `offset + length` (None: to its end) of sequence `index`, in the file's type.

        Raises:
            IndexError: there is no such sequence, or it has no such tokens.
            IndexedDatasetError: the file holds fewer bytes than the index says.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        available = int(self.sequence_lengths[index])
        if length is None:
            length = available - offset
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {index} of {self.prefix}, which has {available}"
            )
        begin = int(self.pointers[index]) + offset * self.dtype.itemsize
        size = length * self.dtype.itemsize
        if self._map is not None:
            self._count_mapped(size)
            first = begin // self.dtype.itemsize
            tokens = self._map[first : first + length]
        else:
            assert self._file is not None
            tokens = np.frombuffer(_read_at(self._file.fileno(), size, begin), dtype=self.dtype)
        if tokens.size != length:
            raise _damaged(self._bin, f"ends within sequence {index}, which {self._idx} places at byte {begin}")
        self._ask_for(begin, size)
        return tokens

    def _ask_for(self, begin: int, size: int) -> None:
        """Have all pages of a sequence in the file read at once: in random order the system reads one at a time."""
        first_page = begin - begin % mmap.PAGESIZE
        if self._random_order and self._mapping is not None and begin + size > first_page + mmap.PAGESIZE:
            self._mapping.madvise(mmap.MADV_WILLNEED, first_page, begin + size - first_page)

    def _count_mapped(self, size: int) -> None:
        """Let go of what was read, once it is much: pages stay in the system's cache, and come back when needed.

        Else the memory of a process would grow to that of the corpus, and that of all ranks to many times as much.
        Several threads may count past each other: the number need not be exact.
        """
        self._mapped += size + _MAPPED_AROUND
        if self._mapped > _MAPPED_AT_MOST and self._mapping is not None:
            self._mapped = 0
            self._mapping.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.sequence_lengths.sum(dtype=np.int64))

    @cached_property
    def fingerprint(self) -> str:
        """What an index of samples depends on: numbers of sequences and tokens, a checksum of all lengths."""
        checksum = zlib.crc32(self.sequence_lengths.data)
        return f"{len(self)} sequences, {self.num_tokens} tokens, lengths {checksum:08x}"

    @cached_property
    def content(self) -> str:
        """A checksum of ids all over the file: of all in a small one, of evenly spaced blocks in a large one.

        So it takes 16 short reads at any size. Another tokenizer or text changes it; a change of single ids need not.
        """
        checksum, _ = self._sampled
        return f"sampled ids {checksum:08x}"

    @cached_property
    def _sampled(self) -> tuple[int, TokenArray]:
        """Of evenly spaced blocks of the file a checksum, and the smallest and the largest id of each."""
        size, itemsize = self._bin.stat().st_size, self.dtype.itemsize
        checksum, extremes = 0, []
        with self._bin.open("rb", buffering=0) as file:
            for number in range(_SAMPLED_BLOCKS):
                begin = number * max(0, size - _SAMPLED_BYTES) // (_SAMPLED_BLOCKS - 1)
                block = _read_at(file.fileno(), _SAMPLED_BYTES, begin)
                checksum = zlib.crc32(block, checksum)
                first = -begin % itemsize  # a block may begin within an id
                ids = np.frombuffer(block, self.dtype, max(0, len(block) - first) // itemsize, first if block else 0)
                extremes += [ids.min(), ids.max()] if ids.size else []
        return checksum, np.array(extremes, dtype=self.dtype)


def _read_at(descriptor: int, size: int, begin: int) -> bytes:
    """`size` bytes from `begin` on, fewer at the end of the file. One read of Linux returns at most 2 GiB."""
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(descriptor, size, begin)
        if not part:
            break
        parts.append(part)
        begin += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def publish(
    prefix: str | Path,
    bin_file: WholeFile,
    dtype: np.dtype[Any],
    *,
    lengths: Iterable[npt.NDArray[Any]],
    pointers: Iterable[npt.NDArray[Any]],
    documents: Iterable[npt.NDArray[Any]],
    modes: Iterable[npt.NDArray[Any]] = (),
) -> None:
    """Write the index of a `.bin` that is complete, and give both their names; a dataset of that name is replaced.

    Args:
        lengths, pointers, documents, modes: the arrays of the index, each in parts that follow each other.
    """
    idx = WholeFile(idx_path(prefix))
    try:
        idx.file.write(bytes(_HEADER.size))
        counts = []
        for parts, stored in ((lengths, "<i4"), (pointers, "<i8"), (documents, "<i8"), (modes, "i1")):
            count = 0
            for part in parts:
                idx.file.write(part.astype(stored, copy=False).data)
                count += part.size
            counts.append(count)
        idx.file.seek(0)
        idx.file.write(_HEADER.pack(MAGIC, VERSION, _CODES[dtype], counts[0], counts[2]))
        bin_file.sync()
        idx.sync()
        # An old index must never stand beside a new .bin.
        idx_path(prefix).unlink(missing_ok=True)
        bin_file.publish()
        idx.publish()
    finally:
        idx.discard()


class IndexedDatasetWriter:
    """Writes `<prefix>.bin/.idx`, under temporary names until `finalize` renames them, `.idx` last.

    A writer that is killed leaves no file that a reader would take; one that fails inside `with` removes its own, and
    the next one of the same prefix those of a killed one (see `whole_file.py`).

    Args:
        prefix: path without the endings; its folder must exist.
        dtype: type of the stored ids, see `optimal_dtype`.

    Raises:
        ValueError: the type has no code in the format.
    """

    def __init__(self, prefix: str | Path, *, dtype: npt.DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise ValueError(f"{self.prefix}: type {self.dtype}; the format knows {', '.join(map(str, _CODES))}")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._bin = WholeFile(bin_path(prefix))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._bin.file.closed:
                self.finalize()
        finally:
            self.abort()

    def add_item(self, tokens: npt.ArrayLike) -> None:
        """Append one sequence to the document that is open.

        Raises:
            UserError: the sequence is longer than the format holds.
            ValueError: an id does not fit the stored type.
        """
        ids = self._convert(tokens)
        self._bin.file.write(ids.tobytes())
        self._add_length(ids.size)

    def end_document(self) -> None:
        """Close the document, which may be empty."""
        self._documents.append(len(self._lengths))

    def add_document(self, tokens: npt.ArrayLike, lengths: Iterable[int]) -> None:
        """Append a whole document: its ids, and how many of them each of its sequences has.

        Raises:
            UserError: a sequence is longer than the format holds.
            ValueError: the lengths do not add up, or an id does not fit the stored type.
        """
        ids = self._convert(tokens)
        counts = [int(length) for length in lengths]
        if sum(counts) != ids.size or min(counts, default=0) < 0:
            raise ValueError(f"{self.prefix}: a document of {ids.size} ids with sequences of {counts} ids")
        self._bin.file.write(ids.tobytes())
        for count in counts:
            self._add_length(count)
        self.end_document()

    def add_documents(
        self, tokens: TokenArray, lengths: npt.NDArray[np.int64], sequences: npt.NDArray[np.int64]
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: the ids of all of them.
            lengths: tokens of each sequence.
            sequences: how many sequences each document has; 0 is a document without tokens.

        Raises:
            UserError: a sequence is longer than the format holds.
            ValueError: the numbers do not add up, or an id does not fit the stored type.
        """
        ids = self._convert(tokens)
        if lengths.sum() != ids.size or sequences.sum() != lengths.size or (lengths < 0).any() or (sequences < 0).any():
            raise ValueError(
                f"{self.prefix}: {ids.size} ids in {lengths.size} sequences of {lengths.sum()} ids, in documents of "
                f"{sequences.sum()} sequences"
            )
        self._check_length(int(lengths.max(initial=0)))
        self._bin.file.write(ids.data)
        first = len(self._lengths)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self._documents.frombytes((first + np.cumsum(sequences)).astype(np.int64).tobytes())

    def finalize(self) -> None:
        """Complete both files on disk and give them their names. A dataset of that name is replaced."""
        lengths = np.frombuffer(self._lengths, dtype=np.intc)
        # In 64 bits: 32 would overflow after 2 GiB.
        sizes = lengths.astype(np.int64) * self.dtype.itemsize
        pointers = np.cumsum(sizes) - sizes
        documents = np.frombuffer(self._documents, dtype=np.int64)
        publish(self.prefix, self._bin, self.dtype, lengths=[lengths], pointers=[pointers], documents=[documents])

    def abort(self) -> None:
        """Remove what was written, unless it is finalized."""
        self._bin.discard()

    def _add_length(self, length: int) -> None:
        self._check_length(length)
        self._lengths.append(length)

    def _check_length(self, length: int) -> None:
        if length > _INT32_MAX:
            raise UserError(f"{self.prefix}: a sequence of {length} ids; the format holds up to {_INT32_MAX}, split it")

    def _convert(self, tokens: npt.ArrayLike) -> TokenArray:
        ids = np.asarray(tokens)
        if ids.size == 0:
            return np.empty(0, dtype=self.dtype)
        if ids.ndim != 1:
            raise ValueError(f"{self.prefix}: ids of shape {ids.shape}, one dimension is expected")
        if ids.dtype != self.dtype and np.issubdtype(self.dtype, np.integer):
            limits = np.iinfo(self.dtype)
            low, high = ids.min(), ids.max()
            if not np.issubdtype(ids.dtype, np.integer) or low < limits.min or high > limits.max:
                raise ValueError(
                    f"{self.prefix}: ids from {low} to {high} ({ids.dtype}) do not fit {self.dtype}; choose "
                    "the type by the vocabulary, see optimal_dtype"
                )
        return ids.astype(self.dtype, copy=False)
