"""What the kernels of activations all take: rows of one type, and where and how to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.extension import BEST_INSTRUCTION_SET, compiled_function


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type that kernels compute in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def compiled_for(name: str, x: Tensor, *, reference_cost: str) -> Callable[..., Any] | None:
    """The kernel `name` for the device of `x`, to be given the rest of its arguments; None: the reference runs.

    While torch compiles its caller there is none: the compiler fuses the reference into what is around it.
    """
    if torch.compiler.is_compiling():
        return None
    if x.is_cuda:
        compiled = compiled_function(f"{name}_cuda", reference_cost=reference_cost, device="cuda")
    else:
        compiled = compiled_function(f"{name}_cpu", reference_cost=reference_cost)
    if compiled is None:
        return None
    on_device = device_arguments(x)
    return lambda **arguments: compiled(**arguments, **on_device)


def device_arguments(x: Tensor) -> dict[str, Any]:
    """The arguments of a kernel that say where and how it runs."""
    if x.is_cuda:
        return {"device": x.device.index, "stream": torch.cuda.current_stream(x.device).cuda_stream}
    return {"threads": torch.get_num_threads(), "instruction_set": BEST_INSTRUCTION_SET}
