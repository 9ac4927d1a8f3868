"""The AdamW kernel against its plain reference and torch's optimizers, and its bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.kernels import extension
from megatron.core.kernels.adam import (
    AdamHyperParameters,
    HyperSpan,
    HyperSpans,
    adamw_,
    adamw_compiled_,
    adamw_reference_,
)
from megatron.core.kernels.dispatch import BEST_INSTRUCTION_SET
from megatron.core.kernels.float_halves import joined, split_
from tests.helpers.numerics import assert_bitwise, assert_parity, assert_within_reference_error, rounded
from tests.optimizer.test_float_halves import EVERY_KIND_OF_NUMBER

SPANS = (
    HyperSpan(length=192),
    HyperSpan(length=64, weight_decay_multiplier=0.0),
    HyperSpan(length=128, weight_decay_multiplier=0.25),
    HyperSpan(length=640),
)
HYPER = AdamHyperParameters(step=3, lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.99, eps=1e-6, gradient_scale=3.7)
# Around the widths of vectors, of a block of the kernel, and of what a thread is woken for.
SIZES = (1, 7, 63, 64, 65, 127, 128, 129, 1000, 4 * 16384 + 17)
# Two roundings of the last of 53 bits where the reference rounds in another order, over the terms of a parameter.
FP64_ROUNDING = 1e-15


@dataclass(frozen=True)
class Types:
    """Of a buffer's tensors."""

    parameter: torch.dtype
    gradient: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    low_precision: torch.dtype | None

    def __str__(self) -> str:
        return "-".join(str(dtype).removeprefix("torch.") for dtype in vars(self).values())


TYPES = [
    Types(main, *read, low)
    for main in (torch.float32, torch.float64)
    for read in itertools.product((main, torch.bfloat16), repeat=3)
    for low in (None, torch.bfloat16, torch.float16)
]
FP32 = Types(torch.float32, torch.float32, torch.float32, torch.float32, None)
FP64 = Types(torch.float64, torch.float64, torch.float64, torch.float64, None)


def module() -> Any:
    loaded = extension.load_extension()
    assert loaded is not None, "the compiled module is not built: `make kernels`"
    return loaded


INSTRUCTION_SETS = module().instruction_sets()


def kernel(threads: int = 1, instruction_set: str = BEST_INSTRUCTION_SET) -> Callable[..., Any]:
    return partial(module().adamw_cpu, threads=threads, instruction_set=instruction_set)


def hyper_spans(spans: Iterable[HyperSpan], device: torch.device | None = None) -> HyperSpans:
    return HyperSpans(spans, torch.device("cpu") if device is None else device)


def many_spans(size: int) -> list[HyperSpan]:
    """Spans of 0 to 200 elements, each with factors of its own."""
    spans, left = [], size
    for index in itertools.count():
        length = min(left, (37 * index) % 201)
        spans.append(HyperSpan(length=length, weight_decay_multiplier=index % 3 / 2, lr_multiplier=1 + index % 5 / 4))
        left -= length
        if not left:
            return spans


