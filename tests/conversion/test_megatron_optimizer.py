"""The distributed optimizer of a model that was cut, whose flat buffers each rank had for its own part.

The buffers are laid out here from what the files of Megatron-LM at 2 x 2 ranks say: the order of their parameters, and
the shape that each has on a rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor

from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.portable import ConversionError
from tests.conversion.megatron_files import CHECKPOINTS, FILE, changed, contents, read_all
from tests.helpers.numerics import assert_bitwise

STATES = ("param", "exp_avg", "exp_avg_sq")
RANKS = [(stage, rank) for stage in range(2) for rank in range(2)]
EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")


def numbered(state: str, weight: Tensor) -> Tensor:
    """Values of a state that say where they belong: a function of the weight, so that whoever holds a copy of the
    weight holds a copy of the state."""
    return weight * {"param": 1.0, "exp_avg": 0.5, "exp_avg_sq": 0.25}[state] + STATES.index(state)


def local_weights(name: str, stage: int, rank: int) -> dict[str, Tensor]:
    """The weights of a rank in the order in which Megatron-LM has them."""
    (path,) = (CHECKPOINTS / name).glob(f"iter_*/mp_rank_{rank:02d}_{stage:03d}/{FILE}")
    return {key: value for key, value in contents(path)["model"].items() if value is not None}


def flat(weights: dict[str, Tensor], state: str, *, shared: bool) -> list[Tensor]:
    """The buckets of a rank, each as long as is stored of it."""
    buckets: list[list[Tensor]] = [[]]

    def length() -> int:
        return sum(map(len, buckets[-1]))

    def align() -> None:
        buckets[-1].append(torch.zeros(-length() % 64))

    for name, weight in reversed(list(weights.items())):
        align()
        apart = shared and name in EMBEDDINGS
        if apart and length():
            buckets.append([])
        buckets[-1].append(numbered(state, weight).flatten())
        if apart:
            buckets.append([])
    return [torch.cat(bucket) for bucket in buckets if sum(map(len, bucket))]


def assert_states(found: dict[str, Tensor]) -> None:
    names = [key.removeprefix("optimizer.exp_avg.") for key in found if key.startswith("optimizer.exp_avg.")]
    assert len(names) * 3 == len(found)
    for name in names:
        weight = found[f"model.{name}"]
        for state in STATES[1:]:
            assert_bitwise(found[f"optimizer.{state}.{name}"], numbered(state, weight), f"{state} {name}")


OPTIMIZER = {"optimizer": {"param_groups": [{"step": 9, "wd_mult": 1.0}]}}
SCALER = {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2}
SCHEDULE = {"num_steps": 36, "max_lr": 1e-3}
ARGUMENTS = {"use_distributed_optimizer": True, "data_parallel_size": 2, "overlap_grad_reduce": False}


@pytest.mark.parametrize("name", ["gpt2_learned/tp2pp2", "llama_gqa/tp2pp2"])
def test_buffers_of_several_ranks_in_the_torch_layout(name: str, tmp_path: Path) -> None:
    def change(folder: str, state: Any) -> None:
        vars(state["args"]).update(ARGUMENTS)
        state |= {"optimizer": OPTIMIZER, "opt_param_scheduler": SCHEDULE}
        weights = local_weights(name, int(folder[-3:]), int(folder[8:10]))
        buckets = {kind: flat(weights, kind, shared=name.startswith("gpt2")) for kind in STATES}
        buffer = {kind: torch.cat(parts) for kind, parts in buckets.items()}
        entry = {(torch.float32, torch.float32): {**buffer, "numel_unpadded": len(buffer["param"])}}
        torch.save({"buckets_coalesced": True, 0: entry}, tmp_path / folder / "distrib_optim.pt")

    for stage, rank in RANKS:
        (tmp_path / f"mp_rank_{rank:02d}_{stage:03d}").mkdir()
    model = read_megatron(changed(name, tmp_path, change))
    assert_states(read_all(model))
    assert model.training is not None and model.training.optimizer["num_updates"] == 9


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["gpt2_learned/tp2pp2", "llama_gqa/tp2pp2"])
def test_buffers_of_several_ranks_in_the_torch_dist_layout(name: str, tmp_path: Path) -> None:
    """Stored by the rank within the model, tensor-parallel ranks first, and by bucket, each with padding at its end."""
    prefix = "optimizer.distributed.dp_group_idx_"
    state = dict(weights_as_global_tensors(name))
    for stage, rank in RANKS:
        for kind in STATES:
            buckets = flat(local_weights(name, stage, rank), kind, shared=name.startswith("gpt2"))
            for number, bucket in enumerate(buckets):
                middle = f"{stage * 2 + rank}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_{number}"
                state[f"{prefix}{middle}.{kind}"] = torch.cat([bucket, torch.zeros(-len(bucket) % 128)])
    objects = {
        f"{prefix}0.optimizer/shard_0_1": [OPTIMIZER["optimizer"]],
        f"{prefix}0.grad_scaler/shard_0_1": [SCALER],
    }
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path)
    planner = torch.distributed.checkpoint.DefaultSavePlanner(flatten_state_dict=False)
    torch.distributed.checkpoint.save(state | objects, storage_writer=writer, planner=planner, no_dist=True)
    (first,) = (CHECKPOINTS / name).glob(f"iter_*/mp_rank_00_000/{FILE}")
    arguments = vars(contents(first)["args"]) | ARGUMENTS
    common = {
        "args": argparse.Namespace(**arguments),
        "iteration": 9,
        "optimizer": {"param_state_sharding_type": "dp_reshardable"},
        "opt_param_scheduler": SCHEDULE,
    }
    torch.save(common, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    model = read_megatron(tmp_path)
    assert_states(read_all(model))
    assert model.training is not None
    assert model.training.optimizer["num_updates"] == 9 and model.training.optimizer["grad_scaler"] == SCALER


def weights_as_global_tensors(name: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in read_all(read_megatron(CHECKPOINTS / name, weights_only=True)).items():
        yield key.removeprefix("model."), value


@pytest.mark.parametrize("buffer", [torch.zeros(8575), torch.zeros(8577), torch.zeros(2 * 8576)[::2], 7])
def test_a_buffer_of_another_length_or_with_gaps_is_refused(buffer: Any, tmp_path: Path) -> None:
    name = "distributed_optimizer_dp2/torch_distributed_optimizer"
    copy = changed(name, tmp_path, lambda _, state: None)
    path = copy / "mp_rank_00" / "distrib_optim.pt"
    state = contents(path)
    (entry,) = state[0].values()
    entry["exp_avg_sq"] = buffer
    torch.save(state, path)
    with pytest.raises(ConversionError, match="exp_avg_sq should be 8576 elements in a row, and is"):
        read_megatron(copy)
