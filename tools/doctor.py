"""What this machine and installation have, and which implementation of each operation runs here.

python tools/doctor.py
python tools/doctor.py --kernels native --device cuda

Each operation with kernels is run once, and compared with its reference. The exit status is 1 when that fails, or when
what --kernels asks for is not there. The text is meant to be pasted into a report: it holds no path and no host name.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from command_line import Parser, print_table, run_tool, say
from torch import Tensor

from megatron.config.problems import UserError
from megatron.core.kernels.activation import gelu_tanh, swiglu, swiglu_reference
from megatron.core.kernels.adam import AdamHyperParameters, HyperSpan, HyperSpans, adamw_, adamw_reference_
from megatron.core.kernels.apex import apex_obstacle
from megatron.core.kernels.choice import OPERATIONS, KernelChoice, Kernels, device_type, set_kernel_choice
from megatron.core.kernels.cross_entropy import (
    LogitGradient,
    logit_gradient,
    logit_gradient_reference,
    logit_statistics,
    logit_statistics_reference,
)
from megatron.core.kernels.extension import (
    MODULE_NAME,
    implementation,
    kernel_problems,
    load_extension,
)
from megatron.core.kernels.grad_norm import ElementSpans, sum_of_squares, sum_of_squares_reference
from megatron.core.kernels.norm import norm, norm_reference
from megatron.data.index_builder import blend_index_reference, build_blend_index

# Each operation computes in float32 here, from numbers around 1, and sums at most some thousand of them.
LARGEST_DIFFERENCE = 1e-5

# What an operation gives, and what its reference gives for the same input.
Results = tuple[Sequence[Tensor], Sequence[Tensor]]


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def adam(device: torch.device) -> Results:
    spans = HyperSpans([HyperSpan(length=4096), HyperSpan(length=104, weight_decay_multiplier=0.0)], device)
    hyper = AdamHyperParameters(step=3, lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.99, eps=1e-6, gradient_scale=4.0)
    mine = [_random(device, spans.size).abs() for _ in range(4)]
    expected = [tensor.clone() for tensor in mine]
    adamw_(*mine, spans=spans, hyper=hyper)
    adamw_reference_(*expected, spans=spans, hyper=hyper)
    return [mine[i] for i in (0, 2, 3)], [expected[i] for i in (0, 2, 3)]


def gradient_norm(device: torch.device) -> Results:
    flat, spans = _random(device, 9999), ElementSpans([(1, 4098), (4099, 9999)], device)
    return [sum_of_squares(flat, spans)], [sum_of_squares_reference(flat, spans)]


def cross_entropy(device: torch.device) -> Results:
    logits, valid = _random(device, 37, 1024), 1003
    target = torch.arange(37, device=device) * 29 % valid
    mine, expected = (
        statistics(logits, target, valid=valid, with_logit_sum=True)
        for statistics in (logit_statistics, logit_statistics_reference)
    )
    of_rows = LogitGradient(
        maximum=expected.maximum, sum=expected.sum, scale=torch.ones_like(expected.sum), on_target=1.0, on_each=0.0
    )
    gradients = torch.empty_like(logits), torch.empty_like(logits)
    logit_gradient(logits, target, of_rows, valid=valid, out=gradients[0])
    logit_gradient_reference(logits, target, of_rows, valid=valid, out=gradients[1])
    return [*_tensors(mine), gradients[0]], [*_tensors(expected), gradients[1]]


def _tensors(values: Sequence[Tensor | None]) -> list[Tensor]:
    return [value for value in values if value is not None]


def norm_(device: torch.device) -> Results:
    x, weight, bias = _random(device, 37, 5, 96), _random(device, 96), _random(device, 96).flip(0)
    both: tuple[list[Tensor], list[Tensor]] = [], []
    for results, function in zip(both, (norm, norm_reference)):
        results += _with_gradients(partial(function, bias=None, epsilon=1e-5), x, weight)
        results += _with_gradients(partial(function, epsilon=1e-5), x, weight, bias)
    return both


def gelu(device: torch.device) -> Results:
    x = _random(device, 37, 5, 96)
    return _with_gradients(gelu_tanh, x), _with_gradients(partial(F.gelu, approximate="tanh"), x)


def swiglu_(device: torch.device) -> Results:
    x = _random(device, 37, 5, 96)
    return _with_gradients(swiglu, x), _with_gradients(swiglu_reference, x)


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, _random(output.device, *output.shape))]


def data_index(device: torch.device) -> Results:
    weights = np.array([0.5, 0.3, 0.2])
    pairs = build_blend_index([0.5, 0.3, 0.2], 1000), blend_index_reference(weights, 1000)
    mine, expected = ([torch.from_numpy(array) for array in pair] for pair in pairs)
    return mine, expected


CHECKS: Mapping[str, Callable[[torch.device], Results]] = {
    "adam": adam,
    "gradient norm": gradient_norm,
    "cross entropy": cross_entropy,
    "RMSNorm": norm_,
    "gelu": gelu,
    "swiglu": swiglu_,
    "data index": data_index,
}


def difference(mine: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest one, relative to the largest element of its tensor; infinite where a number is not finite."""
    largest = 0.0
    for one, other in zip(mine, expected, strict=True):
        apart = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30)
        largest = max(largest, float(apart.nan_to_num(torch.inf)))
    return largest


# ---- what there is ----


def installation() -> Iterator[tuple[str, str]]:
    """(name, what there is) of everything that a report should say."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, {memory:.0f} GB of memory"
    yield "system", f"{system}, {'-'.join(platform.libc_ver())}"
    yield "Python", platform.python_version()
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield "torch", f"{torch.__version__} ({cuda}), {torch.get_num_threads()} threads"
    yield "GPUs", ", ".join(_gpus()) or "none is visible: runs compute on CPUs"
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    yield "communication", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends.items())
    yield MODULE_NAME, compiled_module()
    yield "nvcc", _nvcc_version()
    yield "NVIDIA Apex", apex_obstacle() or "installed"
    for package in ("numpy", "transformers", "sentencepiece", "tokenizers", "safetensors"):
        yield package, _version(package)


def _gpus() -> Iterator[str]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{properties.major}{properties.minor}"
        yield f"{properties.name} ({architecture}, {properties.total_memory / 1e9:.0f} GB)"


def compiled_module() -> str:
    """How it was built."""
    try:
        module = load_extension()
    except ImportError as error:
        return f"does not load: {error.msg.rpartition('/')[2]}; `make kernels` builds it anew"
    if module is None:
        return "is not built; `make kernels` (or `pip install .`) builds it"
    built = vars(module)
    threads = "threads of OpenMP" if built.get("openmp") else "one thread"
    architectures = [word.removesuffix("-real") for word in built.get("cuda_architectures", "").split()]
    gpus = f"for GPUs {', '.join(f'sm_{name}' for name in architectures)}" if built.get("cuda") else "not for GPUs"
    return f"instruction sets {', '.join(module.instruction_sets())}; {threads}; {gpus}"


def _nvcc_version() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "not in the PATH"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    return said.partition("release ")[2].partition(",")[0] or "in the PATH, and says no version"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- what runs ----


def examine(device: torch.device) -> bool:
    """Say what runs in each operation, and how far it is from its reference; whether all are near enough."""
    rows, fine = [("operation", "runs", "because", "difference from the reference")], True
    for operation in OPERATIONS:
        runs = implementation(operation, device_type(device))
        try:
            apart = difference(*CHECKS[operation.name](device))
        except RuntimeError as error:
            fine, shown = False, f"FAILS: {str(error).splitlines()[0]}"
        else:
            wrong = not apart <= LARGEST_DIFFERENCE
            fine, shown = fine and not wrong, f"{apart:.1e}" + (f": WRONG, more than {LARGEST_DIFFERENCE}" * wrong)
        rows.append((operation.name, runs.name, runs.why, shown))
    print_table(rows)
    return fine


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto", help="as in training (default auto)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU is visible")
    options = parser.read()
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU; --device cpu, or leave it out")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    print_table(list(installation()))
    say("")
    say(f"kernels on {kind}, --kernels {options.kernels}:")
    missing = list(kernel_problems(options.kernels, device_type(device)))
    for problem in missing:
        say(f"MISSING: {problem}")
    if not missing:
        set_kernel_choice(KernelChoice(kernels=options.kernels))
    if missing or not examine(device):
        sys.exit(1)


if __name__ == "__main__":
    run_tool(main)
