"""The tiny runs of the other tests, on a device of choice."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.main_grad import main_grad_of
from megatron.core.shard import shard_of
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.pretrain import build_run
from megatron.training.run import Run
from megatron.training.train_step import train_step
from pretrain_gpt import forward_step
from tests.helpers.tiny import context_of_rank, tiny_config

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def run_on(device: torch.device, *arguments: str) -> Run:
    """One rank that is the whole world, before its first iteration."""
    context = replace(context_of_rank(tiny_config(*arguments), 0, 1), device=device)
    run = build_run(context, gpt_datasets, gpt_model, forward_step)
    assert {p.device for chunk in run.chunks for p in chunk.module.parameters()} == {device}
    return run


def losses_on(device: torch.device, *arguments: str) -> list[float]:
    """The loss of each of three iterations, all of which update the weights."""
    run = run_on(device, *arguments)
    reports = [train_step(run) for _ in range(3)]
    assert all(report.applied for report in reports)
    return [report.losses["lm loss"] for report in reports]


def gradients_on(device: torch.device, *arguments: str) -> dict[str, Tensor]:
    """The gradients of the first iteration, unclipped, in the dtype that they are summed in."""
    run = run_on(device, *arguments, "--clip-grad", "0")
    train_step(run)
    parameters = (parameter for chunk in run.chunks for parameter in chunk.module.parameters())
    return {shard_of(parameter).name: main_grad_of(parameter).cpu() for parameter in parameters}
