"""The sum of squares: its value, its bits, and what it says of elements that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.core.kernels import extension, grad_norm
from megatron.core.kernels.float_halves import Halves
from megatron.core.kernels.grad_norm import (
    ElementSpans,
    Span,
    sum_of_squares,
    sum_of_squares_compiled,
    sum_of_squares_reference,
)
from tests.helpers.numerics import assert_bitwise

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# No element, one, less and more than the lanes of the sum, less and more than a tile, and many spans with gaps.
SPANS: dict[str, list[Span]] = {
    "none": [],
    "one": [(5, 6)],
    "lanes": [(3, 34), (40, 72), (80, 113)],
    "tiles": [(0, 4095), (4096, 8192), (8192, 12289), (12290, 40000)],
    "many": [(start, start + start % 97) for start in range(0, 40_000, 97)],
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_spans = pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)


def values(dtype: torch.dtype, length: int = 40_000) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(0)).to(dtype)


def exact(flat: Tensor, spans: Iterable[Span]) -> float:
    return math.fsum(value * value for start, stop in spans for value in flat[start:stop].double().tolist())


def compiled(flat: Tensor, spans: ElementSpans, *, threads: int = 1, instruction_set: str = "best") -> Tensor:
    module = extension.load_extension()
    assert module is not None
    function = partial(module.sum_of_squares_cpu, threads=threads, instruction_set=instruction_set)
    return sum_of_squares_compiled(function, flat, spans)


@each_dtype
@each_spans
def test_it_is_the_exact_sum_to_the_rounding_of_float64(spans: list[Span], dtype: torch.dtype) -> None:
    flat = values(dtype)
    assert float(sum_of_squares(flat, ElementSpans(spans, CPU))) == pytest.approx(exact(flat, spans), rel=1e-14)


@each_dtype
@each_spans
def test_plain_torch_has_the_same_sum_to_the_rounding_of_float32_at_least(
    spans: list[Span], dtype: torch.dtype
) -> None:
    flat = values(dtype)
    mine = float(sum_of_squares_reference(flat, ElementSpans(spans, CPU)))
    # bfloat16 is added up one by one in float32, 4096 elements a row at most
    bound = {torch.float64: 1e-14, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-18}[dtype]
    assert mine == pytest.approx(exact(flat, spans), rel=bound)


@each_dtype
@each_spans
def test_its_bits_depend_neither_on_threads_nor_on_instructions(spans: list[Span], dtype: torch.dtype) -> None:
    flat, elements = values(dtype), ElementSpans(spans, CPU)
    expected = compiled(flat, elements)
    module = extension.load_extension()
    assert module is not None
    for instruction_set in module.instruction_sets():
        for threads in (1, 2, 3, 8):
            assert_bitwise(compiled(flat, elements, threads=threads, instruction_set=instruction_set), expected)


def test_more_tiles_than_are_summed_at_once() -> None:
    flat = values(torch.float32, 100_000)
    single = ElementSpans([(element, element + 1) for element in range(100_000)], CPU)
    expected = pytest.approx(float(flat.double().square().sum()), rel=1e-13)
    assert float(compiled(flat, single)) == expected
    assert_bitwise(compiled(flat, single, threads=2), compiled(flat, single))


@pytest.mark.parametrize("measure", [sum_of_squares, sum_of_squares_reference])
@each_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 31, 32, 4095, 4096, 8998, 8999])
def test_it_is_not_finite_if_one_of_the_elements_is_not(
    position: int, value: float, dtype: torch.dtype, measure: object
) -> None:
    assert callable(measure)
    flat = torch.ones(9000, dtype=dtype)
    flat[position] = value
    assert not torch.isfinite(measure(flat, ElementSpans([(0, 9000)], CPU)))
    others = ElementSpans([(0, position), (position + 1, 9000)], CPU)
    assert float(measure(flat, others)) == pytest.approx(8999, rel=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("measure", [sum_of_squares, sum_of_squares_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_finite_if_all_elements_are_however_large(dtype: torch.dtype, measure: object) -> None:
    assert callable(measure)
    largest = torch.finfo(dtype).max
    flat = torch.full((5000,), largest, dtype=dtype)
    assert float(measure(flat, ElementSpans([(0, 5000)], CPU))) == pytest.approx(5000 * float(largest) ** 2, rel=1e-14)


def test_the_whole_blocks_of_halves_share_what_the_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these is a copy to it."""
    made: list[Span] = []

    def counted(spans: Iterable[Span], device: torch.device) -> ElementSpans:
        made.extend(spans)
        return ElementSpans(spans, device)

    flat = values(torch.float32)
    halves = Halves(torch.empty_like(flat, dtype=torch.bfloat16), torch.empty(flat.shape, dtype=torch.int16))
    halves.copy_(flat)
    spans = [(0, 30_500), (31_000, 31_001)]
    elements = ElementSpans(spans, CPU)
    monkeypatch.setattr(grad_norm, "ElementSpans", counted)
    monkeypatch.setattr(grad_norm, "_EXACT_BLOCK", 1000)
    assert float(sum_of_squares(halves, elements)) == pytest.approx(exact(flat, spans), rel=1e-14)
    assert made == [(0, 1000), (0, 500), (0, 1)]


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="takes float64, float32 and bfloat16"):
        sum_of_squares(values(torch.float16), ElementSpans([(0, 9)], CPU))
