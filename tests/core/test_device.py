"""Which device a process takes, by what it sees and how it was started."""

from __future__ import annotations

import pytest
import torch

from megatron.core.device import choose_device, to_device


@pytest.mark.parametrize(
    "visible, local_rank, gpu_per_task, index",
    [
        (8, 3, False, 3),
        (1, 0, False, 0),
        (1, 3, True, 0),  # srun --gpus-per-task 1: each process sees its own GPU as number 0
        (8, 3, True, 3),  # bound by Slurm, but all are visible
    ],
)
def test_a_process_takes_the_gpu_of_its_local_rank_or_its_only_one(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, gpu_per_task: bool, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert choose_device("nccl", local_rank, gpu_per_task=gpu_per_task) == torch.device("cuda", index)


def test_more_processes_than_gpus_are_refused_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"local rank 2 has no GPU: 2 .*--nproc-per-node 2.*--gpus-per-task 1"):
        choose_device("nccl", 2)


def test_gloo_computes_on_the_cpu() -> None:
    assert choose_device("gloo", 5) == torch.device("cpu")


def test_a_tensor_that_is_on_its_device_is_not_copied() -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
    assert to_device(tensor, torch.device("meta")).device.type == "meta"
