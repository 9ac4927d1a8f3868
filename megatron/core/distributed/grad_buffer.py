"""One contiguous buffer of parameters and one of gradients, for all parameters of one dtype, cut into buckets.

Note [Slices]
~~~~~~~~~~~~~
The optimizer of a rank updates one slice of each bucket. Without the distributed optimizer that is the whole
bucket: gradients are all-reduced, and each data-parallel rank makes the same update. With it (ZeRO-1, Rajbhandari
et al. 2020) the data-parallel ranks have a slice each, of one length: gradients are reduce-scattered, after which
only the own slice is the sum and the rest means nothing; main parameters and optimizer state exist for the slice
alone; the updated slices are gathered. Both work in place in the buffers. Slices know nothing of the borders of
parameters: one may hold parts of many, or nothing but padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megatron.core import collectives
from megatron.core.collectives import Reduction
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import Numbers
from megatron.core.main_grad import forget, main_grad_of

# Each parameter starts on a multiple of this many elements: whole cache lines and whole vectors in any dtype,
# and any slice of the buffer that is cut on such a boundary is updated with the same bits as the whole.
ALIGNMENT = 64

NumbersT = TypeVar("NumbersT", bound=Numbers)


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


@dataclass(frozen=True, kw_only=True)
class EntrySlice:
    """Elements `first` to `stop` of a parameter, in row-major order: those that lie in a slice of a bucket.

    Attributes:
        start: index within the slice of the first of them.
    """

    entry: BufferEntry
    first: int
    stop: int
    start: int

    @property
    def parameter(self) -> nn.Parameter:
        return self.entry.parameter

    def view(self, flat: NumbersT) -> NumbersT:
        """The part of a flat tensor, as long as the slice, that belongs to these elements, [stop - first]."""
        return cast(NumbersT, flat[self.start : self.start + self.stop - self.first])


class Bucket:
    """A run of whole parameters of a buffer, reduced and gathered in one collective; see Note [Slices].

    Attributes:
        entries: the parameters, in order.
        start, stop: where the bucket lies in its buffer; the parameters end before `stop`, with zeros up to it.
        parameters, gradients: [stop - start] this run of the buffer.
        sharded: whether the slices of the data-parallel ranks are parts.
        late: whether some gradients must first be summed over the tensor-parallel group, once the backward is over.
        awaited_by_modules: whether it is left to the next forward pass to wait for its gather.
    """

    def __init__(
        self,
        entries: Sequence[BufferEntry],
        *,
        start: int,
        parameters: Tensor,
        gradients: Tensor,
        data_group: CommGroup,
        sharded: bool,
        late: bool,
        awaited_by_modules: bool,
    ) -> None:
        self.entries = tuple(entries)
        self.start, self.stop = start, start + parameters.numel()
        self.parameters, self.gradients = parameters, gradients
        self.data_group = data_group
        self.sharded = sharded
        self.late = late
        self.awaited_by_modules = awaited_by_modules
        self._reduction: dist.Work | None = None
        self._gather: dist.Work | None = None

    # ---- the slice ----

    def slice_of(self, flat: Tensor) -> Tensor:
        """What this rank's optimizer updates of a flat tensor as long as the bucket, a view."""
        return collectives.slice_of(flat, self.data_group) if self.sharded else flat

    def slice_entries(self) -> Iterator[EntrySlice]:
        """The parameters that have elements in the slice, with those."""
        length = (self.stop - self.start) // (self.data_group.size if self.sharded else 1)
        start = self.start + (self.data_group.rank * length if self.sharded else 0)
        for entry in self.entries:
            first, stop = max(entry.start, start), min(entry.stop, start + length)
            if first < stop:
                yield EntrySlice(entry=entry, first=first - entry.start, stop=stop - entry.start, start=first - start)

    # ---- its two collectives ----

    def start_reduction(self, op: Reduction) -> None:
        """Begin to reduce the gradients over the data-parallel group; once a step."""
        for entry in self.entries:
            main_grad_of(entry.parameter)  # those that got no gradient are zero, see Note [First gradients]
        reduce_ = collectives.reduce_scatter_ if self.sharded else collectives.all_reduce_
        self._reduction = reduce_(self.gradients, self.data_group, op, async_op=True)

    def finish_reduction(self) -> None:
        """Wait until the slice holds the reduced gradients."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    @property
    def is_gathering(self) -> bool:
        """Whether parameters of other ranks' slices may still be those before the last update."""
        return self._gather is not None

    def start_gather(self) -> None:
        """Begin to collect the slices that the other ranks have updated."""
        assert self._gather is None, "the last gather was not awaited"
        if self.sharded:
            self._gather = collectives.all_gather_(self.parameters, self.data_group, async_op=True)

    def finish_gather(self) -> None:
        """Wait until the parameters are whole."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            # What autograd has kept of them was read too early, and is then an error in its backward.
            increment_version([entry.parameter for entry in self.entries])


@dataclass(frozen=True, kw_only=True)
class BucketContent:
    """What is to lie in one bucket: parameters with their names, and whether it is `Bucket.late`."""

    named_parameters: Sequence[tuple[str, nn.Parameter]]
    late: bool = False


class GradBuffer:
    """Parameters of one dtype and their gradients, each set in one flat tensor.

    `parameter.data` and `parameter.main_grad` become views. The parameters lie in the order in which they are
    given. The elements between them are zero and stay zero.

    Attributes:
        buckets: runs of it, which tile it.
        parameters: [n] flat, in the dtype of the parameters; of a bucket that `is_gathering` the slices of other ranks
            may still be those before the last update.
        gradients: [n] flat, in `grad_dtype`.
    """

    def __init__(
        self,
        contents: Sequence[BucketContent],
        *,
        grad_dtype: torch.dtype,
        data_group: CommGroup,
        sharded: bool = False,
        awaited_by_modules: bool = False,
        bucket_multiple: int = ALIGNMENT,
    ) -> None:
        """
        Args:
            contents: of each bucket; all parameters have one dtype.
            sharded: each rank of `data_group` updates a slice of each bucket.
            awaited_by_modules: of each bucket.
            bucket_multiple: what the lengths of buckets are multiples of: of `ALIGNMENT`, for each slice.
        """
        first = contents[0].named_parameters[0][1]
        entries: list[list[BufferEntry]] = []
        ends: list[int] = []
        size = 0
        for content in contents:
            entries.append([])
            for name, parameter in content.named_parameters:
                assert parameter.dtype == first.dtype, f"{name} is {parameter.dtype} in a buffer of {first.dtype}"
                assert parameter.device == first.device, f"{name} is on {parameter.device}, others on {first.device}"
                entries[-1].append(BufferEntry(name=name, parameter=parameter, start=size))
                size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            begin = ends[-1] if ends else 0
            size = begin + -(-(size - begin) // bucket_multiple) * bucket_multiple
            ends.append(size)
        self.parameters = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(size, dtype=grad_dtype, device=first.device)
        self.buckets = tuple(
            Bucket(
                entries_of_bucket,
                start=start,
                parameters=self.parameters[start:stop],
                gradients=self.gradients[start:stop],
                data_group=data_group,
                sharded=sharded,
                late=content.late,
                awaited_by_modules=awaited_by_modules,
            )
            for content, entries_of_bucket, start, stop in zip(contents, entries, [0, *ends], ends)
        )
        for entry in self.entries:
            view = entry.view(self.parameters)
            view.copy_(entry.parameter.data)
            entry.parameter.data = view
            entry.parameter.main_grad = entry.view(self.gradients)  # type: ignore[attr-defined]

    @property
    def entries(self) -> tuple[BufferEntry, ...]:
        """The parameters in order."""
        return tuple(entry for bucket in self.buckets for entry in bucket.entries)

    def forget_gradients(self) -> None:
        """Let the gradient of each parameter count as zero, see Note [First gradients] in core/main_grad.py."""
        for entry in self.entries:
            forget(entry.parameter)
