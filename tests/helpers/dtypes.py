"""Which types of numbers a program computes with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DtypesSeen(TorchDispatchMode):
    """Counts the floating-point tensors that operations read or make, by operation and dtype; backward included.

    Attributes:
        expected: how many have the dtype that all should have.
        others: those that have not, with their shapes.
        allowed: those of them inside `allowing`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.expected = 0
        self.others: Counter[str] = Counter()
        self.allowed: Counter[str] = Counter()
        self._count = self.others

    @contextmanager
    def allowing(self) -> Iterator[None]:
        """Other dtypes are allowed inside."""
        self._count = self.allowed
        try:
            yield
        finally:
            self._count = self.others

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                if leaf.dtype == self.dtype:
                    self.expected += 1
                else:
                    self._count[f"{function}: {leaf.dtype} {tuple(leaf.shape)}"] += 1
        return result
