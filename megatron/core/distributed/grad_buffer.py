"""One contiguous buffer of parameters and one of gradients, for all parameters of one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

# Each parameter starts on a multiple of this many elements: whole cache lines and whole vectors in any dtype,
# and any slice of the buffer that is cut on such a boundary is updated with the same bits as the whole.
ALIGNMENT = 64


def main_grad_of(parameter: Tensor) -> Tensor:
    """The view into the gradient buffer in which the gradient of `parameter` is accumulated."""
    return cast(Tensor, parameter.main_grad)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class BufferEntry:
    """Where a parameter lies in its buffer.

    Attributes:
        name: name within the module, for messages. The global name is in the shard.
        start: index of its first element, a multiple of `ALIGNMENT`.
    """

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The part of a flat tensor, as long as the buffer, that belongs to this parameter, in its shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


class GradBuffer:
    """Parameters of one dtype and their gradients, each set in one flat tensor.

    `parameter.data` and `parameter.main_grad` become views. The parameters lie in the order in which they are
    given: `DistributedDataParallel` gives them in the reverse of `named_parameters()`, about the order in
    which a backward pass finishes their gradients. The elements between them are zero and stay zero.

    Attributes:
        entries: the parameters in order.
        parameters: [n] flat, in the dtype of the parameters.
        gradients: [n] flat, in `grad_dtype`.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], *, grad_dtype: torch.dtype) -> None:
        assert named_parameters, "a buffer of no parameters"
        first = named_parameters[0][1]
        entries = []
        size = 0
        for name, parameter in named_parameters:
            assert parameter.dtype == first.dtype, f"{name} is {parameter.dtype} in a buffer of {first.dtype}"
            assert parameter.device == first.device, f"{name} is on {parameter.device}, others on {first.device}"
            entries.append(BufferEntry(name=name, parameter=parameter, start=size))
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.entries = tuple(entries)
        self.parameters = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(size, dtype=grad_dtype, device=first.device)
        for entry in self.entries:
            view = entry.view(self.parameters)
            view.copy_(entry.parameter.data)
            entry.parameter.data = view
            entry.parameter.main_grad = entry.view(self.gradients)  # type: ignore[attr-defined]

    def zero_gradients(self) -> None:
        self.gradients.zero_()
