"""Whole runs with slices of the optimizer and overlapped communication: what they log, evaluate, save and skip."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import load_checkpoint
from megatron.core.comm_group import CommGroup
from megatron.training.metrics import StepReport
from megatron.training.pretrain import train
from megatron.training.run import Hook, Run
from tests.helpers.distributed import run_distributed
from tests.helpers.launch import launch
from tests.helpers.numerics import assert_bitwise
from tests.helpers.tiny import TINY_GPT
from tests.parity.layouts import DATA_PARALLELISM
from tests.training.runs import build, rows_on_ranks, trained
from tests.training.test_precision import FP16, pretrain_poisoned
from tests.training.test_train_step import state_of, whole

PLAIN, ZERO, _, ZERO_OVERLAP = DATA_PARALLELISM.values()


def timeless(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{**row, "seconds": 0, "tokens_per_second": 0} for row in rows]


@cache
def plain_rows(world_size: int, *arguments: str) -> list[list[dict[str, object]]]:
    """What the ranks report without slices and overlap."""
    return run_distributed(rows_on_ranks, world_size, *arguments)


def evaluated_and_saved(rank: int, world_size: int, *arguments: str) -> list[tuple[str, int, dict[str, float]]]:
    _, recorder = trained(*arguments, rank=rank, world_size=world_size)
    return recorder.evaluations


def test_evaluations_and_checkpoints_right_after_a_step_have_its_weights(tmp_path: Path) -> None:
    """With overlap the last gathers are still open then."""
    arguments = ("--bf16", "--clip-grad", "0", "--eval-iters", "1", "--eval-interval", "1", "--save-interval", "1")
    results = {}
    for name, choices in DATA_PARALLELISM.items():
        folder = tmp_path / name
        results[name] = run_distributed(evaluated_and_saved, 2, *arguments, "--save", str(folder), *choices)
    assert len(results["plain"][0]) >= 3
    for name, evaluations in results.items():
        assert evaluations == results["plain"], name
        checkpoint, plain = (
            load_checkpoint(tmp_path / each, world=CommGroup.single("world")) for each in (name, "plain")
        )
        assert checkpoint.tensors.keys() == plain.tensors.keys()
        for key in plain.tensors:
            assert_bitwise(checkpoint.read(key), plain.read(key), f"{name}: {key}")
    zero = [tmp_path / "zero" / "iter_0000003" / f"shard_0000{rank}.safetensors" for rank in range(2)]
    sizes = [file.stat().st_size for file in zero]
    assert max(sizes) < 1.1 * min(sizes), "each rank writes its own slices"


def resumed_weights(rank: int, world_size: int, *arguments: str) -> dict[str, torch.Tensor]:
    run, _ = build(*arguments, rank=rank, world_size=world_size)
    for chunk in run.chunks:
        chunk.wait_for_parameters()
    return state_of(run)


def resumed_slices(
    rank: int, world_size: int, *arguments: str
) -> tuple[dict[str, torch.Tensor], list[tuple[str, int, torch.Tensor]]]:
    """The weights of the model, and of its main weights and state the key, the first element and what is held."""
    run, _ = build(*arguments, rank=rank, world_size=world_size)
    slices = []
    for named in (*run.optimizer.named_main_parameters(), *run.optimizer.named_state()):
        assert named.elements is not None
        key = named.key.replace("model.", "main.", 1) if named.key.startswith("model.") else named.key
        slices.append((key, named.elements.first, whole(named.tensor).clone()))
    return model_weights(run), slices


def model_weights(run: Run) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in state_of(run).items() if key.startswith("model.")}


def weights_after_training(rank: int, world_size: int, *arguments: str) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """Whether a gather is open after each step and at the end, where nobody has waited for it; the weights."""
    run, _ = build(*arguments, rank=rank, world_size=world_size)
    is_open: list[bool] = []

    class Look(Hook):
        def after_step(self, run: Run, report: StepReport) -> None:
            self.on_end(run)

        def on_end(self, run: Run) -> None:
            is_open.append(any(bucket.is_gathering for chunk in run.chunks for bucket in chunk.buckets))

    run.hooks = [Look(), *run.hooks]
    train(run)
    return is_open, model_weights(run)


@pytest.mark.parametrize("end", [(), ("--exit-interval", "2")], ids=["", "exit-interval"])
def test_a_finished_run_has_whole_weights(end: tuple[str, ...]) -> None:
    arguments = ("--bf16", "--clip-grad", "0", *end)
    plain = run_distributed(weights_after_training, 2, *arguments)
    ranks = run_distributed(weights_after_training, 2, *arguments, *ZERO_OVERLAP)
    for (is_open, weights), (_, expected) in zip(ranks, plain):
        assert is_open == [True] * (len(is_open) - 1) + [False]
        for key, tensor in weights.items():
            assert_bitwise(tensor, expected[key], key)


def test_a_checkpoint_of_slices_is_that_of_whole_ones(tmp_path: Path) -> None:
    """Loaded on one rank, bit for bit, weights and state; and what one rank has saved, loaded as slices."""
    arguments = ("--bf16", "--clip-grad", "0")
    loaded = {}
    for name, choices in (("plain", PLAIN), ("zero", ZERO_OVERLAP)):
        run_distributed(rows_on_ranks, 2, *arguments, "--save", str(tmp_path / name), *choices)
        (loaded[name],) = run_distributed(resumed_weights, 1, *arguments, "--load", str(tmp_path / name))
    for key, tensor in loaded["zero"].items():
        assert_bitwise(tensor, loaded["plain"][key], key)
    ranks = run_distributed(resumed_slices, 2, *arguments, "--load", str(tmp_path / "plain"), *ZERO_OVERLAP)
    compared = dict.fromkeys(loaded["plain"], 0)
    for weights, slices in ranks:
        for key, tensor in weights.items():
            assert_bitwise(tensor, loaded["plain"][key], key)
            compared[key] += tensor.numel()
        for key, first, tensor in slices:
            assert_bitwise(tensor, loaded["plain"][key].view(-1)[first : first + tensor.numel()], key)
            compared[key] += tensor.numel()
    for key, tensor in loaded["plain"].items():
        copies = 2 if key.startswith("model.") else 1
        assert compared[key] == copies * tensor.numel(), f"{key}: the slices are not the whole"


@pytest.mark.parametrize("choices", [ZERO, ZERO_OVERLAP], ids=["zero", "zero-overlap"])
def test_norms_and_zeros_are_those_of_the_whole_model(choices: tuple[str, ...]) -> None:
    # without clipping, by a norm that is summed in another order, both train the same to the bit
    arguments = ("--fp64", "--log-params-norm", "--log-num-zeros-in-grad", "--clip-grad", "0")
    arguments += ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    plain = plain_rows(4, *arguments)
    sliced = run_distributed(rows_on_ranks, 4, *arguments, *choices)
    for rows, expected_rows in zip(sliced, plain):
        for row, expected in zip(rows, expected_rows, strict=True):
            assert row["num_zeros"] == expected["num_zeros"]
            assert row["num_zeros"], "rows of words that are not in the batch"
            for name in ("grad_norm", "params_norm", "lm loss"):
                assert row[name] == pytest.approx(expected[name], rel=1e-12)


@pytest.mark.parametrize("choices", [ZERO, ("--overlap-grad-reduce",), ZERO_OVERLAP], ids=["zero", "overlap", "both"])
def test_overflows_of_fp16_are_skipped_as_without_slices(choices: tuple[str, ...]) -> None:
    arguments = (*FP16, "--initial-loss-scale", str(2.0**24), "--train-iters", "14", "--clip-grad", "0")
    plain = timeless(plain_rows(2, *arguments)[0])
    assert {row["applied"] for row in plain} == {True, False}
    sliced = timeless(run_distributed(rows_on_ranks, 2, *arguments, *choices)[0])
    for row, expected in zip(sliced, plain, strict=True):
        norms = [float(str(each["grad_norm"])) for each in (row, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12, nan_ok=True)
        assert {**row, "grad_norm": 0} == {**expected, "grad_norm": 0}


def test_a_nan_is_named_by_the_rank_that_made_it_with_overlap_too(tmp_path: Path) -> None:
    outcome = launch(
        pretrain_poisoned, [*TINY_GPT, "--log-interval", "1", *ZERO_OVERLAP], ranks=2, folder=tmp_path
    ).wait(60)
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert "gradients were not finite, before any reduction, on rank 1: " in said
    assert "on rank 0" not in said


def test_slices_on_one_rank_are_the_whole() -> None:
    plain, _ = trained("--fp64", "--clip-grad", "0")
    sliced, _ = trained("--fp64", "--clip-grad", "0", *ZERO_OVERLAP)
    states = {}
    for name, run in (("plain", plain), ("sliced", sliced)):
        states[name] = {f"{key}": tensor.view(-1) for key, tensor in state_of(run).items()}
    for key, tensor in states["sliced"].items():
        assert_bitwise(tensor, states["plain"][key], key)


PROGRAM = """
import sys
from megatron.core.parallel_state import destroy_model_parallel
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.pretrain import pretrain
from pretrain_gpt import forward_step
pretrain(gpt_datasets, gpt_model, forward_step)
assert "torch._dynamo" not in sys.modules
destroy_model_parallel()
sys.argv += {more}
pretrain(gpt_datasets, gpt_model, forward_step)
assert "torch._dynamo" not in sys.modules
"""


def test_what_is_not_compiled_does_not_wait_for_the_import_of_the_compiler() -> None:
    """That takes each rank seconds, and says nothing. In one process first plain, then with slices and overlap."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(more=list(ZERO_OVERLAP)), *TINY_GPT],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
