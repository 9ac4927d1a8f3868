"""Which device and communication backend a process uses, and how data get there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from megatron.config.problems import Problem, UserError

Backend = Literal["nccl", "gloo"]


def choose_backend(requested: Backend | None) -> Backend:
    """NCCL where there is a GPU and gloo elsewhere, unless one is asked for."""
    return requested or ("nccl" if torch.cuda.is_available() else "gloo")


def backend_problems(requested: Backend | None) -> Iterator[Problem]:
    """What keeps the backend that is asked for from running here."""
    if requested == "nccl" and not torch.cuda.is_available():
        yield Problem(
            flags=("--distributed-backend",),
            value=requested,
            rule="needs a GPU, and none is visible here",
            works="--distributed-backend gloo; or leave it out: gloo is taken on CPUs and nccl on GPUs",
        )


def choose_device(backend: Backend, local_rank: int, *, gpu_per_task: bool = False) -> torch.device:
    """The GPU with the number of the local rank, or the CPU under gloo.

    Args:
        gpu_per_task: the launcher gives each process a GPU of its own (`srun --gpus-per-task 1`), the only one that it
            sees.

    Raises:
        UserError: the node has fewer GPUs than ranks.
    """
    if backend == "gloo":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if gpu_per_task and count == 1:
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU: {count} GPU(s) are visible on this node; "
            f"start at most {count} processes per node (torchrun --nproc-per-node {count}), or let Slurm give each "
            f"task a GPU of its own (srun --gpus-per-task 1)"
        )
    return torch.device("cuda", local_rank)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for, ready for whatever is queued on the device after it.

    Only page-locked memory can be copied behind the host's back. A tensor that is there already is returned itself.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
