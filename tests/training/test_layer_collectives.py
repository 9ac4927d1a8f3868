"""A transformer layer communicates what the papers say, and nothing else.

Shoeybi et al., "Megatron-LM", 2019: two all-reduces forward and two backward. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022: with sequence parallelism each becomes an all-gather and a
reduce-scatter of the same bytes; the backward gathers the inputs of the two column-parallel layers once more, in place
of keeping them.
"""

from __future__ import annotations

import pytest
import torch

from megatron.core.shard import name_parameters
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.init import initialize_weights
from megatron.model.transformer import TransformerLayer
from tests.helpers.distributed import run_distributed
from tests.helpers.tiny import tiny_config
from tests.tensor_parallel.collective_log import recorded_collectives
from tests.tensor_parallel.ranks import give_main_grads, placed, tensor_group

SEQUENCE, BATCH, HIDDEN = 24, 2, 48
WHOLE = SEQUENCE * BATCH * HIDDEN

Log = list[tuple[str, int]]
FLAVOURS = {
    "gpt": (),
    "llama": (
        *("--position-embedding-type", "none", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--group-query-attention", "--num-query-groups", "2", "--hidden-dropout", "0.1"),
    ),
}


def _collectives_of_layer(
    rank: int, world_size: int, arguments: tuple[str, ...], sequence_parallel: bool
) -> tuple[Log, Log]:
    """What one layer issues in its forward and in its backward."""
    config = tiny_config(*arguments).model
    layer = TransformerLayer(config, layer=1, placement=placed(tensor_group(rank, world_size), sequence_parallel))
    name_parameters(layer)
    initialize_weights(layer, seed=1)
    give_main_grads(list(layer.parameters()), torch.float64)
    shape = (SEQUENCE // world_size if sequence_parallel else SEQUENCE, BATCH, HIDDEN)
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    dropout = DropoutStream(seed=1, iteration=0, sample_ids=torch.arange(BATCH))
    with recorded_collectives() as forward:
        y = layer(x, rotary=None, mask=None, dropout=dropout)
    with recorded_collectives() as backward:
        y.sum().backward()
    return forward, backward


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tensor_parallel(world_size: int, flavour: str) -> None:
    expected = [("all_reduce", WHOLE)] * 2 if world_size > 1 else []
    for logs in run_distributed(_collectives_of_layer, world_size, FLAVOURS[flavour], False):
        assert logs == (expected, expected)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_sequence_parallel(flavour: str) -> None:
    for forward, backward in run_distributed(_collectives_of_layer, 2, FLAVOURS[flavour], True):
        assert forward == [("all_gather", WHOLE), ("reduce_scatter", WHOLE)] * 2
        assert sorted(backward) == [("all_gather", WHOLE)] * 4 + [("reduce_scatter", WHOLE)] * 2
