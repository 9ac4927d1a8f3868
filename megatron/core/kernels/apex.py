"""NVIDIA Apex, where it is installed: whether it can be used, and its kernels.

The package index holds another, unrelated package of that name, which is never imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.kernels.float_halves import narrow_

if TYPE_CHECKING:
    from megatron.core.kernels.adam import AdamHyperParameters, HyperSpans

_SOURCES = "https://github.com/NVIDIA/apex"
# Packages that NVIDIA's has and the other one has not, and the compiled modules that they call.
_PACKAGES = ("multi_tensor_apply", "optimizers", "normalization")
_EXTENSIONS = ("amp_C", "fused_layer_norm_cuda")
# What Apex gives a block of threads at a time, and the longest tensor it is given: it counts elements in 32 bits.
_CHUNK = 2048 * 32
_LONGEST = 2**30


def apex_obstacle() -> str:
    """Why the kernels of Apex cannot be called; "" where they can be. Nothing is imported to find out."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return f"NVIDIA Apex is not installed; it is built from its sources, {_SOURCES}"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not all(any((folder / package).is_dir() for folder in folders) for package in _PACKAGES):
        return (
            f"the package `apex` that is installed here{_installed_as()} is not NVIDIA's, but an unrelated one of the "
            f"same name; `pip uninstall apex`, then build NVIDIA's from its sources, {_SOURCES}"
        )
    missing = [name for name in _EXTENSIONS if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"NVIDIA Apex is installed without its compiled {' and '.join(missing)}; build it again with its C++ and "
            f"CUDA extensions, see {_SOURCES}"
        )
    return ""


def _installed_as() -> str:
    """Version and summary of the distribution `apex`, in brackets; "" where it is none."""
    try:
        distribution = importlib.metadata.metadata("apex")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f" ({distribution['Version']}: {distribution['Summary']})"


@functools.cache
def multi_tensor_adam() -> Callable[..., None]:
    """The kernel of `apex.optimizers.FusedAdam`."""
    function: Callable[..., None] = importlib.import_module("amp_C").multi_tensor_adam
    return function


@functools.cache
def normalization() -> Any:
    """The module with `fused_layer_norm_affine` and `fused_rms_norm_affine`."""
    return importlib.import_module("apex.normalization.fused_layer_norm")


def norm_by_apex(apex: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """`norm` by `normalization()`."""
    normed: Tensor
    if bias is None:
        normed = apex.fused_rms_norm_affine(x, weight, weight.shape, epsilon)
    else:
        normed = apex.fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon)
    return normed


def adamw_by_apex_(
    adam: Callable[..., None],
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    spans: HyperSpans,
    hyper: AdamHyperParameters,
    low_precision: Tensor | None,
) -> None:
    """`adamw_` by `multi_tensor_adam()`: all tensors float32, [n]; overwrites the gradient.

    It neither unscales nor writes the copy in low precision: these are passes of their own.
    """
    tensors = (gradient, parameter, exp_avg, exp_avg_sq)  # in the order of Apex
    assert all(tensor.dtype == torch.float32 for tensor in tensors), [tensor.dtype for tensor in tensors]
    if hyper.gradient_scale != 1.0:
        gradient.div_(hyper.gradient_scale)
    pieces: dict[tuple[float, float], list[tuple[int, int]]] = {}
    start = 0
    for span in spans.spans:
        stop = start + span.length
        of_these = pieces.setdefault((span.lr_multiplier, span.weight_decay_multiplier), [])
        of_these.extend((first, min(first + _LONGEST, stop)) for first in range(start, stop, _LONGEST))
        start = stop
    never_skip = torch.zeros(1, dtype=torch.int32, device=parameter.device)
    for (lr, weight_decay), bounds in pieces.items():
        adam(
            _CHUNK,
            never_skip,
            [[tensor[first:last] for first, last in bounds] for tensor in tensors],
            lr * hyper.lr,
            hyper.beta1,
            hyper.beta2,
            hyper.eps,
            hyper.step,
            int(hyper.decoupled),
            1,  # with bias correction
            weight_decay * hyper.weight_decay,
        )
    if low_precision is not None:
        narrow_(parameter, low_precision)
