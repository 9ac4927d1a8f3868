"""How the next token is drawn."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config.problems import UserError
from megatron.inference.generation import Sampling, choose_token

LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


def drawn(sampling: Sampling, draws: int = 400) -> list[float]:
    """The share of each token among the drawn ones."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([choose_token(LOGITS, sampling, generator) for _ in range(draws)])
    return [float(share) for share in torch.bincount(tokens, minlength=4) / draws]


def test_tokens_are_drawn_by_their_probability() -> None:
    # Four standard deviations of a share of 400 draws are at most 0.1.
    assert drawn(Sampling()) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=1e-310),
        Sampling(top_k=1),
        Sampling(top_p=0.4),
    ],
)
def test_the_most_likely_token_can_be_taken_always(sampling: Sampling) -> None:
    assert drawn(sampling, 50) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.7)])
def test_unlikely_tokens_can_be_left_out(sampling: Sampling) -> None:
    assert drawn(sampling) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.1)
    assert drawn(sampling)[2:] == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(temperature: float, wrong: float) -> None:
    logits = torch.tensor([0.0, wrong])
    with pytest.raises(UserError, match="not finite"):
        choose_token(logits, Sampling(temperature=temperature), torch.Generator())
