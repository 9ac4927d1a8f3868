"""Several validation sets with losses of their own, and validation on all the data that there is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config import parse_arguments
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.pretrain import build_run, train
from megatron.training.run import Run
from pretrain_gpt import forward_step
from tests.data.corpora import write_corpus
from tests.helpers.tiny import TINY_GPT, context_of_rank
from tests.training.runs import Recorder

PLACE = TINY_GPT.index("--data-path")
WITHOUT_DATA = TINY_GPT[:PLACE] + TINY_GPT[PLACE + 6 :]
# Of 24 + 1 tokens each sample: 3, 11 and 6 of them, and 17 tokens more that are in none.
SAMPLES = {"train": 3, "web": 11, "code": 6}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    random = np.random.default_rng(0)
    for name, samples in SAMPLES.items():
        documents = [random.integers(0, 250, 24 * samples - 30), random.integers(0, 250, 48)]
        write_corpus(folder / name, [[[*ids.tolist(), 250]] for ids in documents])
    return folder


def evaluated(corpora: Path, *arguments: str) -> tuple[Run, Recorder]:
    """A run to its end, and what it reported."""
    data = ["--train-data-path", f"{corpora}/train", "--data-cache-path", f"{corpora}/cache", "--eval-iters", "1"]
    config, _ = parse_arguments([*WITHOUT_DATA, *data, *arguments], world_size=1, say=lambda text: None)
    run = build_run(context_of_rank(config, 0, 1), gpt_datasets, gpt_model, forward_step)
    recorder = Recorder()
    run.hooks = [recorder, *run.hooks]
    train(run)
    return run, recorder


def both(corpora: Path) -> tuple[str, ...]:
    return ("--valid-data-path", f"{corpora}/web", f"{corpora}/code")


def test_each_set_is_evaluated_as_if_it_were_the_only_one(
    corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, recorder = evaluated(
        corpora,
        *both(corpora),
        *("--multiple-validation-sets", "--eval-interval", "1", "--train-iters", "2"),
        *("--log-json", f"{tmp_path}/log.json", "--tensorboard-dir", f"{tmp_path}/board"),
        "--log-validation-ppl-to-tensorboard",
    )
    found = {(split, iteration): losses["lm loss"] for split, iteration, losses in recorder.evaluations}
    assert list(found) == [(f"validation {name}", iteration) for iteration in (1, 2) for name in ("web", "code")]
    for name in ("web", "code"):
        one = ("--valid-data-path", f"{corpora}/{name}", "--eval-interval", "1", "--train-iters", "2")
        alone = evaluated(corpora, *one)[1]
        assert [found[f"validation {name}", iteration] for iteration in (1, 2)] == [
            losses["lm loss"] for _, _, losses in alone.evaluations
        ]
    assert run.progress.consumed_valid_samples == 16
    assert " validation web loss at iteration 2 | lm loss value: " in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "log.json").read_text().splitlines()]
    assert rows[-1]["lm loss validation code"] == found["validation code", 2]
    board = EventAccumulator(f"{tmp_path}/board").Reload()
    tags = {tag for tag in board.Tags()["scalars"] if "validation" in tag and "samples" not in tag}
    assert tags == {f"lm loss validation {name}{end}" for name in ("web", "code") for end in ("", " ppl")}


def test_sets_are_called_as_one_wishes(corpora: Path) -> None:
    names = ("--validation-set-names", "prose", "programs")
    _, recorder = evaluated(corpora, *both(corpora), "--multiple-validation-sets", *names, "--skip-train")
    assert [split for split, _, _ in recorder.evaluations] == ["validation prose", "validation programs"]


@pytest.mark.parametrize("micro_batch", ["1", "4"])
def test_full_validation_reads_each_sample_once_whatever_the_batch(corpora: Path, micro_batch: str) -> None:
    """11 samples fill no number of batches of 4 or 8, and what fills the last one counts for nothing."""
    full = (*both(corpora), "--multiple-validation-sets", "--full-validation", "--skip-train")
    _, recorder = evaluated(corpora, *full, "--micro-batch-size", micro_batch)
    found = {split: losses["lm loss"] for split, _, losses in recorder.evaluations}
    for name in ("web", "code"):
        one_by_one = ("--valid-data-path", f"{corpora}/{name}", "--skip-train", "--global-batch-size", "1")
        _, alone = evaluated(corpora, *one_by_one, "--eval-iters", str(SAMPLES[name]))
        ((_, _, losses),) = alone.evaluations
        assert found[f"validation {name}"] == pytest.approx(losses["lm loss"], rel=1e-6)


def test_full_validation_begins_at_the_start_each_time(corpora: Path) -> None:
    """With next to no learning rate the weights stay, and so does the loss over all the samples."""
    still = ("--lr", "1e-30", "--weight-decay", "0", "--eval-interval", "1", "--train-iters", "2", "--full-validation")
    run, recorder = evaluated(corpora, *both(corpora), *still)
    (_, _, first), (_, _, second) = recorder.evaluations
    assert first == second
    assert run.progress.consumed_valid_samples == 0
    (split,) = run.loaders.valid
    assert (split.split, split.iterations) == ("validation", -(-(11 + 6) // 8))
