"""The model computes the same on every tensor-parallel layout: losses, logits, gradients, with dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.collectives import all_reduce, all_reduce_
from megatron.core.comm_group import CommGroup
from megatron.core.parallel_state import build_parallel_state, grid_of_world
from megatron.core.shard import shard_of
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.flops import built_parameter_count, elements_of_chunk, parameter_count
from megatron.model.language_model import LanguageModel
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_all_parity, assert_bitwise
from tests.model.tiny import VOCAB, batch, build, tiny_config, whole

DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [0] * 20 + [1] * 4])
SIZES: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 12, "ffn_hidden_size": 72}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama with fewer groups than ranks": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "group_query_attention": True,
        "num_query_groups": 1,
        "untie_embeddings_and_output_weights": True,
    },
    "grouped alibi": {
        "position_embedding_type": "alibi",
        "group_query_attention": True,
        "num_query_groups": 12,
        "window_size": (9, 0),
        "qk_layernorm": True,
    },
    "alibi with a normalized head": {
        "position_embedding_type": "alibi",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "normalize_output_weights": True,
    },
}


def whole_gradients(model: LanguageModel, group: CommGroup) -> dict[str, Tensor]:
    """The gradient of each global tensor, put together from the pieces of all ranks.

    Each rank adds its pieces into a global tensor of zeros: replicated runs and partial gradients sum up, as
    they should. Where each rank has the full gradient of a whole tensor, the sum is divided again.
    """
    gradients = {}
    for parameter in model.parameters():
        shard = shard_of(parameter)
        assert parameter.grad is not None, shard.name
        whole = torch.zeros(shard.global_shape, dtype=parameter.dtype)
        for piece in shard.pieces:
            held = parameter.grad.narrow(shard.split_dim, piece.local, piece.length)
            whole.narrow(shard.split_dim, piece.start, piece.length).add_(held)
        all_reduce_(whole, group)
        if shard.dim is None and not shard.partial_gradient:
            whole /= group.size
        gradients[shard.name] = whole
    return gradients


def run_model(group: CommGroup, sequence_parallel: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Losses, logits and gradients of a model with dropout and several documents, on one rank of a layout."""
    config = tiny_config(**SIZES, **settings, hidden_dropout=0.2, attention_dropout=0.2)
    model = build(config, group=group, sequence_parallel=sequence_parallel)
    tokens, position_ids, labels = batch()
    stream = DropoutStream(seed=1, iteration=4, sample_ids=torch.tensor([17, 5]))
    common: dict[str, Any] = {"document_ids": DOCUMENTS, "dropout": stream}
    losses = model(tokens, position_ids, labels=labels, **common)
    (losses.sum() / losses.numel()).backward()
    with torch.no_grad():
        logits = model(tokens, position_ids, **common)
    count = all_reduce(torch.tensor(built_parameter_count([model])), group)
    assert int(count) == parameter_count(config, VOCAB)
    held = sum(parameter.numel() for parameter in model.parameters())
    padded_size = model.padded_vocab_size
    assert held == elements_of_chunk(
        config, whole(config), tensor_parallel_size=group.size, padded_vocab_size=padded_size
    )
    return {"losses": losses.detach(), "logits": logits, **whole_gradients(model, group)}


def tensor_group(rank: int, world_size: int) -> CommGroup:
    return build_parallel_state(grid_of_world(world_size, tensor=world_size, pipeline=1), rank=rank).tensor


def check_outputs(rank: int, world_size: int, sequence_parallel: bool, settings: dict[str, Any]) -> None:
    expected = run_model(CommGroup.single("tensor"), False, settings)
    assert expected["logits"].shape == (2, 24, VOCAB)
    assert_all_parity(run_model(tensor_group(rank, world_size), sequence_parallel, settings), expected)


@pytest.mark.parametrize("world_size, sequence_parallel", [(2, False), (3, True), (4, False), (4, True)])
@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_ranks_agree_with_one(name: str, world_size: int, sequence_parallel: bool) -> None:
    run_distributed(check_outputs, world_size, sequence_parallel, MODELS[name])


def whole_weights(group: CommGroup, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The initial value of each global tensor, put together from the owned pieces of all ranks."""
    weights = {}
    for parameter in build(tiny_config(**SIZES, **settings), group=group).parameters():
        shard = shard_of(parameter)
        whole = torch.zeros(shard.global_shape, dtype=parameter.dtype)
        for piece in shard.owned_pieces():
            held = parameter.detach().narrow(shard.split_dim, piece.local, piece.length)
            whole.narrow(shard.split_dim, piece.start, piece.length).copy_(held)
        weights[shard.name] = all_reduce(whole, group)
    return weights


def check_initial_weights(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    expected = whole_weights(CommGroup.single("tensor"), settings)
    found = whole_weights(tensor_group(rank, world_size), settings)
    assert sorted(found) == sorted(expected)
    for name in expected:
        assert_bitwise(found[name], expected[name], name)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_are_the_same_bits_in_every_layout(name: str, world_size: int) -> None:
    run_distributed(check_initial_weights, world_size, MODELS[name])
