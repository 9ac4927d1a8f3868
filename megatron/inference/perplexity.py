"""How well a model predicts a text: each of its tokens, or the last word of each of many texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.problems import UserError
from megatron.core.collectives import all_reduce_
from megatron.inference.stages import ModelInput, StagedModel

Tokens = npt.NDArray[np.integer]  # [n]


@dataclass(frozen=True, kw_only=True)
class Score:
    """The surprise of a model at tokens: `nats` is the sum of -log p over `tokens` of them."""

    tokens: int
    nats: float

    @property
    def loss(self) -> float:
        """Of a token, on average, as in a training."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Infinite where a float64 has no number for it."""
        try:
            return exp(self.loss)
        except OverflowError:
            return inf


@dataclass(frozen=True, kw_only=True)
class WordScore(Score):
    """The same for the last words of texts.

    Attributes:
        words: number of texts.
        right: of these, how often each token of the word was the most likely one.
    """

    words: int
    right: int

    @property
    def accuracy(self) -> float:
        return self.right / self.words


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens `start` to `stop` are predicted; those from `first` on are scored, the rest is only looked back on."""

    start: int
    stop: int
    first: int


def windows(num_tokens: int, *, context_length: int, stride: int) -> Iterator[Window]:
    """Windows of at most `context_length` tokens, each `stride` after the last, that score each token once."""
    done = 0
    for start in range(0, num_tokens, stride):
        stop = min(start + context_length, num_tokens)
        yield Window(start=start, stop=stop, first=done)
        done = stop
        if done == num_tokens:
            return


@torch.no_grad()
def score_text(
    model: StagedModel,
    tokens: Tokens,
    *,
    after: int,
    context_length: int,
    stride: int,
    batch_size: int,
    scored: Callable[[int], object] = lambda tokens: None,
) -> Score:
    """Score all tokens of a text; a collective over the ranks of the model.

    Args:
        tokens: may be mapped from a file that is larger than the memory: a few windows of it are held at a time.
        after: the token that the first one is predicted from.
        stride: where it is `context_length`, windows do not overlap, and a token is predicted from those before it in
            its window; where it is less, from `context_length - stride` of them or more.
        batch_size: windows that go through the model together.
        scored: told how many tokens, as it goes on.

    Raises:
        UserError: the losses are not finite.
    """
    assert len(tokens) > 0 and 1 <= stride <= context_length
    all_windows = list(windows(len(tokens), context_length=context_length, stride=stride))
    length = max(window.stop - window.start for window in all_windows)
    rows = min(batch_size, len(all_windows))
    # So many micro-batches follow each other through the stages, and most of the time none waits.
    together = rows * (1 if model.ranks.pipeline.size == 1 else 4 * model.ranks.pipeline.size)
    nats = torch.zeros((), dtype=torch.float64, device=model.device)
    for number in range(0, len(all_windows), together):
        part = all_windows[number : number + together]
        batches = [
            _batch(tokens, part[first : first + rows], after=after, rows=rows, length=length, device=model.device)
            for first in range(0, len(part), rows)
        ]
        losses = model.run([batch for batch, _ in batches])  # [b, s] each, where the output is
        for loss, (_, is_scored) in zip(losses, batches):
            nats += loss[is_scored].sum(dtype=torch.float64)
        scored(sum(window.stop - window.first for window in part))
    return Score(tokens=len(tokens), nats=_total(model, nats))


def _batch(
    tokens: Tokens, part: Sequence[Window], *, after: int, rows: int, length: int, device: torch.device
) -> tuple[ModelInput, Tensor]:
    """Windows side by side, filled up to [rows, length], and where in it tokens are scored."""
    inputs, labels = torch.zeros(2, rows, length, dtype=torch.int64)
    is_scored = torch.zeros(rows, length, dtype=torch.bool)
    for row, window in enumerate(part):
        held = torch.from_numpy(tokens[window.start : window.stop].astype(np.int64))
        labels[row, : len(held)], inputs[row, 1 : len(held)] = held, held[:-1]
        inputs[row, 0] = after if window.start == 0 else int(tokens[window.start - 1])
        is_scored[row, window.first - window.start : window.stop - window.start] = True
    batch = ModelInput(
        tokens=inputs.to(device), position_ids=_positions(rows, length, device), labels=labels.to(device)
    )
    return batch, is_scored.to(device)


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """A text whose tokens from `start` on are its last word."""

    tokens: Sequence[int]
    start: int


@torch.no_grad()
def score_last_words(
    model: StagedModel,
    texts: Sequence[LastWord],
    *,
    batch_size: int,
    scored: Callable[[int], object] = lambda texts: None,
) -> WordScore:
    """Score the last words (Paperno et al. 2016, arXiv 1606.06031); a collective over the ranks of the model.

    Raises:
        UserError: the logits are not finite.
    """
    assert all(0 < text.start < len(text.tokens) for text in texts)
    by_length = sorted(texts, key=lambda text: len(text.tokens))  # so that there is little to fill up
    nats = torch.zeros((), dtype=torch.float64, device=model.device)
    right = torch.zeros((), dtype=torch.float64, device=model.device)
    for first in range(0, len(by_length), batch_size):
        part = by_length[first : first + batch_size]
        length = len(part[-1].tokens) - 1
        filled = [[*text.tokens, *[0] * (length + 1 - len(text.tokens))] for text in part]
        inputs = torch.tensor(filled, device=model.device)  # [b, s + 1]
        batch = ModelInput(tokens=inputs[:, :-1], position_ids=_positions(len(part), length, model.device))
        for logits in model.run([batch]):  # [b, s, v], where the output is
            for row, text in enumerate(part):
                span = slice(text.start - 1, len(text.tokens) - 1)
                predicted, word = logits[row, span].double(), inputs[row, 1:][span]  # [n, v], [n]
                nats += F.cross_entropy(predicted, word, reduction="sum")
                right += (predicted.argmax(dim=-1) == word).all()
        scored(len(part))
    return WordScore(
        tokens=sum(len(text.tokens) - text.start for text in texts),
        nats=_total(model, nats),
        words=len(texts),
        right=round(_total(model, right)),
    )


def _positions(rows: int, length: int, device: torch.device) -> Tensor:
    """[b, s]"""
    return torch.arange(length, device=device).expand(rows, -1)


def _total(model: StagedModel, value: Tensor) -> float:
    """What one rank with the output has summed up, on all ranks."""
    if not (model.has_output and model.ranks.tensor.is_first):
        value = torch.zeros_like(value)
    total = value.clone()
    all_reduce_(total, model.ranks.world)
    if not bool(total.isfinite()):
        raise UserError("the model's losses are not finite, as when weights hold NaN; --ckpt-step takes an earlier one")
    return float(total)
