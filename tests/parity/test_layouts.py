"""Any two layouts train the same model: in float64 losses, gradients, norms and weights agree with one rank."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import PARITY_FP32, PARITY_FP64, assert_all_parity
from tests.helpers.tiny import StepResult, assemble, losses_of, train_steps
from tests.parity.layouts import DATA_PARALLELISM, Case, all_cases, every_layout, pairwise_cover

STEPS = 3
PRODUCT = list(all_cases())
# Of data parallelism the plain one and all of it at once: tests/distributed compares the others with the plain one.
COVER = pairwise_cover([case for case in PRODUCT if case.data in ("plain", "zero-overlap")])
EVERY_LAYOUT = [case for case in every_layout(PRODUCT) if case not in COVER]


@cache
def reference(*arguments: str) -> list[StepResult]:
    """The model trained on one rank, in micro-batches of one."""
    return run_distributed(train_steps, 1, STEPS, *arguments)[0]


def check_parity(case: Case, *, precision: tuple[str, ...], bound: float, with_parameters: bool) -> None:
    model = (*precision, *case.model_arguments)
    expected = reference(*model)
    ranks = run_distributed(train_steps, case.world_size, STEPS, *model, *case.layout_arguments)
    for step in range(STEPS):
        assert losses_of(ranks, step) == pytest.approx(expected[step].losses, rel=bound)
        norms = [rank[step].grad_norm for rank in ranks]
        assert norms == pytest.approx([expected[step].grad_norm] * len(ranks), rel=bound)
        gradients = assemble(rank[step].gradients for rank in ranks)
        parameters = assemble(rank[step].parameters for rank in ranks)
        assert_all_parity(gradients, assemble([expected[step].gradients]))
        if with_parameters:
            assert_all_parity(parameters, assemble([expected[step].parameters]))


@pytest.mark.parametrize("case", COVER, ids=str)
def test_pairwise_cover_of_layouts(case: Case) -> None:
    check_parity(case, precision=("--fp64",), bound=PARITY_FP64, with_parameters=True)


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_every_layout(case: Case) -> None:
    check_parity(case, precision=("--fp64",), bound=PARITY_FP64, with_parameters=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The drawn cases come from the product of every layout with every model, too many to run at once."""
    if "drawn_case" in metafunc.fixturenames:
        seed, _, count = metafunc.config.option.product_slice.rpartition(":")
        metafunc.parametrize("drawn_case", random.Random(seed).sample(PRODUCT, int(count)), ids=str)


@pytest.mark.full
def test_slice_of_the_whole_product(drawn_case: Case) -> None:
    check_parity(drawn_case, precision=("--fp64",), bound=PARITY_FP64, with_parameters=True)


@pytest.mark.parametrize("case", [case for case in COVER if 1 < case.world_size <= 6][:4], ids=str)
def test_float32_losses_norms_and_gradients_agree_too(case: Case) -> None:
    """Not the weights: the gradient of a key bias is zero in theory. And with SGD: Adam divides each gradient by its
    own size, so of the rounding in those that are nearly zero it makes steps as large as any."""
    check_parity(case, precision=("--optimizer", "sgd"), bound=PARITY_FP32, with_parameters=False)


@pytest.mark.parametrize("data", ["plain", "zero-overlap"])
def test_a_chunk_without_a_parameter(data: str) -> None:
    """The first of the second stage has no layer, neither embedding nor output."""
    model = ("--fp64", "--num-layers", "3")
    layout = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et||t|tL")
    expected = reference(*model)
    ranks = run_distributed(train_steps, 4, STEPS, *model, *layout, *DATA_PARALLELISM[data])
    for step in range(STEPS):
        assert losses_of(ranks, step) == pytest.approx(expected[step].losses, rel=PARITY_FP64)
        assert_all_parity(assemble(rank[step].parameters for rank in ranks), assemble([expected[step].parameters]))


@pytest.mark.parametrize("ranks", [3])
def test_averages_in_the_collective_over_ranks_that_are_no_power_of_two(ranks: int) -> None:
    model = ("--fp64", "--global-batch-size", "6")
    expected = reference(*model)
    results = run_distributed(train_steps, ranks, STEPS, *model, *DATA_PARALLELISM["overlap"])
    for step in range(STEPS):
        assert losses_of(results, step) == pytest.approx(expected[step].losses, rel=PARITY_FP64)
        assert_all_parity(assemble(rank[step].parameters for rank in results), assemble([expected[step].parameters]))


def test_the_cover_holds_every_axis_value() -> None:
    assert {case.tp for case in COVER} == {1, 2, 3, 4, 8}
    assert {case.vpp for case in COVER} == {1, 2}
    assert any(case.groups < case.tp for case in COVER)
    assert any(case.data == "zero-overlap" and case.tied and case.pp > 1 for case in COVER)
    assert any(case.layers % (case.pp * case.vpp) for case in COVER if case.pp > 1)
    assert any(case.dropout and case.sequence_parallel and case.pp > 1 for case in COVER)
