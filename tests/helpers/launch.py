"""Ranks as real processes that start as under `torchrun`, in milliseconds in place of seconds.

Each is forked from the server that has imported torch, gets the environment of its rank, and runs a program from its
command line on, with output in files of its own. It can be killed or sent signals at any moment.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from tests.helpers.distributed import _CONTEXT
from tests.helpers.tiny import TINY_GPT


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of each rank its exit code (minus a signal's number when that ended it) and what it printed."""

    codes: list[int | None]
    out: list[str]
    err: list[str]

    def check(self) -> Outcome:
        """All ranks ended well."""
        assert not any(self.codes), "\n".join(
            f"--- rank {rank}: {code} ---\n{self.out[rank]}\n{self.err[rank]}" for rank, code in enumerate(self.codes)
        )
        return self


class Launched:
    """Ranks that run."""

    def __init__(self, processes: Sequence[ForkServerProcess], files: Sequence[Path]) -> None:
        self.processes = processes
        self._files = files

    def wait(self, timeout: float = 150.0) -> Outcome:
        """Until all ranks have ended; the rest are killed after `timeout` seconds, and have code None."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        texts = [[file.with_suffix(kind).read_text() for file in self._files] for kind in (".out", ".err")]
        return Outcome(codes=codes, out=texts[0], err=texts[1])

    def kill(self) -> None:
        """SIGKILL to all ranks, which gives none of them a moment."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def launch(
    program: Callable[[], object],
    arguments: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    present: Sequence[int] | None = None,
) -> Launched:
    """Start `program`, of the top of a module, on ranks in `folder`.

    Args:
        arguments: its command line.
        environment: further variables of a rank.
        present: the ranks that are started; all when not given.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, files = [], []
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks) if present is None else present:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **environment(rank),
        }
        file = folder / f"rank-{port}-{rank}.out"
        process = _CONTEXT.Process(
            target=_main, args=(program, list(arguments), variables, str(folder), str(file)), daemon=True
        )
        process.start()
        processes.append(process)
        files.append(file)
    return Launched(processes, files)


def _main(
    program: Callable[[], object], arguments: list[str], variables: dict[str, str], folder: str, out: str
) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    for path, descriptor in ((Path(out), 1), (Path(out).with_suffix(".err"), 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    sys.argv = ["pretrain_gpt.py", *arguments]
    torch.set_num_threads(1)
    program()


def pretrain_gpt() -> None:
    """What `pretrain_gpt.py` does."""
    from megatron.training.gpt import gpt_datasets, gpt_model
    from megatron.training.pretrain import pretrain
    from pretrain_gpt import forward_step

    pretrain(gpt_datasets, gpt_model, forward_step)


def launch_tiny(folder: Path, *arguments: str, ranks: int = 1, **settings: Any) -> Launched:
    """`pretrain_gpt.py` with `TINY_GPT` and further arguments, in a folder."""
    return launch(pretrain_gpt, [*TINY_GPT, *arguments], ranks=ranks, folder=folder, **settings)


def pretrain_tiny(folder: Path, *arguments: str, ranks: int = 1, timeout: float = 150.0, **settings: Any) -> Outcome:
    """The same to its end."""
    return launch_tiny(folder, *arguments, ranks=ranks, **settings).wait(timeout)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a `--log-json` file."""
    return [json.loads(line) for line in file.read_text().splitlines()]
