"""Files of `torch.save`, read without running what is in them."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpointing.slices import Box
from megatron.conversion.megatron_lm.pickles import StandIn, StridedTensor, read_pickle, read_torch_file
from megatron.conversion.portable import ConversionError, LazyTensor
from tests.helpers.numerics import assert_bitwise


class Executes:
    """What a pickle of it calls when it is loaded in the plain way."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def pickled(path: Path, program: bytes) -> Path:
    """A file of torch.save with a pickle of one's own."""
    torch.save({"weight": torch.arange(4.0)}, path)
    return with_member(path, "data.pkl", program)


def with_member(path: Path, name: str, data: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """The file with another member in place of one that ends so."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for member, old in members.items():
            replaced = member.endswith(name)
            archive.writestr(member, data if replaced else old, compression if replaced else zipfile.ZIP_STORED)
    return path


def test_tensors_of_every_type_and_form_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {
        "plain": base,
        "transposed": base.t(),
        "slice": base[1:3, 2:5],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "parameter": torch.nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(0))),
        **{str(dtype): torch.arange(5).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)},
        **{str(dtype): torch.arange(5).to(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)},
        **{str(dtype): torch.arange(5).to(dtype) for dtype in (torch.uint8, torch.bool)},
    }
    torch.save(state, tmp_path / "state.pt")
    found = read_torch_file(tmp_path / "state.pt")
    assert list(found) == list(state)
    for name, tensor in state.items():
        lazy = found[name]
        assert (lazy.shape, lazy.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert_bitwise(lazy.read(), tensor.detach().contiguous(), name)
        assert lazy.read().is_contiguous()


def test_a_part_of_a_tensor_is_read_alone(tmp_path: Path) -> None:
    whole = torch.arange(100.0)
    state = {"flat": whole[10:], "matrix": whole.view(10, 10), "columns": whole.view(10, 10).t(), "slice": whole[::3]}
    torch.save(state, tmp_path / "state.pt")
    found = read_torch_file(tmp_path / "state.pt")
    assert all(isinstance(tensor, StridedTensor) for tensor in found.values())
    flat = found["flat"].part(Box(offset=(5,), shape=(6,))).viewed((2, 3))
    assert_bitwise(flat.read(), torch.arange(15.0, 21.0).view(2, 3))
    for name in ("matrix", "columns"):
        for box in (
            Box(offset=(2, 0), shape=(3, 10)),
            Box(offset=(1, 4), shape=(9, 2)),
            Box(offset=(4, 4), shape=(0, 1)),
        ):
            assert_bitwise(found[name].part(box).read(), state[name][box.index].contiguous(), f"{name} {box}")
    assert_bitwise(found["slice"].part(Box(offset=(3,), shape=(4,))).read(), state["slice"][3:7].contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensor_is_read_into_a_place_of_any_form(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = [
        torch.arange(12).to(dtype).view(3, 4),
        torch.arange(12).to(dtype).view(4, 3).t(),
        torch.ones((), dtype=dtype),
    ]
    torch.save(tensors, tmp_path / "state.pt")
    for stored, tensor in zip(read_torch_file(tmp_path / "state.pt"), tensors):
        for place in (torch.zeros(tensor.shape, dtype=dtype), torch.zeros(*tensor.shape, 2, dtype=dtype)[..., 1]):
            stored.read_into(place)
            assert_bitwise(place.contiguous(), tensor.contiguous())


def test_plain_values_are_as_they_were_and_foreign_objects_say_what_they_were(tmp_path: Path) -> None:
    state = {
        "numbers": [1, -2, 2**70, 0.5, True, None],
        "texts": ("a", b"bytes", "é"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "counts": collections.defaultdict(list, x=[1]),
        "set": {1, 2},
        "namespace": argparse.Namespace(num_layers=2, dtype=torch.bfloat16),
        "random": np.random.RandomState(0).get_state(),
    }
    torch.save(state, tmp_path / "state.pt")
    found = read_torch_file(tmp_path / "state.pt")
    for name in ("numbers", "texts", "ordered", "counts", "set"):
        assert found[name] == state[name]
    namespace = found["namespace"]
    assert isinstance(namespace, StandIn) and namespace.name == "argparse.Namespace"
    assert namespace.fields == {"num_layers": 2, "dtype": torch.bfloat16}
    assert found["random"][0] == "MT19937" and isinstance(found["random"][1], StandIn)


def test_a_plain_pickle_is_read_alike(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(pickle.dumps({"size": torch.Size([2, 3]), "of": torch.float32}, protocol=4))
    assert read_pickle(tmp_path / "index") == {"size": (2, 3), "of": torch.float32}


ATTACKS: dict[str, Callable[[Path], object]] = {
    "a command": lambda mark: Executes(os.system, f"touch {mark}"),
    "a builtin": lambda mark: Executes(eval, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Executes(open, str(mark), "w"),
    "inside of a list in a dictionary": lambda mark: {"model": [Executes(os.system, f"touch {mark}")]},
    "as the key of a dictionary": lambda mark: {Executes(os.system, f"touch {mark}"): 1},
    "as the state of a namespace": lambda mark: argparse.Namespace(x=Executes(os.system, f"touch {mark}")),
    "torch.load": lambda mark: Executes(torch.load, str(mark)),
    "pickle.loads": lambda mark: Executes(pickle.loads, pickle.dumps(Executes(os.system, f"touch {mark}"))),
    "a method by its path": lambda mark: Executes(Path.touch, mark),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(attack: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    program = pickle.dumps(ATTACKS[attack](mark), protocol=protocol)
    for path in (pickled(tmp_path / "state.pt", program), tmp_path / "index"):
        (tmp_path / "index").write_bytes(program)
        with pytest.raises(
            ConversionError, match=r"no place in a checkpoint; nothing of the file was run|not callable"
        ):
            (read_torch_file if path.suffix else read_pickle)(path)
    assert not mark.exists()


def stack_global(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


# Instructions of pickles: \x80 the protocol, c a global, ( a mark, t a tuple, R a call, b the state of an object,
# \x81 a new object, q and r put into the memory, h takes out of it, N is None, } a dictionary, . the end.
PROGRAMS: dict[str, tuple[bytes, str]] = {
    "a name in two parts": (b"\x80\x04" + stack_global("os", "system") + b".", "'os.system'"),
    "an attribute of an allowed module": (b"\x80\x04" + stack_global("torch", "serialization.load") + b".", "no place"),
    "a path below an allowed name": (
        b"\x80\x04" + stack_global("argparse", "Namespace.__init__") + b".",
        "'argparse.Namespace.__init__'",
    ),
    "a module of a name with dots": (b"\x80\x02cos.path\nos.system\n.", "no place"),
    "a function that is rebuilt by state": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__code__NsN\x86b.",
        "changes what is not its own",
    ),
    "an allowed function with other arguments": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NNNtR.",
        "can not be read",
    ),
    "an encoding that runs code": (
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.",
        "an encoding",
    ),
    "getattr of a module's class": (
        b"\x80\x02c__builtin__\ngetattr\n(ctorch\nfloat32\nX\x03\x00\x00\x00mrotR.",
        "getattr of",
    ),
    "a numbered global": (b"\x80\x02\x82\x01.", "an instruction that no checkpoint has, EXT1"),
    "an instance of the first protocol": (b"(ios\nsystem\n.", "an instruction that no checkpoint has, INST"),
    "an object of the first protocol": (b"(cargparse\nNamespace\no.", "an instruction that no checkpoint has, OBJ"),
    "a memory of two thousand million places": (b"\x80\x02Nr\xff\xff\xff\x7f.", "as number 2147483647"),
    "a memory that was not filled": (b"\x80\x02h\x05.", "can not be read"),
    "a stack that is empty": (b"\x80\x02R.", "can not be read"),
    "an end before the end": (b"\x80\x02}q\x00X\x10\x00\x00\x00abc", "can not be read"),
    "an unknown instruction": (b"\x80\x02\xff.", "can not be read"),
    "a protocol to come": (b"\x80\x63N.", "can not be read"),
    "nothing": (b"", "can not be read"),
    "a reference that is none": (b"\x80\x02N\x51.", "can not be read"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_torch_does_not_write_is_refused(name: str, tmp_path: Path) -> None:
    program, text = PROGRAMS[name]
    with pytest.raises(ConversionError, match=text):
        read_torch_file(pickled(tmp_path / "state.pt", program))


def test_what_stands_for_a_class_takes_any_state_and_does_nothing_with_it(tmp_path: Path) -> None:
    """The name is a class of this very package, which is not looked up."""
    program = b"\x80\x02cmegatron.conversion.megatron_lm.pickles\nStandIn\n(NtR}X\x0c\x00\x00\x00__setstate__Nsb."
    found = read_torch_file(pickled(tmp_path / "state.pt", program))
    assert isinstance(found, StandIn) and type(found) is not StandIn
    assert found.arguments == (None,) and found.fields == {"__setstate__": None}


def tensor_program(
    offset: int = 0, size: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,), **other: Any
) -> bytes:
    """A pickle of one tensor with numbers of one's own."""
    settings = {"dtype": torch.FloatStorage, "key": "0", "length": 4} | other
    buffer = io.BytesIO()

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            if isinstance(thing, Storage):
                return ("storage", settings["dtype"], settings["key"], "cpu", settings["length"])
            return None

        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, torch.Tensor):
                arguments = (Storage(), offset, size, strides, False, collections.OrderedDict())
                return torch._utils._rebuild_tensor_v2, arguments
            return NotImplemented

    Pickler(buffer, protocol=2).dump(torch.zeros(1))
    return buffer.getvalue()


