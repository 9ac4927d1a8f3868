"""`--log-memory`, and what is said by a run that does not fit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.tokenizer import TokenizerConfig
from megatron.core import parallel_state
from megatron.planning.memory import StageMemory, memory_table, predict_memory
from megatron.planning.saved_tensors import SavedBytes
from megatron.training import initialize, memory
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.memory import (
    MemoryAccount,
    _memory_warning,
    is_out_of_memory,
    measured_memory,
    out_of_memory_advice,
    predicted_memory,
)
from megatron.training.pretrain import build_run, pretrain, train
from megatron.training.train_step import train_step
from pretrain_gpt import forward_step
from tests.helpers.distributed import run_distributed
from tests.helpers.launch import launch
from tests.helpers.tiny import TINY_GPT, context_of_rank, tiny_config, tiny_run
from tests.training.runs import build, trained

# Documents' masks are left out: the account has them, and each sample of the tiny data ends in padding of its own.
BF16 = ("--bf16", "--no-reset-attention-mask", "--log-memory")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pp2-vpp2": (2, ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")),
    "tp2-sp": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "sharded": (2, ("--use-distributed-optimizer",)),
    "muon": (1, ("--optimizer", "muon")),
    "halves": (1, ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16")),
}


def _account(rank: int, world_size: int, *arguments: str) -> tuple[StageMemory, StageMemory]:
    """Predicted and measured, of this rank's stage."""
    run = tiny_run(rank, world_size, *BF16, *arguments)
    parameters = [parameter for chunk in run.chunks for parameter in chunk.module.parameters()]
    with SavedBytes(parameters) as saved:
        train_step(run)
    assert saved.bytes == 0
    predicted = predicted_memory(run)
    assert predicted is not None
    return predicted[run.state.pipeline.rank], measured_memory(run, saved.peak)


@pytest.mark.parametrize("recomputed", [(), FULL], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_account_of_each_stage_is_what_it_holds(layout: str, recomputed: tuple[str, ...]) -> None:
    ranks, arguments = LAYOUTS[layout]
    for predicted, measured in run_distributed(_account, ranks, *arguments, *recomputed):
        # Parameters begin on multiples of 64 elements, which of tiny ones is much.
        for name in ("parameters", "gradients", "optimizer"):
            assert getattr(measured, name) == pytest.approx(getattr(predicted, name), rel=0.1), name
        assert measured.activations == pytest.approx(predicted.activations, rel=0.1)


def test_an_allocation_that_fails_is_told_from_other_errors() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_the_cheapest_changes_that_fit_come_first() -> None:
    arguments = ("--micro-batch-size", "2", "--global-batch-size", "16", "--attention-dropout", "0.1")
    config = tiny_config(*arguments, world_size=4)
    advice = out_of_memory_advice(config, available=10**9, on_cpu=True)
    assert "--use-distributed-optimizer: " in advice.splitlines()[5]
    costs = [int(cost) for cost in re.findall(r"about \+(\d+)% time", advice)]
    assert costs == sorted(costs)
    assert len(re.findall(r"^  \d\. --", advice, re.MULTILINE)) == 3


def test_a_run_that_nothing_makes_fit_is_told_what_spares_most() -> None:
    advice = out_of_memory_advice(tiny_config(world_size=1), available=1000, on_cpu=True)
    assert "No two changes make it fit" in advice
    assert "--recompute-granularity full" in advice


def test_the_advice_says_what_it_compares_with_what_in_one_unit() -> None:
    """The smaller of what there is and of nine tenths of what did not fit."""
    config = tiny_config(world_size=2)
    (stage,) = predict_memory(config, padded_vocab_size=256)
    for available, said in (
        (10**9, f"{0.9 * stage.total / 1e6:,.1f} MB: nine tenths"),
        (10**6, "1.0 MB: all there is"),
    ):
        advice = out_of_memory_advice(config, available=available, on_cpu=True)
        assert f"A rank has {available / 1e6:,.1f} MB, of which libraries, " in advice
        assert f"the largest stage then needs no more than {said}" in advice
        assert re.search(r"^  1\. --.*: [\d.]+ MB, ", advice, re.MULTILINE)
        assert "GB" not in advice


PROGRAM = """
import resource, sys
import torch
from megatron.training.initialize import initialize_megatron
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.pretrain import build_run, pretrain, train
from pretrain_gpt import forward_step
limit = int(sys.argv.pop(1))
def limited(*arguments):
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return gpt_model(*arguments)
pretrain(gpt_datasets, limited, forward_step)
"""


def test_a_run_without_enough_memory_says_what_it_needs_and_what_would_fit() -> None:
    limit = 24 * 10**9
    flags = [
        *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "16384"),
        *("--max-position-embeddings", "16384", "--micro-batch-size", "16", "--train-iters", "1", "--lr", "1e-3"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "250", "--mock-data", "--eval-iters", "0"),
        *("--hidden-dropout", "0", "--num-workers", "0"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(limit), *flags], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rank 0 ran out of memory in iteration 1: " in done.stderr
    assert "activations" in done.stderr
    assert "--recompute-" in done.stderr
    assert "Traceback" not in done.stderr


def pretrain_until_memory_runs_out() -> None:
    """On the ranks of the last argument, one second after the other, as an allocator of GPUs says it."""
    *sys.argv, ranks = sys.argv
    runs_out = [int(rank) for rank in ranks.split(",")]
    rank = int(os.environ["RANK"])
    if len(runs_out) > 1:
        initialize._TIME_TO_ASK = 60.0  # nobody waits so long, but a busy machine may need it

    def short_of_memory(*arguments: Any) -> Tensor | dict[str, Tensor]:
        if rank in runs_out:
            time.sleep(runs_out.index(rank))
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rank + 1} GiB.\nlong story")
        return forward_step(*arguments)

    pretrain(gpt_datasets, gpt_model, short_of_memory)


