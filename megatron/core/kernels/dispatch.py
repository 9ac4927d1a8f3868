"""Which kernel runs for a tensor, and what all kernels take: addresses, types, and where and how to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.extension import compiled_function

# The widest vectors that this processor has; csrc/instruction_set.h names them all.
BEST_INSTRUCTION_SET = "best"


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type that kernels compute in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def tensor_argument(tensor: Tensor | None) -> tuple[int, str]:
    """Address and dtype of a contiguous tensor, as the kernels take it; None where they take none."""
    if tensor is None:
        return 0, ""
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch.")


def compiled_for(name: str, x: Tensor, *, reference_cost: str) -> Callable[..., Any] | None:
    """The kernel `name` for the device of `x`, to be given the rest of its arguments; None: the reference runs.

    While torch compiles its caller there is none: the compiler fuses the reference into what is around it.
    """
    if torch.compiler.is_compiling():
        return None
    if not x.is_cuda:
        compiled = compiled_function(f"{name}_cpu", reference_cost=reference_cost)
        return None if compiled is None else lambda **arguments: compiled(**arguments, **device_arguments(x))
    on_gpu = compiled_function(f"{name}_cuda", reference_cost=reference_cost, device="cuda")
    if on_gpu is None:
        return None

    def launch(**arguments: Any) -> Any:
        # The kernel makes the device of `x` the current one of this thread; torch must find its own again.
        with torch.cuda.device(x.device):
            return on_gpu(**arguments, **device_arguments(x))

    return launch


def device_arguments(x: Tensor) -> dict[str, Any]:
    """The arguments of a kernel that say where and how it runs."""
    if x.is_cuda:
        return {"device": x.device.index, "stream": torch.cuda.current_stream(x.device).cuda_stream}
    return {"threads": torch.get_num_threads(), "instruction_set": BEST_INSTRUCTION_SET}
