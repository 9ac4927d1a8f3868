"""`--fast-attention-dropout`: torch draws the masks, and yet they follow from the seed and the position in the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain_gpt import forward_step
from tests.helpers.distributed import run_distributed
from tests.training.runs import rows_on_ranks, trained

FAST = ["--fast-attention-dropout", "--attention-dropout", "0.2", "--train-iters", "4"]
PIPELINE = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]


def generator_seeds(*arguments: str) -> list[int]:
    """That of torch's generator in each forward of a run."""
    seeds: list[int] = []

    def watched(*parts: Any) -> Tensor | dict[str, Tensor]:
        seeds.append(torch.initial_seed())
        return forward_step(*parts)

    trained(*FAST, *arguments, forward_step=watched)
    return seeds


def test_each_forward_draws_from_a_generator_of_its_own_that_follows_from_the_seed() -> None:
    first, again, other = generator_seeds(), generator_seeds(), generator_seeds("--seed", "4321")
    assert len(first) == len(set(first)) == 4 * 8  # iterations × micro-batches
    assert first == again
    assert not set(first) & set(other)


def losses_of(rows: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [row["lm loss"] for rank in rows for row in rank if "lm loss" in row]


def test_the_losses_are_reproducible_and_masked() -> None:
    torch.manual_seed(1)
    first = trained(*FAST)[1].losses
    torch.manual_seed(2)  # whatever else has drawn from the generator
    assert trained(*FAST)[1].losses == first
    assert trained("--train-iters", "4")[1].losses != first


@pytest.mark.parametrize("layout", [[], PIPELINE], ids=["one-rank", "interleaved"])
def test_a_resumed_run_is_the_one_that_was_never_stopped(layout: list[str], tmp_path: Path) -> None:
    arguments = [*FAST, *layout]
    ranks = 2 if layout else 1
    whole = losses_of(run_distributed(rows_on_ranks, ranks, *arguments))
    save = ["--save", str(tmp_path), "--load", str(tmp_path), "--load-if-exists", "--exit-interval", "2"]
    parts = [losses_of(run_distributed(rows_on_ranks, ranks, *arguments, *save)) for _ in range(2)]
    assert [len(part) for part in parts] == [2, 2]
    assert [*parts[0], *parts[1]] == whole
