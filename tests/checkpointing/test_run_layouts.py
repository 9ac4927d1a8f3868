"""What a run saves in one layout, another loads in any other: every tensor of model and optimizer has the same bits.

The ranks are built one after another in one process, over communicators that do nothing: to build is to know what each
holds, and the files say the rest.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.checkpointing import load_checkpoint
from megatron.checkpointing.save import Save, writers_of
from megatron.checkpointing.shares import share_of
from megatron.config.megatron_config import MegatronConfig, Task
from megatron.config.problems import ConfigError
from megatron.core.comm_group import CommGroup
from megatron.core.distributed import distributed_data_parallel
from megatron.core.kernels.float_halves import Halves
from megatron.core.shard import NamedTensor
from megatron.optimizer.build import build_optimizer
from megatron.training.bert import bert_model
from megatron.training.gpt import gpt_model
from megatron.training.setup import ModelProvider, build_chunks, build_layout, build_vocabulary
from tests.checkpointing.layouts import ALONE, bits, fill
from tests.checkpointing.processes import call
from tests.helpers.bert import tiny_bert_config
from tests.helpers.tiny import context_of_rank, tiny_config
from tests.parity.layouts import DATA_PARALLELISM

_MODELS: dict[Task, ModelProvider] = {"gpt": gpt_model, "bert": bert_model}
UNTOUCHED = 77.0  # what no load may leave in a piece, nor change outside of one


@dataclass(frozen=True)
class Layout:
    task: Task
    arguments: tuple[str, ...]
    world_size: int

    @property
    def config(self) -> MegatronConfig:
        make = {"gpt": tiny_config, "bert": tiny_bert_config}[self.task]
        return make(*self.arguments, world_size=self.world_size)


def random_bert(rng: random.Random) -> list[str]:
    arguments = ["--num-layers", rng.choice("357"), "--vocab-size", rng.choice(("251", "97", "1009"))]
    arguments += rng.choice(([], ["--untie-embeddings-and-output-weights"]))
    arguments += rng.choice(([], ["--bert-no-binary-head"]))
    return [*arguments, *rng.choice(([], ["--layernorm-placement", "post"]))]


def random_gpt(rng: random.Random) -> list[str]:
    """Of sizes that do not divide each other: vocabulary and layers are odd, groups of queries fewer than ranks."""
    arguments = ["--num-layers", rng.choice("357"), "--vocab-size", rng.choice(("251", "97", "1009"))]
    arguments += rng.choice(([], ["--untie-embeddings-and-output-weights"]))
    arguments += rng.choice(([], ["--group-query-attention", "--num-query-groups", rng.choice("1236")]))
    arguments += rng.choice(
        (
            [],
            ["--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"],
            ["--qk-layernorm", "--add-qkv-bias", "--disable-bias-linear"],
        )
    )
    return [*arguments, *rng.choice(([], ["--optimizer", "sgd", "--sgd-momentum", "0.9"], ["--optimizer", "muon"]))]


def random_layout(task: Task, model: list[str], precisions: tuple[tuple[str, ...], ...], rng: random.Random) -> Layout:
    """One that the program takes, over at most 8 ranks."""
    while True:
        tensor, pipeline = rng.choice((1, 1, 2, 3, 4, 6, 8)), rng.choice((1, 1, 2, 3, 4, 5))
        data = rng.randint(1, max(1, 8 // (tensor * pipeline)))
        arguments = [
            *model,
            "--tensor-model-parallel-size",
            str(tensor),
            "--pipeline-model-parallel-size",
            str(pipeline),
        ]
        arguments += ["--micro-batch-size", "1", "--global-batch-size", str(data * pipeline)]
        arguments += rng.choice(([], ["--sequence-parallel"])) if tensor > 1 else []
        arguments += rng.choice(([], ["--num-virtual-stages-per-pipeline-rank", "2"])) if pipeline > 1 else []
        arguments += rng.choice(([], ["--use-tp-pp-dp-mapping"]))
        arguments += ["--make-vocab-size-divisible-by", rng.choice(("1", "7", "128"))]
        layout = Layout(
            task,
            (*arguments, *rng.choice(list(DATA_PARALLELISM.values())), *rng.choice(precisions)),
            tensor * pipeline * data,
        )
        try:
            assert layout.world_size <= 8
            layout.config  # noqa: B018
        except (AssertionError, ConfigError):
            continue
        return layout


@contextmanager
def tensors_of(layout: Layout, rank: int) -> Iterator[tuple[list[NamedTensor], CommGroup]]:
    """What a run has on a rank to save or to fill, and the ranks that have the same."""
    if layout.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    config = layout.config
    context = context_of_rank(config, rank, layout.world_size)
    vocabulary = build_vocabulary(config)
    # To find what several ranks hold, so that its gradients can be summed, they would have to talk; nothing asks here.
    with patch.object(distributed_data_parallel, "find_replicated_spans", return_value=()):
        chunks = build_chunks(context, build_layout(config, vocabulary), vocabulary, _MODELS[layout.task])
    group = context.state.world if config.data_parallel.use_distributed_optimizer else context.state.model
    optimizer = build_optimizer(chunks, config.optimizer, model_group=group, device=context.device, count_zeros=False)
    yield [*optimizer.named_main_parameters(), *optimizer.named_state()], context.state.data_context
    if layout.world_size > 1:
        dist.destroy_process_group()


def value_of(named: NamedTensor) -> Tensor:
    """The global tensor of a key."""
    generator = torch.Generator().manual_seed(zlib.crc32(named.key.encode()))
    return torch.randn(named.shard.global_shape, generator=generator, dtype=torch.float64).to(named.tensor.dtype)


def expected(named: NamedTensor) -> Tensor:
    """What a rank holds of it, written the plain way."""
    shape = tuple(named.tensor.shape) if named.elements is None else named.elements.shape
    local = torch.full(shape, UNTOUCHED, dtype=named.tensor.dtype)
    fill(local, named.shard, value_of(named))
    return local if named.elements is None else local.view(-1)[named.elements.first : named.elements.stop]


def check(root: Path, writer: Layout, reader: Layout) -> int:
    """Returns: the number of tensors that were compared."""
    saves, keys = [], set()
    for rank in range(writer.world_size):
        with tensors_of(writer, rank) as (tensors, replicas):
            for named in tensors:
                named.tensor.copy_(expected(named))
                keys.add(named.key)
            save = Save(root=root, iteration=1, rank=rank).prepare(share_of(tensors, replicas), {})
            save.write()
            saves.append(save)
    saves[0].publish(writers_of([save.plan for save in saves]))
    checkpoint = load_checkpoint(root, world=ALONE)
    assert set(checkpoint.tensors) == keys
    compared, read = 0, set()
    for rank in range(reader.world_size):
        with tensors_of(reader, rank) as (tensors, _):
            for named in tensors:
                named.tensor.copy_(torch.full(tuple(named.tensor.shape), UNTOUCHED, dtype=named.tensor.dtype))
            checkpoint.load_into(tensors, world=ALONE, ignore=("",))
            for named in tensors:
                held = named.tensor.joined() if isinstance(named.tensor, Halves) else named.tensor
                assert torch.equal(bits(held), bits(expected(named))), (rank, named.key)
                read.add(named.key)
                compared += 1
    assert read == keys
    return compared


def _check_pairs(root: Path, seeds: range, task: Task) -> int:
    compared = 0
    for seed in seeds:
        rng = random.Random(seed)
        model = random_gpt(rng) if task == "gpt" else random_bert(rng)
        precisions: tuple[tuple[str, ...], ...] = ((), ("--bf16",), ("--fp16",))
        if "muon" not in model and "sgd" not in model:
            precisions += (("--bf16", "--use-precision-aware-optimizer"),)
        if rng.random() < 0.2:
            precisions = (("--fp64",),)
        writer, reader = (random_layout(task, model, precisions, rng) for _ in range(2))
        try:
            compared += check(root / str(seed), writer, reader)
        except BaseException as error:
            error.add_note(f"seed {seed}: saved with {writer}, loaded with {reader}")
            raise
    return compared


def test_what_one_layout_saved_another_loads_with_the_same_bits(tmp_path: Path) -> None:
    assert call(_check_pairs, tmp_path, range(10), "gpt", timeout=200) > 500


def test_so_it_is_with_a_bert(tmp_path: Path) -> None:
    assert call(_check_pairs, tmp_path, range(3), "bert", timeout=200) > 150


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 220, 20))
def test_what_one_layout_saved_another_loads_with_the_same_bits_many_times(tmp_path: Path, first: int) -> None:
    assert call(_check_pairs, tmp_path, range(first, first + 20), "gpt", timeout=280) > 1000


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 160, 20))
def test_so_it_is_with_a_bert_many_times(tmp_path: Path, first: int) -> None:
    assert call(_check_pairs, tmp_path, range(first, first + 20), "bert", timeout=280) > 1000
