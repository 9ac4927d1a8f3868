"""Files of `torch.save`, of which nothing is run.

A pickle is a program: it names functions and calls them. Here a name means what a closed table says. What rebuilds a
tensor gives a `LazyTensor`, whose bytes are read when they are asked for; a class of Megatron-LM, or of what its
checkpoints are written with, gives a `StandIn` that keeps its arguments and its state; every other name is an error.
The numbers in a file are believed as far as the file is long.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor

from megatron.checkpointing.slices import Box
from megatron.conversion.portable import ConversionError, LazyTensor

# What pickles of tensors, containers and records are made of. Left out are instructions that no such pickle has:
# those of the first protocols, and the registry of numbered names, which other code of this process may have filled.
_INSTRUCTIONS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET"),
        *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "BINPERSID"),
        *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    )
)
_DTYPES: Mapping[str, torch.dtype] = {
    "torch.float64": torch.float64,
    "torch.float32": torch.float32,
    "torch.float16": torch.float16,
    "torch.bfloat16": torch.bfloat16,
    "torch.int64": torch.int64,
    "torch.int32": torch.int32,
    "torch.int16": torch.int16,
    "torch.int8": torch.int8,
    "torch.uint8": torch.uint8,
    "torch.bool": torch.bool,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.storage.UntypedStorage": torch.uint8,
}
# Classes and functions whose objects are kept as they were described, and never made.
_STAND_INS = frozenset(
    (
        *("argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "_io.BytesIO"),
        *("pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath"),
        *("numpy.ndarray", "numpy.dtype", "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar"),
        *("numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar"),
        *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.device"),
        *("torch.serialization._get_layout", "torch.torch_version.TorchVersion"),
    )
)
_STAND_IN_PACKAGES = (
    *("megatron.", "torch.distributed.checkpoint.", "torch.distributed._shard.", "transformer_engine."),
    *("nvidia_resiliency_ext.", "apex.", "deepspeed."),
)
# How a file began before torch 1.6, and the version of that form.
_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_STREAM_VERSION = 1001
_NO_FILE = "can not be read as a file of torch.save"
_CHECKED_AT_ONCE = 2**20
_LOCAL_HEADER = 30  # bytes of a zip's header before the member's name
# Of a tensor: more has none, and to multiply the sizes of ten thousand dimensions takes minutes.
_MOST_DIMENSIONS, _MOST_ELEMENTS = 16, 2**60


class StandIn:
    """Where an object of a foreign class was: what it was made from, and its state. Its class is never looked up."""

    __slots__ = ("arguments", "state")
    name: ClassVar[str]
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> StandIn:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> Mapping[str, Any]:
        """Its attributes, of an object that keeps them in the plain way; else none."""
        return self.state if isinstance(self.state, dict) else {}


class _Sealed:
    """What a pickle can hold, and not change."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes what is not its own")


class _Record(dict[Any, Any], _Sealed):
    """An `OrderedDict` or a `defaultdict`, whose attributes are dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:  # type: ignore[override]
        pass


class _Function(_Sealed):
    """A function of the table."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)


def _become_shorter(path: Path | str) -> ConversionError:
    return ConversionError(f"{path}: ends inside of a tensor; it has become shorter since it was opened")


@dataclass(kw_only=True)
class _Bytes:
    """What a storage has in a file: `size` bytes from `start` on.

    Attributes:
        checksum: CRC-32 of all of them, as the archive has it; None where there is none, or once they agreed with it.
    """

    start: int
    size: int
    checksum: int | None = None

    def check(self, file: IO[bytes]) -> None:
        """Read all of them at the first use: a bit that has flipped would be a weight like any other."""
        if self.checksum is None:
            return
        file.seek(self.start)
        found, left = 0, self.size
        while data := file.read(min(left, _CHECKED_AT_ONCE)):
            found, left = zlib.crc32(data, found), left - len(data)
        if left:
            raise _become_shorter(file.name)
        if found != self.checksum:
            raise ConversionError(
                f"{file.name}: is damaged: bytes {self.start} to {self.start + self.size} have another checksum than "
                "the archive says"
            )
        self.checksum = None


