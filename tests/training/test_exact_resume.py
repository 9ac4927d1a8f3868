"""A run that is stopped and resumed ends with the bytes of one that was not: all pairs of what could be in the way."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_distributed
from tests.parity.layouts import DATA_PARALLELISM, pairwise_cover
from tests.training.runs import trained
from tests.training.test_resume import checksums, timeless

LENGTH, STOP = 6, 3

TP, PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp2": (2, ()),
    "vpp2": (2, (*PP, "--num-virtual-stages-per-pipeline-rank", "2")),
    "tp2-dp2": (4, (*TP, "--sequence-parallel")),
    "pp2-dp2": (4, PP),
    "tp2-pp2": (4, (*TP, *PP)),
}
PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("--bf16",),
    "halves": ("--bf16", "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"),
    # a scale near where gradients overflow: it changes every few steps
    "fp16": ("--fp16", "--initial-loss-scale", str(2**20), "--loss-scale-window", "2", "--hysteresis", "1"),
    "fp64": ("--fp64",),
}
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adam": (),
    "sgd": ("--optimizer", "sgd", "--lr", "0.1"),
    "muon": ("--optimizer", "muon", "--muon-extra-scale-factor", "0.2"),
}


@dataclass(frozen=True)
class Case:
    layout: str
    data: str
    precision: str
    optimizer: str
    dropout: str
    workers: str

    def valid(self) -> bool:
        adam_only = self.precision == "halves"
        return (self.data == "plain" or "dp2" in self.layout) and not (adam_only and self.optimizer != "adam")

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def arguments(self) -> tuple[str, ...]:
        return (
            *(LAYOUTS[self.layout][1] + DATA_PARALLELISM[self.data] + PRECISIONS[self.precision]),
            *OPTIMIZERS[self.optimizer],
            *("--hidden-dropout", self.dropout, "--attention-dropout", self.dropout, "--num-workers", self.workers),
            *("--train-iters", str(LENGTH), "--lr-warmup-iters", "2", "--eval-iters", "1", "--eval-interval", "2"),
        )

    def __str__(self) -> str:
        return "-".join([self.layout, self.data, self.precision, self.optimizer, self.dropout, self.workers])


def all_cases() -> list[Case]:
    axes = (LAYOUTS, DATA_PARALLELISM, PRECISIONS, OPTIMIZERS, ("0", "0.1"), ("0", "2"))
    return [case for values in itertools.product(*axes) if (case := Case(*values)).valid()]


Outcome = tuple[list[dict[str, object]], list[tuple[str, int, dict[str, float]]]]


def _run(rank: int, world_size: int, *arguments: str) -> Outcome:
    _, recorder = trained(*arguments, rank=rank, world_size=world_size)
    return timeless(recorder), recorder.evaluations


def _last(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The last checkpoint: what its tensors and its index are in bytes, and its metadata but for the paths in them."""
    last = folder / f"iter_{LENGTH:07d}"
    metadata = json.loads((last / "metadata.json").read_text())
    for field in ("save", "load"):
        del metadata["config"]["checkpoint"][field]
    del metadata["config"]["training"]["exit_interval"]
    return {name: sum for name, sum in checksums(last).items() if name not in ("metadata.json", "COMPLETE")}, metadata


def check(case: Case, folder: Path) -> None:
    straight = run_distributed(_run, case.ranks, *case.arguments, "--save", str(folder / "straight"))
    stop = ("--save", str(folder / "stopped"), "--exit-interval", str(STOP))
    first = run_distributed(_run, case.ranks, *case.arguments, *stop)
    go_on = ("--save", str(folder / "stopped"), "--load", str(folder / "stopped"))
    second = run_distributed(_run, case.ranks, *case.arguments, *go_on)
    for whole, half, other in zip(straight, first, second, strict=True):
        assert [len(rows) for rows, _ in (whole, half, other)] == [LENGTH, STOP, LENGTH - STOP]
        assert half[0] + other[0] == whole[0]
        assert half[1] + other[1] == whole[1]
    expected, actual = _last(folder / "straight"), _last(folder / "stopped")
    assert len(expected[0]) >= 2
    assert actual == expected
    if case.precision == "fp16":
        scales = {row["loss_scale"] for row in straight[-1][0][STOP - 1 :]}
        assert len(scales) > 1, "what the scale counts goes on over the stop"


CASES = all_cases()
COVER = pairwise_cover(CASES)


@pytest.mark.parametrize("case", COVER[:8], ids=str)
def test_stopped_and_resumed_it_ends_with_the_same_bytes(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", COVER[8:], ids=str)
def test_each_pair_of_what_could_be_in_the_way(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_the_cases_have_all_pairs_and_the_first_each_value() -> None:
    axes = list(Case.__annotations__)
    for chosen, size in ((COVER, 2), (COVER[:8], 1)):
        for names in itertools.combinations(axes, size):
            wanted = {tuple(getattr(case, name) for name in names) for case in CASES}
            assert {tuple(getattr(case, name) for name in names) for case in chosen} == wanted
