"""The output layer and its loss in one: the same numbers as one after the other, and no logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.comm_group import CommGroup
from megatron.core.kernels.choice import KernelChoice, set_kernel_choice
from megatron.core.kernels.cross_entropy import LogitStatistics
from megatron.core.tensor_parallel import linear_cross_entropy as module
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import column_parallel_linear
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise, assert_parity, assert_within_reference_error
from tests.helpers.operations import RecordedOperations
from tests.tensor_parallel.collective_log import kinds, recorded_collectives
from tests.tensor_parallel.ranks import drawn, placed, tensor_group

S, B, H = 12, 2, 16
TARGET = torch.randint(13, (S, B), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some five rows of the weight at a time."""
    monkeypatch.setattr(module, "_CPU_CHUNK", 0)
    monkeypatch.setattr(module, "_LEAST_ROWS", 5)


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    set_kernel_choice(KernelChoice(kernels=request.param))
    yield
    set_kernel_choice(KernelChoice())


Gradients = tuple[Tensor, Tensor, Tensor]


def losses_and_gradients(
    fused: bool,
    x: Tensor,
    weight: Tensor,
    *,
    group: CommGroup,
    sequence_parallel: bool,
    vocab_size: int,
    smoothing: float = 0.0,
    main_grad: bool = False,
) -> Gradients:
    """Losses, and the gradients of x and of the weight for a weight of each token's own, as that of a loss mask."""
    placement = placed(group, sequence_parallel, x.dtype)
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    if main_grad:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float64)  # type: ignore[attr-defined]
    if fused:
        losses = linear_cross_entropy(
            x, weight, TARGET, placement=placement, vocab_size=vocab_size, label_smoothing=smoothing
        )
    else:
        logits = column_parallel_linear(x, weight, None, placement)
        losses = vocab_parallel_cross_entropy(
            logits, TARGET, group=group, vocab_size=vocab_size, label_smoothing=smoothing
        )
    mask = (drawn(5, S, B) > 0).double() * drawn(6, S, B)
    (losses * mask.to(losses.dtype)).sum().backward()
    assert x.grad is not None
    if main_grad:
        assert weight.grad is None
        return losses.detach(), x.grad, weight.main_grad  # type: ignore[attr-defined,return-value]
    assert weight.grad is not None
    return losses.detach(), x.grad, weight.grad


