"""The tools as a user starts them."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from tests.helpers.launch import Outcome, launch

ROOT = Path(__file__).parents[2]

Arguments = Sequence[str | Path]


def command(tool: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]


def run(tool: str, *arguments: str | Path, status: int = 0) -> str:
    """What the tool printed: its stdout, or its stderr where the exit status is that of a refusal, 2.

    The tool runs in a fork of this process, which has all libraries loaded already; a new interpreter would
    spend most of the time of these tests on importing them.
    """
    words = command(tool, *arguments)[1:]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            run_in_child(words, out.fileno(), err.fileno())
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        printed, complained = out.read(), err.read()
    assert "Traceback" not in complained, complained
    assert ended == status, complained
    return complained if status == 2 else printed


def run_in_child(words: list[str], out: int, err: int) -> NoReturn:
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = words
        sys.path.insert(0, str(ROOT / "tools"))
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def on_ranks(tool: str, *arguments: str | Path, ranks: int, folder: Path) -> Outcome:
    """What the tool does on ranks that start as under `torchrun`."""
    return launch(partial(run_as_program, tool), [*map(str, arguments)], ranks=ranks, folder=folder).wait()


def run_as_program(tool: str) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")


def names_of_tool(tool: str) -> dict[str, Any]:
    """What the file of a tool defines; nothing is run."""
    with patch.object(sys, "path", [str(ROOT / "tools"), *sys.path]):
        return runpy.run_path(str(ROOT / "tools" / f"{tool}.py"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
