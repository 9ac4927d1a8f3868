"""Trainings of Megatron-LM, started from its own initial weights and run here: the same samples, rates, losses, norms.

`params.json` holds its command line, `record.json` what it did, step by step, `init` the weights before the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron.config.arguments import parse_arguments
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.native import write_native
from megatron.data.sample_dataset import SampleDataset, TokenArray
from megatron.training.data_loaders import Datasets, SampleCounts
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.initialize import MegatronContext
from megatron.training.metrics import StepReport
from megatron.training.pretrain import build_run, train
from megatron.training.setup import Vocabulary
from pretrain_gpt import forward_step
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise
from tests.helpers.tiny import INDICES, context_of_rank
from tests.training.runs import Recorder

FIXTURES = Path(__file__).parents[1] / "fixtures"
RUNS = FIXTURES / "training"
LOSS, GRAD_NORM = 1e-5, 1e-4

# What of its command line is about files: where its data and caches were, and how it saved.
FILES = ("--data-path", "--data-cache-path", "--ckpt-format")


class Noted:
    """A dataset that notes which samples are read, in their order."""

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> TokenArray:
        self.read.append(number)
        return self.dataset[number]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank has done: its steps, the losses of the evaluations between them, and the samples that it read."""

    steps: list[StepReport]
    evaluations: list[tuple[str, int, dict[str, float]]]
    samples: list[int]


def train_on_rank(rank: int, world_size: int, arguments: Sequence[str]) -> Trained:
    noted: list[Noted] = []

    def datasets(context: MegatronContext, vocabulary: Vocabulary, counts: SampleCounts) -> Datasets:
        found = gpt_datasets(context, vocabulary, counts)
        noted.append(Noted(found.train))
        return replace(found, train=noted[0])

    config, _ = parse_arguments(list(arguments), world_size=world_size)
    run = build_run(context_of_rank(config, rank, world_size), datasets, gpt_model, forward_step)
    recorder = Recorder()
    run.hooks = [recorder, *run.hooks]
    train(run)
    return Trained(steps=recorder.steps, evaluations=recorder.evaluations, samples=noted[0].read)


def command_line(name: str, folder: Path, *layout: str) -> list[str]:
    """Its command line, with the initial weights as a checkpoint of ours to load.

    None of the runs had `--calculate-per-token-loss`, which is the default here.
    """
    params = json.loads((RUNS / name / "params.json").read_text())
    initial = RUNS / (params["same_initial_weights_as"] or name) / "init"
    write_native(read_megatron(initial), folder / "initial")
    words = list(params["arguments"])
    for flag in FILES:
        while flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    if "core_v0.15.3" in params["version"]:  # whose NullTokenizer had one entry more, the end of a document
        words[words.index("--vocab-size") + 1] = "1000"
    data = FIXTURES / "preprocess" / Path(params["data"]).name
    words += ["--data-path", str(data), "--data-cache-path", str(INDICES)]
    return [*words, "--no-calculate-per-token-loss", "--load", str(folder / "initial"), *layout]


def check(name: str, ranks: Sequence[Trained], *, data_parallel: int = 1) -> None:
    record: dict[str, Any] = json.loads((RUNS / name / "record.json").read_text())
    steps = record["steps"]
    for trained in ranks:
        assert len(trained.steps) == len(steps) == 20
        for found, expected in zip(trained.steps, steps):
            assert found.applied
            assert found.global_batch_size == expected["global_batch_size"]
            assert found.consumed_samples == expected["consumed_before"] + expected["global_batch_size"]
            assert found.learning_rate == pytest.approx(expected["lr_used"], rel=1e-12, abs=0)
            assert found.next_learning_rate == pytest.approx(expected["lr_after"], rel=1e-12, abs=0)
            assert found.weight_decay == pytest.approx(expected["wd_used"], rel=1e-12, abs=0)
            assert found.grad_norm == pytest.approx(expected["grad_norm"], rel=GRAD_NORM)
    with_output = [trained for trained in ranks if trained.steps[0].losses]
    assert with_output
    for trained in with_output:
        for found, expected in zip(trained.steps, steps):
            assert found.losses["lm loss"] == pytest.approx(expected["loss"], rel=LOSS)
        valid = {iteration: losses for split, iteration, losses in trained.evaluations if split == "validation"}
        for evaluation in record["validation"]:
            assert valid[evaluation["after_steps"]]["lm loss"] == pytest.approx(evaluation["loss"], rel=LOSS)
    order = [sample for step in steps for sample in read_by_one_replica(step["sample_indices_per_rank"])]
    replicas = {tuple(trained.samples) for trained in ranks}
    assert len(replicas) == data_parallel
    assert sorted(sample for replica in replicas for sample in replica) == sorted(order)
    assert data_parallel > 1 or replicas == {tuple(order)}


def read_by_one_replica(by_rank: list[list[int]]) -> list[int]:
    """The samples of a step, each once, though several ranks of a replica may have read them."""
    return list(dict.fromkeys(sample for rank in by_rank for sample in rank))


@pytest.mark.parametrize("name", ["gpt2_cosine", "llama_linear_resets", "gpt2_v015_rampup"])
def test_a_training_of_megatron_on_one_rank_is_reproduced(name: str, tmp_path: Path) -> None:
    check(name, [train_on_rank(0, 1, command_line(name, tmp_path))])


TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2_cosine_tp2", "gpt2_cosine_pp2", "gpt2_cosine_dp2", "gpt2_cosine_dp2_distopt"])
def test_a_training_of_megatron_on_two_ranks_is_reproduced(name: str, tmp_path: Path) -> None:
    ranks = run_distributed(train_on_rank, 2, command_line(name, tmp_path))
    check(name, ranks, data_parallel=2 if "dp2" in name else 1)
    record = json.loads((RUNS / name / "record.json").read_text())
    for rank, trained in enumerate(ranks):
        expected = [sample for step in record["steps"] for sample in step["sample_indices_per_rank"][rank]]
        assert trained.samples == expected or not expected  # its other tensor-parallel rank was sent the samples


@pytest.mark.full
@pytest.mark.parametrize(
    "name, world_size, layout, data_parallel",
    [
        ("gpt2_cosine", 4, (*TP2, *PP2), 1),
        ("gpt2_cosine", 4, (*TP2, "--sequence-parallel"), 2),
        ("gpt2_cosine", 4, (*PP2, "--use-distributed-optimizer"), 2),
        ("llama_linear_resets", 2, TP2, 1),
        ("llama_linear_resets", 2, PP2, 1),
        ("llama_linear_resets", 2, (), 2),
        ("gpt2_v015_rampup", 2, TP2, 1),
        ("gpt2_v015_rampup", 2, PP2, 1),
    ],
)
def test_a_training_of_megatron_on_one_rank_is_reproduced_on_other_layouts(
    name: str, world_size: int, layout: tuple[str, ...], data_parallel: int, tmp_path: Path
) -> None:
    arguments = command_line(name, tmp_path, *layout)
    check(name, run_distributed(train_on_rank, world_size, arguments), data_parallel=data_parallel)


# The run that made `llama_gqa`, of which six iterations are done.
LLAMA = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "8", "--ffn-hidden-size", "52"),
    *("--group-query-attention", "--num-query-groups", "4", "--max-position-embeddings", "64", "--seq-length", "32"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--norm-epsilon", "1e-6", "--swiglu"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "153", "--padded-vocab-size", "160", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--lr", "3e-3", "--lr-decay-style", "constant", "--weight-decay", "0.1", "--mock-data", "--split", "99,1,0"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0", "--num-workers", "0"),
    *("--no-calculate-per-token-loss", "--train-iters", "8", "--seed", "77"),
]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a rank has when it has loaded a checkpoint, and then two iterations later."""

    iteration: int
    num_steps: int
    optimizer: dict[str, Any]
    state: dict[str, Tensor]
    losses: list[dict[str, float]]


def resume_on_rank(rank: int, world_size: int, arguments: Sequence[str]) -> Resumed:
    config, _ = parse_arguments(list(arguments), world_size=world_size)
    run = build_run(context_of_rank(config, rank, world_size), gpt_datasets, gpt_model, forward_step)
    state = {
        named.key: named.tensor.clone()
        for named in (*run.optimizer.named_main_parameters(), *run.optimizer.named_state())
        if isinstance(named.tensor, Tensor)
    }
    position = {"iteration": run.progress.iteration, "num_steps": run.scheduler.num_steps}
    optimizer = run.optimizer.state_dict()
    recorder = Recorder()
    run.hooks = [recorder, *run.hooks]
    train(run)
    losses = [dict(step.losses) for step in recorder.steps]
    return Resumed(optimizer=optimizer, state=state, losses=losses, **position)


@pytest.mark.parametrize("name", ["tp1pp1", "tp2pp1", "torch_dist"])
def test_a_training_of_megatron_goes_on_here(name: str, tmp_path: Path) -> None:
    model = read_megatron(FIXTURES / "megatron_checkpoints/llama_gqa" / name)
    write_native(model, tmp_path / "native")
    resumed = resume_on_rank(0, 1, [*LLAMA, "--load", str(tmp_path / "native")])
    assert (resumed.iteration, resumed.num_steps, resumed.optimizer["num_updates"]) == (6, 24, 6)
    assert sorted(resumed.state) == sorted(model.tensors)
    for key, lazy in model.tensors.items():
        assert_bitwise(resumed.state[key], lazy.read(), key)
    assert len(resumed.losses) == 2


@pytest.mark.full
@pytest.mark.parametrize("layout", [TP2, PP2, (*TP2, *PP2), ("--use-distributed-optimizer",)])
def test_a_training_of_megatron_goes_on_alike_in_any_layout(layout: tuple[str, ...], tmp_path: Path) -> None:
    write_native(read_megatron(FIXTURES / "megatron_checkpoints/llama_gqa/tp1pp1"), tmp_path / "native")
    arguments = [*LLAMA, "--load", str(tmp_path / "native")]
    expected = resume_on_rank(0, 1, arguments).losses
    ranks = run_distributed(resume_on_rank, 4 if len(layout) == 4 else 2, [*arguments, *layout])
    found = [rank.losses for rank in ranks if rank.losses[0]]
    assert found
    for losses in found:
        for mine, theirs in zip(losses, expected, strict=True):
            assert mine["lm loss"] == pytest.approx(theirs["lm loss"], rel=LOSS)
