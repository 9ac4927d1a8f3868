"""Files of `torch.save`, written one tensor after the other.

`torch.save` takes all tensors at once, so it holds them all. Here the description is written first, from shapes, and
each tensor follows, so that the one that is being written is in memory.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.pickles import contiguous_strides

_STORAGES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


@dataclass(frozen=True, kw_only=True)
class TensorToCome:
    """Stands for a tensor in what is saved, until it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class _StorageToCome:
    """The numbers of one, under their key in the archive."""

    key: str
    dtype: torch.dtype
    length: int


class TorchWriter:
    """A file as `torch.save` writes it: plain values at once, and then the tensors in their order."""

    def __init__(self, path: Path, state: Any) -> None:
        """
        Args:
            state: dictionaries, lists and plain values, with `TensorToCome` where tensors will be.

        Raises:
            OSError: the file can not be written.
        """
        program = io.BytesIO()
        pickler = _Pickler(program)
        pickler.dump(state)
        self._left = pickler.tensors
        self._file = path.open("xb")
        self._archive = torch._C.PyTorchFileWriter(self._file)
        try:
            for name, data in (("data.pkl", program.getvalue()), ("byteorder", sys.byteorder.encode())):
                self._archive.write_record(name, data, len(data))
        except BaseException:
            self._abandon()
            raise

    def write(self, tensor: Tensor) -> None:
        """The next tensor, of the shape and type that were said of it."""
        storage, expected = self._left.pop(0)
        assert (tuple(tensor.shape), tensor.dtype) == (expected.shape, expected.dtype), (tensor.shape, expected)
        whole = tensor.detach().contiguous()
        size = whole.numel() * whole.itemsize
        numbers = whole.untyped_storage()
        if numbers.nbytes() != size:
            numbers = whole.clone().untyped_storage()
        self._archive.write_record(f"data/{storage.key}", numbers, size)  # type: ignore[arg-type]

    def __enter__(self) -> TorchWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._abandon()
            return
        assert not self._left, f"{len(self._left)} tensors have not been written"
        try:
            self._archive.write_end_of_file()
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _abandon(self) -> None:
        """Close what has not been finished. The archive must be ended before: it ends itself when it is let go of, and
        with it the process where it can not write any more."""
        with suppress(Exception):
            self._archive.write_end_of_file()
        self._file.close()


class _Pickler(pickle.Pickler):
    """Describes tensors to come as torch describes tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[tuple[_StorageToCome, TensorToCome]] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageToCome):
            return None
        return ("storage", _STORAGES[value.dtype], value.key, "cpu", value.length)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TensorToCome):
            return NotImplemented
        storage = _StorageToCome(key=str(len(self.tensors)), dtype=value.dtype, length=math.prod(value.shape))
        self.tensors.append((storage, value))
        arguments: tuple[Any, ...] = (storage, 0, value.shape, contiguous_strides(value.shape), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments
