"""`--fast-attention-dropout`: torch draws the masks, and yet they follow from the seed and the position in the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_parity
from tests.training.runs import rows_on_ranks, trained

FAST = ["--fast-attention-dropout", "--attention-dropout", "0.2", "--train-iters", "4"]
PIPELINE = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]


def drawn_seeds(*arguments: str) -> list[int]:
    """That of torch's generator in each attention of a run."""
    seeds: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*parts: Any, **keywords: Any) -> torch.Tensor:
        seeds.append(torch.initial_seed())
        return attention(*parts, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        run, _ = trained(*FAST, *arguments)
    assert len(seeds) == 4 * 8 * run.config.model.num_layers  # iterations × micro-batches × layers
    return seeds


def test_each_attention_draws_from_a_generator_of_its_own_that_follows_from_the_seed() -> None:
    first, again, other = drawn_seeds(), drawn_seeds(), drawn_seeds("--seed", "4321")
    assert len(set(first)) == len(first)
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


@pytest.mark.parametrize(
    "layout, ranks", [(PIPELINE, 2), (["--pipeline-model-parallel-size", "1"], 2)], ids=["pipeline", "data-parallel"]
)
def test_pipeline_and_data_parallel_sizes_change_no_mask(layout: list[str], ranks: int) -> None:
    expected = losses_of(run_distributed(rows_on_ranks, 1, *FAST, "--fp64"))
    got = losses_of(run_distributed(rows_on_ranks, ranks, *FAST, "--fp64", *layout))
    got = got[: len(expected)]  # with data parallelism each rank reports the same
    assert_parity(torch.tensor(got, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))
