"""The kernels of the cross entropy: their exponential, their bits, and plain torch beside them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.cross_entropy import (
    LogitGradient,
    LogitStatistics,
    logit_gradient_compiled,
    logit_gradient_reference,
    logit_statistics_compiled,
    logit_statistics_reference,
)
from megatron.core.kernels.dispatch import BEST_INSTRUCTION_SET, compute_dtype
from megatron.core.kernels.extension import load_extension
from tests.helpers.numerics import assert_bitwise, assert_parity, assert_within_reference_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Less and more than the lanes of a sum and than the block that is read at once.
SHAPES = [(3, 1, 1), (3, 31, 30), (4, 33, 33), (2, 512, 512), (5, 1100, 1003), (2, 40, 0), (2, 0, 0)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def instruction_sets() -> list[str]:
    module = load_extension()
    assert module is not None
    sets: list[str] = module.instruction_sets()
    return sets


def compiled_statistics(
    logits: Tensor, target: Tensor, valid: int, *, threads: int = 1, instruction_set: str = BEST_INSTRUCTION_SET
) -> LogitStatistics:
    module = load_extension()
    assert module is not None
    return logit_statistics_compiled(
        partial(module.logit_statistics_cpu, threads=threads, instruction_set=instruction_set),
        logits,
        target,
        valid=valid,
        with_logit_sum=True,
    )


def compiled_gradient(
    logits: Tensor,
    target: Tensor,
    gradient: LogitGradient,
    valid: int,
    *,
    out: Tensor | None = None,
    threads: int = 1,
    instruction_set: str = BEST_INSTRUCTION_SET,
) -> Tensor:
    module = load_extension()
    assert module is not None
    out = torch.full_like(logits, math.nan) if out is None else out
    logit_gradient_compiled(
        partial(module.logit_gradient_cpu, threads=threads, instruction_set=instruction_set),
        logits,
        target,
        gradient,
        valid=valid,
        out=out,
    )
    return out


def case(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, LogitGradient]:
    """Logits whose padding would ruin a sum, targets of which some are elsewhere, and the rest of a gradient."""
    rows, width, valid = shape
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, width, generator=generator)).to(dtype)
    logits[:, valid:] = 1000.0
    target = torch.randint(-1, valid + 2, (rows,), generator=generator)
    statistics = logit_statistics_reference(logits.double(), target, valid=valid, with_logit_sum=False)
    wide = compute_dtype(logits)
    gradient = LogitGradient(
        maximum=statistics.maximum.to(wide),
        sum=statistics.sum.to(wide),
        scale=torch.randn(rows, generator=generator).to(wide),
        on_target=0.9,
        on_each=0.1 / 1003,
    )
    return logits, target, gradient


def ulps(actual: Tensor, exact: Tensor) -> float:
    """The largest error in units of the last place of the exact value, rounded to the type of the actual one."""
    rounded = exact.to(actual.dtype)
    step = torch.nextafter(rounded, torch.full_like(rounded, math.inf)).to(exact.dtype) - rounded.to(exact.dtype)
    return float(((actual.to(exact.dtype) - exact).abs() / step).max())


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_its_exponential_errs_by_at_most_two_units_in_the_last_place(instruction_set: str) -> None:
    """A gradient with sum and scale 1 and nothing subtracted is e**x itself."""
    for low, high in ((-87.33, 88.37), (-1.0, 1.0), (-1e-4, 1e-4)):
        x = torch.linspace(low, high, 2_000_000, dtype=torch.float64).float()
        zero, one = torch.zeros(1), torch.ones(1)
        plain = LogitGradient(maximum=zero, sum=one, scale=one, on_target=0.0, on_each=0.0)
        target = torch.tensor([-1])
        power = compiled_gradient(x.view(1, -1), target, plain, x.numel(), instruction_set=instruction_set)
        assert ulps(power.view(-1), x.double().exp()) <= 2
    wide = torch.linspace(-700.0, 700.0, 1_000_000, dtype=torch.float64)
    doubles = LogitGradient(maximum=zero.double(), sum=one.double(), scale=one.double(), on_target=0.0, on_each=0.0)
    power = compiled_gradient(wide.view(1, -1), target, doubles, wide.numel(), instruction_set=instruction_set)
    assert ulps(power.view(-1), wide.exp()) <= 3  # torch's own errs by one


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_its_exponential_has_the_limits_of_the_function(instruction_set: str) -> None:
    x = torch.tensor([[-math.inf, -1e4, -88.0, 0.0, 89.0, math.inf, math.nan]])
    zero, one = torch.zeros(1), torch.ones(1)
    plain = LogitGradient(maximum=zero, sum=one, scale=one, on_target=0.0, on_each=0.0)
    power = compiled_gradient(x, torch.tensor([-1]), plain, 7, instruction_set=instruction_set)
    assert power[0, :6].tolist() == [0.0, 0.0, 0.0, 1.0, math.inf, math.inf]
    assert power[0, 6].isnan()


@each_dtype
@each_shape
def test_statistics_are_those_of_plain_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    logits, target, _ = case(shape, dtype)
    mine = compiled_statistics(logits, target, shape[2])
    plain = logit_statistics_reference(logits, target, valid=shape[2], with_logit_sum=True)
    exact = logit_statistics_reference(logits.double(), target, valid=shape[2], with_logit_sum=True)
    assert_bitwise(mine.maximum, exact.maximum.to(mine.maximum.dtype), "maximum")
    assert_bitwise(mine.target_logit, exact.target_logit.to(mine.maximum.dtype), "logit of the target")
    assert mine.logit_sum is not None
    assert exact.logit_sum is not None
    for name, value, other in (("sum", mine.sum, exact.sum), ("logits", mine.logit_sum, exact.logit_sum)):
        assert_parity(value, other.to(value.dtype), name, floor=1.0)
    assert_parity(plain.sum, exact.sum.to(plain.sum.dtype), "plain torch")


@each_dtype
@each_shape
def test_the_gradient_errs_at_most_twice_as_much_as_plain_torch(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    logits, target, gradient = case(shape, dtype)
    mine = compiled_gradient(logits, target, gradient, shape[2])
    plain = torch.full_like(logits, math.nan)
    logit_gradient_reference(logits, target, gradient, valid=shape[2], out=plain)
    doubles = {name: value.double() if isinstance(value, Tensor) else value for name, value in vars(gradient).items()}
    exact = torch.full_like(logits, math.nan, dtype=torch.float64)
    logit_gradient_reference(logits.double(), target, LogitGradient(**doubles), valid=shape[2], out=exact)
    assert_bitwise(mine[:, shape[2] :], torch.zeros_like(mine[:, shape[2] :]), "padding")
    if dtype in (torch.float64, torch.float32):
        assert_parity(mine, exact.to(dtype), "gradient")
    else:
        assert_within_reference_error(mine, plain, exact, "gradient")


@each_dtype
@each_shape
def test_bits_depend_neither_on_threads_nor_on_vectors_nor_on_where_the_gradient_is_written(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    logits, target, gradient = case((40 * shape[0], *shape[1:]), dtype)
    statistics = compiled_statistics(logits, target, shape[2])
    written = compiled_gradient(logits, target, gradient, shape[2])
    for instruction_set in instruction_sets()[1:]:
        for threads in (1, 2, 3):
            chosen = {"threads": threads, "instruction_set": instruction_set}
            others = compiled_statistics(logits, target, shape[2], **chosen)  # type: ignore[arg-type]
            for mine, other in zip(statistics, others):
                assert mine is not None
                assert other is not None
                assert_bitwise(other, mine)
            over = logits.clone()
            compiled_gradient(over, target, gradient, shape[2], out=over, **chosen)  # type: ignore[arg-type]
            assert_bitwise(over, written)


@each_dtype
@pytest.mark.parametrize("position", [0, 31, 511, 512, 1002])
@pytest.mark.parametrize("filler", [0.0, -math.inf])
def test_what_is_not_a_number_shows_in_the_sum(filler: float, position: int, dtype: torch.dtype) -> None:
    logits = torch.full((1, 1003), filler, dtype=dtype)
    logits[0, position] = math.nan
    assert compiled_statistics(logits, torch.tensor([0]), 1003).sum.isnan().all()
    plain = logit_statistics_reference(logits, torch.tensor([0]), valid=1003, with_logit_sum=False)
    assert plain.sum.isnan().all()