def tensors(dtype: torch.dtype, length: int = 1024) -> list[Tensor]:
    """(parameter, gradient, exp_avg, exp_avg_sq), the same values in any dtype but for rounding."""
    generator = torch.Generator().manual_seed(3)
    parameter, gradient, exp_avg = (torch.randn(length, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(length, generator=generator)
    return [values.to(dtype) for values in (parameter, gradient, exp_avg, exp_avg_sq)]


def buffers(types: Types, length: int) -> list[Tensor | None]:
    """The tensors of an update in these types, with the same values, and the copy."""
    four = [
        values.to(dtype)
        for values, dtype in zip(
            tensors(torch.float32, length), (types.parameter, types.gradient, types.exp_avg, types.exp_avg_sq)
        )
    ]
    return [*four, None if types.low_precision is None else torch.zeros(length, dtype=types.low_precision)]


def updated(
    types: Types,
    spans: HyperSpans,
    *,
    threads: int = 1,
    instruction_set: str = BEST_INSTRUCTION_SET,
    hyper: AdamHyperParameters = HYPER,
) -> list[Tensor]:
    """The tensors after an update by the kernel."""
    *four, low_precision = buffers(types, spans.size)
    adamw_compiled_(kernel(threads, instruction_set), *four, spans=spans, hyper=hyper, low_precision=low_precision)
    return [tensor for tensor in (*four, low_precision) if tensor is not None]


def assert_all_bitwise(mine: list[Tensor], expected: list[Tensor]) -> None:
    for name, actual, other in zip(("parameter", "gradient", "exp_avg", "exp_avg_sq", "copy"), mine, expected):
        assert_bitwise(actual, other, name)


# ---- values ----


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("gradient_scale", [1.0, 3.7, 65536.0])
@pytest.mark.parametrize("size", SIZES)
def test_float64_is_the_reference_to_the_last_bits(size: int, gradient_scale: float, decoupled: bool) -> None:
    hyper, spans = replace(HYPER, gradient_scale=gradient_scale, decoupled=decoupled), hyper_spans(many_spans(size))
    mine, reference = tensors(torch.float64, size), tensors(torch.float64, size)
    adamw_(*mine, spans=spans, hyper=hyper)
    adamw_reference_(*reference, spans=spans, hyper=hyper)
    for actual, expected in zip(mine, reference):
        scale = expected.abs().clamp(min=1.0)
        assert float(((actual - expected).abs() / scale).max()) <= FP64_ROUNDING


@pytest.mark.parametrize("gradient_scale", [1.0, 3.7, 65536.0])
def test_float32_errs_no_more_than_plain_torch(gradient_scale: float) -> None:
    hyper, spans = replace(HYPER, gradient_scale=gradient_scale), hyper_spans(SPANS)
    mine, plain, exact = tensors(torch.float32), tensors(torch.float32), tensors(torch.float64)
    adamw_(*mine, spans=spans, hyper=hyper)
    adamw_reference_(*plain, spans=spans, hyper=hyper)
    adamw_reference_(*exact, spans=spans, hyper=hyper)
    for name, i in (("parameter", 0), ("exp_avg", 2), ("exp_avg_sq", 3)):
        assert_within_reference_error(mine[i], plain[i], exact[i], name)


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_what_is_narrow_is_read_widened_and_written_rounded(types: Types) -> None:
    """As if the wide update had been run between two conversions."""
    spans = hyper_spans(many_spans(1000))
    mine = updated(types, spans)
    wide = [tensor.to(types.parameter) for tensor in buffers(types, 1000)[:4] if tensor is not None]
    adamw_compiled_(kernel(), *wide, spans=spans, hyper=HYPER, low_precision=None)
    expected = [
        wide[0],
        wide[1].to(types.gradient),
        wide[2].to(types.exp_avg),
        wide[3].to(types.exp_avg_sq),
    ]
    if types.low_precision is not None:
        expected.append(rounded(wide[0], types.low_precision))
    assert_all_bitwise(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoupled", [True, False])
def test_twenty_steps_are_those_of_torch(decoupled: bool, dtype: torch.dtype) -> None:
    """Two groups of torch's optimizer are two spans here; gradients arrive multiplied by a loss scale."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator, dtype=torch.float64)
    leaves = [start[:600].to(dtype).requires_grad_(), start[600:].to(dtype).requires_grad_()]
    groups = [
        {"params": leaves[:1], "weight_decay": 0.1, "lr": 1e-2},
        {"params": leaves[1:], "weight_decay": 0.0, "lr": 5e-3},
    ]
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, betas=(0.9, 0.95), eps=1e-8)
    spans = hyper_spans(
        [HyperSpan(length=600), HyperSpan(length=400, weight_decay_multiplier=0.0, lr_multiplier=0.5)],
    )
    mine, exp_avg, exp_avg_sq = start.to(dtype), torch.zeros(1000, dtype=dtype), torch.zeros(1000, dtype=dtype)
    for step in range(1, 21):
        gradient = torch.randn(1000, generator=generator, dtype=torch.float64).to(dtype)
        leaves[0].grad, leaves[1].grad = gradient[:600].clone(), gradient[600:].clone()
        theirs.step()
        hyper = AdamHyperParameters(
            step=step,
            lr=1e-2,
            weight_decay=0.1,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            gradient_scale=1024.0,
            decoupled=decoupled,
        )
        adamw_(mine, gradient * 1024, exp_avg, exp_avg_sq, spans=spans, hyper=hyper)
    assert_parity(mine, torch.cat([leaf.detach() for leaf in leaves]))


def test_a_small_weight_decay_is_not_rounded_away() -> None:
    """1 - 1e-7 as a float32 factor is 1 - 1.19e-7; over many steps the parameters would shrink by a fifth too much."""
    parameter = torch.linspace(1, 2, 4096, dtype=torch.float32)
    exact = parameter.double() * (1 - 1e-7)
    still = [torch.zeros_like(parameter) for _ in range(3)]
    hyper = replace(HYPER, lr=1e-6, weight_decay=0.1)
    adamw_(parameter, *still, spans=hyper_spans([HyperSpan(length=4096)]), hyper=hyper)
    assert_bitwise(parameter, exact.float())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_where_it_is(value: float) -> None:
    mine, clean = tensors(torch.float32), tensors(torch.float32)
    mine[1][77] = value
    for four in (mine, clean):
        adamw_(*four, spans=hyper_spans(SPANS), hyper=HYPER)
    others = torch.arange(1024) != 77
    assert not torch.isfinite(mine[2][77])
    assert_all_bitwise([tensor[others] for tensor in mine], [tensor[others] for tensor in clean])


# ---- bits ----


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("types", [FP32, FP64, replace(FP32, gradient=torch.bfloat16, low_precision=torch.bfloat16)])
def test_bits_depend_neither_on_threads_nor_on_instructions(
    types: Types, size: int, threads: int, instruction_set: str
) -> None:
    spans = hyper_spans(many_spans(size))
    mine = updated(types, spans, threads=threads, instruction_set=instruction_set)
    assert_all_bitwise(mine, updated(types, spans, instruction_set="generic"))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_every_instruction_set_has_the_same_bits_in_all_types(types: Types, instruction_set: str) -> None:
    spans = hyper_spans(many_spans(1000))
    assert_all_bitwise(updated(types, spans, instruction_set=instruction_set), updated(types, spans))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("borders", [(64, 448), (1, 2, 130, 131), (5, 777)])
def test_bits_do_not_depend_on_where_an_element_lies(borders: tuple[int, ...], dtype: torch.dtype) -> None:
    whole, sliced = tensors(dtype), tensors(dtype)
    copies = [torch.zeros(1024, dtype=torch.bfloat16) for _ in range(2)]
    adamw_(*whole, spans=hyper_spans([HyperSpan(length=1024)]), hyper=HYPER, low_precision=copies[0])
    for start, stop in itertools.pairwise((0, *borders, 1024)):
        part = (flat[start:stop] for flat in sliced)
        spans = hyper_spans([HyperSpan(length=stop - start)])
        adamw_(*part, spans=spans, hyper=HYPER, low_precision=copies[1][start:stop])
    assert_all_bitwise([*sliced, copies[1]], [*whole, copies[0]])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_copy_rounds_every_kind_of_number(low: torch.dtype, instruction_set: str) -> None:
    """To the nearest, as torch does; halves in bfloat16 away from zero."""
    parameter = EVERY_KIND_OF_NUMBER.clone()
    copy = torch.zeros(parameter.numel(), dtype=low)
    stand_still(parameter, low_precision=copy, instruction_set=instruction_set)
    numbers = torch.isfinite(parameter)  # decay times infinity is no number: no update leaves one alone
    assert_bitwise(copy[numbers], rounded(EVERY_KIND_OF_NUMBER, low)[numbers])
    assert torch.isnan(copy[~numbers]).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_halves_keep_every_bit_of_every_number(instruction_set: str) -> None:
    upper, lower = halves_of(EVERY_KIND_OF_NUMBER)
    stand_still(upper, remainder=lower, instruction_set=instruction_set)
    numbers = torch.isfinite(EVERY_KIND_OF_NUMBER)
    assert_bitwise(
        joined(upper, lower)[numbers].view(torch.int32), EVERY_KIND_OF_NUMBER[numbers].view(torch.int32), "parameter"
    )
    assert torch.isnan(upper[~numbers]).all()
    assert torch.count_nonzero(lower[~numbers]) == 0


def stand_still(
    parameter: Tensor,
    *,
    instruction_set: str,
    low_precision: Tensor | None = None,
    remainder: Tensor | None = None,
) -> None:
    """An update by the kernel that changes no number."""
    still = [torch.zeros(parameter.numel(), dtype=torch.float32) for _ in range(3)]
    adamw_compiled_(
        kernel(1, instruction_set),
        parameter,
        *still,
        spans=hyper_spans([HyperSpan(length=parameter.numel(), weight_decay_multiplier=0.0)]),
        hyper=HYPER,
        low_precision=low_precision,
        remainder=remainder,
    )


def halves_of(wide: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = (torch.empty(wide.shape, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    split_(wide, upper, lower)
    return upper, lower


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_in_halves_the_updates_are_those_of_whole_parameters(
    size: int, moments: torch.dtype, compiled: bool, request: pytest.FixtureRequest
) -> None:
    """Bit for bit, the model's bfloat16 too, over steps in which parameters change their sign."""
    if not compiled:
        request.getfixturevalue("without_module")
    generator = torch.Generator().manual_seed(size)
    spans = hyper_spans(many_spans(size))
    whole = 0.02 * torch.randn(size, generator=generator)
    first, copy = whole.clone(), torch.zeros(size, dtype=torch.bfloat16)
    upper, lower = halves_of(whole)
    states = [[torch.zeros(size, dtype=moments) for _ in range(2)] for _ in range(2)]
    for step in range(1, 8):
        hyper = replace(HYPER, step=step)
        gradient = torch.randn(size, generator=generator, dtype=torch.float32).to(moments)
        # Without the module torch's fused functional updates whole float32 parameters, and rounds in its own order.
        update_ = adamw_ if compiled else adamw_reference_
        update_(whole, gradient.clone(), *states[0], spans=spans, hyper=hyper, low_precision=copy)
        adamw_(upper, gradient.clone(), *states[1], spans=spans, hyper=hyper, remainder=lower)
        assert_bitwise(upper, copy, "the model's")
        assert_bitwise(joined(upper, lower), whole, "parameter")
        assert_all_bitwise(states[1], states[0])
    if size > 100:
        assert bool((whole.sign() != first.sign()).any())
        assert bool((lower < 0).any())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("threads", [1, 3])
def test_in_halves_bits_depend_neither_on_threads_nor_on_instructions(threads: int, instruction_set: str) -> None:
    size = SIZES[-1]
    spans = hyper_spans(many_spans(size))
    results = []
    for compiled in (kernel(threads, instruction_set), kernel()):
        whole, *others = tensors(torch.float32, size)
        upper, lower = halves_of(whole)
        adamw_compiled_(compiled, upper, *others, spans=spans, hyper=HYPER, low_precision=None, remainder=lower)
        results.append([upper, lower, *others])
    for mine, expected in zip(*results):
        assert_bitwise(mine, expected)


def test_zero_padding_stays_zero() -> None:
    flat = [torch.zeros(128, dtype=torch.float32) for _ in range(4)]
    adamw_(*flat, spans=hyper_spans([HyperSpan(length=128)]), hyper=HYPER)
    assert all(torch.count_nonzero(tensor) == 0 for tensor in flat)


# ---- without the module, and what is refused ----


@pytest.fixture
def without_module(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    extension.load_extension.cache_clear()
    monkeypatch.setattr(extension, "MODULE_NAME", "megatron._not_built")
    yield
    extension.load_extension.cache_clear()


@pytest.mark.usefixtures("without_module")
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_without_the_module_the_update_is_the_same_to_rounding(types: Types, decoupled: bool) -> None:
    spans, hyper = hyper_spans(many_spans(1000)), replace(HYPER, decoupled=decoupled)
    mine, reference = buffers(types, 1000), buffers(types, 1000)
    exact = [tensor.to(torch.float64, copy=True) for tensor in mine[:4] if tensor is not None]
    adamw_(*mine[:4], spans=spans, hyper=hyper, low_precision=mine[4])
    adamw_reference_(*reference[:4], spans=spans, hyper=hyper, low_precision=reference[4])
    adamw_reference_(*exact, spans=spans, hyper=hyper)
    for index in (0, 2, 3):
        actual, plain = mine[index], reference[index]
        assert actual is not None and plain is not None
        if actual.dtype == torch.float64:
            assert_parity(actual, exact[index])
        else:
            assert_within_reference_error(actual, plain, exact[index])
    if types.low_precision is not None:
        assert mine[0] is not None and mine[4] is not None
        assert_bitwise(mine[4], rounded(mine[0], types.low_precision))


def test_runs_that_do_not_tile_the_buffer_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="tile"):
        adamw_(*tensors(torch.float32), spans=hyper_spans(SPANS[:-1]), hyper=HYPER)


def test_types_that_no_kernel_takes_are_refused() -> None:
    four = tensors(torch.float32)
    for index, dtype in ((0, torch.bfloat16), (1, torch.float64), (2, torch.float16), (3, torch.int64)):
        wrong = [tensor.to(dtype) if i == index else tensor for i, tensor in enumerate(four)]
        with pytest.raises(ValueError, match=r"adamw takes|no kernel takes"):
            adamw_(*wrong, spans=hyper_spans(SPANS), hyper=HYPER)
    lower = torch.zeros(1024, dtype=torch.int16)
    with pytest.raises(ValueError, match="adamw takes"):
        adamw_(*four, spans=hyper_spans(SPANS), hyper=HYPER, remainder=lower)
    four[0] = four[0].bfloat16()
    with pytest.raises(ValueError, match="adamw takes"):
        adamw_(*four, spans=hyper_spans(SPANS), hyper=HYPER, remainder=lower, low_precision=four[0].clone())


@pytest.mark.parametrize("operator", ["adamw", "sum_of_squares"])
def test_an_instruction_set_that_the_processor_lacks_is_refused(operator: str) -> None:
    call: dict[str, Callable[[], object]] = {
        "adamw": lambda: updated(FP32, hyper_spans(SPANS), instruction_set="avx1024"),
        "sum_of_squares": lambda: module().sum_of_squares_cpu(
            data=(0, ""), tiles=0, num_tiles=0, threads=1, instruction_set="avx1024"
        ),
    }
    with pytest.raises(ValueError, match="no instruction set 'avx1024'"):
        call[operator]()


def test_an_empty_buffer_is_updated() -> None:
    adamw_(*tensors(torch.float32, length=0), spans=hyper_spans(()), hyper=HYPER)
