"""Whole runs of `pretrain_bert.py`: two losses, evaluation, checkpoints, and what they are resumed with."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import CheckpointError
from megatron.config.problems import UserError
from megatron.inference.load import open_model
from megatron.inference.stages import ModelRanks
from megatron.training.bert import bert_datasets, bert_model
from megatron.training.pretrain import build_run, train
from megatron.training.run import Run
from pretrain_bert import forward_step
from tests.helpers.bert import tiny_bert_config
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import PARITY_FP64
from tests.helpers.tiny import context_of_rank, tiny_run
from tests.training.runs import Recorder
from tests.training.test_resume import checksums, timeless

WORDS = [*(f"word{number}" for number in range(90)), *(f"##piece{number}" for number in range(6))]
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
LENGTH, STOP = 4, 2


def data(folder: Path) -> list[str]:
    """Arguments for sentences that count up, over a WordPiece vocabulary of 101 tokens."""
    file = folder / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return [
        *("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(file), "--vocab-size", "101"),
        *("--seq-length", "48", "--max-position-embeddings", "48", "--data-cache-path", str(folder)),
    ]


def trained(*arguments: str, rank: int = 0, world_size: int = 1) -> tuple[Run, Recorder]:
    config = tiny_bert_config(*arguments, world_size=world_size)
    run = build_run(context_of_rank(config, rank, world_size), bert_datasets, bert_model, forward_step)
    recorder = Recorder()
    run.hooks = [recorder, *run.hooks]
    train(run)
    return run, recorder


def rows(rank: int, world_size: int, *arguments: str) -> tuple[list[dict[str, object]], list[object]]:
    _, recorder = trained(*arguments, rank=rank, world_size=world_size)
    return timeless(recorder), list(recorder.evaluations)


def test_both_losses_are_logged_and_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = ("--train-iters", "3", "--eval-iters", "1", "--eval-interval", "2", "--log-interval", "1")
    _, recorder = trained(*data(tmp_path), *length, "--num-layers", "2")
    first = recorder.steps[0].losses
    assert first["lm loss"] == pytest.approx(log(101), rel=0.1) and first["sop loss"] == pytest.approx(log(2), rel=0.1)
    evaluated = {(split, iteration): set(losses) for split, iteration, losses in recorder.evaluations}
    both = {"lm loss", "sop loss"}
    assert evaluated == {("validation", 2): both, ("validation", 3): both, ("test", 3): both}
    said = capsys.readouterr().out
    assert "| lm loss: " in said and "| sop loss: " in said
    assert "validation loss at iteration 2 | lm loss value: " in said and "| sop loss PPL: " in said


def test_without_pairs_there_is_one_loss(tmp_path: Path) -> None:
    run, recorder = trained(*data(tmp_path), "--train-iters", "1", "--bert-no-binary-head", "--num-layers", "1")
    assert recorder.steps[0].losses.keys() == {"lm loss"}
    names = {name for chunk in run.chunks for name, _ in chunk.module.named_parameters()}
    assert not [name for name in names if name.startswith(("pooler", "binary_head")) or "tokentype" in name]


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2-dp2": (4, ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer")),
    "pp2-vpp2": (2, ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")),
}
EVALUATED = ("--eval-iters", "1", "--eval-interval", "2")


@pytest.mark.parametrize(
    "layout, precision",
    [
        ("pp2-vpp2", "--bf16"),
        pytest.param("tp2-dp2", "--fp64", marks=pytest.mark.full),
        pytest.param("tp2-dp2", "--fp16", marks=pytest.mark.full),
    ],
)
def test_stopped_and_resumed_it_ends_with_the_same_bytes(layout: str, precision: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    arguments = (*data(tmp_path), *DROPOUT, *flags, precision, *EVALUATED, "--train-iters", str(LENGTH))
    arguments += ("--layernorm-placement", "post")
    straight = run_distributed(rows, ranks, *arguments, "--save", str(tmp_path / "straight"))
    saved = ("--save", str(tmp_path / "stopped"))
    first = run_distributed(rows, ranks, *arguments, *saved, "--exit-interval", str(STOP))
    second = run_distributed(rows, ranks, *arguments, *saved, "--load", str(tmp_path / "stopped"))
    for whole, half, other in zip(straight, first, second, strict=True):
        assert half[0] + other[0] == whole[0]
        assert half[1] + other[1] == whole[1]
    files = [checksums(tmp_path / name / f"iter_{LENGTH:07d}") for name in ("straight", "stopped")]
    tensors = [{name: found for name, found in each.items() if name.endswith(".safetensors")} for each in files]
    assert tensors[0] == tensors[1] and tensors[0]


@pytest.mark.parametrize(
    "writer, reader",
    [("tp2-dp2", "pp2-vpp2"), pytest.param("pp2-vpp2", "tp2-dp2", marks=pytest.mark.full)],
)
def test_another_layout_goes_on_with_the_same_losses(writer: str, reader: str, tmp_path: Path) -> None:
    arguments = (*data(tmp_path), *DROPOUT, "--fp64", "--train-iters", str(LENGTH))
    saved = ("--save", str(tmp_path / "saved"), "--exit-interval", str(STOP))
    straight = run_distributed(rows, 1, *arguments)[0][0]
    run_distributed(rows, LAYOUTS[writer][0], *arguments, *LAYOUTS[writer][1], *saved)
    load = ("--load", str(tmp_path / "saved"))
    resumed = run_distributed(rows, LAYOUTS[reader][0], *arguments, *LAYOUTS[reader][1], *load)[-1][0]
    for row, expected in zip(resumed, straight[STOP:], strict=True):
        for name in ("lm loss", "sop loss", "grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=PARITY_FP64)


def test_a_checkpoint_of_the_other_task_is_refused_by_the_names_of_the_programs(tmp_path: Path) -> None:
    bert = (*data(tmp_path), "--train-iters", "1", "--num-layers", "1")
    trained(*bert, "--save", str(tmp_path / "bert"))
    with pytest.raises(
        CheckpointError, match=r"holds a BERT, which pretrain_bert\.py goes on with; this is pretrain_gpt"
    ):
        tiny_run(0, 1, "--load", str(tmp_path / "bert"))
    with pytest.raises(UserError, match=r"holds a BERT, which does not continue texts; tools/fill_mask\.py"):
        open_model(tmp_path / "bert").load_gpt(ModelRanks.single(), torch.device("cpu"))


def test_a_tokenizer_without_the_tokens_of_bert_is_refused() -> None:
    with pytest.raises(UserError, match=r"NullTokenizer: the vocabulary has no \[CLS\], \[MASK\], \[PAD\], \[SEP\]"):
        trained("--tokenizer-type", "NullTokenizer", "--vocab-size", "251")


def test_a_batch_without_a_masked_token_is_no_nan(tmp_path: Path) -> None:
    """A share of one token in 45 is none of a shorter sample. Of pairs there is a loss all the same."""
    few = ("--mask-prob", "0.0223", "--short-seq-prob", "1", "--seed", "11")
    steps = ("--train-iters", "2", "--eval-iters", "1", "--eval-interval", "2", "--num-layers", "1")
    run, recorder = trained(*data(tmp_path), *few, *steps)
    assert [(step.applied, step.nan, step.losses) for step in recorder.steps] == [(False, False, {})] * 2
    assert [set(losses) for _, _, losses in recorder.evaluations] == [{"sop loss"}] * 2
    for chunk in run.chunks:
        assert all(bool(parameter.isfinite().all()) for parameter in chunk.module.parameters())
