"""Files as bytes, compressed or not. A damaged or truncated one is an error, never a shorter text."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, cast

import zstandard

from megatron.config.problems import UserError
from preprocess.inputs import InputFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER = 1 << 20
# What the library is given of a zstd file at once. It returns all that comes of it: of four bytes, which can stand for
# so many equal ones, 128 KiB.
_STEP = 1 << 10
# Of `zstd --long=31`, the most that the format has.
_LARGEST_WINDOW = 1 << 31


@contextmanager
def opened(file: InputFile) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The bytes of a file, and how many of the bytes on disk are read so far.

    Raises:
        UserError: when it is read, that the compressed file is damaged.
    """
    with file.path.open("rb", buffering=_BUFFER) as raw:
        stream: BinaryIO = raw
        if file.compression == ".gz":
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif file.compression == ".zst":
            stream = io.BufferedReader(_ZstdReader(raw), _BUFFER)
        try:
            if file.compression and file.path.stat().st_size == 0:
                raise EOFError("it is empty")  # a text of no bytes is not, once it is compressed
            yield stream, raw.tell
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise UserError(
                f"{file.path}: truncated or damaged, it cannot be decompressed to its end ({error})"
            ) from None


class _ZstdReader(io.RawIOBase):
    """Frame after frame. The stream readers of the library take a truncated frame for the end of the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = memoryview(b"")
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer)
        while not self._output:
            if not self._input:
                self._input = memoryview(self._file.read(_BUFFER))
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            step = self._input[:_STEP]
            self._output = memoryview(self._frame.decompress(step))
            used = len(step)
            if self._frame.eof:
                used -= len(self._frame.unused_data)
                self._frame = None
            self._input = self._input[used:]
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
