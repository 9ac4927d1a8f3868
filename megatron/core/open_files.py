"""How many files this process may have open: each mapped array keeps one, and a dataset has about ten."""

from __future__ import annotations

import resource
from contextlib import suppress


def allow_open_files() -> None:
    """Raise the soft limit to the hard one, for this process and those that it starts.

    It is low, often 1,024, for programs that wait with select(2), which takes no higher numbers: here is none.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the system's own limit may be lower by now: the soft one stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
