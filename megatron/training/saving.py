"""When a run saves, what becomes of a save that fails, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from megatron.checkpointing import AsyncSaver, CheckpointError, NotWritten, Retention, Written, save_checkpoint
from megatron.core.collectives import all_gather_object
from megatron.training.checkpoints import kept_of
from megatron.training.failures import launcher_gone
from megatron.training.initialize import MegatronContext
from megatron.training.metrics import StepReport
from megatron.training.run import Hook, Run
from megatron.training.save_folder import SaveFolder

_LONG_WAIT = 1.0  # seconds


class Saving(Hook):
    """A checkpoint every `--save-interval` iterations, and when the run ends before or at its last one.

    A save that fails is told and the training goes on, as the next one may go well; only the last one must.
    """

    def __init__(self, folder: SaveFolder, context: MegatronContext) -> None:
        wanted, state = context.config.checkpoint, context.state
        self._folder = folder
        self._context = context
        self._interval = wanted.save_interval
        self._retention = Retention(keep_last=wanted.keep_last, retain_interval=wanted.save_retain_interval)
        self._background = AsyncSaver(world=state.world, replicas=state.data_context) if wanted.async_save else None
        self._saved: int | None = None
        self._stood_still: float | None = None  # seconds until now, for a copy that is being made

    @property
    def staging_bytes(self) -> int:
        """Memory of the host for what is written in the background."""
        return 0 if self._background is None else self._background.reserved

    def on_start(self, run: Run) -> None:
        self._saved = run.progress.iteration  # what was just loaded, or nothing worth keeping, needs no saving
        if self._background is not None:
            self._background.reserve(kept_of(run)[0])

    def before_update(self, run: Run) -> None:
        """Let what is saved in the background be copied before it changes; a collective after the start of a save."""
        if self._background is None or self._stood_still is None:
            return
        start = time.perf_counter()
        self._background.wait_for_copy()
        mine, self._stood_still = self._stood_still + time.perf_counter() - start, None
        run.say(
            f"  saving checkpoint from iteration {run.progress.iteration:7d} in the background; training stood still "
            f"for {max(all_gather_object(mine, run.state.world)):.3f} s"
        )

    def after_step(self, run: Run, report: StepReport) -> None:
        self._tell_end()
        if self._interval is not None and report.iteration % self._interval == 0:
            try:
                self._save(run)
            except CheckpointError as error:
                run.say(_failure(run.progress.iteration, error))

    def on_end(self, run: Run) -> None:
        """
        Raises:
            CheckpointError: the last checkpoint of the run could not be saved.
        """
        self._settle()
        self._save(run)
        self._finish()

    def _save(self, run: Run) -> None:
        """Save this iteration, unless that is done; in the background, begin to."""
        iteration = run.progress.iteration
        if self._saved == iteration:
            return
        start = time.perf_counter()
        if self._background is None:
            save_run(run, self._folder.path)
            self._saved = iteration
            run.say(self._success(iteration, f"in {time.perf_counter() - start:.1f} s"))
            self._say_first(self._delete_obsolete(iteration))
            return
        self._settle()
        waited = time.perf_counter() - start
        if waited > _LONG_WAIT:
            run.say(f"  training stood still for {waited:.1f} s, until the checkpoint before was written")
        start = time.perf_counter()
        tensors, metadata = kept_of(run)
        self._background.start(
            self._folder.path, iteration, tensors, metadata, afterwards=lambda: self._delete_obsolete(iteration)
        )
        self._saved = iteration
        self._stood_still = time.perf_counter() - start

    def _settle(self) -> None:
        """Wait until what is saved in the background has ended, well or not; a collective."""
        try:
            self._finish()
        except CheckpointError:
            self._saved = None
            self._tell_end()

    def _finish(self) -> None:
        """Wait until what is saved in the background is complete; a collective.

        Raises:
            CheckpointError: it could not be saved.
        """
        if self._background is not None:
            self._say_waiting(self._background)
            self._background.finish()
            self._tell_end()

    def _tell_end(self) -> None:
        """Say on the first rank, which knows it before the others, how a save in the background has ended."""
        if self._background is not None:
            self._tell(self._background.take_end())

    def _tell(self, end: Written | NotWritten | None, *, goes_on: bool = True) -> None:
        if isinstance(end, Written):
            success = self._success(end.iteration, f"in {end.seconds:.1f} s in the background")
            self._say_first([success, *end.notes])
        elif end is not None:
            self._say_first([_failure(end.iteration, end.error, goes_on=goes_on)])

    def _success(self, iteration: int, how_long: str) -> str:
        state = self._context.state
        return (
            f"  [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] successfully saved checkpoint from iteration {iteration:7d} to "
            f"{self._folder.path} [ t 1/{state.tensor.size}, p 1/{state.pipeline.size} ] {how_long}"
        )

    def _say_waiting(self, background: AsyncSaver) -> None:
        iteration = background.writing
        if iteration is not None:
            self._say_first([f"  waiting until the checkpoint from iteration {iteration:7d} is written"])

    def _delete_obsolete(self, newest: int) -> Iterable[str]:
        return self._retention.apply(self._folder.path, newest) if self._context.state.rank == 0 else ()

    def _say_first(self, lines: Iterable[str]) -> None:
        for line in lines:
            if self._context.state.rank == 0:
                print(line, flush=True)

    def close(self) -> None:
        """Let what is saved in the background end, also when an error ends the run; nothing is new after a normal end.

        Without its launcher the run may have been started again by now, and the checkpoint is given up.
        """
        try:
            if self._background is not None:
                self._say_waiting(self._background)
                end = self._background.close(
                    abandoned=lambda: launcher_gone(self._context.launcher),
                    patience=60.0 * self._context.config.parallel.distributed_timeout_minutes,
                )
                self._tell(end, goes_on=False)
        finally:
            self._folder.close()


def save_run(run: Run, folder: Path) -> None:
    """Write a checkpoint of the present iteration; a collective."""
    tensors, metadata = kept_of(run)
    save_checkpoint(
        folder,
        run.progress.iteration,
        tensors,
        metadata,
        world=run.state.world,
        replicas=run.state.data_context,
    )


def _failure(iteration: int, error: Exception, *, goes_on: bool = True) -> str:
    then = "; the run goes on, and the next save tries again" if goes_on else ""
    return (
        f"ERROR: the checkpoint from iteration {iteration} is NOT saved, and those before it stay as they are{then}. "
        f"{error}"
    )
