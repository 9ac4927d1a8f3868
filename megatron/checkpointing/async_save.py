"""Saving in the background: a thread copies this rank's share while the training goes on, and writes the copy.

Note [When the copy is made]
The next iteration reads the weights and the optimizer from its start, and changes them at its end. So the copy is made
during its forward and backward passes, and only the update must wait for it: CheckFreq's two phases, snapshot and
persist (Mohan et al., FAST 2021, section 4). What is no tensor is written down in `start` already. On a GPU the copies
are queued on a stream of their own, behind all that the training had queued when it called `start`, and the thread
waits for each; so work that is queued after `wait_for_copy` cannot overtake them.

Note [Ranks that write in the background]
While threads write, the training uses the communicators, so the ranks speak through files in the temporary folder of
the save. The index of a rank's share gets its name when the share is on disk. Until then it has a temporary name and a
lock on it, which the kernel gives up when the process ends (`WholeFile`). A rank that fails leaves a file that says why
before it gives up its lock. So the first rank, whose thread waits for all the others, learns of each that it has
written, why it has failed, or that it is gone; and where the folder is, there is nothing else that it needs to know.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.checkpointing import storage
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.save import PreparedSave, Save
from megatron.checkpointing.shares import Share, share_of
from megatron.checkpointing.staging import StagingBuffer
from megatron.checkpointing.storage import PendingSlice
from megatron.config.problems import counted, listing
from megatron.core.agreement import agree, place_of, reason_of
from megatron.core.comm_group import CommGroup
from megatron.core.shard import NamedTensor
from megatron.core.whole_file import WholeFile, has_writer, whole_file

_POLL_SECONDS = 0.05
_LOOK_FOR_LOST_SECONDS = 2.0  # between two looks at the locks of all ranks


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint that is complete.

    Attributes:
        seconds: from the end of `start` to its being complete.
        notes: what `afterwards` has said.
    """

    iteration: int
    folder: Path
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NotWritten:
    """A checkpoint that is not there, and why."""

    iteration: int
    error: Exception