@pytest.mark.parametrize(
    "ranks, layout, runs_out",
    [
        (2, (), "1"),
        (2, (), "0"),
        (2, (), "0,1"),
        (2, (), "1,0"),
        (3, ("--pipeline-model-parallel-size", "3"), "2"),
        (2, ("--tensor-model-parallel-size", "2"), "1"),
    ],
    ids=["one", "the first", "both", "the first later", "a last stage", "in a layer"],
)
def test_memory_that_runs_out_is_said_once_and_those_that_lose_the_rank_are_silent(
    ranks: int, layout: tuple[str, ...], runs_out: str, tmp_path: Path
) -> None:
    """The first rank holds the store where ranks learn of each other, and takes it away."""
    arguments = [*TINY_GPT, *layout, "--global-batch-size", "12", runs_out]
    outcome = launch(pretrain_until_memory_runs_out, arguments, ranks=ranks, folder=tmp_path).wait()
    said = "".join(outcome.err)
    assert said.count("ran out of memory in iteration 1: CUDA out of memory. Tried to allocate") == 1
    assert said.count("needs on a rank of each stage, predicted (MB)") == 1
    assert "Traceback" not in said
    assert said.count("has lost another rank") == (1 if runs_out == "0" else 0)
    short = [int(rank) for rank in runs_out.split(",")]
    assert outcome.codes == [2 if rank in short else 1 for rank in range(ranks)]


def test_the_account_is_printed_at_the_start_and_measured_in_the_second_iteration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained("--log-memory", "--train-iters", "3")
    text = capsys.readouterr().out
    assert text.count("predicted (MB):") == 1
    assert "GB of memory" not in text, "there is enough"
    assert text.count("predicted -> measured in iteration 2 (MB):") == 1
    assert re.search(r"\n +0  +0\.5 -> 0\.5 ", text)


def _account_of_parts(rank: int, world_size: int) -> str:
    """What is said of a run whose ranks keep a part each of what layers are computed again from."""
    parts = ("--tensor-model-parallel-size", str(world_size), *FULL, "--distribute-saved-activations")
    batch = ("--micro-batch-size", "64", "--global-batch-size", "64")
    run, account = tiny_run(rank, world_size, *BF16, *parts, *batch), MemoryAccount()
    with redirect_stdout(StringIO()) as said:
        for _ in range(2):
            account.after_step(run, train_step(run))
    return said.getvalue()


def test_activations_of_which_each_rank_keeps_a_part_are_predicted_only() -> None:
    """The recomputation holds them itself, and the saved tensors of autograd know nothing of them."""
    _, said = run_distributed(_account_of_parts, 2)  # the last rank speaks
    stage, parameters, gradients, optimizer, activations, recomputed, total = re.split(
        " {2,}", said.splitlines()[-1].strip()
    )
    assert stage == "0"
    assert all("->" in cell for cell in (parameters, gradients, optimizer, total))
    assert all(float(cell) >= 0 for cell in (activations, recomputed))
    assert "in iteration 2 (MB), activations as predicted:" in said
    shown = [float(cell.split(" -> ")[-1].split()[0]) for cell in (parameters, gradients, optimizer, activations)]
    measured = float(total.split(" -> ")[1].split()[0])
    assert measured == pytest.approx(sum(shown), abs=0.05 * (len(shown) + 1))  # all are rounded to a tenth
    assert float(activations) >= 0.3, "too little to be missed in the total"


