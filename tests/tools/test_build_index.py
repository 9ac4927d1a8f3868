"""Indices built ahead of a training, by the tool as a user starts it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from megatron.config import parse_arguments
from megatron.config.megatron_config import Task
from megatron.training.bert import bert_datasets, bert_model
from megatron.training.data_loaders import DatasetsProvider
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.pretrain import build_run, train
from megatron.training.setup import ModelProvider
from pretrain_bert import forward_step as bert_forward_step
from pretrain_gpt import forward_step as gpt_forward_step
from tests.data.corpora import write_corpus
from tests.helpers.bert import TINY_BERT
from tests.helpers.tiny import TINY_GPT, context_of_rank
from tests.helpers.tokenizer_files import BERT_VOCABULARY
from tests.helpers.tools import run

PLACE = TINY_GPT.index("--data-path")
GPT = TINY_GPT[:PLACE] + TINY_GPT[PLACE + 6 :]


def corpus(prefix: Path, documents: int, sentences: int = 1) -> Path:
    random = np.random.default_rng(len(prefix.name))
    lengths = random.integers(5, 40, (documents, sentences))
    return write_corpus(prefix, [[random.integers(5, 240, size).tolist() for size in sizes] for sizes in lengths])


def trains_without_building(words: list[str], task: Task, caplog: pytest.LogCaptureFixture) -> None:
    """Every index that a training wants is there: none is built, on disk or in memory."""
    of_task: dict[Task, tuple[DatasetsProvider, ModelProvider, object]] = {
        "gpt": (gpt_datasets, gpt_model, gpt_forward_step),
        "bert": (bert_datasets, bert_model, bert_forward_step),
    }
    datasets, model, forward_step = of_task[task]
    config, _ = parse_arguments(words, task=task, world_size=1, say=lambda text: None)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="megatron"):
        made = build_run(context_of_rank(config, 0, 1), datasets, model, forward_step)  # type: ignore[arg-type]
        train(made)
    assert [record.getMessage() for record in caplog.records if {"built", "kept"} & vars(record).keys()] == []


def test_a_training_of_gpt_finds_all_its_indices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "bb", "ccc", "dddd"):
        corpus(tmp_path / name, 40)
    (tmp_path / "blends.json").write_text(
        json.dumps({"train": [0.3, f"{tmp_path}/a", 0.7, f"{tmp_path}/bb"], "valid": f"{tmp_path}/ccc {tmp_path}/dddd"})
    )
    words = [*GPT, "--per-split-data-args-path", f"{tmp_path}/blends.json", "--data-cache-path", f"{tmp_path}/cache"]
    words += ["--multiple-validation-sets", "--eval-iters", "2", "--train-iters", "2"]
    said = run("build_index", "pretrain_gpt.py", *words)
    assert "train: " in said and f"built index {tmp_path}/cache/" in said
    assert "indices built: 5, " in said, "of four corpora, and of the blend"
    assert said.endswith("a training with the same flags finds them all\n")
    trains_without_building(words, "gpt", caplog)
    assert "indices built: 0, " in run("build_index", "pretrain_gpt.py", *words)
    assert "indices built: 3, " in run("build_index", "pretrain_gpt.py", *words, "--train-iters", "50")


def test_a_training_of_bert_finds_all_its_indices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = TINY_BERT.index("--tokenizer-type")
    words = [
        *TINY_BERT[:place],
        *TINY_BERT[place + 5 :],
        "--tokenizer-type",
        "BertWordPieceLowerCase",
        "--vocab-file",
        str(BERT_VOCABULARY),
    ]
    words += ["--data-path", str(corpus(tmp_path / "a", 60, 4)), "--data-cache-path", f"{tmp_path}/cache"]
    words += ["--split", "80,20,0", "--eval-iters", "1"]
    said = run("build_index", "./pretrain_bert.py", *words)
    assert "indices built: 2, " in said
    trains_without_building(words, "bert", caplog)


def test_a_run_that_is_prolonged_has_the_block_that_it_will_append(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*GPT, "--data-path", str(corpus(tmp_path / "a", 60)), "--data-cache-path", f"{tmp_path}/cache"]
    words += ["--split", "1", "--save", f"{tmp_path}/run", "--load", f"{tmp_path}/run", "--load-if-exists"]
    assert "indices built: 1, " in run("build_index", "pretrain_gpt.py", *words)
    trains_without_building(words, "gpt", caplog)
    longer = [*words, "--train-iters", "5", "--override-opt_param-scheduler"]
    assert "indices built: 1, " in run("build_index", "pretrain_gpt.py", *longer)
    trains_without_building(longer, "gpt", caplog)


def test_the_number_of_processes_matters_where_the_batch_depends_on_it(tmp_path: Path) -> None:
    place = GPT.index("--global-batch-size")
    words = [*GPT[:place], *GPT[place + 2 :], "--data-path", str(corpus(tmp_path / "a", 60)), "--split", "1"]
    complaint = run("build_index", "pretrain_gpt.py", *words, status=2)
    assert "the number of processes: --world-size N says it" in complaint
    assert "indices built: 1, " in run("build_index", "pretrain_gpt.py", *words, "--world-size", "4")
    one = [*words, "--global-batch-size", "4"]
    assert "indices built: 0, " in run("build_index", "pretrain_gpt.py", *one), "the same samples"


def test_a_blend_without_a_folder_is_not_passed_over(tmp_path: Path) -> None:
    blend = ["1", str(corpus(tmp_path / "a", 60)), "1", str(corpus(tmp_path / "bb", 60))]
    complaint = run("build_index", "pretrain_gpt.py", *GPT, "--data-path", *blend, "--split", "1", status=2)
    assert "not every index could be kept, see above: --data-cache-path names a folder" in complaint


def test_wrong_words_are_refused_as_a_training_does(tmp_path: Path) -> None:
    assert "the first word is the program that trains" in run("build_index", "mine.py", *GPT, status=2)
    assert "there is nothing to train on" in run("build_index", "pretrain_gpt.py", *GPT, status=2)
    missing = run("build_index", "pretrain_gpt.py", *GPT, "--data-path", f"{tmp_path}/none", status=2)
    assert f"no file {tmp_path}/none.bin" in missing
