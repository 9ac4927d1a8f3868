"""Main weights of 32 bits beside weights of 16: as a copy, or as the bits that the rounding takes away.

A float32 is cut into the nearest bfloat16, of two the larger in size, and an int16 that says by how many units of its
last bit it was rounded. Together they are the float32 again, all its bits: a model in bfloat16 then holds half of each
main weight, and the optimizer the other half. With ties to even they would not be: of two float32 with one lower half
and one nearest bfloat16, one may have been rounded up to it and the other down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TIE = 0x8000
_NOT_A_NUMBER = 0x7FC0
# Elements that are cut at a time: what lies between the numbers and their halves takes some 10 bytes of each.
_BLOCK = 2**22


@dataclass(frozen=True)
class Halves:
    """Float32 numbers that `split_` has cut, to be indexed, viewed and written to as the tensor that they stand for.

    Attributes:
        upper: bfloat16.
        lower: int16, of the same shape.
    """

    upper: Tensor
    lower: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.upper.shape

    @property
    def device(self) -> torch.device:
        return self.upper.device

    def numel(self) -> int:
        return self.upper.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __getitem__(self, index: Any) -> Halves:
        return Halves(self.upper[index], self.lower[index])

    def view(self, shape: tuple[int, ...]) -> Halves:
        return Halves(self.upper.view(shape), self.lower.view(shape))

    def detach(self) -> Halves:
        return Halves(self.upper.detach(), self.lower.detach())

    def copy_(self, wide: Tensor) -> None:
        split_(wide.to(torch.float32), self.upper, self.lower)

    def joined(self) -> Tensor:
        """The numbers as a tensor, twice the memory of the upper half: to be called on parts."""
        return joined(self.upper, self.lower)


Numbers = Tensor | Halves


def narrow_(wide: Tensor, low_precision: Tensor) -> None:
    """Round main weights into those of the model: halves away from zero in bfloat16, else as torch does.

    Args:
        wide: float32 or float64.
        low_precision: of the same shape, receives them.
    """
    if low_precision.dtype == torch.bfloat16:
        for numbers, target in _blocks(wide, low_precision):
            target.copy_(_upper(numbers.to(torch.float32)))
    else:
        low_precision.copy_(wide)


def split_(wide: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Cut float32 numbers into `upper` bfloat16 and `lower` int16, of the same shape. A NaN loses its payload."""
    for numbers, top, rest in _blocks(wide, upper, lower):
        top.copy_(_upper(numbers))
        rest.copy_(numbers.view(torch.int32).to(torch.int16).masked_fill_(numbers.isnan(), 0))


def joined(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 numbers that `split_` has cut."""
    bits = (upper.view(torch.int16).to(torch.int32) << 16) + lower.to(torch.int32)
    return bits.view(torch.float32)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one shape, some rows at a time: about `_BLOCK` elements, or a row where that is more."""
    with_rows = [tensor if tensor.dim() else tensor.view(1) for tensor in tensors]
    rows = max(1, _BLOCK * len(with_rows[0]) // max(1, with_rows[0].numel()))
    yield from zip(*(torch.split(tensor, rows) for tensor in with_rows))


def _upper(wide: Tensor) -> Tensor:
    bits = (wide.view(torch.int32) + _TIE) >> 16
    return bits.to(torch.int16).masked_fill_(wide.isnan(), _NOT_A_NUMBER).view(torch.bfloat16)
