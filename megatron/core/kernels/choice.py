"""The operations that have kernels, and which implementation of them a process has chosen.

The choice is made once, when a program starts (`--kernels`), and holds for the whole process: it changes neither what
an operation computes nor who calls it, so nothing above this package needs to know it. With it goes what a run says of
its weight gradients, which are torch's products in any case: whether a product and its addition to a sum are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

DeviceType = Literal["cpu", "cuda"]
Kernels = Literal["auto", "native", "apex", "torch"]


def device_type(device: torch.device) -> DeviceType:
    return "cuda" if device.type == "cuda" else "cpu"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation with kernels, and a reference in plain torch or numpy.

    Attributes:
        cpu, cuda: the functions of the compiled module that it calls there; none where the reference runs in any case.
        on_host: it runs on the CPU wherever the model is.
        in_apex: whether NVIDIA Apex has it, for GPUs; with RMSNorm goes LayerNorm, which has no kernel here.
    """

    name: str
    cpu: tuple[str, ...]
    cuda: tuple[str, ...] = ()
    on_host: bool = False
    in_apex: bool = False

    def device(self, device: DeviceType) -> DeviceType:
        """Where it runs in a process whose model is on `device`."""
        return "cpu" if self.on_host else device

    def functions(self, device: DeviceType) -> tuple[str, ...]:
        return self.cuda if self.device(device) == "cuda" else self.cpu


OPERATIONS = (
    Operation(name="adam", cpu=("adamw_cpu",), cuda=("adamw_cuda",), in_apex=True),
    Operation(
        name="gradient norm", cpu=("sum_of_squares_cpu",), cuda=("sum_of_squares_cuda", "sum_of_squares_scratch")
    ),
    Operation(
        name="cross entropy",
        cpu=("logit_statistics_cpu", "logit_gradient_cpu"),
        cuda=("logit_statistics_cuda", "logit_gradient_cuda"),
    ),
    Operation(
        name="RMSNorm",
        cpu=("rms_norm_cpu", "rms_norm_gradient_cpu"),
        cuda=("rms_norm_cuda", "rms_norm_gradient_cuda"),
        in_apex=True,
    ),
    Operation(name="gelu", cpu=("gelu_cpu", "gelu_gradient_cpu"), cuda=("gelu_cuda", "gelu_gradient_cuda")),
    Operation(name="swiglu", cpu=("swiglu_cpu", "swiglu_gradient_cpu"), cuda=("swiglu_cuda", "swiglu_gradient_cuda")),
    Operation(
        name="data index",
        cpu=(
            "build_sample_index_int32",
            "build_sample_index_int64",
            "build_blend_index",
            "build_exhaustive_blend_index",
            "mark_bert_samples",
            "build_bert_mapping_uint32",
            "build_bert_mapping_uint64",
        ),
        on_host=True,
    ),
)
# The operation that calls a function of the compiled module.
OPERATION_OF: Mapping[str, Operation] = {
    function: operation for operation in OPERATIONS for function in operation.cpu + operation.cuda
}


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """Which implementation of each operation runs.

    Attributes:
        kernels: "native" are those of the compiled module, "auto" too where it has them; "apex" takes those of NVIDIA
            Apex for what it has, and is "auto" for the rest; "torch" are the references.
        references: operations whose reference runs in any case, each with the flag that says so.
        weight_gradients_apart: weight gradients are computed by themselves before they are added to their wide sum.
    """

    kernels: Kernels = "auto"
    references: Mapping[str, str] = field(default_factory=dict)
    weight_gradients_apart: bool = False

    def __post_init__(self) -> None:
        unknown = self.references.keys() - {operation.name for operation in OPERATIONS}
        assert not unknown, f"there are no operations {sorted(unknown)}, of which a reference could run"


_chosen = KernelChoice()


def kernel_choice() -> KernelChoice:
    """What `set_kernel_choice` set last in this process; "auto" at first."""
    return _chosen


def set_kernel_choice(choice: KernelChoice) -> None:
    global _chosen
    _chosen = choice
