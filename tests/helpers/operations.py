"""Which operations of torch a piece of code runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class RecordedOperations(TorchDispatchMode):
    """The operations that run inside, by their names in full, and the tensors that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.outputs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        if isinstance(output, Tensor):
            self.outputs.append(output)
        return output
