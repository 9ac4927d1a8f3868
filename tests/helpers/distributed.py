"""Run a function on several ranks over gloo, quickly.

Ranks are forked from a server process that has imported torch and has never computed: a process that has used threads
makes a forked child hang, and importing torch once costs more than most tests.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "numpy", "tests.helpers.preload"])


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not come back; the text holds each one's traceback."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 150.0
) -> list[Any]:
    """Call `function(rank, world_size, *arguments)` on `world_size` ranks; the results in rank order.

    `function` must be defined at the top of a module. `torch.distributed` is initialised over gloo, also for one rank.

    Raises:
        RankFailure: a rank raised, died, or took longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rendezvous"
        processes, receivers = [], []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank_main,
                args=(sender, function, rank, world_size, str(store), arguments, timeout),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        try:
            outcomes = _collect(receivers, timeout)
        finally:
            for process in processes:
                process.kill() if process.exitcode is None else None
            for process in processes:
                process.join()
    failures = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failures:
        raise RankFailure("\n".join(failures))
    return [value for _, value in outcomes]


def _collect(receivers: list[Connection], timeout: float) -> list[tuple[bool, Any]]:
    """Each rank's (succeeded, value or traceback); once one has failed, the others get a moment to report too."""
    outcomes: list[tuple[bool, Any]] = [(False, f"no answer within {timeout} s")] * len(receivers)
    waiting = dict(enumerate(receivers))
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        ready = wait_for(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        for rank, receiver in list(waiting.items()):
            if receiver in ready:
                try:
                    outcomes[rank] = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    outcomes[rank] = (False, "the process died without a word")
                if not outcomes[rank][0]:
                    deadline = min(deadline, time.monotonic() + 2.0)
                del waiting[rank]
    return outcomes


def _rank_main(
    sender: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    arguments: tuple[Any, ...],
    timeout: float,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = function(rank, world_size, *arguments)
        dist.barrier()
        _send(sender, True, result)
        dist.destroy_process_group()
    except BaseException:  # the traceback is the test's message, whatever it is
        _send(sender, False, traceback.format_exc())
    finally:
        sender.close()


def _send(sender: Connection, succeeded: bool, value: Any) -> None:
    """By value: `Connection.send` would share tensors through memory that ends with this process."""
    sender.send_bytes(pickle.dumps((succeeded, value)))
