"""Text generation: one token after the other from the distribution that the model predicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.problems import UserError
from megatron.model.gpt_model import GPTModel


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
    """Draw one token id from logits [v].

    Raises:
        UserError: a logit is not finite.
    """
    if not torch.isfinite(logits).all():
        raise UserError(
            "the model's scores are not finite, as when weights hold NaN; --ckpt-step takes an earlier checkpoint"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    below_best = logits.double() - logits.max()  # divided by the smallest temperature, the best stays finite
    probabilities, order = torch.softmax(below_best / sampling.temperature, dim=-1).sort(descending=True)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if sampling.top_k > 0:
        kept[sampling.top_k :] = False
    before = probabilities.cumsum(dim=-1) - probabilities
    kept &= before < sampling.top_p
    drawn = torch.multinomial(probabilities * kept, 1, generator=generator)
    return int(order[drawn])


@torch.no_grad()
def generate(
    model: GPTModel,
    prompt: list[int],
    *,
    num_tokens: int,
    context_length: int,
    end_token: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, until `end_token` or `num_tokens` of them.

    Args:
        model: a whole model in one process.
        prompt: at least one token; only the last `context_length` tokens are looked at.
        context_length: positions that the model was trained on.
    """
    assert prompt, "a prompt needs a token; the end-of-document token starts a document"
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context_length:]], device=device)  # [1, s]
        positions = torch.arange(window.shape[1], device=device).unsqueeze(0)  # [1, s]
        logits = model(window, positions)  # [1, s, v]
        token = choose_token(logits[0, -1].cpu(), sampling, generator)
        if token == end_token:
            return
        tokens.append(token)
        yield token
