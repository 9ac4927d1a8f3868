"""Any two layouts train the same BERT: in float64 both losses, gradients, norms and weights agree with one rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.helpers.bert import train_bert_steps
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import PARITY_FP32, PARITY_FP64, assert_all_parity, assert_bitwise
from tests.helpers.tiny import StepResult, assemble, losses_of
from tests.parity.layouts import DATA_PARALLELISM, pairwise_cover

STEPS = 2
NORMS: dict[str, tuple[str, ...]] = {
    "pre": (),
    "residual": ("--apply-residual-connection-post-layernorm",),
    "post": ("--layernorm-placement", "post", "--activation", "gelu"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A BERT and a layout of it."""

    tp: int
    pp: int
    vpp: int
    dp: int
    sequence_parallel: bool
    norms: str
    pairs: bool
    tied: bool
    dropout: bool
    micro_batch: int
    data: str

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def valid(self) -> bool:
        return (
            self.world_size <= 8
            and not (self.sequence_parallel and self.tp == 1)
            and not (self.vpp > 1 and self.pp == 1)
            and self.pp * self.vpp <= 4
            and not (self.data != "plain" and self.dp == 1)
        )

    @property
    def model_arguments(self) -> tuple[str, ...]:
        arguments = ["--num-layers", str(max(2, self.pp * self.vpp)), *NORMS[self.norms]]
        if not self.pairs:
            arguments.append("--bert-no-binary-head")
        if not self.tied:
            arguments.append("--untie-embeddings-and-output-weights")
        if self.dropout:
            arguments += ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
        return tuple(arguments)

    @property
    def layout_arguments(self) -> tuple[str, ...]:
        arguments = [
            *("--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)),
            *("--micro-batch-size", str(self.micro_batch), *DATA_PARALLELISM[self.data]),
        ]
        if self.sequence_parallel:
            arguments.append("--sequence-parallel")
        if self.vpp > 1:
            arguments += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        return tuple(arguments)

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", f"vpp{self.vpp}"]
        parts += ["sp"] * self.sequence_parallel + [self.data, self.norms] + ["pairs"] * self.pairs
        return "-".join([*parts, *["untied"] * (not self.tied), *["dropout"] * self.dropout, f"mbs{self.micro_batch}"])


AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "dp": (1, 2, 4),
    "sequence_parallel": (False, True),
    "norms": tuple(NORMS),
    "pairs": (True, False),
    "tied": (True, False),
    "dropout": (False, True),
    "micro_batch": (1, 2),
    "data": ("plain", "zero-overlap"),
}
PRODUCT = [case for values in itertools.product(*AXES.values()) if (case := Case(**dict(zip(AXES, values)))).valid()]
# Each pair of values among the layouts that split nothing in more than two.
COVER = pairwise_cover([case for case in PRODUCT if max(case.tp, case.pp, case.dp) <= 2 and case.world_size <= 4])


def every_layout() -> list[Case]:
    """Every layout, each with one model, so that in a row all models meet all parts of layouts."""
    layout = ("tp", "pp", "vpp", "dp", "sequence_parallel", "micro_batch", "data")
    by_layout: dict[tuple[Any, ...], list[Case]] = {}
    for case in PRODUCT:
        by_layout.setdefault(tuple(getattr(case, name) for name in layout), []).append(case)
    return [cases[7 * number % len(cases)] for number, cases in enumerate(by_layout.values())]


@cache
def reference(*arguments: str) -> list[StepResult]:
    """The model trained on one rank, in micro-batches of one."""
    return run_distributed(train_bert_steps, 1, STEPS, *arguments)[0]


def check_parity(case: Case, *more: str, bound: float = PARITY_FP64, with_parameters: bool = True) -> None:
    model = (*more, *case.model_arguments)
    expected = reference(*model)
    ranks = run_distributed(train_bert_steps, case.world_size, STEPS, *model, *case.layout_arguments)
    for step in range(STEPS):
        losses = losses_of(ranks, step)
        assert losses.keys() == ({"lm loss", "sop loss"} if case.pairs else {"lm loss"})
        assert losses == pytest.approx(expected[step].losses, rel=bound)
        norms = [rank[step].grad_norm for rank in ranks]
        assert norms == pytest.approx([expected[step].grad_norm] * len(ranks), rel=bound)
        gradients = assemble(rank[step].gradients for rank in ranks)
        parameters = assemble(rank[step].parameters for rank in ranks)
        assert_all_parity(gradients, assemble([expected[step].gradients]))
        if with_parameters:
            assert_all_parity(parameters, assemble([expected[step].parameters]))


@pytest.mark.parametrize("case", COVER, ids=str)
def test_pairwise_cover_of_layouts(case: Case) -> None:
    check_parity(case, "--fp64")


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in every_layout() if case not in COVER], ids=str)
def test_every_layout(case: Case) -> None:
    check_parity(case, "--fp64")


@pytest.mark.parametrize("case", [case for case in COVER if case.world_size > 1][:1], ids=str)
def test_float32_losses_norms_and_gradients_agree_too(case: Case) -> None:
    """With SGD and without the weights, as for GPT."""
    check_parity(case, "--optimizer", "sgd", bound=PARITY_FP32, with_parameters=False)


RECOMPUTED: dict[str, tuple[str, ...]] = {
    "layers": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    "parts": ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp"),
    "norms": ("--recompute-granularity", "selective", "--recompute-modules", "layernorm", "core_attn"),
}


@pytest.mark.parametrize(
    "way, norms",
    [
        ("layers", "post"),
        pytest.param("norms", "residual", marks=pytest.mark.full),
        pytest.param("parts", "post", marks=pytest.mark.full),
        pytest.param("norms", "pre", marks=pytest.mark.full),
    ],
)
def test_recomputation_changes_no_bit(way: str, norms: str) -> None:
    arguments = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1", *NORMS[norms])
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    kept, again = (
        run_distributed(train_bert_steps, 2, STEPS, *arguments, *layout, *recompute)
        for recompute in ((), RECOMPUTED[way])
    )
    for one, other in zip(kept, again, strict=True):
        for step in range(STEPS):
            assert one[step].losses == other[step].losses
            for name, part in one[step].gradients.items():
                assert_bitwise(other[step].gradients[name].tensor, part.tensor, name)


def test_the_cover_holds_every_axis_value() -> None:
    for name in ("norms", "pairs", "tied", "dropout", "data", "sequence_parallel", "vpp"):
        assert {getattr(case, name) for case in COVER} == set(AXES[name])
    assert any(case.sequence_parallel and case.pairs and case.pp > 1 for case in COVER)
    assert any(case.tied and case.pp > 1 and case.data == "zero-overlap" for case in COVER)
