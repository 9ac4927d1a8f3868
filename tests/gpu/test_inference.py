"""A trained model on a GPU writes the texts, and has the scores, that it has on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.inference.generation import Sampling, generate
from megatron.inference.load import open_model
from megatron.inference.perplexity import LastWord, score_last_words, score_text
from megatron.inference.stages import ModelRanks, StagedModel
from tests.gpu.runs import CPU, CUDA
from tests.helpers.numerics import PARITY_FP64
from tests.training.runs import trained

pytestmark = pytest.mark.gpu

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
GROUPED = ["--group-query-attention", "--num-query-groups", "6"]
VARIANTS = {
    "learned positions": [],
    "rotary": ["--position-embedding-type", "rope", "--max-position-embeddings", "24", *GROUPED],
    "alibi": ["--position-embedding-type", "alibi", *GROUPED],
    "window": ["--window-size", "6", "0"],
}


@pytest.fixture(params=VARIANTS)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> list[StagedModel]:
    """The same model on a CPU and on a GPU, in float64."""
    trained(
        "--fp64", "--train-iters", "1", "--init-method-std", "0.2", *VARIANTS[request.param], "--save", str(tmp_path)
    )
    return [open_model(tmp_path).load(ModelRanks.single(), device) for device in (CPU, CUDA)]


def text_of(model: StagedModel) -> list[list[int | None]]:
    """Longer than what the model looks back on."""
    return list(
        generate(
            model,
            PROMPTS,
            num_tokens=30,
            context_length=24,
            end_token=250,
            sampling=Sampling(),
            generators=[torch.Generator().manual_seed(number) for number in range(len(PROMPTS))],
        )
    )


def test_texts_and_scores_are_those_of_a_cpu(models: list[StagedModel]) -> None:
    texts = [text_of(model) for model in models]
    assert texts[0] == texts[1]
    tokens = np.arange(100) * 7 % 250
    scores = [score_text(model, tokens, after=7, context_length=24, stride=10, batch_size=3) for model in models]
    assert scores[1].nats == pytest.approx(scores[0].nats, rel=PARITY_FP64)
    words = [LastWord(tokens=[*range(length)], start=length - 1) for length in (3, 9, 20)]
    last = [score_last_words(model, words, batch_size=2) for model in models]
    assert last[1].nats == pytest.approx(last[0].nats, rel=PARITY_FP64)
