"""RMSNorm, GELU and SwiGLU as kernels: their values, gradients and bits, and what they keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels import dispatch
from megatron.core.kernels import norm as norm_module
from megatron.core.kernels.activation import gelu_tanh, swiglu, swiglu_reference
from megatron.core.kernels.choice import KernelChoice, set_kernel_choice
from megatron.core.kernels.extension import load_extension
from megatron.core.kernels.norm import norm, norm_reference
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_as_exact, assert_bitwise

CPU = torch.device("cpu")
EPSILON = 1e-5
Operation = Callable[..., Tensor]


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


# The operation, plain torch beside it, and whether it has a weight.
OPERATIONS: dict[str, tuple[Operation, Operation, bool]] = {
    "rms_norm": (
        lambda x, weight: norm(x, weight, None, EPSILON),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, EPSILON),
        True,
    ),
    "gelu": (gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), False),
    "swiglu": (swiglu, plain_swiglu, False),
}
REFERENCES: dict[str, tuple[Operation, Operation, bool]] = {
    "rms_norm": (lambda x, weight: norm_reference(x, weight, None, EPSILON), *OPERATIONS["rms_norm"][1:]),
    "swiglu": (swiglu_reference, *OPERATIONS["swiglu"][1:]),
}
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = [(1, 2), (3, 31, 2), (40, 2, 66), (5, 1, 1000)]


def instruction_sets() -> list[str]:
    module = load_extension()
    assert module is not None
    sets: list[str] = module.instruction_sets()
    return sets


def results(
    function: Operation,
    with_weight: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    wide: bool,
    device: torch.device = CPU,
) -> Any:
    """Output and gradients for inputs rounded to `dtype`, computed in it or `wide`."""
    generator = torch.Generator().manual_seed(0)
    inputs = [2 * torch.randn(shape, generator=generator, dtype=torch.float64)]
    if with_weight:
        inputs.append(torch.rand(shape[-1], generator=generator, dtype=torch.float64) + 0.5)
    to = torch.float64 if wide else dtype
    leaves = [tensor.to(dtype).to(device, to).requires_grad_() for tensor in inputs]
    output = function(*leaves)
    gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype).to(device, to)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def check_against_torch(
    operation: tuple[Operation, Operation, bool], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    mine, plain, with_weight = operation
    exact = results(plain, with_weight, shape, dtype, wide=True)
    torchs = results(plain, with_weight, shape, dtype, wide=False)
    for name, one, other, best in zip(
        ("output", "x", "weight"), results(mine, with_weight, shape, dtype, wide=False), torchs, exact
    ):
        assert one.dtype == dtype
        assert_as_exact(one, other, best, name)


@each_operation
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_errs_at_most_twice_as_much_as_plain_torch(
    shape: tuple[int, ...], dtype: torch.dtype, operation: tuple[Operation, Operation, bool]
) -> None:
    check_against_torch(operation, shape, dtype)


@pytest.mark.parametrize("operation", REFERENCES.values(), ids=REFERENCES)
@each_dtype
def test_so_does_its_reference(dtype: torch.dtype, operation: tuple[Operation, Operation, bool]) -> None:
    check_against_torch(operation, (40, 2, 66), torch.float64 if dtype == torch.float16 else dtype)


@pytest.mark.parametrize("shape", [(40, 2, 66), (5, 1, 1000)], ids=str)
def test_the_reference_of_swiglu_rounds_once(shape: tuple[int, ...]) -> None:
    mine = results(swiglu_reference, False, shape, torch.bfloat16, wide=False)
    exact = results(plain_swiglu, False, shape, torch.bfloat16, wide=True)
    for one, best in zip(mine, exact):
        # But for what lies in the middle of two numbers, to the rounding of fp32.
        assert (one != best.bfloat16()).double().mean() < 0.01


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@each_operation
def test_an_empty_last_dimension_is_as_in_torch(operation: tuple[Operation, Operation, bool], kernels: Any) -> None:
    mine, plain, with_weight = operation
    set_kernel_choice(KernelChoice(kernels=kernels))
    try:
        both = [results(one, with_weight, (3, 2, 0), torch.float32, wide=False) for one in (mine, plain)]
    finally:
        set_kernel_choice(KernelChoice())
    for one, other in zip(*both, strict=True):
        assert_bitwise(one, other)


@each_operation
@each_dtype
def test_its_bits_depend_neither_on_threads_nor_on_vectors(
    dtype: torch.dtype, operation: tuple[Operation, Operation, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, _, with_weight = operation
    every = []
    for instruction_set in instruction_sets()[1:] or ["generic"]:
        for threads in (1, 2, 3):
            chosen = {"threads": threads, "instruction_set": instruction_set}
            monkeypatch.setattr(dispatch, "device_arguments", lambda x, chosen=chosen: chosen)
            every.append(results(function, with_weight, (700, 2, 66), dtype, wide=False))
    for others in every[1:]:
        for one, other in zip(every[0], others):
            assert_bitwise(other, one)


@each_operation
def test_without_vectors_it_is_the_same_to_the_rounding(
    operation: tuple[Operation, Operation, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "device_arguments", lambda x: {"threads": 1, "instruction_set": "generic"})
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check_against_torch(operation, (40, 2, 66), dtype)


@each_operation
def test_it_keeps_its_input_and_at_most_a_number_for_each_row(operation: tuple[Operation, Operation, bool]) -> None:
    function, _, with_weight = operation
    x = torch.randn(64, 2, 256).bfloat16().requires_grad_()
    weight = torch.ones(256).bfloat16().requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x, weight) if with_weight else function(x)
    others = [tensor for tensor in kept if tensor.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert sum(tensor.numel() for tensor in others) <= x.numel() / 256


@pytest.mark.parametrize("function", [gelu_tanh, swiglu])
def test_large_inputs_and_what_is_not_a_number_pass_as_in_torch(function: Operation) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 0.0, -0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
        x.requires_grad_()
        output = function(x)
        output.sum().backward()
        assert x.grad is not None
        assert output.isfinite().all()
        assert x.grad.isfinite().all()
        large = [0.0, 0.0, 100.0, float(torch.tensor(1e4, dtype=dtype))]
        assert output[0, :4].tolist() == pytest.approx(large, abs=1e-30)
        assert function(torch.full((1, 2), math.nan, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("size", [1e4, 3e13, 1e18, 1e30])
def test_the_gradient_of_gelu_has_the_limits_of_the_function(
    size: float, instruction_set: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "device_arguments", lambda x: {"threads": 1, "instruction_set": instruction_set})
    x = torch.tensor([[-size, size] * 20], dtype=dtype, requires_grad=True)
    gelu_tanh(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 1.0] * 20]
    if size < 1e19:  # whose square torch needs
        other = x.detach().requires_grad_()
        F.gelu(other, approximate="tanh").sum().backward()
        assert other.grad is not None
        assert_bitwise(x.grad, other.grad)


def check_compiled_caller(rank: int, world_size: int, name: str) -> None:
    function, plain, with_weight = OPERATIONS[name]

    def caller(*leaves: Tensor) -> Tensor:
        return function(*leaves) * 2.0

    compiled = torch.compile(caller, backend="aot_eager", fullgraph=True)
    for dtype in (torch.float64, torch.bfloat16):
        eager = results(caller, with_weight, (8, 2, 66), dtype, wide=False)
        exact = results(lambda *leaves: plain(*leaves) * 2.0, with_weight, (8, 2, 66), dtype, wide=True)
        for one, other, best in zip(results(compiled, with_weight, (8, 2, 66), dtype, wide=False), eager, exact):
            assert_as_exact(one, other, best)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_compiled_caller_has_the_same_values(name: str) -> None:
    """In a process of its own: the compiler starts threads, and later tests fork this one."""
    run_distributed(check_compiled_caller, 1, name)


@pytest.fixture
def torch_kernels() -> Any:
    set_kernel_choice(KernelChoice(kernels="torch"))
    yield
    set_kernel_choice(KernelChoice())


@each_operation
@pytest.mark.usefixtures("torch_kernels")
def test_the_references_run_where_they_are_asked_for(operation: tuple[Operation, Operation, bool]) -> None:
    check_against_torch(operation, (40, 2, 66), torch.float64)


def compiled_norm(rank: int, world_size: int) -> None:
    def asked(name: str, x: Tensor) -> bool:
        raise AssertionError("what runs was asked of the process while its caller was compiled")

    with mock.patch.object(norm_module, "runs_in_apex", asked):
        compiled = torch.compile(lambda x, weight: norm(x, weight, None, EPSILON), backend="eager", fullgraph=True)
        compiled(torch.ones(3, 4), torch.ones(4))


def test_a_compiled_norm_does_not_ask_for_apex() -> None:
    """The answer lies in a variable of the process, of which the compiler would make a guard."""
    run_distributed(compiled_norm, 1)
