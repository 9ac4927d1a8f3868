"""Each region function is the collective that its name says, and its backward the conjugate one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.comm_group import CommGroup
from megatron.core.tensor_parallel import mappings
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise, assert_parity
from tests.tensor_parallel.ranks import drawn, tensor_group

WORLD_SIZES = [2, 3, 4]
S, B, H = 12, 2, 12

REGIONS = {
    "copy": lambda x, g: mappings.copy_to_tensor_parallel_region(x, g),
    "reduce": lambda x, g: mappings.reduce_from_tensor_parallel_region(x, g),
    "scatter": lambda x, g: mappings.scatter_to_tensor_parallel_region(x, g),
    "gather": lambda x, g: mappings.gather_from_tensor_parallel_region(x, g),
    "scatter sequence": lambda x, g: mappings.scatter_to_sequence_parallel_region(x, g),
    "gather sequence, reduce-scatter": lambda x, g: mappings.gather_from_sequence_parallel_region(
        x, g, backward="reduce_scatter"
    ),
    "gather sequence, scatter": lambda x, g: mappings.gather_from_sequence_parallel_region(x, g, backward="scatter"),
    "reduce-scatter sequence": lambda x, g: mappings.reduce_scatter_to_sequence_parallel_region(x, g),
    "all-to-all": lambda x, g: mappings.all_to_all_between_dims(x, g, split_dim=2, concat_dim=0),
}


def part(x: Tensor, rank: int, size: int, dim: int) -> Tensor:
    return x.chunk(size, dim)[rank]


def expected(name: str, xs: list[Tensor], rank: int) -> Tensor:
    """The definition, from the tensors of all ranks: the operation of `name` applied to `xs`, on `rank`."""
    size = len(xs)
    return {
        "identity": lambda: xs[rank],
        "sum": lambda: sum(xs[1:], xs[0]),
        "part hidden": lambda: part(xs[rank], rank, size, -1),
        "concatenate hidden": lambda: torch.cat(xs, dim=-1),
        "part sequence": lambda: part(xs[rank], rank, size, 0),
        "concatenate sequence": lambda: torch.cat(xs, dim=0),
        "part of the sum": lambda: part(sum(xs[1:], xs[0]), rank, size, 0),
        "hidden for sequence": lambda: torch.cat([part(x, rank, size, 2) for x in xs], dim=0),
        "sequence for hidden": lambda: torch.cat([part(x, rank, size, 0) for x in xs], dim=2),
    }[name]()


CONJUGATES = {
    "copy": ("identity", "sum"),
    "reduce": ("sum", "identity"),
    "scatter": ("part hidden", "concatenate hidden"),
    "gather": ("concatenate hidden", "part hidden"),
    "scatter sequence": ("part sequence", "concatenate sequence"),
    "gather sequence, reduce-scatter": ("concatenate sequence", "part of the sum"),
    "gather sequence, scatter": ("concatenate sequence", "part sequence"),
    "reduce-scatter sequence": ("part of the sum", "concatenate sequence"),
    "all-to-all": ("hidden for sequence", "sequence for hidden"),
}


def check_all_regions(rank: int, world_size: int) -> None:
    group = tensor_group(rank, world_size)
    for name, region in REGIONS.items():
        forward, backward = CONJUGATES[name]
        xs = [drawn(r, S, B, H) for r in range(world_size)]
        # A tensor that another operation made, and not contiguous: the shape in which models hand them over.
        x = xs[rank].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        before = x.detach().clone()
        y = region(x, group)
        assert_parity(y.detach(), expected(forward, xs, rank), f"{name} forward")
        gradients = [drawn(100 + r, *y.shape) for r in range(world_size)]
        gradient = gradients[rank].clone()
        y.backward(gradient)
        assert x.grad is not None
        assert_parity(x.grad, expected(backward, gradients, rank), f"{name} backward")
        assert_bitwise(x.detach(), before, f"{name} input")
        assert_bitwise(gradient, gradients[rank], f"{name} output gradient")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_region_is_its_collective_and_backward_the_conjugate_without_touching_inputs(
    world_size: int,
) -> None:
    run_distributed(check_all_regions, world_size)


def check_scatter_does_not_alias(rank: int, world_size: int) -> None:
    group = tensor_group(rank, world_size)
    x = drawn(0, S, B, H)
    for scatter in (
        mappings.scatter_to_sequence_parallel_region,
        mappings.scatter_to_tensor_parallel_region,
    ):
        output = scatter(x, group)
        output.zero_()
        assert_bitwise(x, drawn(0, S, B, H))


def test_writing_into_a_scattered_part_leaves_the_whole_alone() -> None:
    run_distributed(check_scatter_does_not_alias, 2)


@pytest.mark.parametrize("name", REGIONS)
def test_a_group_of_one_returns_its_input(name: str) -> None:
    x = drawn(0, S, B, H).requires_grad_()
    assert REGIONS[name](x, CommGroup.single("tensor")) is x
