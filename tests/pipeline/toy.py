"""A toy model that can be cut anywhere, the same model in one piece, and instruments to watch it."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import PipelineLayout, StageLayout, pipeline_layout
from megatron.config.transformer import TransformerConfig

SEQUENCE, BATCH, HIDDEN = 2, 3, 4
HIDDEN_SHAPE = (SEQUENCE, BATCH, HIDDEN)


class Chunk(nn.Module):
    """Layers x + tanh(W x + b), named by their global number; values are a function of the name."""

    def __init__(self, layout: StageLayout) -> None:
        super().__init__()
        self.layout = layout
        numbers = list(layout.layers)
        names = [str(number) for number in numbers]
        names += ["embedding"] * layout.has_embedding + ["output"] * layout.has_output
        self.layers = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for name in names})
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 2)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.layout.has_embedding:
            hidden = self.layers["embedding"](hidden)
        for number in self.layout.layers:
            hidden = hidden + torch.tanh(self.layers[str(number)](hidden))
        return self.layers["output"](hidden) if self.layout.has_output else hidden


@dataclass
class Instruments:
    """Counts the graphs that are alive, and whether outputs still hold memory when their backward begins."""

    live: int = 0
    peak_live: int = 0
    unfreed_outputs: int = 0
    calls: list[tuple[int, bool]] = field(default_factory=list)

    def watch(self, hidden: Tensor) -> Tensor:
        """Counts the graph that `hidden` becomes part of as alive until it is destroyed."""
        return _Watched.apply(hidden, self)

    def watch_output(self, output: Tensor) -> None:
        storage = StorageWeakRef(output.untyped_storage())

        def at_backward(gradient: Tensor) -> None:
            self.unfreed_outputs += not storage.expired()

        if output.requires_grad:
            output.register_hook(at_backward)

    def born(self) -> None:
        self.live += 1
        self.peak_live = max(self.peak_live, self.live)

    def died(self) -> None:
        self.live -= 1


class _Token:
    pass


class _Watched(torch.autograd.Function):
    """The identity; its node in the graph carries a token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, instruments: Instruments) -> Tensor:
        ctx.token = _Token()
        instruments.born()
        weakref.finalize(ctx.token, instruments.died)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def loss_sums(output: Tensor) -> dict[str, Tensor]:
    return {"square": output.square().sum(), "absolute": output.abs().sum()}


def forward_step(batch: Tensor, chunk: Chunk, hidden: Tensor | None) -> Tensor | dict[str, Tensor]:
    output = chunk(batch if hidden is None else hidden)
    return loss_sums(output) if chunk.layout.has_output else output


def instrumented(instruments: Instruments) -> Any:
    """`forward_step`, watched."""

    def step(batch: Tensor, chunk: Chunk, hidden: Tensor | None) -> Tensor | dict[str, Tensor]:
        instruments.calls.append((chunk.layout.chunk, torch.is_grad_enabled()))
        output = chunk(instruments.watch(batch.clone().requires_grad_() if hidden is None else hidden))
        if chunk.layout.has_output:
            return loss_sums(output)
        instruments.watch_output(output)
        return output

    return step


def microbatches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(HIDDEN_SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]


def divisors(count: int) -> list[dict[str, Tensor]]:
    """Different ones for each micro-batch and term, to see that each meets its own."""
    return [{"square": torch.tensor(3 + i), "absolute": torch.tensor(7.0 + 2 * i)} for i in range(count)]


def layout_for(num_stages: int, num_chunks: int, num_layers: int) -> PipelineLayout:
    """Stages of unequal size wherever `num_layers` does not divide."""
    model = TransformerConfig(num_layers=num_layers, hidden_size=HIDDEN, num_attention_heads=1)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=num_stages,
        num_virtual_stages_per_pipeline_rank=num_chunks if num_chunks > 1 else None,
    )
    return pipeline_layout(model, parallel, vocab_size=16)


def whole(num_layers: int) -> Chunk:
    """The model in one piece."""
    return Chunk(StageLayout(stage=0, chunk=0, layers=range(num_layers), has_embedding=True, has_output=True))


@lru_cache
def reference(num_layers: int, num: int, scale: float) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses and gradients of the model in one piece, by plain autograd."""
    model = whole(num_layers)
    losses = []
    for batch, counts in zip(microbatches(num), divisors(num)):
        sums = loss_sums(model(batch))
        (scale * sum(sums[term] / counts[term] for term in sums)).backward()
        losses.append({term: value.detach() for term, value in sums.items()})
    return losses, gradients([model])


def gradients(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Gradients by global name."""
    return {
        name: parameter.grad
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }
