"""A measurement of what is kept between forward and backward: the saved tensors of autograd, each storage once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """A saved tensor, counted as long as the graph holds it."""

    __slots__ = ("_measure", "_place", "tensor")

    def __init__(self, tensor: Tensor, measure: SavedBytes) -> None:
        self.tensor = tensor
        self._measure = measure
        self._place = tensor.untyped_storage().data_ptr()
        measure._add(self._place, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        self._measure._remove(self._place)


class SavedBytes:
    """A context in which the bytes that autograd keeps are counted.

    A view counts as the whole storage that it keeps alive, and a storage that several operations save counts once.
    What the backward has freed counts no more. What `torch.utils.checkpoint` computes again is never kept by the graph,
    so it does not count; the inputs that it starts from do, but not those of which each rank keeps a part
    (`--distribute-saved-activations`): the recomputation holds these itself.

    Args:
        parameters: they are in memory anyway: what shares their storage is left out.

    Attributes:
        bytes: what is kept now.
        peak: the most that was kept at once.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._lasting = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._uses: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self.bytes = self.peak = 0

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Kept:
        return _Kept(tensor, self)

    def _add(self, place: int, size: int) -> None:
        self._uses[place] += 1
        if self._uses[place] == 1 and place not in self._lasting:
            self._sizes[place] = size
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def _remove(self, place: int) -> None:
        self._uses[place] -= 1
        if self._uses[place] == 0:
            self.bytes -= self._sizes.pop(place, 0)
