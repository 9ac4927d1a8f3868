"""Training in each precision, and what a number that is not finite does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.random import DropoutStream
from megatron.data.batches import GPTBatch
from megatron.model import language_model
from megatron.model.rotary import RotaryTable, rotary_table
from megatron.training.failures import NonFiniteError
from megatron.training.pretrain import train
from megatron.training.train_step import train_step
from pretrain_gpt import forward_step
from tests.helpers.distributed import run_distributed
from tests.helpers.dtypes import DtypesSeen
from tests.helpers.launch import TINY_GPT, launch
from tests.helpers.numerics import LOSS_BF16, assert_bitwise, rounded
from tests.training.runs import build, trained
from tests.training.test_train_step import state_of

# ---- fp64 ----


def numbers_below_fp64(rank: int, world_size: int, *flags: str) -> dict[str, int]:
    """The operations on numbers of less than 64 bits in two iterations of a rank, those of rotary angles left out."""
    run, recorder = build(
        *("--fp64", "--train-iters", "2", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--log-params-norm"),
        *("--eval-iters", "1", "--eval-interval", "1", "--log-num-zeros-in-grad"),
        *flags,
        rank=rank,
        world_size=world_size,
    )
    seen = DtypesSeen(torch.float64)

    def table_of(*arguments: Any) -> RotaryTable:
        with seen.allowing():  # angles are float32 in every precision
            table = rotary_table(*arguments)
        assert table.cos.dtype == table.sin.dtype == torch.float64
        return table

    with seen, patch.object(language_model, "rotary_table", table_of):
        train(run)
    assert len(recorder.steps) == 2
    assert seen.expected
    assert bool(seen.allowed) == (run.config.model.position_embedding_type == "rope")
    return dict(seen.others)


FOUR_RANKS = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize("ranks, layout", [(1, ()), (4, FOUR_RANKS)], ids=["one-rank", "tp2-sp-pp2"])
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--qk-layernorm"),
        ("--position-embedding-type", "alibi", "--optimizer", "sgd", "--no-calculate-per-token-loss"),
    ],
    ids=["gpt", "llama", "alibi"],
)
def test_a_step_in_fp64_makes_no_tensor_of_less(flags: tuple[str, ...], ranks: int, layout: tuple[str, ...]) -> None:
    """Dropout, norms, losses, clipping, the logged norm of the parameters, an evaluation and messages included."""
    assert run_distributed(numbers_below_fp64, ranks, *layout, *flags) == [{}] * ranks


def test_the_detector_of_float32_tensors_works() -> None:
    run, _ = build("--train-iters", "1")
    with DtypesSeen(torch.float64) as seen:
        train(run)
    assert seen.others


# ---- bf16 ----


def test_bf16_keeps_float32_main_weights_and_trains() -> None:
    run, recorder = trained("--bf16", "--train-iters", "3")
    _, exact = trained("--train-iters", "3")
    assert recorder.losses == pytest.approx(exact.losses, rel=LOSS_BF16)
    state = state_of(run)
    assert {tensor.dtype for name, tensor in state.items() if name.startswith("model.")} == {torch.bfloat16}
    assert {tensor.dtype for name, tensor in state.items() if not name.startswith("model.")} == {torch.float32}
    for name, tensor in state.items():
        if name.startswith("main."):
            assert_bitwise(state["model." + name.removeprefix("main.")], rounded(tensor, torch.bfloat16), name)


# ---- fp16 ----

FP16 = ("--fp16", "--hysteresis", "1", "--loss-scale-window", "4", "--lr-warmup-iters", "1")


def test_an_overflow_halves_the_loss_scale_skips_the_step_and_the_run_goes_on() -> None:
    run, recorder = build(*FP16, "--initial-loss-scale", str(2.0**24), "--train-iters", "20")
    before = state_of(run)
    first = train_step(run)
    assert not first.applied
    assert not first.nan
    assert run.scheduler.num_steps == 0
    for name, tensor in state_of(run).items():
        assert_bitwise(tensor, before[name], name)
    train(run)
    scales = [first.loss_scale] + [step.loss_scale for step in recorder.steps]
    steps = [first, *recorder.steps]
    assert any(step.applied for step in steps)
    for step, scale in zip(steps, scales[1:]):
        assert scale == step.loss_scale / 2 if not step.applied else scale in (step.loss_scale, 2 * step.loss_scale)
    assert steps[-1].consumed_samples == 20 * 8
    assert run.scheduler.num_steps == 8 * sum(step.applied for step in steps)
    assert not any(step.nan for step in steps)


OVERFLOWING_SAMPLE = 9  # of the second iteration; on one of two data-parallel ranks


def overflowing_forward_step(
    batch: GPTBatch, chunk: nn.Module, hidden_states: Tensor | None, dropout: DropoutStream | None
) -> Tensor | dict[str, Tensor]:
    """A sample whose loss is finite, and whose gradients are not in float16."""
    output = forward_step(batch, chunk, hidden_states, dropout)
    if isinstance(output, Tensor) or OVERFLOWING_SAMPLE not in batch.sample_ids.tolist():
        return output
    return {name: loss * 1e30 for name, loss in output.items()}


def steps_with_an_overflow(rank: int, world_size: int, *arguments: str) -> list[tuple[bool, float, float, bool]]:
    """Of each step whether it was applied, its loss scale, the next learning rate, and whether any weight changed."""
    run, _ = build(*arguments, rank=rank, world_size=world_size, forward_step=overflowing_forward_step)
    told = []
    for _ in range(4):
        before = state_of(run)
        report = train_step(run)
        changed = any(not torch.equal(tensor, before[name]) for name, tensor in state_of(run).items())
        told.append((report.applied, report.loss_scale, report.next_learning_rate, changed))
    return told


@pytest.mark.parametrize("hysteresis, after", [(1, 2.0**7), (2, 2.0**8)])
@pytest.mark.parametrize("sharded", [(), ("--use-distributed-optimizer",)], ids=["", "sharded"])
def test_an_overflow_on_one_rank_is_skipped_by_all(sharded: tuple[str, ...], hysteresis: int, after: float) -> None:
    """Over stages and replicas. The step that follows has the scale that the hysteresis leaves, and is applied."""
    flags = ("--fp16", "--initial-loss-scale", "256", "--hysteresis", str(hysteresis), "--lr-warmup-iters", "1")
    layout = ("--pipeline-model-parallel-size", "2", "--train-iters", "6")
    ranks = run_distributed(steps_with_an_overflow, 4, *flags, *layout, *sharded)
    for told in ranks:
        applied, scales, rates, changed = (list(column) for column in zip(*told))
        assert applied == changed == [True, False, True, True]
        assert scales == [2.0**8, 2.0**8, after, after]
        assert rates[1] == rates[0]


def test_the_loss_scale_and_its_counters_survive_a_resume(tmp_path: Path) -> None:
    arguments = [*FP16, "--initial-loss-scale", str(2.0**24), "--train-iters", "14", "--log-interval", "1"]
    _, straight = trained(*arguments)
    folder = str(tmp_path)
    _, first = trained(*arguments, "--save", folder, "--exit-interval", "7")
    _, second = trained(*arguments, "--load", folder)
    assert len(first.steps) == len(second.steps) == 7
    reports = [{**step.as_json(), "seconds": 0, "tokens_per_second": 0} for step in first.steps + second.steps]
    assert reports == [{**step.as_json(), "seconds": 0, "tokens_per_second": 0} for step in straight.steps]
    assert len({step.loss_scale for step in straight.steps}) > 2


@pytest.mark.parametrize(
    "flags, advice",
    [
        (("--loss-scale", "1e30"), "--loss-scale is fixed; without the flag an overflow lowers it: try --loss-scale"),
        (
            ("--min-loss-scale", "1e30", "--initial-loss-scale", "1e30"),
            "--min-loss-scale keeps the dynamic loss scale from going below it: try --min-loss-scale",
        ),
    ],
)
def test_a_loss_scale_that_cannot_go_lower_is_named_when_gradients_overflow_and_the_advice_works(
    flags: tuple[str, ...], advice: str
) -> None:
    with pytest.raises(NonFiniteError, match=r"a loss scale of 1e\+30 may be too large for gradients") as caught:
        trained("--fp16", *flags)
    _, advised, rest = str(caught.value).partition(advice)
    assert advised
    smaller = rest.split()[0]
    _, recorder = trained("--fp16", flags[0], smaller, *("--initial-loss-scale", smaller)[: len(flags) - 2])
    assert all(step.applied for step in recorder.steps)


# ---- not finite ----

POISONED_SAMPLE = 9  # of the second iteration; on the second of two data-parallel ranks


def poisoned_forward_step(
    batch: GPTBatch, chunk: nn.Module, hidden_states: Tensor | None, dropout: DropoutStream | None
) -> Tensor | dict[str, Tensor]:
    """A sample whose loss is NaN."""
    output = forward_step(batch, chunk, hidden_states, dropout)
    if isinstance(output, Tensor) or POISONED_SAMPLE not in batch.sample_ids.tolist():
        return output
    return {name: loss * float("nan") for name, loss in output.items()}


def pretrain_poisoned() -> None:
    from megatron.training.gpt import gpt_datasets, gpt_model
    from megatron.training.pretrain import pretrain

    pretrain(gpt_datasets, gpt_model, poisoned_forward_step)


def test_a_nan_stops_all_ranks_with_an_error_that_names_rank_and_parameter(tmp_path: Path) -> None:
    outcome = launch(pretrain_poisoned, [*TINY_GPT, "--log-interval", "1"], ranks=2, folder=tmp_path).wait(30)
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert "Traceback" not in said
    assert "gradients were not finite, before any reduction, on rank 1: decoder." in said
    assert "rank 0: decoder." not in said
    assert "| grad norm: nan |" in outcome.out[1], "the line of the iteration is missing"
    assert "iteration        3/" not in outcome.out[1]


@pytest.mark.parametrize("precision", ["--fp64", "--fp16"])
def test_a_nan_loss_of_the_last_stage_stops_all_stages(precision: str, tmp_path: Path) -> None:
    """With fp16 too, where gradients that are not finite are no fault, and a loss that is not is one."""
    outcome = launch(
        pretrain_poisoned,
        [*TINY_GPT, precision, "--pipeline-model-parallel-size", "2"],
        ranks=2,
        folder=tmp_path,
    ).wait(30)
    assert outcome.codes == [2, 2]
    assert any("the weights were not updated. Resume from" in text for text in outcome.err), "no advice on a loss scale"


def test_a_nan_that_does_not_stop_the_run_is_printed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    run, recorder = trained(
        *("--no-check-for-nan-in-loss-and-grad", "--log-interval", "3"), forward_step=poisoned_forward_step
    )
    assert [step.nan for step in recorder.steps] == [False, True, False]
    assert [step.applied for step in recorder.steps] == [True, False, True]
    assert recorder.steps[1].as_json()["lm loss"] == "nan"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "iteration        2/" in line]
    assert "| lm loss: NAN |" in line, "a line comes at once, whatever --log-interval says"
    assert "| number of skipped iterations:   1 | number of nan iterations:   1 |" in line
    assert run.scheduler.num_steps == 16
