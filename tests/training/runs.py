"""Whole runs of a tiny model, in this process or on ranks, and what they reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.training import TrainingConfig
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.metrics import StepReport
from megatron.training.pretrain import build_run, train
from megatron.training.run import ForwardStep, Hook, Run
from pretrain_gpt import forward_step as gpt_forward_step
from tests.data.corpora import write_corpus
from tests.helpers.tiny import context_of_rank, tiny_config


class Recorder(Hook):
    """Keeps what the hooks of a run are told."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.evaluations: list[tuple[str, int, dict[str, float]]] = []
        self.tables: list[dict[str, list[float]]] = []

    def after_step(self, run: Run, report: StepReport) -> None:
        self.steps.append(report)

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        self.evaluations.append((split, run.progress.iteration, dict(losses)))

    def after_timing(self, run: Run, milliseconds: Mapping[str, Sequence[float]]) -> None:
        self.tables.append({name: list(values) for name, values in milliseconds.items()})

    @property
    def losses(self) -> list[float]:
        return [step.losses["lm loss"] for step in self.steps]


def build(
    *arguments: str,
    rank: int = 0,
    world_size: int = 1,
    forward_step: ForwardStep = gpt_forward_step,
    training: TrainingConfig | None = None,
) -> tuple[Run, Recorder]:
    """A tiny run with a recorder among its hooks, before its first iteration.

    Args:
        training: in place of what the arguments say of that section.
    """
    config = tiny_config(*arguments, world_size=world_size)
    if training is not None:
        config = replace(config, training=training)
        config.validate()
    run = build_run(context_of_rank(config, rank, world_size), gpt_datasets, gpt_model, forward_step)
    recorder = Recorder()
    run.hooks = [recorder, *run.hooks]
    return run, recorder


def trained(*arguments: str, rank: int = 0, world_size: int = 1, **settings: Any) -> tuple[Run, Recorder]:
    """The same after its end."""
    run, recorder = build(*arguments, rank=rank, world_size=world_size, **settings)
    train(run)
    return run, recorder


def rows_on_ranks(rank: int, world_size: int, *arguments: str) -> list[dict[str, object]]:
    """What a rank's steps report, for `run_distributed`."""
    _, recorder = trained(*arguments, rank=rank, world_size=world_size)
    return [step.as_json() for step in recorder.steps]


def counting_corpus(folder: Path) -> list[str]:
    """Arguments for a corpus of documents that count up, and so can be learnt, of 1 to 12 tokens, so that micro-batches
    differ in their numbers of tokens."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    documents = []
    for _ in range(600):
        first, length = random.integers(0, 200), random.integers(1, 13)
        documents.append([[*range(first, first + length), 250]])
    prefix = write_corpus(folder / "counting", documents)
    return ["--data-path", str(prefix), "--data-cache-path", str(folder)]
