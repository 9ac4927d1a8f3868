"""How a run ends that cannot go on: each reason is said once, however many ranks have it."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron.config.problems import UserError
from megatron.training.initialize import MegatronContext

# Rank 0 may hold the store that the other ranks look into, so it is the last to leave, but not for long.
_PATIENCE = 2.0


class NonFiniteError(UserError, FloatingPointError):
    """A loss or gradient norm is NaN or infinite; raised on all ranks."""


class LauncherGone(Exception):
    """What started the ranks and watched over them has ended, and they end too; raised on all of them."""


@contextmanager
def exit_on_user_error(context: MegatronContext) -> Iterator[None]:
    """End the program with exit code 2 and one message when the user can mend what went wrong.

    That is what `UserError` is for. Any other exception is a bug or a failing machine, and keeps its traceback.
    """
    try:
        yield
    except UserError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if _first_to_say(context, text):
            print(f"{Path(sys.argv[0]).name}: error: {text} (rank {context.state.rank})", file=sys.stderr, flush=True)
        sys.exit(2)
    except LauncherGone as end:
        if context.state.rank == 0:
            print(end, file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        if context.state.rank == 0:
            print("interrupted; the last checkpoint stays as it is", file=sys.stderr, flush=True)
        sys.exit(130)


def _first_to_say(context: MegatronContext, text: str) -> bool:
    """Whether no other rank has said this yet."""
    if context.store is None:
        return True
    key = "said-" + hashlib.sha256(text.encode()).hexdigest()
    try:
        first = bool(context.store.add(key, 1) == 1)
        deadline = time.monotonic() + _PATIENCE
        while context.state.rank == 0 and context.store.add(key, 0) < context.state.world.size:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return first
    except dist.DistError:  # the rank that holds the store is gone: better twice than never
        return True
