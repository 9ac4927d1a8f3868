"""Vocab-parallel cross entropy against plain torch over the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.comm_group import CommGroup
from megatron.core.kernels.choice import KernelChoice, set_kernel_choice
from megatron.core.tensor_parallel.cross_entropy import (
    cross_entropy_reference,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.mappings import gather_from_tensor_parallel_region
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise, assert_parity, assert_within_reference_error
from tests.tensor_parallel.collective_log import recorded_collectives
from tests.tensor_parallel.ranks import drawn, tensor_group

TENSOR_SIZES = [1, 2, 3, 4]
S, B = 5, 3


def padded(vocab_size: int, world_size: int, extra: int = 0) -> int:
    return (-(-vocab_size // world_size) + extra) * world_size


def local_logits(whole: Tensor, rank: int, world_size: int, extra: int = 0) -> Tensor:
    """This rank's columns; padding is filled with numbers large enough to ruin a softmax that saw them."""
    filler = torch.full(
        (*whole.shape[:-1], padded(whole.shape[-1], world_size, extra) - whole.shape[-1]),
        50.0,
        dtype=whole.dtype,
    )
    return torch.cat((whole, filler), dim=-1).chunk(world_size, dim=-1)[rank].clone()


def check_against_torch(rank: int, world_size: int, vocab_size: int, smoothing: float, extra: int) -> None:
    group = tensor_group(rank, world_size)
    whole = (3 * drawn(1, S, B, vocab_size)).requires_grad_()
    target = torch.randint(vocab_size, (S, B), generator=torch.Generator().manual_seed(2))
    weights = drawn(3, S, B)
    # PyTorch spreads its share over all v tokens, Megatron over the v - 1 others: the same at this value.
    theirs = F.cross_entropy(
        whole.flatten(0, 1),
        target.flatten(),
        reduction="none",
        label_smoothing=smoothing * vocab_size / (vocab_size - 1),
    ).view(S, B)
    (theirs * weights).sum().backward()
    assert whole.grad is not None

    logits = local_logits(whole.detach(), rank, world_size, extra).requires_grad_()
    before = logits.detach().clone()
    loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=vocab_size, label_smoothing=smoothing)
    (loss * weights).sum().backward()
    assert logits.grad is not None

    assert_parity(loss.detach(), theirs.detach(), "loss")
    reference = cross_entropy_reference(whole.detach(), target, vocab_size=vocab_size, label_smoothing=smoothing)
    assert_parity(reference, theirs.detach(), "reference")
    width = logits.shape[-1]
    valid = min(max(vocab_size - rank * width, 0), width)
    expected = whole.grad[..., rank * width : rank * width + valid]
    assert_parity(logits.grad[..., :valid], expected, "gradient")
    assert_bitwise(logits.grad[..., valid:], torch.zeros(S, B, width - valid).double(), "padding")
    assert_bitwise(logits.detach(), before, "logits are read only")


def check_all_vocabularies_against_torch(rank: int, world_size: int) -> None:
    # divisible by the group; padded; so padded that some ranks hold nothing but padding
    for vocab_size, extra in ((12, 0), (13, 0), (7, 5)):
        for smoothing in (0.0, 0.1):
            check_against_torch(rank, world_size, vocab_size, smoothing, extra)


@pytest.mark.parametrize("world_size", TENSOR_SIZES)
def test_loss_and_gradient_equal_torch_over_the_unpadded_vocabulary(world_size: int) -> None:
    run_distributed(check_all_vocabularies_against_torch, world_size)


def smoothed_losses(rank: int, world_size: int, smoothing: float) -> float:
    logits = torch.arange(8.0, dtype=torch.float64).view(1, 1, 8).chunk(world_size, dim=-1)[rank]
    loss = vocab_parallel_cross_entropy(
        logits,
        torch.tensor([[3]]),
        group=tensor_group(rank, world_size),
        vocab_size=8,
        label_smoothing=smoothing,
    )
    return float(loss)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("smoothing", "value"), [(0.0, 4.458340), (0.1, 4.401197)])
def test_label_smoothing_uses_the_global_vocabulary_on_every_rank(
    world_size: int, smoothing: float, value: float
) -> None:
    losses = run_distributed(smoothed_losses, world_size, smoothing)
    assert [f"{loss:.6f}" for loss in losses] == [f"{value:.6f}"] * world_size


