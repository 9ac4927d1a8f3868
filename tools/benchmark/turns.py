"""What the benchmarks share: sides that run by turns, medians of their times, tables, JSON.

Sides run by turns so that whatever else the machine does falls on all of them, and each second turn in the reverse
order. A ratio is the median of the ratios within a turn, not the ratio of medians.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")
# Runs once; what it needs anew each time is laid out before, untimed.
Timed = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of each side the seconds of each turn.

    Attributes:
        cpu: processor time, over all threads.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def add(self, side: str, seconds: float, cpu: float) -> None:
        self.seconds.setdefault(side, []).append(seconds)
        self.cpu.setdefault(side, []).append(cpu)


def in_turn(sides: Sequence[str], turn: int) -> list[str]:
    """The order of the sides in a turn."""
    return list(sides) if turn % 2 == 0 else list(sides)[::-1]


def shown(items: Sequence[Item], what: str, *, silent: bool = False) -> Iterator[Item]:
    """The items, each counted in a line on stderr when it is done, with the time that is left.

    Args:
        silent: no such line.
    """
    start = time.perf_counter()
    for done, item in enumerate(items, start=1):
        yield item
        left = (time.perf_counter() - start) / done * (len(items) - done)
        if not silent:
            print(f"{what} {done} of {len(items)}, {left:.0f} s left", file=sys.stderr, flush=True)


def take_turns(
    sides: Mapping[str, Timed],
    *,
    turns: int,
    warm_up: int = 0,
    before: Timed = lambda: None,
    after: Callable[[int], object] = lambda turn: None,
    before_side: Timed = lambda: None,
    what: str = "all sides",
    silent: bool = False,
) -> Times:
    """Time each side once a turn.

    Args:
        warm_up: turns before the first that counts; their numbers are negative.
        before, after: run around each turn, untimed; `after` gets the number of the turn.
        before_side: run before each side, untimed: waits for what others or a device still do.
        what: is measured, for the count of turns on stderr.
        silent: no such count.
    """
    times = Times()
    for turn in shown(range(-warm_up, turns), f"{what}: turn", silent=silent):
        before()
        for side in in_turn(list(sides), turn):
            before_side()
            start, cpu_start = time.perf_counter(), time.process_time()
            sides[side]()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            if turn >= 0:
                times.add(side, seconds, cpu)
        after(turn)
    return times


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [one / other for one, other in zip(numerators, denominators, strict=True)]


def cell(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """Median and range."""
    median, least, most = (scale * value for value in (statistics.median(values), min(values), max(values)))
    return f"{median:{form}} ({least:{form}}-{most:{form}})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(file: Path, results: object) -> None:
    """The results and what they were measured with."""
    machine = {"torch": torch.__version__, "machine": platform.machine(), "python": sys.version.split()[0]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**machine, "results": results}, indent=2) + "\n", encoding="utf-8")
