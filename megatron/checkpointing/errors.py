"""What can go wrong with a checkpoint, and how the ranks of a job agree that it has."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from megatron.config.problems import UserError
from megatron.core import collectives
from megatron.core.comm_group import CommGroup

Value = TypeVar("Value")

_MAX_LISTED = 20


class CheckpointError(UserError):
    """A checkpoint could not be written, found, read, or does not fit; the text says which, where and why."""


class NoCheckpointError(CheckpointError):
    """The folder holds no checkpoint at all: the one case in which a run may start from nothing."""


def listing(lines: list[str]) -> str:
    """The lines, indented, the first twenty of them."""
    shown = [f"  {line}" for line in lines[:_MAX_LISTED]]
    if len(lines) > _MAX_LISTED:
        shown.append(f"  ... and {len(lines) - _MAX_LISTED} more")
    return "\n".join(shown)


def agree(world: CommGroup, phase: str, action: Callable[[], Value]) -> list[Value]:
    """Run `action` on every rank; the results of all ranks, in rank order, or the same error on all of them.

    Without this a rank whose disk is full would raise, and the others would wait for it until a time-out.

    Raises:
        NoCheckpointError: every rank that failed raised one.
        CheckpointError: otherwise, naming each rank that failed and its reason.
    """
    value: Value | None = None
    error: Exception | None = None
    try:
        value = action()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    if world.size == 1 and isinstance(error, CheckpointError):
        raise error
    report = None if error is None else (isinstance(error, NoCheckpointError), socket.gethostname(), _describe(error))
    outcomes = collectives.all_gather_object((report, value), world)
    failures = [(rank, report) for rank, (report, _) in enumerate(outcomes) if report is not None]
    if failures:
        nothing_there = all(report[0] for _, report in failures)
        kind = NoCheckpointError if nothing_there else CheckpointError
        reasons = {reason for _, (_, _, reason) in failures}
        if len(failures) == world.size > 1 and len(reasons) == 1:
            raise kind(f"{phase} failed on all {world.size} ranks: {reasons.pop()}") from error
        lines = listing([f"rank {rank} on {host}: {reason}" for rank, (_, host, reason) in failures])
        raise kind(f"{phase} failed on {len(failures)} of {world.size} ranks:\n{lines}") from error
    return [value for _, value in outcomes]


def _describe(error: Exception) -> str:
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"{kind}{error}"