def gathered_loss(rank: int, world_size: int) -> float:
    group = tensor_group(rank, world_size)
    whole = drawn(1, S, B, 12)
    logits = gather_from_tensor_parallel_region(local_logits(whole, rank, world_size), group)
    target = torch.full((S, B), 11)
    single = CommGroup.single("tensor")
    loss = vocab_parallel_cross_entropy(logits, target, group=single, vocab_size=12)
    assert_parity(loss, cross_entropy_reference(whole, target, vocab_size=12))
    return float(loss.sum())


def test_loss_of_gathered_logits_over_a_group_of_one_is_that_of_one_rank() -> None:
    losses = run_distributed(gathered_loss, 2)
    assert losses[0] == losses[1]


def check_extremes(rank: int, world_size: int) -> None:
    group = tensor_group(rank, world_size)

    def loss_and_gradient(whole: Tensor, target: int) -> tuple[Tensor, Tensor]:
        logits = local_logits(whole.view(1, 1, -1), rank, world_size).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([[target]]), group=group, vocab_size=whole.numel())
        loss.sum().backward()
        assert logits.grad is not None
        return loss.detach(), logits.grad

    huge = torch.tensor([1e4, -1e4, 9.999e3, 0.0], dtype=torch.float64)
    loss, gradient = loss_and_gradient(huge, 0)
    assert_parity(loss, F.cross_entropy(huge.view(1, -1), torch.tensor([0])).view(1, 1), "huge logits")
    assert torch.isfinite(gradient).all()

    impossible = torch.tensor([0.0, 1.0, -math.inf, -math.inf], dtype=torch.float64)  # all of one rank's
    loss, gradient = loss_and_gradient(impossible, 1)
    assert_parity(loss, F.cross_entropy(impossible.view(1, -1), torch.tensor([1])).view(1, 1), "-inf logits")
    assert torch.isfinite(gradient).all()

    for position in range(4):
        broken = torch.zeros(4, dtype=torch.float64)
        broken[position] = math.nan
        loss, _ = loss_and_gradient(broken, 0)
        assert torch.isnan(loss).all(), f"NaN in column {position} is hidden on rank {rank}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_large_logits_are_stable_impossible_ones_are_fine_and_nan_reaches_every_rank(world_size: int) -> None:
    run_distributed(check_extremes, world_size)


def check_communication(rank: int, world_size: int) -> None:
    logits = local_logits(drawn(1, S, B, 64), rank, world_size).requires_grad_()
    target = torch.zeros(S, B, dtype=torch.int64)
    with recorded_collectives() as log:
        loss = vocab_parallel_cross_entropy(
            logits, target, group=tensor_group(rank, world_size), vocab_size=64, label_smoothing=0.1
        )
        assert log == [("all_reduce", S * B), ("all_reduce", 2 * S * B)]
        loss.sum().backward()
        assert len(log) == 2


def test_three_numbers_per_token_are_reduced_forward_and_none_backward() -> None:
    run_distributed(check_communication, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_logits_give_fp32_losses_as_exact_as_torch(dtype: torch.dtype) -> None:
    exact = (4 * drawn(1, S, B, 1000)).to(dtype)
    target = torch.randint(1000, (S, B), generator=torch.Generator().manual_seed(2))

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        logits.requires_grad_()
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
        loss.sum().backward()
        assert logits.grad is not None
        return loss.detach(), logits.grad

    exact_loss, exact_gradient = run(exact.double())
    torch_loss, _ = run(exact.float())
    _, torch_gradient = run(exact.clone())
    logits = exact.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, group=CommGroup.single("tensor"), vocab_size=1000)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    assert_within_reference_error(loss.detach(), torch_loss, exact_loss, "loss")
    assert_within_reference_error(logits.grad, torch_gradient, exact_gradient, "gradient")


def test_blocks_of_rows_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = drawn(1, S, B, 12), torch.zeros(S, B, dtype=torch.int64)
    results = []
    for block in (1, 30, 1 << 20):
        monkeypatch.setattr("megatron.core.kernels.cross_entropy._CPU_BLOCK", block)
        x = logits.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            x, target, group=CommGroup.single("tensor"), vocab_size=11, label_smoothing=0.2
        )
        loss.sum().backward()
        assert x.grad is not None
        results.append((loss.detach(), x.grad))
    for loss, gradient in results[1:]:
        assert_parity(loss, results[0][0])
        assert_parity(gradient, results[0][1])


