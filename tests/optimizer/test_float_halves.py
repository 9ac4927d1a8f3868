"""Float32 numbers in halves: nothing is lost, and the upper half is the nearest bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.kernels import float_halves
from megatron.core.kernels.float_halves import joined, narrow_, split_
from tests.helpers.numerics import assert_bitwise, rounded


def numbers_of(uppers: Tensor, lowers: Tensor) -> Tensor:
    """Float32 numbers with all pairs of these upper and lower 16 bits."""
    return (uppers[:, None].to(torch.int64) << 16 | lowers).to(torch.int32).view(torch.float32).flatten()


# Every sign, exponent and leading bits of the fraction, with the rest of it below, at and above the halves of bfloat16
# and float16: zeros, subnormal numbers, the largest, infinities and what is not a number are among them.
LOWERS = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF)
EVERY_KIND_OF_NUMBER = numbers_of(torch.arange(2**16), torch.tensor(LOWERS))
# Every rest of the fraction, below leading bits of zeros, subnormal, the least normal, 1, the largest, infinite, NaN.
EVERY_REST = numbers_of(
    torch.tensor([0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0xBF80, 0x7F7F, 0x7F80, 0xFF80, 0x7FFF]),
    torch.arange(2**16),
)


@pytest.mark.parametrize("numbers", [EVERY_KIND_OF_NUMBER, EVERY_REST], ids=["every-kind", "every-rest"])
def test_halves_joined_are_the_number_in_all_its_bits(numbers: Tensor) -> None:
    upper, lower = torch.empty(numbers.shape, dtype=torch.bfloat16), torch.empty(numbers.shape, dtype=torch.int16)
    split_(numbers, upper, lower)
    known = ~numbers.isnan()
    whole = joined(upper, lower)
    assert_bitwise(whole[known].view(torch.int32), numbers[known].view(torch.int32))
    assert bool(whole[~known].isnan().all()) and bool(upper[~known].isnan().all())
    assert_bitwise(upper[known].view(torch.int16), rounded(numbers, torch.bfloat16)[known].view(torch.int16))


def test_a_copy_in_bfloat16_is_the_upper_half_and_one_in_float16_is_that_of_torch() -> None:
    for dtype, expected in (
        (torch.bfloat16, rounded(EVERY_KIND_OF_NUMBER, torch.bfloat16)),
        (torch.float16, EVERY_KIND_OF_NUMBER.half()),
    ):
        copy = torch.empty(EVERY_KIND_OF_NUMBER.shape, dtype=dtype)
        narrow_(EVERY_KIND_OF_NUMBER, copy)
        known = ~EVERY_KIND_OF_NUMBER.isnan()
        assert_bitwise(copy[known].view(torch.int16), expected[known].view(torch.int16))
        assert bool(copy[~known].isnan().all())


def test_a_half_rounds_away_from_zero_and_leaves_a_negative_remainder() -> None:
    numbers = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8])
    upper, lower = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    split_(numbers, upper, lower)
    assert upper.tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6]
    assert lower.tolist() == [-(2**15)] * 3


def test_a_number_that_rounds_to_infinity_is_kept() -> None:
    largest = torch.tensor([3.4028234e38, -3.4028234e38])
    upper, lower = torch.empty(2, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int16)
    split_(largest, upper, lower)
    assert bool(upper.isinf().all())
    assert_bitwise(joined(upper, lower), largest)


class NewBytes(TorchDispatchMode):
    """The largest memory that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("shape", [(100_001,), (1000, 70), (3, 5, 1000)])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_more_than_a_block_is_made_at_a_time(
    shape: tuple[int, ...], transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    copy, upper, lower = (torch.empty(shape, dtype=t) for t in (torch.bfloat16, torch.bfloat16, torch.int16))
    if transposed:
        numbers, copy, upper, lower = (
            tensor.mT if tensor.dim() > 1 else tensor for tensor in (numbers, copy, upper, lower)
        )
    monkeypatch.setattr(float_halves, "_BLOCK", 5000)
    with NewBytes() as made:
        narrow_(numbers, copy)
        split_(numbers, upper, lower)
    assert 0 < made.largest <= 4 * 5000
    assert_bitwise(copy, rounded(numbers, torch.bfloat16))
    assert_bitwise(joined(upper, lower), numbers)


def test_a_single_number_and_none() -> None:
    for numbers in (torch.tensor(1 + 2**-8), torch.empty(0, 3), torch.empty(0)):
        copy = torch.empty(numbers.shape, dtype=torch.bfloat16)
        narrow_(numbers, copy)
        assert_bitwise(copy, rounded(numbers, torch.bfloat16))
