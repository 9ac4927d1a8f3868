"""Muon in every kind of layout against one rank, in float64: what is orthogonalized is the whole matrix."""

from __future__ import annotations

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_all_parity
from tests.helpers.tiny import assemble, losses_of, train_steps

STEPS = 3
MUON = (
    *("--fp64", "--optimizer", "muon", "--muon-momentum", "0.95", "--muon-nesterov"),
    *("--muon-extra-scale-factor", "0.2"),
)
MODELS = {
    "gpt": (),
    "llama": (
        *("--group-query-attention", "--num-query-groups", "2", "--disable-bias-linear", "--swiglu"),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--qk-layernorm"),
        "--untie-embeddings-and-output-weights",
    ),
}
SHARDED = ("--use-distributed-optimizer", "--ddp-bucket-size", "5000", "--overlap-grad-reduce")
TP2 = ("--tensor-model-parallel-size", "2")
LAYOUTS = {
    "dp2": (2, ()),
    "tp2-sp": (2, (*TP2, "--sequence-parallel")),
    "pp2": (2, ("--pipeline-model-parallel-size", "2")),
    # Four ranks share the two heads of keys and values.
    "tp4": (4, ("--tensor-model-parallel-size", "4")),
    "dp2-sharded": (2, SHARDED),
    "tp2-dp2-sharded": (4, (*TP2, *SHARDED, "--overlap-param-gather")),
    "tp2-pp2-dp2": (8, (*TP2, "--pipeline-model-parallel-size", "2")),
}


def assert_as_on_one_rank(model: str, layout: str, *more: str) -> None:
    arguments = (*MUON, *MODELS[model], *more)
    ranks, flags = LAYOUTS[layout]
    alone = run_distributed(train_steps, 1, STEPS, *arguments)
    spread = run_distributed(train_steps, ranks, STEPS, *arguments, *flags)
    for step in range(STEPS):
        assert losses_of(spread, step) == pytest.approx(losses_of(alone, step), rel=1e-10)
        expected = assemble(rank[step].parameters for rank in alone)
        assert_all_parity(assemble(rank[step].parameters for rank in spread), expected)


@pytest.mark.parametrize("model, layout", [("llama", "tp4"), ("gpt", "tp2-sp"), ("gpt", "dp2-sharded")])
def test_matrices_are_updated_as_on_one_rank(model: str, layout: str) -> None:
    assert_as_on_one_rank(model, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("more", [(), ("--muon-no-split-qkv", "--muon-coefficient-type", "simple")], ids=["", "simple"])
def test_every_kind_of_layout(model: str, layout: str, more: tuple[str, ...]) -> None:
    assert_as_on_one_rank(model, layout, *more)