@pytest.mark.parametrize(
    "flags",
    [
        ("--tensor-model-parallel-size", "4"),
        ("--tensor-model-parallel-size", "2", "--use-distributed-optimizer"),
        ("--pipeline-model-parallel-size", "2", "--seq-length", "64", "--max-position-embeddings", "64"),
    ],
    ids=["tp4", "sharded", "pp2"],
)
def test_a_run_that_a_nodes_memory_has_no_room_for_gets_a_warning_with_the_account(flags: tuple[str, ...]) -> None:
    """Two of four ranks; in a pipeline those of the first stage here, and of the last one on the other node."""
    config = tiny_config("--bf16", *flags, world_size=4)
    parallel = config.parallel
    grid = parallel_state.grid_of_world(
        4, tensor=parallel.tensor_model_parallel_size, pipeline=parallel.pipeline_model_parallel_size
    )
    assert config.tokenizer.vocab_size is not None
    stages = predict_memory(config, padded_vocab_size=config.padded_vocab_size(config.tokenizer.vocab_size))
    for rank, stage in ((0, stages[0]), (2, stages[-1])):
        state = replace(parallel_state.ParallelState.single(), grid=grid, nodes=("a", "a", "b", "b"), rank=rank)
        assert _memory_warning(state, stages, 2 * stage.total) == ""
        text = _memory_warning(state, stages, 2 * stage.total - 1)
        assert text.startswith(f"the 2 rank(s) of this node need about {2 * stage.total / 1e9:.1f} GB or more")
        assert text.endswith(memory_table(stages))


def test_the_warning_at_the_start_and_the_account_have_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the size of the vocabulary stands in the files of the tokenizer."""
    monkeypatch.setattr(memory, "_bytes_of_memory", lambda: 1000)
    tokenizer = TokenizerConfig(tokenizer_type="ByteTokenizer")
    config = replace(tiny_config("--log-memory", "--train-iters", "1"), tokenizer=tokenizer)
    train(build_run(context_of_rank(config, 0, 1), gpt_datasets, gpt_model, forward_step))
    text = capsys.readouterr().out
    _, warning, account, *_ = re.split(r"warning: the 1 rank\(s\) of this node need about|, predicted \(MB\):\n", text)
    table = account.splitlines()[:2]
    assert warning.splitlines()[1:3] == table
    assert out_of_memory_advice(config, available=10**9, on_cpu=True).splitlines()[1:3] == table


SAVED = {
    "fp32": (1, ()),
    "bf16": (2, ("--bf16",)),
    "halves": (1, ("--bf16", "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16")),
    "sharded": (2, ("--bf16", "--use-distributed-optimizer")),
    "muon": (1, ("--optimizer", "muon")),
    "weights": (1, ("--no-save-optim",)),
}


def _staging(rank: int, world_size: int, folder: Path, *arguments: str) -> tuple[StageMemory, StageMemory]:
    """Predicted and measured."""
    run, _ = build(*arguments, "--async-save", "--save", str(folder), rank=rank, world_size=world_size)
    run.hooks[-1].on_start(run)
    run.hooks[-1].close()
    predicted = predicted_memory(run)
    assert predicted is not None
    return predicted[0], measured_memory(run, 0)


@pytest.mark.parametrize("layout", SAVED)
def test_the_account_has_the_copy_that_is_written_in_the_background(layout: str, tmp_path: Path) -> None:
    ranks, arguments = SAVED[layout]
    for predicted, measured in run_distributed(_staging, ranks, tmp_path, *arguments):
        assert measured.staging == pytest.approx(predicted.staging, rel=0.05)
        assert replace(predicted, staging=0).total == predicted.total
        header, line = memory_table([predicted], [measured]).splitlines()
        assert header.split()[-2:] == ["total", "staging"]
        assert f"{predicted.staging / 1e6:,.1f} -> {measured.staging / 1e6:,.1f}" in line


def test_on_cpus_the_copy_counts_where_memory_is_short(tmp_path: Path) -> None:
    config = tiny_config("--async-save", "--save", str(tmp_path), world_size=1)
    (stage,) = predict_memory(config, padded_vocab_size=256)
    assert stage.staging > 0
    state = replace(parallel_state.ParallelState.single(), nodes=("a",))
    assert _memory_warning(state, [stage], stage.total + stage.staging) == ""
    assert _memory_warning(state, [stage], stage.total + stage.staging - 1) != ""
    advice = out_of_memory_advice(config, 10**5, on_cpu=True)
    assert "the largest stage, with its staging, then needs no more than 0.1 MB: all there is." in advice
    advice = out_of_memory_advice(config, 10**9, on_cpu=True)
    assert f"no more than {0.9 * (stage.total + stage.staging) / 1e6:,.1f} MB: nine tenths" in advice
    advice = out_of_memory_advice(config, 10**9, on_cpu=False)
    assert f"the largest stage then needs no more than {0.9 * stage.total / 1e6:,.1f} MB: nine tenths" in advice


def test_a_run_that_ends_before_its_second_iteration_stops_counting() -> None:
    run, _ = trained("--log-memory", "--train-iters", "1")
    (account,) = [hook for hook in run.hooks if isinstance(hook, MemoryAccount)]
    assert account.saved is None
