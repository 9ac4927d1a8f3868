"""Tiny runs of the whole program, in this process or on ranks: what most tests of layouts and of the loop train."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.config.arguments import parse_arguments
from megatron.config.megatron_config import MegatronConfig
from megatron.core.collectives import all_gather_
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_state import build_parallel_state, grid_of_world
from megatron.core.shard import Shard, shard_of
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.initialize import MegatronContext
from megatron.training.pretrain import build_run
from megatron.training.run import Run
from megatron.training.train_step import train_step
from pretrain_gpt import forward_step
from tests.helpers.session import SESSION_FOLDER

# Documents of some 20 tokens, the end of each token 250. Its indices are built once for each run of the tests.
CORPUS = Path(__file__).parents[1] / "fixtures" / "gpt_dataset" / "data" / "alpha"
INDICES = Path(os.environ[SESSION_FOLDER]) / "indices"

# A GPT that every tensor-parallel size up to 8 divides, 3 too, with a vocabulary that none does, on data whose
# documents end in the middle of samples, so that token counts differ between micro-batches.
TINY_GPT = [
    *("--num-layers", "4", "--hidden-size", "48", "--num-attention-heads", "24", "--kv-channels", "4"),
    *("--ffn-hidden-size", "96", "--seq-length", "24", "--max-position-embeddings", "24"),
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "3"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "251"),
    *("--data-path", str(CORPUS), "--split", "90,10,0", "--data-cache-path", str(INDICES)),
    *("--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"),
    *("--lr", "1e-2", "--lr-decay-style", "cosine", "--clip-grad", "0.5", "--weight-decay", "0.1"),
    # Adam moves an element by up to lr / eps times its gradient. With the default of 1e-8, one whose gradient happens
    # to be 1e-10 (the rare row of an embedding) would show the rounding of a sum a million times over.
    *("--adam-eps", "1e-6"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0", "--num-workers", "0"),
]


def tiny_config(*arguments: str, world_size: int = 1) -> MegatronConfig:
    """`TINY_GPT` with further arguments; of a flag given twice the last one counts."""
    config, _ = parse_arguments([*TINY_GPT, *arguments], world_size=world_size)
    return config


def context_of_rank(config: MegatronConfig, rank: int, world_size: int) -> MegatronContext:
    """The context of one rank of a world whose `torch.distributed` is initialised already (or which is one process)."""
    parallel = config.parallel
    grid = grid_of_world(
        world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        order=parallel.rank_order,
    )
    return MegatronContext(
        config=config,
        state=build_parallel_state(grid, rank=rank),
        device=torch.device("cpu"),
        extra=argparse.Namespace(),
    )


def tiny_run(rank: int, world_size: int, *arguments: str) -> Run:
    config = tiny_config(*arguments, world_size=world_size)
    return build_run(context_of_rank(config, rank, world_size), gpt_datasets, gpt_model, forward_step)


@dataclass(frozen=True)
class LocalPart:
    """A rank's part of a global tensor."""

    shard: Shard
    tensor: Tensor


@dataclass(frozen=True)
class StepResult:
    """What one rank knows after a step."""

    losses: dict[str, float]
    grad_norm: float
    gradients: dict[str, LocalPart]
    parameters: dict[str, LocalPart]


def local_parts(run: Run, *, gradients: bool) -> dict[str, LocalPart]:
    """What this rank holds; a collective over data-parallel ranks that each have a slice."""
    for bucket in (bucket for chunk in run.chunks for bucket in chunk.buckets):
        bucket.finish_gather()
        if gradients and bucket.sharded:
            all_gather_(bucket.gradients, bucket.data_group)
    parts = {}
    for chunk in run.chunks:
        for parameter in chunk.module.parameters():
            shard = shard_of(parameter)
            tensor = main_grad_of(parameter) if gradients else parameter.data
            # groups hold communicators, which do not travel between processes; the pieces say all that is needed
            kept = Shard(
                name=shard.name,
                global_shape=shard.global_shape,
                dim=shard.dim,
                pieces=shard.pieces,
                group=None,  # type: ignore[arg-type]
                init=shard.init,
                owned=shard.owned,
            )
            parts[shard.name + ("" if shard.owned else " (copy)")] = LocalPart(kept, tensor.detach().clone())
    return parts


def train_steps(rank: int, world_size: int, steps: int, *arguments: str) -> list[StepResult]:
    """Train and report after each step; run it with `run_distributed`."""
    return steps_of(tiny_run(rank, world_size, *arguments), steps)


def steps_of(run: Run, steps: int) -> list[StepResult]:
    """What this rank knows after each of so many steps."""
    results = []
    for _ in range(steps):
        report = train_step(run)
        assert report.applied
        results.append(
            StepResult(
                losses=dict(report.losses),
                grad_norm=report.grad_norm,
                gradients=local_parts(run, gradients=True),
                parameters=local_parts(run, gradients=False),
            )
        )
    return results


def assemble(ranks: Iterable[dict[str, LocalPart]]) -> dict[str, Tensor]:
    """Global tensors from the parts of all ranks. All holders of an element must hold the same bits.

    Padding, which is in no piece, is left out, and must be zero.
    """
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for parts in ranks:
        for name, part in parts.items():
            shard, name = part.shard, name.removesuffix(" (copy)")
            target = whole.setdefault(name, torch.zeros(shard.global_shape, dtype=part.tensor.dtype))
            marks = filled.setdefault(name, torch.zeros(shard.global_shape, dtype=torch.bool))
            covered = torch.zeros(part.tensor.shape, dtype=torch.bool)
            for piece in shard.pieces:
                here = part.tensor.narrow(shard.split_dim, piece.local, piece.length)
                there = target.narrow(shard.split_dim, piece.start, piece.length)
                known = marks.narrow(shard.split_dim, piece.start, piece.length)
                assert torch.equal(here[known], there[known]), f"{name}: its holders differ"
                there.copy_(here)
                known.fill_(True)
                covered.narrow(shard.split_dim, piece.local, piece.length).fill_(True)
            assert not part.tensor[~covered].any(), f"{name}: the padding is not zero"
    for name, marks in filled.items():
        assert bool(marks.all()), f"{name}: no rank holds {int((~marks).sum())} elements"
    return whole


def losses_of(results: Sequence[Sequence[StepResult]], step: int) -> dict[str, float]:
    """The losses that the ranks with the output report, which must all be the same."""
    reported = [rank[step].losses for rank in results if rank[step].losses]
    assert reported, "no rank reported a loss"
    assert all(losses == reported[0] for losses in reported)
    return reported[0]
