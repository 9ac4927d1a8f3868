"""First values: a function of (seed, global name, global index), the same whatever holds which part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.pipeline_layout import StageLayout
from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.shard import Init, Piece, Shard, set_shard, shard_of
from megatron.model import init
from megatron.model.flops import built_parameter_count, parameter_count
from megatron.model.init import initialize_parameter, initialize_weights
from tests.helpers.numerics import assert_bitwise
from tests.model.tiny import ARCHITECTURES, VOCAB, batch, build, tiny_config


def normal_shard(shape: tuple[int, ...], **changes: Any) -> Shard:
    """A whole normal tensor, on one rank, but for what `changes` says."""
    settings: dict[str, Any] = {
        "name": "weight",
        "global_shape": shape,
        "dim": 0,
        "pieces": (Piece(local=0, start=0, length=shape[0]),),
        "group": CommGroup.single(),
        "init": Init.normal(1.0),
    }
    return Shard(**(settings | changes))


def drawn_values(shard: Shard, local_shape: tuple[int, ...] | None = None, *, seed: int = 1) -> Tensor:
    """The local part that `shard` describes."""
    tensor = torch.full(local_shape or shard.global_shape, float("nan"), dtype=torch.float64)
    initialize_parameter(tensor, shard, seed)
    return tensor


@pytest.mark.parametrize("block", [1, 30, 64, 2**20])
def test_every_part_of_a_tensor_is_that_part_of_the_whole(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", block)
    whole = drawn_values(normal_shard((20, 10)))
    held = (Piece(local=0, start=3, length=4), Piece(local=6, start=11, length=9))
    rows = drawn_values(normal_shard((20, 10), pieces=held), (16, 10))
    assert_bitwise(rows[0:4], whole[3:7])
    assert_bitwise(rows[6:15], whole[11:20])
    for padding in (rows[4:6], rows[15:]):
        assert torch.all(padding == 0), "rows in no piece are zero"
    columns = drawn_values(normal_shard((20, 10), dim=1, pieces=(Piece(local=0, start=5, length=5),)), (20, 5))
    assert_bitwise(columns, whole[:, 5:])


def test_no_more_than_a_block_is_drawn_at_a_time_and_only_blocks_that_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 30)
    drawn = []
    draw = init._draw

    def record(*arguments: Any) -> Tensor:
        drawn.append(tuple(draw(*arguments).shape))
        return draw(*arguments)

    monkeypatch.setattr(init, "_draw", record)
    drawn_values(normal_shard((20, 10), pieces=(Piece(local=0, start=4, length=3),)), (3, 10))
    assert drawn == [(3, 10), (3, 10)]


def test_seed_name_and_block_all_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 40)
    first = drawn_values(normal_shard((8, 10)))
    assert not torch.equal(first, drawn_values(normal_shard((8, 10), name="other")))
    assert not torch.equal(first, drawn_values(normal_shard((8, 10)), seed=2))
    assert not torch.equal(first[:4], first[4:])


def test_the_generator_of_torch_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    values = drawn_values(normal_shard((2, 3)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert_bitwise(drawn_values(normal_shard((2, 3))), values)


def test_the_numbers_themselves_stay() -> None:
    """A change of them changes every run that was ever started."""
    numbers = [-1.177347, -1.095355, 0.3510987, 1.14719]
    assert drawn_values(normal_shard((8, 10)))[0, :4].tolist() == pytest.approx(numbers, rel=1e-5)


def test_the_dtype_of_the_model_rounds_the_draw_and_does_not_change_it() -> None:
    wide = build(tiny_config(), dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        other = build(tiny_config(), dtype=dtype)
        for (name, mine), (_, theirs) in zip(other.named_parameters(), wide.named_parameters(), strict=True):
            assert_bitwise(mine.detach(), theirs.detach().to(dtype), name)


@pytest.mark.parametrize("untied", [False, True])
def test_standard_deviations(untied: bool) -> None:
    """Only the projections into the residual stream are scaled by depth; an untied output layer is not."""
    layers, std = 8, 0.02
    config = tiny_config(
        num_layers=layers,
        hidden_size=128,
        ffn_hidden_size=512,
        init_method_std=std,
        untie_embeddings_and_output_weights=untied,
    )
    model = build(config, vocab_size=1000, dtype=torch.float32)
    expected = {"linear_proj.weight": std / 4, "linear_fc2.weight": std / 4, "layernorm.weight": 0.0}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        deviation = next((value for end, value in expected.items() if name.endswith(end)), std)
        if name.endswith("bias"):
            assert torch.all(weight == 0), name
        elif "layernorm" in name:
            assert torch.all(weight == 1), name
        else:
            # The deviation of n draws is itself off by std / sqrt(2 n); five of those.
            assert float(weight.std()) == pytest.approx(deviation, rel=5 / (2 * weight.numel()) ** 0.5), name
            assert float(weight.mean().abs()) < 5 * deviation / weight.numel() ** 0.5, name
    assert ("output_layer.weight" in dict(model.named_parameters())) == untied


def test_embeddings_may_have_a_deviation_of_their_own() -> None:
    config = tiny_config(hidden_size=128, embedding_init_method_std=1.0, untie_embeddings_and_output_weights=True)
    model = build(config, vocab_size=1000, dtype=torch.float32)
    assert model.embedding is not None
    assert float(model.embedding.word_embeddings.weight.detach().std()) == pytest.approx(1.0, rel=0.02)
    assert float(dict(model.named_parameters())["output_layer.weight"].detach().std()) == pytest.approx(0.2, rel=0.02)


def stages(config: TransformerConfig, cuts: tuple[int, ...]) -> Iterator[StageLayout]:
    """One chunk a stage, cut after so many layers each."""
    bounds = (0, *cuts, config.num_layers)
    for stage, (first, last) in enumerate(pairwise(bounds)):
        yield StageLayout(
            stage=stage,
            chunk=0,
            layers=range(first, last),
            has_embedding=stage == 0,
            has_output=stage == len(cuts),
        )


@pytest.mark.parametrize("cuts", [(2,), (1, 1, 3), (0, 4)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_together_are_the_model(architecture: str, cuts: tuple[int, ...]) -> None:
    config = tiny_config(num_layers=4, **ARCHITECTURES[architecture])
    expected = {name: weight.detach() for name, weight in build(config).named_parameters()}
    chunks = [build(config, stage=stage) for stage in stages(config, cuts)]
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        for weight in chunk.parameters():
            shard = shard_of(weight)
            assert_bitwise(weight.detach(), expected[shard.name], shard.name)
            if shard.owned:
                assert shard.name not in found
                found[shard.name] = weight
    assert sorted(found) == sorted(expected)
    assert built_parameter_count(chunks) == parameter_count(config, VOCAB)


def test_a_tied_head_in_another_chunk_is_a_copy_that_counts_for_nothing() -> None:
    config = tiny_config()
    first, last = (build(config, stage=stage) for stage in stages(config, (1,)))
    assert first.embedding is not None
    assert last.output_layer is not None
    embedding, head = first.embedding.word_embeddings.weight, last.output_layer.weight
    assert shard_of(embedding).name == shard_of(head).name == "embedding.word_embeddings.weight"
    assert shard_of(embedding).tied
    assert shard_of(head).tied
    assert shard_of(embedding).owned
    assert not shard_of(head).owned
    assert_bitwise(head.detach(), embedding.detach())
    whole = build(config)
    assert whole.output_layer is None
    assert whole.embedding is not None
    assert not shard_of(whole.embedding.word_embeddings.weight).tied


def test_chunks_in_turn_compute_what_the_whole_model_does() -> None:
    config = tiny_config(num_layers=3)
    tokens, position_ids, labels = batch()
    hidden = None
    for stage in stages(config, (1, 1)):
        hidden = build(config, stage=stage)(tokens, position_ids, labels=labels, hidden_states=hidden)
    expected = build(config)(tokens, position_ids, labels=labels)
    assert hidden is not None
    assert_bitwise(hidden, expected)


def test_an_unnamed_parameter_is_a_bug() -> None:
    module = nn.Linear(2, 2, bias=False)
    set_shard(module.weight, normal_shard((2, 2), name=""))
    with pytest.raises(AssertionError, match="no global name"):
        initialize_weights(module, 1)