@pytest.mark.parametrize(("vocab_size", "smoothing"), [(9, 0.0), (0, 0.0), (8, 1.0), (8, -0.1)])
def test_impossible_requests_are_refused_with_their_value(vocab_size: int, smoothing: float) -> None:
    with pytest.raises(ValueError, match=str(smoothing) if vocab_size == 8 else rf"\({vocab_size}\)"):
        vocab_parallel_cross_entropy(
            torch.zeros(1, 1, 8),
            torch.zeros(1, 1, dtype=torch.int64),
            group=CommGroup.single("tensor"),
            vocab_size=vocab_size,
            label_smoothing=smoothing,
        )


# ---- who owns the logits ----


def check_overwriting(rank: int, world_size: int) -> None:
    group = tensor_group(rank, world_size)
    target = torch.randint(13, (S, B), generator=torch.Generator().manual_seed(2))
    gradients = []
    for overwrite in (False, True):
        leaf = local_logits(drawn(1, S, B, 13), rank, world_size).requires_grad_()
        logits = leaf * 1.0
        before = logits.detach().clone()
        loss = vocab_parallel_cross_entropy(
            logits, target, group=group, vocab_size=13, label_smoothing=0.1, overwrite_logits=overwrite
        )
        assert_bitwise(logits.detach(), before, "forward reads only")
        (loss * drawn(3, S, B)).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        assert_bitwise(logits.detach(), leaf.grad if overwrite else before, "logits after backward")
    assert_bitwise(gradients[1], gradients[0], "gradient")


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_is_written_over_logits_that_are_given_away_and_over_no_others(world_size: int) -> None:
    run_distributed(check_overwriting, world_size)


def test_a_second_backward_is_an_error_where_autograd_compares_no_versions() -> None:
    leaf = drawn(1, S, B, 12).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss = vocab_parallel_cross_entropy(
            leaf * 1.0,
            torch.zeros(S, B, dtype=torch.int64),
            group=CommGroup.single(),
            vocab_size=12,
            overwrite_logits=True,
        )
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_a_leaf_is_not_overwritten() -> None:
    arguments: dict[str, Any] = {"group": CommGroup.single(), "vocab_size": 12, "overwrite_logits": True}
    leaf, target = drawn(1, S, B, 12).requires_grad_(), torch.zeros(S, B, dtype=torch.int64)
    with pytest.raises(ValueError, match="a leaf of autograd can not be overwritten"):
        vocab_parallel_cross_entropy(leaf, target, **arguments)
    vocab_parallel_cross_entropy(leaf.detach(), target, **arguments)  # as in evaluation


def check_what_is_kept(rank: int, world_size: int) -> int:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    logits = (local_logits(drawn(1, S, B, 13).float(), rank, world_size)).requires_grad_()
    target = torch.zeros(S, B, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = vocab_parallel_cross_entropy(logits, target, group=tensor_group(rank, world_size), vocab_size=13)
    assert loss.requires_grad
    return sum(kept.values()) - logits.untyped_storage().nbytes()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_kept_besides_the_logits_are_a_target_and_two_numbers_of_each_token(world_size: int, kernels: Any) -> None:
    set_kernel_choice(KernelChoice(kernels=kernels))
    try:
        assert run_distributed(check_what_is_kept, world_size) == [S * B * (8 + 2 * 4)] * world_size
    finally:
        set_kernel_choice(KernelChoice())


def test_a_second_use_of_logits_that_were_given_away_is_an_error_in_backward() -> None:
    leaf = drawn(1, S, B, 12).requires_grad_()
    logits = leaf * 1.0
    squares = logits.square()
    loss = vocab_parallel_cross_entropy(
        logits, torch.zeros(S, B, dtype=torch.int64), group=CommGroup.single(), vocab_size=12, overwrite_logits=True
    )
    loss.sum().backward(retain_graph=True)
    for again in (squares, loss):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.sum().backward(retain_graph=True)
