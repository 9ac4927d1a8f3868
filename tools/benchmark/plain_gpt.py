"""A GPT in plain torch: what a user would write for this one model. The yardstick of the benchmarks, and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPS, CLIP_GRAD = 1e-4, 0.1, (0.9, 0.95), 1e-8, 1.0
ROTARY_BASE = 10_000


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its batch.

    Attributes:
        llama: rotary positions, RMSNorm, SwiGLU and no biases; else learned positions, LayerNorm, GELU, biases (GPT-2).
        steps: iterations of one turn.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    sequence: int
    micro_batch: int
    vocabulary: int
    llama: bool
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batch * self.sequence


SIZES = {
    # the model of `make quickstart`
    "tiny": Size(
        layers=4,
        hidden=192,
        heads=6,
        ffn=512,
        sequence=256,
        micro_batch=8,
        vocabulary=1024,
        llama=True,
        steps=2,
    ),
    "s384": Size(
        layers=6,
        hidden=384,
        heads=6,
        ffn=1536,
        sequence=256,
        micro_batch=8,
        vocabulary=50_304,
        llama=False,
        steps=1,
    ),
    "s768": Size(
        layers=12,
        hidden=768,
        heads=12,
        ffn=3072,
        sequence=512,
        micro_batch=2,
        vocabulary=50_304,
        llama=False,
        steps=1,
    ),
    # nothing to measure: shows that a benchmark runs
    "smoke": Size(
        layers=1,
        hidden=32,
        heads=2,
        ffn=64,
        sequence=16,
        micro_batch=2,
        vocabulary=128,
        llama=False,
        steps=1,
    ),
}


def flags(size: Size, *, bf16: bool) -> list[str]:
    """The command line of pretrain_gpt.py."""
    architecture = ["--position-embedding-type", "learned_absolute"]
    if size.llama:
        architecture = ["--position-embedding-type", "rope", "--rotary-base", str(ROTARY_BASE)]
        architecture += ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"]
    values = {
        "--num-layers": size.layers,
        "--hidden-size": size.hidden,
        "--num-attention-heads": size.heads,
        "--ffn-hidden-size": size.ffn,
        "--seq-length": size.sequence,
        "--max-position-embeddings": size.sequence,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--micro-batch-size": size.micro_batch,
        "--global-batch-size": size.micro_batch,
        "--train-iters": 1_000_000,
        "--log-interval": 1_000_000,
        "--eval-iters": 0,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": size.vocabulary,
        "--lr": LEARNING_RATE,
        "--lr-decay-style": "constant",
        "--weight-decay": WEIGHT_DECAY,
        "--adam-beta1": BETAS[0],
        "--adam-beta2": BETAS[1],
        "--adam-eps": EPS,
        "--clip-grad": CLIP_GRAD,
    }
    words = [str(word) for pair in values.items() for word in pair]
    return [*words, *architecture, "--mock-data", *(["--bf16"] if bf16 else [])]


class PlainBlock(nn.Module):
    """One layer. Its parameters come in the order of the framework's."""

    def __init__(self, size: Size, *, eager: bool) -> None:
        super().__init__()
        self.size, self.eager = size, eager
        self.norm1 = plain_norm(size)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=not size.llama)
        self.projection = nn.Linear(size.hidden, size.hidden, bias=not size.llama)
        self.norm2 = plain_norm(size)
        self.fc1 = nn.Linear(size.hidden, size.ffn * (2 if size.llama else 1), bias=not size.llama)
        self.fc2 = nn.Linear(size.ffn, size.hidden, bias=not size.llama)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        batch, sequence, hidden = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.size.heads, -1)  # [b, s, 3, a, d]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [b, a, s, d] each
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        attend = eager_attention if self.eager else torch_attention
        context = attend(query, key, value)  # [b, a, s, d]
        x = x + self.projection(context.transpose(1, 2).reshape(batch, sequence, hidden))
        inner = self.fc1(self.norm2(x))  # [b, s, f], with SwiGLU [b, s, 2f]
        if self.size.llama:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")
        output: Tensor = x + self.fc2(inner)
        return output


def torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def eager_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[b, a, s, d] three times: attention whose weights are in memory."""
    length, dim = query.shape[-2:]
    ahead = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-1, -2)) * dim**-0.5  # [b, a, s, s]
    weights: Tensor = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)
    return weights.to(value.dtype) @ value


class PlainGPT(nn.Module):
    """The same GPT in plain torch, with tied embeddings; with `eager`, attention weights are in memory."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size, *, eager: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = None if size.llama else nn.Embedding(size.sequence, size.hidden)
        self.blocks = nn.ModuleList(PlainBlock(size, eager=eager) for _ in range(size.layers))
        self.norm = plain_norm(size)
        dim = size.hidden // size.heads
        frequencies = 1.0 / (ROTARY_BASE ** (torch.arange(0, dim, 2) / dim))
        angles = torch.outer(torch.arange(size.sequence), frequencies).repeat(1, 2)  # [s, d]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Tokens and labels [b, s] -> the mean loss."""
        x = self.words(tokens)  # [b, s, h]
        rotary = None
        if self.positions is None:
            rotary = self.cos.to(x.dtype), self.sin.to(x.dtype)
        else:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, rotary)
        logits = F.linear(self.norm(x), self.words.weight)  # [b, s, v]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_norm(size: Size) -> nn.Module:
    return nn.RMSNorm(size.hidden, eps=1e-5) if size.llama else nn.LayerNorm(size.hidden)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


# Runs that many iterations and returns the loss of the last one.
Trainer = Callable[[int], float]


def plain_trainer(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], *, bf16: bool) -> Trainer:
    """The loop that one would write by hand, over ready batches; the model turns tokens and labels into a mean loss."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        fused=True,
    )
    iteration = 0

    def steps(number: int) -> float:
        nonlocal iteration
        for _ in range(number):
            tokens, labels = batches[iteration % len(batches)]
            iteration += 1
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                loss = model(tokens, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
            optimizer.step()
            value = float(loss.detach())  # a loop that reports its loss waits for it, as the framework does
        return value

    return steps
