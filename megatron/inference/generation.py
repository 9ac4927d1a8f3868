"""Text generation: one token after the other from the distribution that the model predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.problems import UserError
from megatron.core.collectives import all_reduce_
from megatron.inference.kv_cache import KeyValueCache
from megatron.inference.stages import ModelInput, StagedModel

_NOT_FINITE = -1  # in place of a token, so that all ranks hear of it


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: the logits are divided by it; 0 always takes the most likely token.
        top_k: only so many of the most likely tokens are drawn from; 0 for all.
        top_p: only the most likely tokens that together reach this probability are drawn from (Holtzman et al. 2020,
            arXiv 1904.09751); 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # which NaN is not
            raise UserError(f"--temperature ({self.temperature}) must be 0 or more; 0 is greedy")
        if self.top_k < 0:
            raise UserError(f"--top-k ({self.top_k}) must not be negative; 0 draws from all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p ({self.top_p}) must be above 0 and at most 1; 1 draws from all tokens")


def choose_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token id from logits [v], all of them finite."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    below_best = logits.double() - logits.max()  # divided by the smallest temperature, the best stays finite
    probabilities = torch.softmax(below_best / sampling.temperature, dim=-1)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return int(torch.multinomial(probabilities, 1, generator=generator))
    likely, order = probabilities.topk(min(sampling.top_k or len(logits), len(logits)))  # in falling order
    before = likely.cumsum(dim=-1) - likely
    drawn = torch.multinomial(likely * (before < sampling.top_p), 1, generator=generator)
    return int(order[drawn])


@torch.no_grad()
def generate(
    model: StagedModel,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    context_length: int,
    end_token: int,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, None where a text has ended, until all have; a collective of the model.

    Each token is predicted from the `context_length` tokens before it. What a prompt is followed by does not depend on
    the others.

    Args:
        prompts: of at least one token and at most `context_length` each.
        num_tokens: of each text, at most; `end_token` ends one earlier.
        generators: one for each prompt, to draw its tokens with.

    Raises:
        UserError: the logits are not finite.
    """
    assert prompts and all(0 < len(prompt) <= context_length for prompt in prompts)
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    slots = min(context_length, max(map(len, texts)) + num_tokens)
    cache = KeyValueCache(model.part, batch_size=len(texts), slots=slots)
    for _ in range(num_tokens):
        if cache.length == cache.slots:  # all that is remembered has moved by a position, and is of no use
            cache.clear()
        batch = _next_input(texts, cache, model.device)
        logits = [output.squeeze(1).cpu() for output in model.run([batch], cache=cache)]  # [b, v], where the output is
        tokens = _agreed(model, [_choose_all(each, sampling, generators) for each in logits], len(texts))
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        ended = [was or token == end_token for was, token in zip(ended, tokens, strict=True)]
        if all(ended):
            return
        yield [None if is_over else token for is_over, token in zip(ended, tokens, strict=True)]


def _choose_all(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """A token for each row of logits [b, v]."""
    return [
        choose_token(row, sampling, generator) if bool(row.isfinite().all()) else _NOT_FINITE
        for row, generator in zip(logits, generators, strict=True)
    ]


def _agreed(model: StagedModel, chosen: list[list[int]], batch_size: int) -> list[int]:
    """The tokens that one rank with the output has chosen, on all ranks."""
    tokens = torch.zeros(batch_size, dtype=torch.int64, device=model.device)
    if chosen and model.ranks.tensor.is_first:
        tokens.copy_(torch.tensor(chosen[0]))
    all_reduce_(tokens, model.ranks.world)
    if bool((tokens == _NOT_FINITE).any()):
        raise UserError(
            "the model's scores are not finite, as when weights hold NaN; --ckpt-step takes an earlier checkpoint"
        )
    return [int(token) for token in tokens]


def _next_input(texts: Sequence[Sequence[int]], cache: KeyValueCache, device: torch.device) -> ModelInput:
    """The tokens that the cache lacks: of an empty one as many of the last of each text as it has room for.

    Shorter texts have padding before them, so that all end together; attention does not see it.
    """
    first, length = cache.length, min(max(map(len, texts)), cache.slots)
    padding = [max(0, length - len(text)) for text in texts]
    tokens = [
        [0] * (before - first) + list(text[max(0, len(text) - (length - first)) :])
        for text, before in zip(texts, padding, strict=True)
    ]
    slots = torch.arange(length, device=device)
    starts = torch.tensor(padding, device=device)[:, None]  # [b, 1]
    return ModelInput(
        tokens=torch.tensor(tokens, device=device),  # [b, q]
        position_ids=(slots[first:] - starts).clamp(min=0),  # [b, q]
        document_ids=(slots >= starts).long() if any(padding) else None,  # [b, s]
    )