@dataclass(frozen=True, kw_only=True)
class _Storage(_Sealed):
    """Numbers in a file: `length` of a dtype."""

    path: Path
    place: _Bytes
    dtype: torch.dtype
    length: int

    def fill(self, numbers: Tensor, first: int) -> None:
        """Read the numbers from one on into a contiguous tensor of their type, as many as it has."""
        data = numbers.flatten().view(torch.uint8).numpy().data
        with self.path.open("rb") as file:
            self.place.check(file)
            file.seek(self.place.start + first * self.dtype.itemsize)
            got = file.readinto(data)
        if got != len(data):
            raise _become_shorter(self.path)


@dataclass(frozen=True, kw_only=True)
class StridedTensor(LazyTensor, _Sealed):
    """A tensor in a file: of a storage the elements from `first` on, in steps of `strides`."""

    read: Callable[[], Tensor] = field(init=False, repr=False)
    source: str = field(init=False, repr=False)
    storage: _Storage
    first: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "read", self._read)
        object.__setattr__(self, "source", str(self.storage.path))

    def _read(self) -> Tensor:
        span = 0 if 0 in self.shape else 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides))
        numbers = torch.empty(span, dtype=self.dtype)
        self.storage.fill(numbers, self.first)
        return numbers.as_strided(self.shape, self.strides).contiguous()

    def read_into(self, place: Tensor) -> None:
        """Read it into a tensor of its shape and type, without a second one in memory if both are in one row."""
        if place.is_contiguous() and self.strides == contiguous_strides(self.shape):
            self.storage.fill(place, self.first)
        else:
            place.copy_(self.read())

    def part(self, box: Box) -> StridedTensor:
        """The elements in a box of it."""
        assert Box.whole(self.shape).contains(box), (self.shape, box)
        first = self.first + sum(offset * step for offset, step in zip(box.offset, self.strides))
        return replace(self, shape=box.shape, first=first)

    def viewed(self, shape: tuple[int, ...]) -> StridedTensor:
        """Elements in a row in another shape."""
        assert self.strides == (1,) and self.shape == (math.prod(shape),), (self.shape, self.strides, shape)
        return replace(self, shape=shape, strides=contiguous_strides(shape))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Steps, in elements, of a tensor whose elements lie one after the other."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def read_torch_file(path: Path, *, start: int = 0, length: int | None = None) -> Any:
    """What `torch.save` wrote to a file, or to a part of one: containers, plain values, `LazyTensor`s and `StandIn`s.

    Args:
        start, length: the bytes of the part; to the end of the file when not given.

    Raises:
        ConversionError: it is no such file, is damaged, or names what has no place in a checkpoint.
    """
    with errors_named(path, _NO_FILE):
        return _read_file(path, start, length)


def read_pickle(path: Path) -> Any:
    """A plain pickle, as the index of a `torch.distributed.checkpoint` is, with `StandIn`s for its records.

    Raises:
        ConversionError: as for `read_torch_file`.
    """
    with errors_named(path, _NO_FILE):
        return _Unpickler(path, path.read_bytes(), {}).load()


class _NamedError(ConversionError):
    """One that names its source."""


