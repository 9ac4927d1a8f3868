"""What each rank does for itself and any may fail in: all go on, or all say why not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from megatron.config.problems import UserError, listing
from megatron.core.collectives import all_gather_object
from megatron.core.comm_group import CommGroup

Value = TypeVar("Value")


def agree(world: CommGroup, phase: str, action: Callable[[], Value], *, raises: type[UserError]) -> list[Value]:
    """Run `action` on every rank; the results of all ranks, in rank order, or an error on all of them.

    Without this a rank whose disk is full would raise, and the others would wait for it until a time-out.

    Args:
        phase: what is done, in words for the error.
        raises: what a failure that the user can mend is raised as; it and its subclasses are made of a text alone.

    Raises:
        UserError: ranks failed of a `UserError` or `OSError`; the text names each with its reason. It is of class
            `raises`, or of the one subclass of it that all of them raised.
        RuntimeError: another rank failed of anything else, which is a bug; that rank raises what it was.
    """
    value: Value | None = None
    error: Exception | None = None
    try:
        value = action()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    mendable = isinstance(error, UserError | OSError)
    if error is not None and world.size == 1 and (isinstance(error, raises) or not mendable):
        raise error
    kind = type(error) if isinstance(error, raises) else raises
    report = None if error is None else (mendable, kind, place_of(world.rank), reason_of(error))
    outcomes = all_gather_object((report, value), world)
    failures = [report for report, _ in outcomes if report is not None]
    if not failures:
        return [value for _, value in outcomes]
    if error is not None and not mendable:
        raise error
    reasons = {reason for *_, reason in failures}
    if len(failures) == world.size > 1 and len(reasons) == 1:
        text = f"{phase} failed on all {world.size} ranks: {reasons.pop()}"
    else:
        lines = listing([f"{place}: {reason}" for *_, place, reason in failures])
        text = f"{phase} failed on {len(failures)} of {world.size} ranks:\n{lines}"
    if not all(mendable for mendable, *_ in failures):
        raise RuntimeError(text) from error
    kinds = {kind for _, kind, *_ in failures}
    raise (kinds.pop() if len(kinds) == 1 else raises)(text) from error


def place_of(rank: int) -> str:
    """This rank and its host, in words."""
    return f"rank {rank} on {socket.gethostname()}"


def reason_of(error: Exception) -> str:
    """What has failed, in words; by its class where that is not one of ours."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{kind}{error}"
