"""The programs as users start them, through a real `torchrun`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.checkpointing import read_tracker
from tests.helpers.launch import pretrain_tiny, rows_of
from tests.helpers.numerics import PARITY_FP64
from tests.helpers.tiny import TINY_GPT

ROOT = Path(__file__).parents[2]
MINE = Path(__file__).with_name("pretrain_mine.py")
SIX_DIGITS = 5e-7


def torchrun(
    folder: Path, arguments: list[str], script: Path = ROOT / "pretrain_gpt.py", *launch: str
) -> subprocess.Popen[str]:
    """Start an agent of `torchrun` whose ranks have one thread each and temporary files below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    variables |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", *launch, str(script), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def output_of(agent: subprocess.Popen[str], timeout: float = 200.0) -> str:
    try:
        text, _ = agent.communicate(timeout=timeout)
    finally:
        agent.kill()
    assert agent.returncode == 0, text
    return text


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def standalone(ranks: int) -> tuple[str, ...]:
    return ("--nproc-per-node", str(ranks), "--master-port", free_port())


TWENTY_ITERATIONS = [
    *("--train-iters", "20", "--log-json", "losses.json", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    *("--eval-iters", "1", "--eval-interval", "10", "--lr", "1e-3", "--lr-warmup-iters", "4"),
]
EIGHT_RANKS = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"]


def check_same_losses(folder: Path, precision: list[str], bound: float) -> None:
    """Those that a run in `folder` has written, and those of one rank."""
    pretrain_tiny(folder / "one", *TWENTY_ITERATIONS, *precision).check()
    one, eight = (rows_of(file) for file in (folder / "one" / "losses.json", folder / "losses.json"))
    assert [row["iteration"] for row in one] == [*range(1, 11), 10, *range(11, 21), 20]
    for name in ("lm loss", "lm loss validation"):
        expected = [row[name] for row in one if name in row]
        assert len(expected) == (20 if name == "lm loss" else 2)
        assert [row[name] for row in eight if name in row] == pytest.approx(expected, rel=bound)


@pytest.mark.full
def test_twenty_iterations_on_eight_ranks_of_torchrun_are_those_of_one_rank(tmp_path: Path) -> None:
    """Eight interpreters that import torch; the tests below start two or four of them."""
    arguments = [*TINY_GPT, *TWENTY_ITERATIONS, *EIGHT_RANKS, "--fp64"]
    output_of(torchrun(tmp_path, arguments, ROOT / "pretrain_gpt.py", *standalone(8)))
    check_same_losses(tmp_path, ["--fp64"], PARITY_FP64)


@pytest.mark.parametrize(
    "precision, bound",
    [
        pytest.param(["--fp64"], PARITY_FP64, id="fp64"),
        pytest.param([], SIX_DIGITS, id="fp32-to-six-digits", marks=pytest.mark.full),
    ],
)
def test_twenty_iterations_on_eight_ranks_are_those_of_one_rank(
    precision: list[str], bound: float, tmp_path: Path
) -> None:
    """Without `torchrun`, whose part the other tests here have."""
    pretrain_tiny(tmp_path, *TWENTY_ITERATIONS, *EIGHT_RANKS, *precision, ranks=8, timeout=120).check()
    check_same_losses(tmp_path, precision, bound)


def test_two_agents_train_over_two_nodes(tmp_path: Path) -> None:
    """On one machine, each with a temporary folder of its own: nothing but the network joins them."""
    arguments = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--log-interval", "1", "--print-parallel-groups"]
    nodes = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    agents = [
        torchrun(tmp_path / f"node{node}", arguments, ROOT / "pretrain_gpt.py", *nodes, "--node-rank", str(node))
        for node in (0, 1)
    ]
    first, second = (output_of(agent) for agent in agents)
    host = socket.gethostname()
    assert "4 ranks on 2 node(s) = " in second
    assert f"rank 1 on {host}#0: " in second
    assert f"rank 2 on {host}#1: " in second
    assert "tensor-parallel group(s) span nodes" not in second
    assert second.count("consumed samples:") == 3
    assert "ranks on" not in first and "consumed samples:" not in first


def test_ranks_whose_torchrun_is_killed_end_and_save_nothing(tmp_path: Path) -> None:
    arguments = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--train-iters", "100000", "--save", "saved"]
    agent = torchrun(
        tmp_path, [*arguments, "--log-json", "log.json"], ROOT / "pretrain_gpt.py", *standalone(2)
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "log.json").exists() or len(rows_of(tmp_path / "log.json")) < 2:
        assert time.monotonic() < deadline and agent.poll() is None, agent.communicate()[0]
        time.sleep(0.1)
    agent.kill()
    text, _ = agent.communicate(timeout=60)  # until the ranks, which write to the same pipe, have ended too
    assert agent.returncode == -signal.SIGKILL
    assert text.count("torchrun, which had started the ranks, is gone") == 1
    assert "Traceback" not in text
    assert read_tracker(tmp_path / "saved") is None


def test_a_users_own_script_with_own_data_model_loss_and_arguments(tmp_path: Path) -> None:
    arguments = [
        *("--my-period", "5", "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "1"),
        *("--seq-length", "8", "--max-position-embeddings", "8", "--micro-batch-size", "4"),
        *("--global-batch-size", "16"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "11", "--mock-data", "--train-iters", "60"),
        *("--lr", "5e-2", "--lr-decay-style", "constant", "--weight-decay", "0", "--eval-iters", "1"),
        *("--log-json", "losses.json", "--save", "saved"),
    ]
    said = output_of(torchrun(tmp_path, arguments, MINE, *standalone(2)))
    assert "TFLOP/s/GPU" not in said, "the operations of a GPT are not those of this model"
    rows = rows_of(tmp_path / "losses.json")
    assert rows[59]["series loss"] < 0.05 < 2 < rows[0]["series loss"]
    assert rows[60].keys() == {"iteration", "series loss validation"}
    assert rows[60]["series loss validation"] < 0.05
    arguments[arguments.index("60")] = "61"
    resumed = output_of(torchrun(tmp_path, [*arguments, "--load", "saved"], MINE, *standalone(1)))
    assert "at iteration 60" in resumed
    assert rows_of(tmp_path / "losses.json")[61]["series loss"] < 0.05
