"""The one place that loads the compiled module `megatron._C` (sources in csrc/), and that says what runs where.

Every compiled operator has a reference beside its caller. Without the module the references run: same
results, more time, and one line per operator says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from torch import Tensor

from megatron.config.problems import Problem
from megatron.core.kernels.apex import apex_obstacle
from megatron.core.kernels.choice import (
    OPERATION_OF,
    OPERATIONS,
    DeviceType,
    Kernels,
    Operation,
    kernel_choice,
)

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


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """What runs in an operation, and why.

    Attributes:
        chosen: it runs because it was asked for, not because there is no other.
    """

    name: Literal["native", "apex", "torch"]
    why: str
    chosen: bool = False


def implementation(operation: Operation, device: DeviceType) -> Implementation:
    """What runs in an operation where the model of this process is on `device`."""
    choice, device = kernel_choice(), operation.device(device)
    if operation.name in choice.references:
        return Implementation(name="torch", why=f"{choice.references[operation.name]} asks for it", chosen=True)
    if choice.kernels == "torch":
        return Implementation(name="torch", why="--kernels torch asks for it", chosen=True)
    if choice.kernels == "apex" and operation.in_apex and device == "cuda":
        return Implementation(name="apex", why="--kernels apex asks for it", chosen=True)
    if not operation.functions(device):
        where = "GPUs" if device == "cuda" else "CPUs"
        return Implementation(name="torch", why=f"there is no kernel for {where}", chosen=True)
    obstacle = _obstacle(device)
    if obstacle:
        return Implementation(name="torch", why=obstacle)
    return Implementation(name="native", why=f"{MODULE_NAME} has it")


def _obstacle(device: DeviceType) -> str:
    """Why the compiled module cannot be called for a device; "" where it can be."""
    module = load_extension()
    if module is None:
        return f"the compiled module {MODULE_NAME} is not built"
    if device == "cuda" and vars(module).get("cuda") is False:
        return f"the compiled module {MODULE_NAME} was built without nvcc"
    return ""


def kernel_problems(kernels: Kernels, device: DeviceType) -> Iterator[Problem]:
    """What keeps the implementations that are asked for from running on a device."""
    if kernels == "native":
        module, obstacle = load_extension(), _obstacle(device)
        known = set() if module is None else set(vars(module))
        lacking = [name for operation in OPERATIONS for name in operation.functions(device) if name not in known]
        if lacking and not obstacle:
            obstacle = f"the compiled module {MODULE_NAME} was built from other sources: it lacks {', '.join(lacking)}"
        nvcc = ", with nvcc in the PATH," if device == "cuda" else ""
        works = f"`make kernels` (or `pip install .`){nvcc} builds it; or --kernels auto"
    elif kernels == "apex":
        obstacle = apex_obstacle() if device == "cuda" else "the kernels of NVIDIA Apex run on GPUs, and this is a CPU"
        works = "--kernels auto"
    else:
        return
    if obstacle:
        yield Problem(flags=("--kernels",), value=kernels, rule=obstacle, works=works)


def describe_kernels(device: DeviceType) -> str:
    """What runs in each operation, in a line: `native: adam, gelu; torch: swiglu`."""
    names: dict[str, list[str]] = {}
    for operation in OPERATIONS:
        names.setdefault(implementation(operation, device).name, []).append(operation.name)
    return "; ".join(f"{name}: {', '.join(operations)}" for name, operations in names.items())


def compiled_function(name: str, *, reference_cost: str, device: DeviceType = "cpu") -> Callable[..., Any] | None:
    """The compiled operator `name`, or None: the caller then runs its reference.

    Args:
        name: a function of `megatron._C`.
        reference_cost: what running the reference instead costs, for the line that says so once where it was not
            asked for.
        device: "cuda" for an operator that a module built without nvcc lacks.

    Raises:
        RuntimeError: the module was built from sources that do not know `name`.
    """
    runs = implementation(OPERATION_OF[name], device)
    if runs.name != "native":
        if not runs.chosen:
            _report_reference(name, runs.why, reference_cost)
        return None
    module = load_extension()
    assert module is not None, runs
    if name not in vars(module):
        raise RuntimeError(
            f"the compiled module {module.__file__} has no operator {name!r}: it was built from other "
            "sources; `make kernels` (or `pip install .`) builds it anew"
        )
    function: Callable[..., Any] = vars(module)[name]
    return function


def runs_in_apex(name: str, tensor: Tensor) -> bool:
    """Whether the operation that calls `name` for such a tensor runs in NVIDIA Apex instead."""
    return tensor.is_cuda and implementation(OPERATION_OF[name], "cuda").name == "apex"


@functools.cache
def _report_reference(name: str, reason: str, reference_cost: str) -> None:
    logger.warning("%s: %s, the reference runs (%s); `make kernels` builds it", name, reason, reference_cost)
