"""A model that comes from elsewhere is used like any other: its scores and texts are those that it has there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.conversion.hugging_face import read_hugging_face
from megatron.conversion.native import write_native
from tests.conversion.models import FAMILIES, VOCAB, in_float64, logits_of, made, save
from tests.data.corpora import write_corpus
from tests.helpers.numerics import PARITY_FP64
from tests.helpers.tools import run

CONTEXT, END = 40, 2


def both(family: str, folder: Path) -> nn.Module:
    """The model where it comes from, which `folder / "native"` has too."""
    theirs = made(family, torch.float64)
    write_native(read_hugging_face(save(theirs, folder / "theirs")), folder / "native")
    return in_float64(theirs).eval()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_perplexity_is_that_of_the_model_there(family: str, tmp_path: Path) -> None:
    theirs = both(family, tmp_path)
    text = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 2 * CONTEXT + 7)]
    write_corpus(tmp_path / "corpus", [[text]])
    nats = 0.0
    for start in range(0, len(text), CONTEXT):
        ids = torch.tensor([END, *text][start : start + CONTEXT + 1])[None]
        nats += float(F.cross_entropy(logits_of(theirs, ids[:, :-1])[0], ids[0, 1:], reduction="sum"))
    words = ["--load", tmp_path / "native", "--data-path", tmp_path / "corpus", "--json", tmp_path / "scores.json"]
    run("evaluate", *words)
    assert json.loads((tmp_path / "scores.json").read_text())["data"]["loss"] == pytest.approx(
        nats / len(text), rel=PARITY_FP64
    )


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_most_likely_text_is_that_of_the_model_there(family: str, tmp_path: Path) -> None:
    theirs = both(family, tmp_path)
    text = [5, 11, 7]
    while len(text) < 3 + 20:
        text.append(int(logits_of(theirs, torch.tensor([text]))[0, -1].argmax()))
    expected = text[: text.index(END)] if END in text else text
    how = ["--prompt", "5 11 7", "--num-tokens", "20", "--temperature", "0"]
    printed = run("generate_text", "--load", tmp_path / "native", *how)
    assert [int(token) for token in printed.split()] == expected
