"""Ranks are killed at random moments of training and saving: what was saved loads, and a run that goes on from it ends
with the bytes of one that was never disturbed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from megatron.checkpointing import load_checkpoint, read_tracker
from megatron.core.comm_group import CommGroup
from megatron.training import initialize
from tests.checkpointing.test_async_save import files
from tests.helpers.launch import launch, pretrain_gpt
from tests.helpers.tiny import TINY_GPT
from tests.parity.layouts import DATA_PARALLELISM

LENGTH = 32
RUN = [
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--train-iters", str(LENGTH), "--num-workers", "1"),
    *("--save", "saved", "--save-interval", "1", "--load", "saved", "--load-if-exists", "--keep-last", "2"),
]
LAYOUTS = (
    (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--fp16", "--initial-loss-scale", "1024")),
    (2, ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")),
    (3, ("--bf16", "--global-batch-size", "9")),
    (2, ("--bf16", *DATA_PARALLELISM["zero-overlap"])),
    (4, ("--tensor-model-parallel-size", "2", "--bf16", *DATA_PARALLELISM["zero"])),
)
KILLS = 5
PATIENCE = 250.0  # each iteration syncs several files, and a disk that others use may need a second for each


def hasty() -> None:
    """`pretrain_gpt.py`, whose ranks do not wait long for a lost one to say why."""
    initialize._TIME_TO_SPEAK = 0.3
    pretrain_gpt()


def newest(root: Path) -> int:
    """The iteration of the checkpoint that loads, all of it."""
    checkpoint = load_checkpoint(root, world=CommGroup.single("world"))
    for key in checkpoint.tensors:
        checkpoint.read(key)
    return checkpoint.iteration


def kill_some(folder: Path, ranks: int, arguments: list[str], rng: random.Random) -> None:
    """Start the run, and kill a rank, or all of them, at a moment after it has saved something new."""
    root = folder / "saved"
    before = read_tracker(root) or 0
    run = launch(hasty, [*arguments, *rng.choice(((), ("--async-save",)))], ranks=ranks, folder=folder)
    while (read_tracker(root) or 0) <= before:
        assert all(process.is_alive() for process in run.processes), run.wait(0)
        time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.2))
    victims = rng.sample(range(ranks), rng.choice((1, 1, 1, ranks)))
    named = read_tracker(root)
    assert named is not None
    for victim in victims:
        pid = run.processes[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    outcome = run.wait(60.0)
    survivors = [rank for rank in range(ranks) if rank not in victims]
    assert [outcome.codes[victim] for victim in victims] == [-signal.SIGKILL] * len(victims)
    assert [outcome.codes[rank] for rank in survivors] == [1] * len(survivors), outcome
    said = "".join(outcome.err)
    assert "Traceback" not in said, said
    assert not survivors or "has lost another rank" in said, said
    assert newest(root) >= named > before


def check_kills(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    ranks, layout = LAYOUTS[seed % len(LAYOUTS)]
    arguments = [*TINY_GPT, *RUN, *layout]
    straight, killed = folder / "straight", folder / "killed"
    assert launch(hasty, arguments, ranks=ranks, folder=straight).wait(PATIENCE).check().codes == [0] * ranks
    for _ in range(KILLS):
        kill_some(killed, ranks, arguments, rng)
    assert launch(hasty, arguments, ranks=ranks, folder=killed).wait(PATIENCE).check().codes == [0] * ranks
    assert newest(killed / "saved") == LENGTH
    last = f"iter_{LENGTH:07d}"
    assert files(killed / "saved" / last) == files(straight / "saved" / last)
    assert sorted(os.listdir(killed / "saved")) == sorted(os.listdir(straight / "saved"))


@pytest.mark.timeout(900)
def test_killed_at_random_moments_a_run_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    check_kills(tmp_path, 3)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random_moments_a_run_ends_as_if_it_had_not_been_many_times(tmp_path: Path, seed: int) -> None:
    check_kills(tmp_path, 100 + seed)
