"""Recomputed activations are the activations: losses, gradients and weights have the same bits with and without."""

from __future__ import annotations

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise
from tests.helpers.tiny import StepResult, train_steps

STEPS = 2
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one-rank": (1, ()),
    "tp2": (2, ("--tensor-model-parallel-size", "2")),
    "tp2-sp": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "pp2-vpp2": (2, ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")),
    "tp2-sp-pp2": (
        4,
        ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"),
    ),
}
FULL = ("--recompute-granularity", "full", "--recompute-method")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
WAYS: dict[str, tuple[str, ...]] = {
    "core attention": ("--recompute-activations",),
    "norms": (*SELECTIVE, "layernorm"),
    "mlp": (*SELECTIVE, "mlp"),
    "all parts": (*SELECTIVE, "core_attn", "layernorm", "mlp"),
    "each layer": (*FULL, "uniform", "--recompute-num-layers", "1"),
    "runs of three": (*FULL, "uniform", "--recompute-num-layers", "3"),
    "one of each chunk": (*FULL, "block", "--recompute-num-layers", "1"),
}
IN_PARTS = (*WAYS["each layer"], "--distribute-saved-activations")
LLAMA = (
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"),
)
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def _trained_each_way(
    rank: int, world_size: int, arguments: tuple[str, ...], ways: tuple[tuple[str, ...], ...]
) -> list[list[StepResult]]:
    return [train_steps(rank, world_size, STEPS, *arguments, *way) for way in ((), *ways)]


def check_that_no_bit_changes(layout: str, *arguments: str, ways: tuple[tuple[str, ...], ...]) -> None:
    ranks, layout_arguments = LAYOUTS[layout]
    for plain, *others in run_distributed(
        _trained_each_way, ranks, ("--fp64", *arguments, *layout_arguments), ways, timeout=250.0
    ):
        for way, recomputed in zip(ways, others):
            for expected, got in zip(plain, recomputed):
                assert got.losses == expected.losses, way
                assert got.grad_norm == expected.grad_norm, way
                for name, part in expected.gradients.items():
                    assert_bitwise(got.gradients[name].tensor, part.tensor, f"{way}: gradient of {name}")
                for name, part in expected.parameters.items():
                    assert_bitwise(got.parameters[name].tensor, part.tensor, f"{way}: {name}")


@pytest.mark.parametrize("layout, way", [("tp2-sp", "all parts"), ("pp2-vpp2", "one of each chunk")])
def test_no_bit_changes(layout: str, way: str) -> None:
    check_that_no_bit_changes(layout, *DROPOUT, ways=(WAYS[way], WAYS["each layer"]))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_changes_whatever_is_recomputed(layout: str) -> None:
    check_that_no_bit_changes(layout, *DROPOUT, ways=tuple(WAYS.values()))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2-vpp2"])
def test_no_bit_changes_without_dropout_in_a_llama(layout: str) -> None:
    check_that_no_bit_changes(layout, *LLAMA, ways=tuple(WAYS.values()))


def test_no_bit_changes_where_each_rank_keeps_a_part() -> None:
    check_that_no_bit_changes("tp2", *DROPOUT, ways=(IN_PARTS,))


def test_no_bit_changes_where_the_attention_kernel_draws_the_dropout() -> None:
    fast = (*DROPOUT, "--fast-attention-dropout")
    check_that_no_bit_changes("one-rank", *fast, ways=(WAYS["core attention"], WAYS["each layer"]))
