"""What every tool does with its command line: arguments, progress, results, and errors in one line."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from tqdm import tqdm

from megatron.config.problems import UserError, unknown_flag
from megatron.core.open_files import allow_open_files
from megatron.core.whole_file import whole_file
from megatron.training.failures import exiting

if TYPE_CHECKING:  # it takes seconds to import, and the tools for texts do without
    import torch

# No watching thread: the tools fork, and a thread that holds a lock at that moment would hang the child.
tqdm.monitor_interval = 0


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, an unknown flag before the missing ones: it may be one of them."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def read(self) -> argparse.Namespace:
        """The arguments of this process.

        Raises:
            UserError: a flag is unknown or missing, or its value cannot be read.
        """
        names = [name for action in self._actions for name in action.option_strings]
        for word in sys.argv[1:]:
            flag = word.partition("=")[0]
            if flag.startswith("--") and " " not in flag and flag not in names:
                problem = unknown_flag(flag, names)
                raise UserError(f"{flag}: {problem.rule}; {problem.works}")
        return self.parse_args()

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number, this one or a larger one."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        return value

    return number


def run_tool(main: Callable[[], None], ends: Callable[[], AbstractContextManager[None]] = exiting) -> None:
    """Call a tool's main; it ends as `exiting` says, and a file that cannot be read or written is for its user too.

    Args:
        ends: in place of `exiting`, for a tool of several ranks.
    """
    allow_open_files()
    with ends():
        try:
            main()
        except BrokenPipeError:
            raise
        except OSError as error:
            parts = (error.filename, error.strerror or error)
            raise UserError(": ".join(str(part) for part in parts if part)) from error


def progress(total: int, what: str, *, unit: str) -> "tqdm[Any]":
    """A progress bar with rate and ETA on stderr; into a log file it prints a line every ten seconds only.

    Args:
        unit: "B" for bytes, which are shown as kB, MB, GB.
    """
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=True,
        mininterval=interval,
        maxinterval=interval,
        file=sys.stderr,
    )


def say(line: str) -> None:
    print(line, flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """The cells of each row in columns that are as wide as they need be."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def shown(value: object) -> str:
    """A value as a cell of a table; None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write what a tool has found, over a file that is there."""
    with whole_file(path) as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())


class Stored(Protocol):
    """What a tensor in a file says of itself before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> "torch.dtype": ...


def bytes_of(tensors: Iterable[Stored]) -> int:
    return sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def size_of(num_bytes: int) -> str:
    """`1.5 kB` or `2.0 MB`: of a small size more than 0.0 MB."""
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 1e5 else f"{num_bytes / 1e6:.1f} MB"


def elapsed(since: float) -> str:
    return f"{time.perf_counter() - since:.1f} s"
