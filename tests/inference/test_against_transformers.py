"""Perplexity and greedy texts, in float64, against the models of Hugging Face `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.inference.generation import Sampling, generate
from megatron.inference.perplexity import score_text
from megatron.inference.stages import ModelRanks, StagedModel
from tests.helpers.numerics import PARITY_FP64
from tests.model.test_against_transformers import CASES, from_gpt2, from_llama, noisy
from tests.model.tiny import VOCAB, build, tiny_config

CONTEXT = 20
PROMPTS = [[7, 3, 1], [5], [2, 4, 8, 16, 32, 33, 11]]


def both(case: str) -> tuple[StagedModel, Any]:
    """A model of ours and one of theirs with the same weights."""
    make, changes = CASES[case]
    config = tiny_config(**changes)
    theirs = noisy(make()).eval()
    ours = build(config)
    ours.load_state_dict((from_gpt2 if case.startswith("gpt2") else from_llama)(theirs.state_dict(), config))
    return StagedModel(ours, ModelRanks.single()), theirs


@torch.no_grad()
@pytest.mark.parametrize("stride", [20, 8])
@pytest.mark.parametrize("case", CASES)
def test_perplexity_is_theirs(case: str, stride: int) -> None:
    """Theirs as their guide to the perplexity of models of fixed length has it."""
    ours, theirs = both(case)
    text = np.random.default_rng(1).integers(0, VOCAB, 75)
    nats, done = 0.0, 1
    for start in range(0, len(text) - 1, stride):
        ids = torch.from_numpy(text[start : start + CONTEXT + 1])[None]
        labels = ids.clone()
        labels[:, : done - start] = -100
        done = start + ids.shape[1]
        nats += float(F.cross_entropy(theirs(ids).logits[0, :-1], labels[0, 1:], reduction="sum"))
        if done == len(text):
            break
    score = score_text(ours, text[1:], after=int(text[0]), context_length=CONTEXT, stride=stride, batch_size=2)
    assert score.nats == pytest.approx(nats, rel=PARITY_FP64)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_greedy_texts_are_theirs(case: str) -> None:
    ours, theirs = both(case)
    steps = generate(
        ours,
        PROMPTS,
        num_tokens=12,
        context_length=CONTEXT,
        end_token=VOCAB,
        sampling=Sampling(temperature=0.0),
        generators=[torch.Generator() for _ in PROMPTS],
    )
    found = [list(text) for text in zip(*steps, strict=True)]
    for prompt, text in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        written = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert text == written[0, len(prompt) :].tolist()
