"""How a run ends that cannot go on: each reason is said once, however many ranks have it."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron.training.initialize import MegatronContext


@contextmanager
def exit_on_user_error(context: MegatronContext) -> Iterator[None]:
    """End the program with exit code 2 and one message when the user can mend what went wrong.

    That is what `ValueError` and its subclasses are for here, and `FloatingPointError` for a loss that is not finite.
    Any other exception is a bug or a failing machine, and keeps its traceback.
    """
    try:
        yield
    except (ValueError, FloatingPointError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if _first_to_say(context, text):
            origin = traceback.extract_tb(error.__traceback__)[-1]
            where = f"({Path(origin.filename).name}:{origin.lineno}, rank {context.state.rank})"
            print(f"{Path(sys.argv[0]).name}: error: {text} {where}", file=sys.stderr, flush=True)
        sys.exit(2)


def _first_to_say(context: MegatronContext, text: str) -> bool:
    """Whether no other rank has said this yet."""
    if context.store is None:
        return True
    key = "said-" + hashlib.sha256(text.encode()).hexdigest()
    try:
        return bool(context.store.add(key, 1) == 1)
    except dist.DistError:  # the rank that holds the store is gone: better twice than never
        return True