class AsyncSaver:
    """Saves in the background, one checkpoint at a time, from a buffer that is allocated once.

    `reserve`, `start` and `finish` are collectives; the rest is local.
    """

    def __init__(self, *, world: CommGroup, replicas: CommGroup) -> None:
        self._world = world
        self._replicas = replicas
        self._buffer = StagingBuffer()
        self._background: _Background | None = None
        self._untold: _Background | None = None  # the save that was started last, until its end is taken

    @property
    def writing(self) -> int | None:
        """The iteration of the save that was started, until it has ended; the first rank knows that before `finish`."""
        background = self._background
        return None if background is None or background.end is not None else background.save.iteration

    @property
    def reserved(self) -> int:
        """Bytes of the buffer."""
        return self._buffer.memory.numel()

    def reserve(self, tensors: Iterable[NamedTensor]) -> None:
        """Allocate the buffer for this rank's share of tensors like these, so that the first save finds it ready.

        Raises:
            CheckpointError: on all ranks: they cannot be saved.
        """
        agree(
            self._world,
            "preparing to save in the background",
            lambda: self._buffer.reserve(share_of(tensors, self._replicas)),
            raises=CheckpointError,
        )

    def start(
        self,
        root: str | os.PathLike[str],
        iteration: int,
        tensors: Iterable[NamedTensor],
        metadata: Mapping[str, Any],
        *,
        afterwards: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Begin a save; all is as in `save_checkpoint`, but that the tensors must not change until `wait_for_copy`.

        Args:
            afterwards: is called on the first rank when the checkpoint is complete, by its thread.

        Raises:
            CheckpointError: on all ranks, naming those that failed and why; nothing is being written then.
        """
        assert self._background is None, "the last save was not finished"
        save = Save(root=Path(root), iteration=iteration, rank=self._world.rank)
        background = None
        try:
            prepared, writers = save.prepare_on_all(tensors, metadata, world=self._world, replicas=self._replicas)
            background = _Background(save=prepared, writers=writers, afterwards=afterwards)
            agree(self._world, save.phase, lambda: self._make_ready(background), raises=CheckpointError)
        except Exception:
            if background is not None:
                background.discard_index_file()
            save.discard()
            raise
        self._background = self._untold = background
        background.thread.start()

    def wait_for_copy(self) -> None:
        """Wait until the tensors of the save that was started may change. A copy that failed is told at its end."""
        if self._background is not None:
            self._background.copied.wait()

    def finish(self) -> None:
        """Wait until the save that was started is complete, if one was.

        Raises:
            CheckpointError: on all ranks, naming those that failed and why.
        """
        background, self._background = self._background, None
        if background is None:
            return
        phase = background.save.phase
        try:
            agree(self._world, phase, background.wait_for_share, raises=CheckpointError)
            agree(self._world, phase, background.wait_for_end, raises=CheckpointError)
        except Exception as error:
            background.give_up()
            background.thread.join()
            background.end = NotWritten(iteration=background.save.iteration, error=error)
            raise

    def take_end(self) -> Written | NotWritten | None:
        """On the first rank, how the save that was started last has ended, finished or not; once, then None."""
        end = None if self._untold is None else self._untold.end
        if end is not None:
            self._untold = None
        return end

    def close(self, *, abandoned: Callable[[], bool], patience: float) -> Written | NotWritten | None:
        """Let the save that was started end when the ranks can agree on nothing any more.

        Args:
            abandoned: whether to give up, asked again and again.
            patience: seconds for which the first rank waits for others that are not known to be gone, once its own
                share is written.

        Returns: on the first rank, how it has ended, unless that was taken.
        """
        background = self._background
        if background is None:
            return None
        deadline = None
        while background.thread.is_alive():
            if deadline is None and background.share_ended.is_set():
                deadline = time.monotonic() + patience
            if abandoned() or (deadline is not None and time.monotonic() > deadline):
                background.give_up()
                break
            background.thread.join(_POLL_SECONDS)
        end = self.take_end()
        self._background = self._untold = None
        return end

    def _make_ready(self, background: _Background) -> None:
        """Have room for the share, and the lock that says that it will be written."""
        save = background.save
        if save.share.tensors:
            background.copy = self._buffer.snapshot(save.share)
            background.index_file = save.open_index_file()


@dataclass(kw_only=True)
class _Background:
    """One save in the background, seen from one rank. See Note [Ranks that write in the background]."""

    save: PreparedSave[PendingSlice]
    writers: Sequence[int]
    afterwards: Callable[[], Iterable[str]]
    copy: Callable[[], Share[PendingSlice]] = field(init=False)  # where there is an index file
    index_file: WholeFile | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    share_ended: threading.Event = field(default_factory=threading.Event)
    share_error: Exception | None = None
    end: Written | NotWritten | None = None
    thread: threading.Thread = field(init=False)
    _given_up: bool = False
    _publishing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    # ---- called by the thread that trains ----

    def wait_for_share(self) -> None:
        """Raise what this rank's share has failed of."""
        self.share_ended.wait()
        if self.share_error is not None:
            raise self.share_error

    def wait_for_end(self) -> None:
        """On the first rank, raise what the save has failed of."""
        self.thread.join()
        if isinstance(self.end, NotWritten):
            raise self.end.error

    def give_up(self) -> None:
        """See to it that nothing is published from now on."""
        with self._publishing:
            self._given_up = True

    def discard_index_file(self) -> None:
        if self.index_file is not None:
            self.index_file.discard()

    # ---- the thread that copies and writes ----

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._write_share()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self.share_error = error
        self.copied.set()  # or never will be
        self.share_ended.set()
        if self.save.rank == 0:
            self.end = self._end_on_first_rank(started)

    def _write_share(self) -> None:
        if self.index_file is None:
            return
        try:
            self._copy().write_shard(self.index_file.file)
            self.index_file.publish()
        except Exception as error:
            self._leave_word(error)
            raise
        finally:
            self.index_file.discard()

    def _copy(self) -> PreparedSave[PendingSlice]:
        """The save of the copy."""
        try:
            save = replace(self.save, share=self.copy())
        except (MemoryError, RuntimeError) as error:  # no room for what is copied in parts, on the host or the GPU
            raise CheckpointError(f"copying what is to be saved: {reason_of(error)}") from error
        self.copied.set()
        return save

    def _leave_word(self, error: Exception) -> None:
        """Say why, on a disk that may be full: what was written makes room for it."""
        folder, rank = self.save.folder, self.save.rank
        with suppress(OSError):
            (folder / storage.shard_file(rank)).unlink(missing_ok=True)
            with whole_file(folder / storage.failure_file(rank)) as file:
                file.write(f"{place_of(rank)}: {reason_of(error)}".encode())

    def _end_on_first_rank(self, started: float) -> Written | NotWritten:
        save = self.save
        try:
            failures = self._wait_for_others()
            if self.share_error is not None:
                failures.insert(0, f"{place_of(save.rank)}: {reason_of(self.share_error)}")
            if failures:
                raise CheckpointError(f"{save.phase} failed on {counted(len(failures), 'rank')}:\n{listing(failures)}")
            with self._publishing:
                self._check_wanted()
                save.publish(self.writers)
        except Exception as error:
            save.discard()
            return NotWritten(iteration=save.iteration, error=error)
        seconds = time.perf_counter() - started
        folder = storage.iteration_folder(save.root, save.iteration)
        return Written(iteration=save.iteration, folder=folder, seconds=seconds, notes=self._notes())

    def _notes(self) -> tuple[str, ...]:
        """What `afterwards` says; the checkpoint is complete whatever becomes of that."""
        try:
            return tuple(self.afterwards())
        except Exception as error:
            return (f"warning: after {self.save.phase}: {reason_of(error)}",)

    def _check_wanted(self) -> None:
        if self._given_up:
            raise CheckpointError(f"{self.save.phase} was given up")

    def _wait_for_others(self) -> list[str]:
        """Until each other rank has written its share, has said why not, or is gone. Returns: what failed, in words."""
        folder, failures = self.save.folder, []
        waiting, looked = set(self.writers) - {self.save.rank}, time.monotonic()
        unheard: set[int] = set()  # without a lock at the last look: on NFS a listing can be older than what it lists
        while True:
            lost: set[int] = set()
            if time.monotonic() - looked > _LOOK_FOR_LOST_SECONDS:
                looked = time.monotonic()
                silent = {rank for rank in waiting if not has_writer(folder / storage.index_file(rank))}
                lost, unheard = silent & unheard, silent
            names = set(os.listdir(folder))  # after the locks: who has given up one has left a file by then
            for rank in sorted(waiting):
                if storage.failure_file(rank) in names:
                    failures.append((folder / storage.failure_file(rank)).read_text(encoding="utf-8"))
                elif rank in lost and storage.index_file(rank) not in names:
                    failures.append(f"rank {rank} has ended, and left its share unwritten")
                elif storage.index_file(rank) not in names:
                    continue
                waiting.remove(rank)
            if not waiting:
                return failures
            self._check_wanted()
            time.sleep(_POLL_SECONDS)