@contextmanager
def errors_named(source: Path, problem: str) -> Iterator[None]:
    """Makes of every error in the block one that names its source, once: the first that it comes by.

    Args:
        problem: what an error that nobody foresaw means. A file that somebody made up can cause any.

    Raises:
        ConversionError: for any error.
    """
    try:
        yield
    except _NamedError:
        raise
    except ConversionError as error:
        raise _NamedError(f"{source}: {error}") from error
    except Exception as error:
        raise _NamedError(f"{source}: {problem}: {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    """What an error says, as far as in words: a value from a file can be larger than the memory when it is shown."""
    return " ".join([type(error).__name__, *(part for part in error.args if isinstance(part, str))])


def _read_file(path: Path, start: int, length: int | None) -> Any:
    size = path.stat().st_size
    length = size - start if length is None else length
    if start < 0 or length < 0 or start + length > size:
        raise ConversionError(f"bytes {start} to {start + length} of it are asked for, and it has {size}")
    with path.open("rb") as file:
        window = _Window(file, start, length)
        if zipfile.is_zipfile(window):
            program, storages = _open_archive(window, start)
            return _Unpickler(path, program, storages).load()
        window.seek(0)
        if window.read(len(_MAGIC)) == _MAGIC:
            window.seek(0)
            program, storages = _open_stream(path, window, start)
            return _Unpickler(path, program, storages).load()
    raise ConversionError("is no file of torch.save: neither a zip archive, nor what torch wrote before 1.6")


def _open_archive(window: _Window, start: int) -> tuple[bytes, dict[str, _Bytes]]:
    """The pickle of a zip archive, and where in the file the bytes of each storage are."""
    with zipfile.ZipFile(window) as archive:
        members = {member.filename: member for member in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ConversionError(f"holds {len(pickles)} files <name>/data.pkl, and torch.save writes one")
        root = pickles[0].removesuffix("data.pkl")
        for name, member in members.items():
            if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                raise ConversionError(f"{name} is compressed, and torch.save compresses nothing")
            if member.header_offset + _LOCAL_HEADER + member.file_size > window.length:
                raise ConversionError(f"{name} reaches past the end of the file")
        order = f"{root}byteorder"
        if order in members and archive.read(order) != b"little":
            raise ConversionError("its numbers begin with the high byte, and those of this machine do not")
        program = archive.read(pickles[0])
    storages = {
        name.removeprefix(f"{root}data/"): _Bytes(
            start=start + _data_offset(window, member), size=member.file_size, checksum=member.CRC
        )
        for name, member in members.items()
        if name.startswith(f"{root}data/")
    }
    return program, storages


def _open_stream(path: Path, window: _Window, start: int) -> tuple[bytes, dict[str, _Bytes]]:
    """The same of a file from before torch 1.6: five pickles, and then each storage after its number of elements.

    The pickles are a magic number, a version, facts about the machine, what was saved, and the keys of the storages in
    their order.
    """
    programs = []
    for _ in range(5):
        begin = window.tell()
        _check_instructions(cast(IO[bytes], window))
        end = window.tell()
        window.seek(begin)
        programs.append(window.read(end - begin))
    _, version, machine, saved, keys = programs
    facts = _Unpickler(path, machine, {}).load()
    if _Unpickler(path, version, {}).load() != _STREAM_VERSION or facts.get("little_endian") is not True:
        raise ConversionError("is of a version of torch, or of a machine, that is not known here")
    sizes = _StorageSizes(path, saved).sizes()
    storages = {}
    for key in _Unpickler(path, keys, {}).load():
        count = int.from_bytes(window.read(8), "little", signed=True)
        size = count * sizes[key]
        if size < 0 or window.tell() + size > window.length:
            raise ConversionError(f"data/{key} reaches past the end of the file")
        storages[key] = _Bytes(start=start + window.tell(), size=size)
        window.seek(size, os.SEEK_CUR)
    return saved, storages


def _data_offset(window: _Window, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: after its own header, which may be longer than the one in the directory."""
    window.seek(member.header_offset)
    header = window.read(_LOCAL_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise ConversionError(f"{member.filename} has no header where the directory of the archive says")
    offset = (
        member.header_offset
        + _LOCAL_HEADER
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
    )
    if offset + member.file_size > window.length:
        raise ConversionError(f"{member.filename} reaches past the end of the file")
    return offset


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self.length = length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("a position before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self._position)]
        self._file.seek(self._start + self._position)
        got = self._file.readinto(view)
        self._position += got
        return got


class _Unpickler(pickle.Unpickler):
    """Runs the instructions of a pickle, with the names of the closed table.

    Args:
        path: the file.
        storages: by key, what a storage has in the file.
    """

    def __init__(self, path: Path, program: bytes, storages: Mapping[str, _Bytes]) -> None:
        _check_instructions(io.BytesIO(program))
        super().__init__(io.BytesIO(program))
        self._path = path
        self._storages = storages
        self._stand_ins: dict[str, type[StandIn]] = {}
        self._functions: Mapping[str, _Function] = {
            "torch._utils._rebuild_tensor_v2": _Function(self._tensor),
            "torch._utils._rebuild_parameter": _Function(lambda data, *_: data),
            "torch._tensor._rebuild_from_type_v2": _Function(self._typed_tensor),
            "torch.Size": _Function(lambda sizes: tuple(sizes)),
            "collections.OrderedDict": _Function(lambda pairs=(): _Record(pairs)),
            "collections.defaultdict": _Function(lambda *_: _Record()),
            "_codecs.encode": _Function(_latin),
            "builtins.set": _Function(lambda items=(): set(items)),
            "builtins.getattr": _Function(_enum_member),
            "builtins.list": _Function(list),
            "builtins.dict": _Function(lambda *_: _Record()),
        }

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in self._functions:
            return self._functions[full]
        if full in _DTYPES:
            return _DTYPES[full]
        if full in _STAND_INS or full.startswith(_STAND_IN_PACKAGES):
            if full not in self._stand_ins:
                self._stand_ins[full] = type("StandIn", (StandIn,), {"__slots__": (), "name": full})
            return self._stand_ins[full]
        raise ConversionError(f"names {full!r}, which has no place in a checkpoint; nothing of the file was run")

    def persistent_load(self, key: Any) -> _Storage:
        kind, dtype, name, _, length, *view = key
        if kind != "storage" or type(name) is not str or not isinstance(dtype, torch.dtype) or not _is_size(length):
            raise pickle.UnpicklingError("it refers to something outside of it that is no storage")
        if view not in ([], [None]):
            raise ConversionError(f"data/{name} is a part of another storage, which no checkpoint has")
        if name not in self._storages:
            raise ConversionError(f"has no numbers data/{name}, which a tensor refers to")
        place = self._storages[name]
        if length * dtype.itemsize > place.size:
            raise ConversionError(f"data/{name} should hold {length} numbers of {dtype}, and has {place.size} bytes")
        return _Storage(path=self._path, place=place, dtype=dtype, length=length)

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> LazyTensor:
        """What `torch._utils._rebuild_tensor_v2` does, if all its elements lie in the storage, and no more are there
        than it has: a few bytes that a stride of 0 repeats without end would not fit into the memory."""
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("a tensor without a storage")
        sizes, steps = tuple(shape), tuple(strides)
        if len(sizes) != len(steps) or not (_is_size(offset) and is_shape(sizes) and is_shape(steps)):
            raise pickle.UnpicklingError("a tensor whose shape is none")
        span = offset + 1 + sum((size - 1) * step for size, step in zip(sizes, steps)) if 0 not in sizes else offset
        if span > storage.length or math.prod(sizes) > storage.length:
            raise ConversionError(f"a tensor of shape {list(sizes)} lies past the end of its {storage.length} numbers")
        return StridedTensor(shape=sizes, dtype=storage.dtype, storage=storage, first=offset, strides=steps)

    def _typed_tensor(self, function: Any, _type: Any, arguments: Any, _state: Any) -> LazyTensor:
        """A tensor with attributes, which are dropped."""
        if function is not self._functions["torch._utils._rebuild_tensor_v2"]:
            raise pickle.UnpicklingError("a tensor of a kind that has no place in a checkpoint")
        return self._tensor(*arguments)


class _StorageSizes(_Unpickler):
    """Bytes of an element in each storage that a pickle refers to, from what it says of their types."""

    def __init__(self, path: Path, program: bytes) -> None:
        super().__init__(path, program, {})
        self._sizes: dict[str, int] = {}

    def persistent_load(self, key: Any) -> _Storage:
        name, dtype, length = key[2], key[1], key[4]
        self._sizes[name] = dtype.itemsize
        return _Storage(path=self._path, place=_Bytes(start=0, size=0), dtype=dtype, length=length)

    def sizes(self) -> dict[str, int]:
        self.load()
        return self._sizes


def _check_instructions(program: IO[bytes]) -> None:
    """Read to the end of a pickle. Refuse instructions that a checkpoint has no use for, and a memory of more places
    than there are instructions, all of which would be allocated."""
    for number, (instruction, argument, _) in enumerate(pickletools.genops(program)):
        if instruction.name not in _INSTRUCTIONS:
            raise ConversionError(f"has an instruction that no checkpoint has, {instruction.name}")
        if instruction.name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > number:
            raise ConversionError(f"remembers a value as number {argument}, with {number} values before it")


def is_shape(sizes: tuple[Any, ...]) -> bool:
    """Whether these can be sizes of a tensor, which are counted with: few of them, and none beyond any memory."""
    return len(sizes) <= _MOST_DIMENSIONS and all(map(_is_size, sizes))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_ELEMENTS


def _latin(text: Any, encoding: Any = "latin1") -> bytes:
    """How bytes are written in a protocol without them."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("an encoding that no checkpoint has")
    return text.encode("latin1")


def _enum_member(kind: Any, name: Any) -> StandIn:
    """How some versions of Python write a member of an enumeration: by its name."""
    if not (isinstance(kind, type) and issubclass(kind, StandIn)):
        raise pickle.UnpicklingError("getattr of what is no enumeration")
    return kind(name)
