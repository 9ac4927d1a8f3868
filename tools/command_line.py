"""What every tool does with its command line: arguments, progress, and errors in one line."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from megatron.config.problems import UserError, unknown_flag

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


def run_tool(main: Callable[[], None]) -> None:
    """Call a tool's main; what its user can mend becomes one line on stderr and exit status 2, Ctrl-C status 130."""
    try:
        main()
    except UserError as error:
        _refuse(str(error))
    except BrokenPipeError:  # `| head` has seen enough; nothing more is to be written, nor when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        _refuse(": ".join(str(part) for part in (error.filename, error.strerror or error) if part))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _refuse(text: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: error: {text}", file=sys.stderr)
    sys.exit(2)


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


def elapsed(since: float) -> str:
    return f"{time.perf_counter() - since:.1f} s"
