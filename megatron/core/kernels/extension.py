"""The one place that loads the compiled module `megatron._C` (sources in csrc/).

Every compiled operator has a reference beside its caller. Without the module the references run: same
results, more time, and one line per operator says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

MODULE_NAME = "megatron._C"


@functools.cache
def load_extension() -> ModuleType | None:
    """The compiled module, or None when it was not built.

    A module that exists but does not load (built for another Python or C library) raises its own ImportError:
    hiding it would look like a slow run.
    """
    if importlib.util.find_spec(MODULE_NAME) is None:
        return None
    return importlib.import_module(MODULE_NAME)


def compiled_function(name: str, *, reference_cost: str) -> Callable[..., Any] | None:
    """The compiled operator `name`, or None: the caller then runs its reference.

    Args:
        name: a function of `megatron._C`.
        reference_cost: what running the reference instead costs, for the line that says so once.

    Raises:
        RuntimeError: the module was built from sources that do not know `name`.
    """
    module = load_extension()
    if module is None:
        _report_reference(name, reference_cost)
        return None
    if name not in vars(module):
        raise RuntimeError(
            f"the compiled module {module.__file__} has no operator {name!r}: it was built from other "
            "sources; `make kernels` (or `pip install .`) builds it anew"
        )
    function: Callable[..., Any] = vars(module)[name]
    return function


@functools.cache
def _report_reference(name: str, reference_cost: str) -> None:
    logger.warning(
        "%s: the compiled module %s is not built, the reference runs (%s); `make kernels` builds it",
        name,
        MODULE_NAME,
        reference_cost,
    )
