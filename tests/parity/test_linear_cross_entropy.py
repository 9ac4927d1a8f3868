"""A model whose output layer is one operation with the loss trains as the one with logits: in float64, to 1e-10."""

from __future__ import annotations

import pytest

from megatron.core.tensor_parallel import linear_cross_entropy
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import PARITY_FP64, assert_all_parity
from tests.helpers.tiny import assemble, losses_of, train_steps

STEPS = 2
LINEAR = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear")
TP, SP, PP = ("--tensor-model-parallel-size", "2"), ("--sequence-parallel",), ("--pipeline-model-parallel-size", "2")
UNTIED = ("--untie-embeddings-and-output-weights",)
NORMALIZED = ("--normalize-output-weights",)
MODEL = {*UNTIED, *NORMALIZED}
LAYOUTS: list[tuple[int, tuple[str, ...]]] = [
    (1, ()),
    (2, (*TP, *SP, *UNTIED)),
    (2, (*TP, *UNTIED, *NORMALIZED)),
    (4, (*TP, *PP)),
]
MORE_LAYOUTS: list[tuple[int, tuple[str, ...]]] = [
    (2, TP),
    (2, ()),
    (2, PP),
    (4, (*TP, *SP)),
    (4, (*TP, *SP, *PP, *UNTIED)),
    (4, (*TP, *SP, *PP, *NORMALIZED)),
]


def check(world_size: int, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "_CPU_CHUNK", 0)
    monkeypatch.setattr(linear_cross_entropy, "_LEAST_ROWS", 60)  # of 251: several chunks, the last one smaller
    model = ("--fp64", *(flag for flag in layout if flag in MODEL))
    (expected,) = run_distributed(train_steps, 1, STEPS, *model)
    ranks = run_distributed(train_steps, world_size, STEPS, *model, *layout, *LINEAR)
    for step in range(STEPS):
        assert losses_of(ranks, step) == pytest.approx(expected[step].losses, rel=PARITY_FP64)
        assert [rank[step].grad_norm for rank in ranks] == pytest.approx(
            [expected[step].grad_norm] * world_size, rel=PARITY_FP64
        )
        assert_all_parity(assemble(rank[step].gradients for rank in ranks), assemble([expected[step].gradients]))
        assert_all_parity(assemble(rank[step].parameters for rank in ranks), assemble([expected[step].parameters]))


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_a_model_without_logits_trains_as_one_with_them(
    world_size: int, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(world_size, layout, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "layout"), MORE_LAYOUTS, ids=str)
def test_so_it_does_in_more_layouts(world_size: int, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    check(world_size, layout, monkeypatch)