TENSORS: dict[str, tuple[bytes, str]] = {
    "past the end": (tensor_program(size=(5,)), r"of shape \[5\] lies past the end of its 4 numbers"),
    "from an offset past the end": (tensor_program(offset=2, size=(3,)), "lies past the end"),
    "of an absurd shape": (tensor_program(size=(10**12, 10**6), strides=(10**6, 1)), "lies past the end"),
    "of a shape that repeats one number": (tensor_program(size=(10**15,), strides=(0,)), "lies past the end"),
    "of a negative offset": (tensor_program(offset=-1), "whose shape is none"),
    "of a negative size": (tensor_program(size=(-4,)), "whose shape is none"),
    "of a negative stride": (tensor_program(strides=(-1,)), "whose shape is none"),
    "of more sizes than strides": (tensor_program(size=(2, 2)), "whose shape is none"),
    "of more dimensions than any has": (tensor_program(size=(1,) * 17, strides=(1,) * 17), "whose shape is none"),
    "of dimensions that it takes minutes to count": (
        tensor_program(size=(2**60,) * 20_000, strides=(1,) * 20_000),
        "whose shape is none",
    ),
    "of a size that no memory has": (tensor_program(size=(2**60 + 1, 0), strides=(0, 1)), "whose shape is none"),
    "of a storage that is longer than its file": (tensor_program(length=5), "should hold 5 numbers"),
    "of a wider type than the file has": (tensor_program(dtype=torch.DoubleStorage), "should hold 4 numbers"),
    "of a storage that is not there": (tensor_program(key="7"), "has no numbers data/7"),
    "of a storage elsewhere": (tensor_program(key="../data.pkl"), "has no numbers"),
    "of a storage that is no storage": (tensor_program(dtype=argparse.Namespace), "no storage"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    program, text = TENSORS[name]
    with pytest.raises(ConversionError, match=text):
        read_torch_file(pickled(tmp_path / "state.pt", program))


def test_the_crafted_tensors_differ_from_a_good_one_by_what_they_say(tmp_path: Path) -> None:
    found = read_torch_file(pickled(tmp_path / "state.pt", tensor_program()))
    assert_bitwise(found.read(), torch.arange(4.0))


def stream(state: object, path: Path) -> None:
    """Write a file as torch did before 1.6."""
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(path)


@pytest.mark.parametrize("write", [torch.save, stream])
def test_a_file_cut_at_any_place_is_refused(write: Callable[[object, Path], None], tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    write({"other": torch.arange(3), "weight": torch.arange(100.0)}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConversionError, match=r"cut\.pt"):
            read_torch_file(path)["weight"].read()


@pytest.mark.parametrize("write", [torch.save, stream])
def test_a_file_with_changed_bytes_never_does_anything_but_read_or_refuse(
    write: Callable[[object, Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "changed.pt"
    write({"weight": torch.arange(8.0), "args": argparse.Namespace(a=1)}, path)
    whole = path.read_bytes()
    random = np.random.RandomState(3)
    refused = 0
    for _ in range(300):
        changed = bytearray(whole)
        changed[random.randint(len(whole))] = random.randint(256)
        path.write_bytes(changed)
        try:
            found = read_torch_file(path)
            if isinstance(found, dict) and isinstance(found.get("weight"), LazyTensor):
                found["weight"].read()
        except ConversionError:
            refused += 1
    assert refused > 50


def test_a_file_that_becomes_shorter_is_noticed_when_a_tensor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(torch.arange(1000.0), path)
    lazy = read_torch_file(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ConversionError, match="has become shorter"):
        lazy.read()


def test_a_bit_that_has_flipped_is_noticed_when_a_tensor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"first": torch.arange(1000.0), "second": torch.arange(1000.0, 2000.0)}, path)
    content = bytearray(path.read_bytes())
    content[content.find(torch.arange(1500.0, 1510.0).numpy().tobytes()) + 3] ^= 0x40
    path.write_bytes(content)
    tensors = read_torch_file(path)
    assert_bitwise(tensors["first"].read(), torch.arange(1000.0))
    with pytest.raises(ConversionError, match=r"state\.pt: is damaged: .* another checksum"):
        tensors["second"].read()


def test_compressed_members_are_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "state.pt")
    bomb = with_member(tmp_path / "state.pt", "data.pkl", b"\x00" * 10_000_000, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 100_000
    with pytest.raises(ConversionError, match=r"data\.pkl is compressed"):
        read_torch_file(bomb)


def test_a_directory_that_names_more_bytes_than_there_are_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(torch.arange(4.0), path)
    content = bytearray(path.read_bytes())
    entry = content.rfind(b"PK\x01\x02", 0, content.find(b"data/0", content.find(b"PK\x01\x02")))
    content[entry + 20 : entry + 28] = struct.pack("<II", 2**30, 2**30)
    path.write_bytes(content)
    with pytest.raises(ConversionError, match="reaches past the end"):
        read_torch_file(path)


def test_numbers_of_the_other_byte_order_are_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "state.pt")
    with pytest.raises(ConversionError, match="high byte"):
        read_torch_file(with_member(tmp_path / "state.pt", "byteorder", b"big"))


def test_the_form_before_torch_1_6_is_read_alike(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {
        "plain": base,
        "shared": base[1:3, 2:5],
        "narrow": torch.arange(5).bfloat16(),
        "numbers": torch.arange(7),
        "namespace": argparse.Namespace(num_layers=2),
    }
    stream(state, tmp_path / "old.pt")
    found = read_torch_file(tmp_path / "old.pt")
    for name in ("plain", "shared", "narrow", "numbers"):
        tensor = state[name]
        assert isinstance(tensor, torch.Tensor)
        assert_bitwise(found[name].read(), tensor.contiguous(), name)
    assert found["namespace"].fields == {"num_layers": 2}


def test_that_form_runs_nothing_either(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    stream({"model": Executes(os.system, f"touch {mark}"), "weight": torch.arange(3.0)}, tmp_path / "old.pt")
    with pytest.raises(ConversionError, match="no place in a checkpoint; nothing of the file was run"):
        read_torch_file(tmp_path / "old.pt")
    assert not mark.exists()


def test_what_is_no_file_of_torch_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("weights")
    with pytest.raises(ConversionError, match=r"text\.pt: is no file of torch\.save"):
        read_torch_file(tmp_path / "text.pt")


def test_a_file_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    for read in (read_torch_file, read_pickle):
        with pytest.raises(ConversionError, match=r"nothing\.pt: can not be read .* No such file or directory"):
            read(tmp_path / "nothing.pt")
