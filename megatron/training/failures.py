"""How a program ends that cannot go on: for a reason that its user can mend, with that reason and without a traceback.

The tools end in the same way. Those for texts do without torch, which takes seconds to import, and so does this file.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.config.problems import UserError


class NonFiniteError(UserError, FloatingPointError):
    """A loss or gradient norm is NaN or infinite; raised on all ranks."""


class OutOfMemory(UserError):
    """A rank could not allocate what it needs; a note has the account and what would make it fit."""


class LauncherGone(Exception):
    """What started the ranks and watched over them has ended, and they end too; raised on all of them."""


class RankGone(Exception):
    """Another rank has ended, and this one has lost it.

    Args:
        speaks: this rank should print it; False where the other one says why.
    """

    def __init__(self, message: str, *, speaks: bool) -> None:
        super().__init__(message)
        self.speaks = speaks


def launcher_gone(launcher: int | None) -> bool:
    """Whether the process that started this one and watched over it has ended; never where none did."""
    return launcher is not None and os.getppid() != launcher


@contextmanager
def exiting(
    speaks: Callable[[BaseException], bool] = lambda why: True,
    *,
    said_by: Callable[[BaseException], str] = lambda why: "",
    records: Callable[[str], object] = lambda text: None,
    interrupted: str = "interrupted",
) -> Iterator[None]:
    """End the program with one message and an exit status for what is no bug.

    The status is 2 for a `UserError`, 1 for `LauncherGone` and `RankGone`, 130 for Ctrl-C, and 141, without a word,
    when nobody reads the output any more, as after `| head`. Any other exception is a bug or a failing machine, and
    keeps its traceback.

    Args:
        speaks: whether this process is the one of several that says why. It may wait for that one to have spoken.
        said_by: a line to add after that, as who says so; it may wait to find out, as the reason is said by then.
        records: gets the reason without its notes, on all processes, for whoever reports how each of them has ended.
        interrupted: what is said after Ctrl-C.
    """
    try:
        yield
    except (UserError, LauncherGone, RankGone, KeyboardInterrupt) as why:
        if isinstance(why, UserError):
            status, text = 2, f"{Path(sys.argv[0]).name}: error: {reason(why)}"
        elif isinstance(why, LauncherGone | RankGone):
            status, text = 1, str(why)
        else:
            status, text = 128 + signal.SIGINT, interrupted
        records(str(why) or text)
        if speaks(why):
            print(text, file=sys.stderr, flush=True)
            if line := said_by(why):
                print(line, file=sys.stderr, flush=True)
        sys.exit(status)
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes at its end
        sys.exit(128 + signal.SIGPIPE)


def reason(why: UserError) -> str:
    """The text of an error, with the notes about where it happened."""
    return "\n".join([str(why), *getattr(why, "__notes__", ())])


def topic(why: UserError) -> str:
    """What is said once: the reason, or, of ranks that have each run out of memory, that they have."""
    return type(why).__name__ if isinstance(why, OutOfMemory) else reason(why)


def _nobody_reads() -> bool:
    """Whether the other end of stdout is closed."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # an error is reported whatever is asked for
    return any(event & select.POLLERR for _, event in output.poll(0))
