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

from torch import Tensor

logger = logging.getLogger(__name__)

MODULE_NAME = "megatron._C"
# The widest vectors that this processor has; csrc/instruction_set.h names them all.
BEST_INSTRUCTION_SET = "best"


@functools.cache
def load_extension() -> ModuleType | None:
    """The compiled module, or None when it was not built.

    A module that exists but does not load (built for another Python or C library) raises its own ImportError:
    hiding it would look like a slow run.
    """
    if importlib.util.find_spec(MODULE_NAME) is None:
        return None
    return importlib.import_module(MODULE_NAME)


def compiled_function(name: str, *, reference_cost: str, device: str = "cpu") -> Callable[..., Any] | None:
    """The compiled operator `name`, or None: the caller then runs its reference.

    Args:
        name: a function of `megatron._C`.
        reference_cost: what running the reference instead costs, for the line that says so once.
        device: "cuda" for an operator that a module built without nvcc lacks.

    Raises:
        RuntimeError: the module was built from sources that do not know `name`.
    """
    module = load_extension()
    if module is None:
        _report_reference(name, f"the compiled module {MODULE_NAME} is not built", reference_cost)
        return None
    if device == "cuda" and vars(module).get("cuda") is False:
        _report_reference(name, f"the compiled module {MODULE_NAME} was built without nvcc", reference_cost)
        return None
    if name not in vars(module):
        raise RuntimeError(
            f"the compiled module {module.__file__} has no operator {name!r}: it was built from other "
            "sources; `make kernels` (or `pip install .`) builds it anew"
        )
    function: Callable[..., Any] = vars(module)[name]
    return function


def tensor_argument(tensor: Tensor | None) -> tuple[int, str]:
    """Address and dtype of a contiguous tensor, as the kernels take it; None where they take none."""
    if tensor is None:
        return 0, ""
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch.")


@functools.cache
def _report_reference(name: str, reason: str, reference_cost: str) -> None:
    logger.warning("%s: %s, the reference runs (%s); `make kernels` builds it", name, reason, reference_cost)
