"""Named timers of the parts of an iteration, reported over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from megatron.core.collectives import all_gather_object
from megatron.core.comm_group import CommGroup

TimingOption = Literal["max", "minmax", "all"]


class Timers:
    """Accumulates the seconds spent under each name since the last report.

    Args:
        level: timers of a higher level than this are not kept (`--timing-log-level`).
        synchronize: called before each reading, so that queued GPU work is counted where it belongs.
    """

    def __init__(self, level: int, synchronize: Callable[[], None]) -> None:
        self._level = level
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, *, level: int = 1) -> Iterator[None]:
        """Count the time spent in the `with` block."""
        if level > self._level:
            yield
            return
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def over_ranks(self, world: CommGroup, *, iterations: int) -> dict[str, list[float]]:
        """Milliseconds per iteration of each timer on each rank; the timers start again from zero.

        A collective. A timer that a rank has not used, as its stage has no such part, stood still there.
        """
        mine = {name: seconds * 1000.0 / iterations for name, seconds in self._seconds.items()}
        self._seconds.clear()
        everyone: list[dict[str, float]] = all_gather_object(mine, world)
        names = sorted({name for rank in everyone for name in rank})
        return {name: [rank.get(name, 0.0) for rank in everyone] for name in names}


def format_timers(milliseconds: dict[str, list[float]], option: TimingOption) -> str:
    """The field's table: the name padded with dots to 48 columns, then the times."""
    heading = {
        "max": "max time across ranks (ms):",
        "minmax": "(min, max) time across ranks (ms):",
        "all": "times across ranks (ms):",
    }[option]
    lines = [heading]
    for name, values in milliseconds.items():
        label = f"    {(name + ' ').ljust(48, '.')}:"
        if option == "max":
            lines.append(f"{label} {max(values):.2f}")
        elif option == "minmax":
            lines.append(f"{label} ({min(values):.2f}, {max(values):.2f})")
        else:
            lines.append(label)
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(values)]
    return "\n".join(lines)
