"""Real processes to be killed: started in milliseconds from a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

import tests.helpers.distributed  # noqa: F401  (tells the server, before it starts, what to import)

_CONTEXT = multiprocessing.get_context("forkserver")


def _main(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        sender.send((True, function(*arguments)))
    except BaseException:  # the traceback is the test's message, whatever it is
        sender.send((False, traceback.format_exc()))


def start(function: Callable[..., Any], *arguments: Any) -> ForkServerProcess:
    """Start `function`, of the top of a module, in a process of its own."""
    process = _CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def call(function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> Any:
    """The result of `function` in a process of its own."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = start(_main, sender, function, arguments)
    sender.close()
    try:
        assert receiver.poll(timeout), f"no answer within {timeout} s"
        succeeded, value = receiver.recv()
    finally:
        process.kill()
        process.join()
    assert succeeded, value
    return value