def check_against_both_in_turn(rank: int, world_size: int) -> None:
    group = tensor_group(rank, world_size)
    for vocab_size, rows in ((13, -(-13 // world_size)), (13, 13)):  # padded; ranks with nothing but padding
        for sequence_parallel in (False, True):
            for smoothing, main_grad in ((0.0, True), (0.1, False)):
                x = drawn(1, S, B, H)
                weight = drawn(3, rows * world_size, H).chunk(world_size)[rank]
                if sequence_parallel:
                    x = x.chunk(world_size)[rank]
                settings: dict[str, Any] = {
                    "group": group,
                    "sequence_parallel": sequence_parallel,
                    "vocab_size": vocab_size,
                    "smoothing": smoothing,
                    "main_grad": main_grad,
                }
                mine = losses_and_gradients(True, x, weight, **settings)
                expected = losses_and_gradients(False, x, weight, **settings)
                for name, one, other in zip(("losses", "x", "weight"), mine, expected):
                    assert_parity(one, other, f"{name} {settings}", floor=1.0)


@pytest.mark.usefixtures("small_chunks", "kernels")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_and_gradients_are_those_of_the_two_in_turn(world_size: int) -> None:
    run_distributed(check_against_both_in_turn, world_size)


def test_chunks_cover_the_vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for least in (1, 7, 512):
        monkeypatch.setattr(module, "_LEAST_ROWS", least)
        for valid in (0, 1, 100, 513, 50_304):
            chunks = list(module._chunks(torch.zeros(1000, 1), valid))
            assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(valid))


def issued_collectives(rank: int, world_size: int, sequence_parallel: bool) -> list[str]:
    x = drawn(1, S // world_size if sequence_parallel else S, B, H).requires_grad_()
    placement = placed(tensor_group(rank, world_size), sequence_parallel, x.dtype)
    with recorded_collectives() as log:
        linear_cross_entropy(x, drawn(3, 7, H), TARGET, placement=placement, vocab_size=13).sum().backward()
    return kinds(log)


@pytest.mark.usefixtures("small_chunks")
def test_chunks_do_not_communicate_each() -> None:
    of_losses = ["all_reduce", "all_reduce"]
    for kinds_of_rank in run_distributed(issued_collectives, 2, False):
        assert kinds_of_rank == [*of_losses, "all_reduce"]
    for kinds_of_rank in run_distributed(issued_collectives, 2, True):
        assert kinds_of_rank == ["all_gather", *of_losses, "all_gather", "reduce_scatter"]


@pytest.mark.usefixtures("small_chunks")
def test_in_bfloat16_it_errs_at_most_twice_as_much_as_the_two_in_turn() -> None:
    x, weight = drawn(1, S, B, H).bfloat16(), drawn(3, 13, H).bfloat16()
    settings: dict[str, Any] = {"group": CommGroup.single(), "sequence_parallel": False, "vocab_size": 13}
    mine = losses_and_gradients(True, x, weight, **settings)
    plain = losses_and_gradients(False, x, weight, **settings)
    exact = losses_and_gradients(False, x.double(), weight.double(), **settings)
    for name, one, other, best in zip(("losses", "x", "weight"), mine, plain, exact):
        assert one.dtype == (torch.float32 if name == "losses" else torch.bfloat16)
        assert_within_reference_error(one, other, best, name)


class LargestTensor(TorchDispatchMode):
    """The size in bytes of the largest storage that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("fused", [False, True])
def test_the_logits_are_never_in_memory_and_not_saved(fused: bool) -> None:
    tokens, vocabulary = 256, 65_536
    x = torch.randn(tokens, 1, 8).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, 8).bfloat16().requires_grad_()
    target = torch.zeros(tokens, 1, dtype=torch.int64)
    placement = placed(CommGroup.single(), False, torch.bfloat16)
    logits_bytes = 2 * tokens * vocabulary
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        if tensor.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
            saved += tensor.untyped_storage().nbytes()
        return tensor

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        if fused:
            losses = linear_cross_entropy(x, weight, target, placement=placement, vocab_size=vocabulary)
        else:
            logits = column_parallel_linear(x, weight, None, placement)
            losses = vocab_parallel_cross_entropy(
                logits, target, group=CommGroup.single(), vocab_size=vocabulary, overwrite_logits=True
            )
        losses.sum().backward()
    numbers_a_token = tokens * (8 * 2 + 3 * 8)
    if fused:
        assert largest.bytes <= max(2 * module._CPU_CHUNK, 4 * weight.numel())
        assert largest.bytes <= logits_bytes / 2
        assert saved <= 2 * numbers_a_token
    else:
        assert largest.bytes == logits_bytes
        assert saved >= logits_bytes


@pytest.mark.usefixtures("small_chunks")
def test_without_a_gradient_of_the_input_or_of_the_weight_the_other_is_the_same() -> None:
    placement = placed(CommGroup.single(), False, torch.float64)
    gradients = []
    for needs_x, needs_weight in ((True, True), (True, False), (False, True)):
        x, weight = drawn(1, S, B, H).requires_grad_(needs_x), drawn(3, 13, H).requires_grad_(needs_weight)
        linear_cross_entropy(x, weight, TARGET, placement=placement, vocab_size=13).sum().backward()
        gradients.append((x.grad, weight.grad))
    (x_both, weight_both), (x_alone, no_weight), (no_x, weight_alone) = gradients
    assert no_weight is None
    assert no_x is None
    assert x_both is not None
    assert x_alone is not None
    assert weight_both is not None
    assert weight_alone is not None
    assert_bitwise(x_alone, x_both)
    assert_bitwise(weight_alone, weight_both)


@pytest.mark.usefixtures("small_chunks")
def test_logits_of_minus_infinity_have_a_part_in_no_sum() -> None:
    """Neither those of a whole chunk, the first."""
    x, weight = torch.ones(S, B, H), torch.ones(13, H)
    weight[:6] = -torch.inf
    target = torch.full((S, B), 12)
    placement = placed(CommGroup.single(), False, torch.float32)
    losses = linear_cross_entropy(x, weight, target, placement=placement, vocab_size=13)
    whole = vocab_parallel_cross_entropy(
        column_parallel_linear(x, weight, None, placement), target, group=CommGroup.single(), vocab_size=13
    )
    assert whole.isfinite().all()
    assert_parity(losses, whole)


def test_two_parts_without_a_number_are_one_without_a_number() -> None:
    nothing = LogitStatistics(torch.tensor([-torch.inf]), torch.zeros(1), torch.zeros(1), None)
    merged = module._merged(nothing, nothing)
    assert (merged.maximum.item(), merged.sum.item()) == (-torch.inf, 0.0)


@pytest.mark.usefixtures("small_chunks")
def test_how_weight_gradients_are_computed_says_nothing_of_those_of_the_input() -> None:
    placement = placed(CommGroup.single(), False, torch.float64)
    set_kernel_choice(KernelChoice(weight_gradients_apart=True))
    try:
        x = drawn(1, S, B, H).requires_grad_()
        losses = linear_cross_entropy(x, drawn(3, 13, H), TARGET, placement=placement, vocab_size=13)
        with RecordedOperations() as backward:
            losses.sum().backward()
    finally:
        set_kernel_choice(KernelChoice())
    assert backward.names.count("aten::addmm_") == 3
