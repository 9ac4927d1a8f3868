"""Scores are the sums that they are said to be, whatever the windows, batches and ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import pipeline_layout
from megatron.config.problems import UserError
from megatron.core.parallel_state import build_parallel_state, grid_of_world
from megatron.inference.perplexity import (
    LastWord,
    Score,
    Tokens,
    Window,
    WordScore,
    score_last_words,
    score_text,
    windows,
)
from megatron.inference.stages import ModelRanks, StagedModel
from megatron.model.gpt_model import GPTModel
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import PARITY_FP64
from tests.model.tiny import ARCHITECTURES, VOCAB, build, jitter, tiny_config

CONTEXT = 16
BEFORE = 5
TEXT: Tokens = np.random.default_rng(0).integers(0, VOCAB, 99).astype(np.uint16)
WORDS = [
    LastWord(tokens=[1, 2, 3, 4, 5], start=3),
    LastWord(tokens=[7, 8], start=1),
    LastWord(tokens=[int(token) for token in TEXT[:12]], start=11),
]


def single(**settings: Any) -> StagedModel:
    model = build(tiny_config(**settings))
    jitter(model)
    return StagedModel(model, ModelRanks.single())


def log_probabilities(model: GPTModel, tokens: list[int]) -> Tensor:
    """[s, v]: what follows each of the tokens, of a text that is looked at whole."""
    inputs = torch.tensor([tokens])
    with torch.no_grad():
        logits: Tensor = model(inputs, torch.arange(len(tokens))[None])[0]
    return logits - logits.exp().sum(dim=-1, keepdim=True).log()


def by_hand(model: GPTModel, tokens: Tokens, stride: int) -> float:
    """Each token's -log p, from the first window that it is in."""
    text = [BEFORE, *tokens]
    nats, done = 0.0, 1
    for start in range(0, len(text) - 1, stride):
        window = [int(token) for token in text[start : start + CONTEXT + 1]]
        predicted = log_probabilities(model, window[:-1])
        for place in range(max(1, done - start), len(window)):
            nats -= float(predicted[place - 1, window[place]])
        done = max(done, start + len(window))
    assert done == len(text)
    return nats


@pytest.mark.parametrize("stride", [16, 15, 5, 1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_text_is_scored_as_by_hand(architecture: str, stride: int) -> None:
    model = single(**ARCHITECTURES[architecture])
    told: list[int] = []
    score = score_text(
        model, TEXT, after=BEFORE, context_length=CONTEXT, stride=stride, batch_size=3, scored=told.append
    )
    assert score.nats == pytest.approx(by_hand(model.part, TEXT, stride), rel=PARITY_FP64)
    assert score.tokens == sum(told) == len(TEXT)
    assert score.perplexity == math.exp(score.nats / 99)


def test_a_text_within_the_context_is_one_window() -> None:
    model = single()
    score = score_text(model, TEXT[:9], after=BEFORE, context_length=CONTEXT, stride=4, batch_size=2)
    assert score.nats == pytest.approx(by_hand(model.part, TEXT[:9], CONTEXT), rel=PARITY_FP64)


def test_a_text_may_come_after_a_token_that_its_type_does_not_hold() -> None:
    """As the end of a document in a corpus of bytes."""
    model = StagedModel(build(tiny_config(), vocab_size=300), ModelRanks.single())
    found = [
        score_text(model, tokens, after=299, context_length=CONTEXT, stride=7, batch_size=2)
        for tokens in (TEXT.astype(np.uint8), TEXT)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("stride", [4, 3, 1])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_windows_score_each_token_once_with_enough_before_it(length: int, stride: int) -> None:
    found = list(windows(length, context_length=4, stride=stride))
    assert [token for window in found for token in range(window.first, window.stop)] == [*range(length)]
    assert all(window.start <= window.first < window.stop <= window.start + 4 for window in found)
    assert all(window.first - window.start >= 4 - stride for window in found[1:])


def test_windows_end_with_the_text() -> None:
    assert list(windows(5, context_length=4, stride=4)) == [
        Window(start=0, stop=4, first=0),
        Window(start=4, stop=5, first=4),
    ]
    assert list(windows(4, context_length=4, stride=1)) == [Window(start=0, stop=4, first=0)]


def test_last_words_are_scored_as_by_hand() -> None:
    model = single()
    nats = 0.0
    for word in WORDS:
        predicted = log_probabilities(model.part, list(word.tokens))
        nats -= sum(float(predicted[place - 1, word.tokens[place]]) for place in range(word.start, len(word.tokens)))
    score = score_last_words(model, WORDS, batch_size=2)
    assert score.nats == pytest.approx(nats, rel=PARITY_FP64)
    assert (score.words, score.tokens) == (3, 4)


def test_a_word_is_right_when_each_of_its_tokens_is_the_most_likely_one() -> None:
    model = single()
    likely = [3, 1, 4]
    for _ in range(3):
        likely.append(int(log_probabilities(model.part, likely)[-1].argmax()))
    other = [*likely[:-1], (likely[-1] + 1) % VOCAB]
    score = score_last_words(model, [LastWord(tokens=tokens, start=3) for tokens in (likely, other)], batch_size=4)
    assert (score.right, score.accuracy) == (1, 0.5)


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert Score(tokens=1, nats=709.0).perplexity == math.exp(709)
    assert Score(tokens=1, nats=1e6).perplexity == math.inf


def scores(model: StagedModel) -> tuple[Score, WordScore]:
    return (
        score_text(model, TEXT, after=BEFORE, context_length=CONTEXT, stride=7, batch_size=2),
        score_last_words(model, WORDS, batch_size=2),
    )


def scores_on_ranks(rank: int, world_size: int, tensor: int, settings: dict[str, Any]) -> tuple[Score, WordScore]:
    pipeline = world_size // tensor
    config = tiny_config(num_layers=4, **settings)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, world_size=world_size
    )
    state = build_parallel_state(grid_of_world(world_size, tensor=tensor, pipeline=pipeline), rank=rank)
    (stage,) = pipeline_layout(config, parallel, VOCAB).stage(state.pipeline.rank)
    ranks = ModelRanks(tensor=state.tensor, pipeline=state.pipeline, channels=state.channels, world=state.world)
    return scores(StagedModel(build(config, group=state.tensor, stage=stage), ranks))


@pytest.mark.parametrize(
    "architecture, tensor, pipeline", [("gpt2", 2, 1), ("llama", 1, 2), ("llama", 2, 2), ("gpt2", 1, 4)]
)
def test_every_layout_of_ranks_has_the_same_scores(architecture: str, tensor: int, pipeline: int) -> None:
    settings = ARCHITECTURES[architecture]
    text, words = scores(StagedModel(build(tiny_config(num_layers=4, **settings)), ModelRanks.single()))
    for found in run_distributed(scores_on_ranks, tensor * pipeline, tensor, settings):
        assert found[0].nats == pytest.approx(text.nats, rel=PARITY_FP64)
        assert found[1].nats == pytest.approx(words.nats, rel=PARITY_FP64)
        assert found[1].right == words.right


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_refused(wrong: float) -> None:
    model = single()
    assert model.part.decoder.final_layernorm is not None
    model.part.decoder.final_layernorm.weight.data[0] = wrong
    with pytest.raises(UserError, match="not finite"):
        score_text(model, TEXT, after=BEFORE, context_length=CONTEXT, stride=CONTEXT, batch_size=4)
    with pytest.raises(UserError, match="not finite"):
        score_last_words(model, WORDS, batch_size=4)
