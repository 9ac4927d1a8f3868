"""The copy of a rank's share from which it is written in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron.checkpointing.shares import Share
from megatron.checkpointing.storage import PendingSlice, copy_elements, size_of

_ALIGNMENT = 64


class StagingBuffer:
    """Host memory that is allocated, and touched so that its pages are there, once for all saves of a run."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, share: Share[PendingSlice]) -> None:
        """Have room for a share; pinned where it is copied from a GPU."""
        size = sum(_room(size_of(part)) for part in share.pending)
        if self.memory.numel() < size:
            on_gpu = any(part.tensor.device.type == "cuda" for part in share.pending)
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
            self.memory.zero_()

    def snapshot(self, share: Share[PendingSlice]) -> Callable[[], Share[PendingSlice]]:
        """What copies a share as it is now, to be called by another thread while nothing changes its tensors.

        The copy is of the same slices, and must be written before the next one is made.
        """
        self.reserve(share)
        moment = _moment(share)
        return lambda: self._copy(share, moment)

    def _copy(self, share: Share[PendingSlice], moment: torch.cuda.Event | None) -> Share[PendingSlice]:
        with self._following(moment):
            return Share(tensors=share.tensors, pending=self._copied(share))

    @contextmanager
    def _following(self, moment: torch.cuda.Event | None) -> Iterator[None]:
        """Have copies from a GPU, each of which its caller waits for, begin after a moment, beside all later work."""
        if moment is None:
            yield
            return
        if self._stream is None:
            # One for all saves: what the allocator has reserved for the work of a stream serves no other one.
            self._stream = torch.cuda.Stream(moment.device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield

    def _copied(self, share: Share[PendingSlice]) -> list[PendingSlice]:
        staged: list[PendingSlice] = []
        first = 0
        for run in _runs(share.pending):
            room = self.memory[first : first + run.size]
            first += _room(run.size)
            position = 0
            for part in run.parts:
                stop = position + size_of(part)
                values = room[position:stop].view(part.dtype).view(part.shape)
                staged.append(PendingSlice(key=part.key, tensor=values, box=part.box))
                position = stop
            if run.is_plain:
                # By the C library, which writes around the caches where it copies some hundred megabytes at once: one
                # core is as fast as the memory, and torch would take those that train.
                np.copyto(room.numpy(), run.bytes().numpy())
            else:
                (part,) = run.parts
                copy_elements(part.tensor, room.view(part.dtype))
        return staged


def _moment(share: Share[PendingSlice]) -> torch.cuda.Event | None:
    """On a GPU, the end of what has been queued there until now, and so of what has computed the share."""
    devices = {part.tensor.device for part in share.pending if part.tensor.device.type == "cuda"}
    if not devices:
        return None
    (device,) = devices
    moment: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return moment


def _room(size: int) -> int:
    """Bytes of the buffer for so many bytes: what comes next begins at a multiple that suits every dtype."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Slices that lie one after another in memory, as the parameters of an optimizer do; or one that does not.

    Attributes:
        is_plain: the values are a run of bytes of host memory.
    """

    parts: list[PendingSlice]
    is_plain: bool

    @property
    def size(self) -> int:
        return sum(map(size_of, self.parts))

    def bytes(self) -> Tensor:
        values = self.parts[0].tensor
        assert isinstance(values, Tensor)
        _, start = _place(self.parts[0])
        memory = torch.empty(0, dtype=torch.uint8)
        return memory.set_(values.untyped_storage(), start, (self.size,), (1,))


def _is_plain(part: PendingSlice) -> bool:
    values = part.tensor
    return isinstance(values, Tensor) and values.device.type == "cpu" and values.is_contiguous()


def _place(part: PendingSlice) -> tuple[int, int]:
    """Which memory a plain part is in, and where in it."""
    values = part.tensor
    assert isinstance(values, Tensor)
    return values.untyped_storage().data_ptr(), int(values.storage_offset()) * values.element_size()


def _follows(before: PendingSlice, part: PendingSlice) -> bool:
    storage_before, start_before = _place(before)
    return before.dtype == part.dtype and _place(part) == (storage_before, start_before + size_of(before))


def _runs(parts: Iterable[PendingSlice]) -> Iterator[_Run]:
    parts = list(parts)
    plain = sorted(filter(_is_plain, parts), key=_place)
    cuts = [0, *(i for i, pair in enumerate(pairwise(plain), start=1) if not _follows(*pair)), len(plain)]
    for first, stop in pairwise(cuts):
        if first < stop:
            yield _Run(parts=plain[first:stop], is_plain=True)
    for part in parts:
        if not _is_plain(part):
            yield _Run(parts=[part], is_plain=False)
