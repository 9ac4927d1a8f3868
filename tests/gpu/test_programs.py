"""`pretrain_gpt.py` as users start it, on as many GPUs as there are.

A group of one rank communicates nothing: NCCL carries tensors only where there are two GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.launch import rows_of
from tests.helpers.numerics import PARITY_FP64
from tests.helpers.tiny import TINY_GPT
from tests.training.test_end_to_end import ROOT, output_of, standalone, torchrun

pytestmark = pytest.mark.gpu

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "dp2": (2, ()),
    "tp2-sp": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "pp2": (2, ("--pipeline-model-parallel-size", "2")),
}
POSSIBLE = [name for name, (ranks, _) in LAYOUTS.items() if ranks <= max(1, torch.cuda.device_count())]
ARGUMENTS = [
    *(*TINY_GPT, "--fp64", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--log-interval", "1"),
    *("--eval-iters", "1", "--eval-interval", "2", "--timing-log-level", "2", "--log-json", "losses.json"),
    *("--tensorboard-dir", "tensorboard", "--save", "saved", "--save-interval", "2"),
]


def losses_in(folder: Path) -> list[float]:
    rows = rows_of(folder / "losses.json")
    return [row[name] for row in rows for name in ("lm loss", "lm loss validation") if name in row]


@pytest.mark.parametrize("layout", POSSIBLE)
def test_a_run_over_nccl_is_that_of_one_rank_on_a_cpu(layout: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    script = ROOT / "pretrain_gpt.py"
    on_cpu, on_gpus = ([*ARGUMENTS, "--distributed-backend", backend] for backend in ("gloo", "nccl"))
    reference = torchrun(tmp_path / "cpu", on_cpu, script, *standalone(1))
    said = output_of(torchrun(tmp_path / "gpu", [*on_gpus, *flags], script, *standalone(ranks)))
    output_of(reference)
    assert f"{ranks} cuda rank(s) = " in said
    assert "memory (MB) | allocated: " in said
    assert "forward-backward" in said, "the table of the timers is missing"
    expected = losses_in(tmp_path / "cpu")
    assert len(expected) == 3 + 2
    assert losses_in(tmp_path / "gpu") == pytest.approx(expected, rel=PARITY_FP64)
    longer = [*on_gpus, "--train-iters", "4", "--override-opt_param-scheduler", "--load", "saved"]
    said = output_of(torchrun(tmp_path / "gpu", longer, script, *standalone(1)))
    assert "at iteration 3 in" in said
    assert "iteration        4/       4" in said
