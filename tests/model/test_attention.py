"""What a position sees: never the future, never another document, never beyond its window."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.comm_group import CommGroup
from megatron.core.shard import Piece
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.attention import (
    attention_by_blocks,
    attention_weights,
    fused_attention,
    local_heads,
    weighted_values,
)
from megatron.model.masks import alibi_slopes, attention_mask, document_blocks
from tests.helpers.numerics import assert_all_parity, assert_bitwise, assert_parity
from tests.helpers.operations import RecordedOperations
from tests.model.tiny import ARCHITECTURES, SEQUENCE, VOCAB, batch, build, jitter, tiny_config


def stream(samples: int, iteration: int = 1) -> DropoutStream:
    return DropoutStream(seed=5, iteration=iteration, sample_ids=torch.arange(samples))


def heads(batch_size: int, count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """[b, a, s, d]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, count, SEQUENCE, 8, generator=generator, dtype=torch.float64).to(dtype)


def mask(**changes: Any) -> Tensor | None:
    settings: dict[str, Any] = {"document_ids": None, "window": None, "slopes": None, "explicit": False}
    common: dict[str, Any] = {"sequence_length": SEQUENCE, "dtype": torch.float64, "device": torch.device("cpu")}
    return attention_mask(**(common | settings | changes))


def explicit_mask(**changes: Any) -> Tensor:
    chosen = mask(explicit=True, **changes)
    assert chosen is not None
    return chosen


DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [0] * 20 + [1] * 4])
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {"document_ids": DOCUMENTS},
    "window": {"window": (5, 0)},
    "alibi": {"slopes": alibi_slopes(4)},
    "all": {"document_ids": DOCUMENTS, "window": (5, 0), "slopes": alibi_slopes(4)},
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_later_token_changes_no_bit_of_an_earlier_logit(
    architecture: str, dtype: torch.dtype, dropout: float
) -> None:
    config = tiny_config(**ARCHITECTURES[architecture], attention_dropout=dropout)
    model = build(config, dtype=dtype)
    tokens, position_ids, _ = batch()
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % VOCAB
    logits, after = (model(text, position_ids, dropout=stream(2)) for text in (tokens, changed))
    assert_bitwise(after[:, :15], logits[:, :15])
    assert not torch.equal(after[:, 15:], logits[:, 15:])


@pytest.mark.parametrize("window", [None, (5, 0)])
@pytest.mark.parametrize("positions", ["learned_absolute", "rope", "alibi", "none"])
def test_documents_in_one_sequence_are_as_if_each_were_alone(positions: str, window: tuple[int, int] | None) -> None:
    model = build(tiny_config(position_embedding_type=positions, window_size=window))
    jitter(model)
    tokens, position_ids, labels = batch()
    position_ids = position_ids.clone()
    runs = [(0, 0, 7), (0, 7, 16), (0, 16, 24), (1, 0, 20), (1, 20, 24)]
    for row, start, stop in runs:
        position_ids[row, start:stop] = torch.arange(stop - start)
    together = model(tokens, position_ids, document_ids=DOCUMENTS, labels=labels)
    total = torch.zeros((), dtype=together.dtype)
    for row, start, stop in runs:
        part = (slice(row, row + 1), slice(start, stop))
        alone = model(tokens[part], position_ids[part], labels=labels[part])
        assert_parity(together[part], alone, f"sample {row}, tokens {start} to {stop}")
        total = total + alone.sum()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(together.sum(), parameters)
    for (name, _), packed, of_documents in zip(
        model.named_parameters(), gradients, torch.autograd.grad(total, parameters), strict=True
    ):
        assert_parity(packed, of_documents, name)


LENGTHS = ((7, 9, 8), (20, 4))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some ten tokens, also in short samples."""
    monkeypatch.setattr("megatron.model.masks._BLOCK", 10)
    monkeypatch.setattr("megatron.model.masks.LONGEST_WITH_ONE_MASK", 8)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_attention_by_blocks_of_documents_is_that_with_one_mask(
    architecture: str, recompute: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    changes = {"attention_dropout": 0.0, **ARCHITECTURES[architecture], **(again if recompute else {})}
    model = build(tiny_config(**changes))
    jitter(model)
    tokens, position_ids, labels = batch()
    blocks = document_blocks(DOCUMENTS, LENGTHS)
    assert blocks.lengths == ((16, 8), (20, 4))
    assert [[of_block is None for of_block in row] for row in blocks.masks] == [[False, True], [True, True]]

    def run(**lengths: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        losses = model(tokens, position_ids, document_ids=DOCUMENTS, labels=labels, dropout=stream(2), **lengths)
        return losses, torch.autograd.grad((losses * torch.linspace(1, 2, SEQUENCE)).sum(), list(model.parameters()))

    losses, gradients = run()
    monkeypatch.setattr("megatron.model.gpt_model.attention_mask", None)
    by_blocks, gradients_by_blocks = run(document_lengths=LENGTHS)
    assert_parity(by_blocks, losses, "losses")
    for (name, _), mine, other in zip(model.named_parameters(), gradients_by_blocks, gradients, strict=True):
        assert_parity(mine, other, name)


@pytest.mark.parametrize(
    "changes", [{"attention_dropout": 0.1}, {"position_embedding_type": "alibi"}, {"window_size": (5, 0)}]
)
@pytest.mark.usefixtures("small_blocks")
def test_what_needs_a_mask_of_all_pairs_keeps_it(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.gpt_model.document_blocks", None)
    model = build(tiny_config(**({"attention_dropout": 0.0} | changes)))
    tokens, position_ids, labels = batch()
    settings = {"document_ids": DOCUMENTS, "document_lengths": LENGTHS, "labels": labels, "dropout": stream(2)}
    assert model(tokens, position_ids, **settings).shape == labels.shape


def test_blocks_hold_whole_documents_and_no_mask_is_large() -> None:
    generator = torch.Generator().manual_seed(0)
    documents = [*torch.randint(1, 700, (40,), generator=generator).tolist(), 5000, 3, 2000, *[1] * 1500]
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    blocks = document_blocks(ids[None], [documents])
    (lengths,), (masks,) = blocks.lengths, blocks.masks
    assert sum(lengths) == sum(documents)
    borders = set(torch.cumsum(torch.tensor(documents), 0).tolist())
    assert set(torch.cumsum(torch.tensor(lengths), 0).tolist()) <= borders
    assert {2000, 5000} < set(lengths)
    assert all(sum(pair) >= 512 for pair in pairwise(lengths)), "no more of them than the tokens are worth"
    assert all(of_block is None or of_block.shape == (1, 1, n, n) for n, of_block in zip(lengths, masks, strict=True))
    assert max(of_block.shape[-1] for of_block in masks if of_block is not None) < 1024
    assert sum(of_block.numel() for of_block in masks if of_block is not None) < 1024 * sum(documents)


def test_a_long_sample_of_documents_makes_no_tensor_of_all_pairs() -> None:
    length = 2048
    inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
    documents = [700, 100, 200, 300, 748]
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(documents))[None]
    with RecordedOperations() as recorded:
        attention_by_blocks(*inputs, document_blocks(ids, [documents])).sum().backward()
    assert max(output.numel() for output in recorded.outputs) < length**2 / 4


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("kind", MASKS)
def test_fused_and_explicit_attention_agree(kind: str, groups: int) -> None:
    inputs = [heads(2, count, seed=seed).requires_grad_() for seed, count in enumerate((4, groups, groups))]
    query, key, value = inputs
    fused = fused_attention(query, key, value, mask(**MASKS[kind]))
    explicit = weighted_values(attention_weights(query, key, explicit_mask(**MASKS[kind])), value)
    assert_parity(fused, explicit, "output")
    weight = heads(2, 4, seed=9)
    gradients = [torch.autograd.grad((output * weight).sum(), inputs) for output in (fused, explicit)]
    for name, mine, other in zip("qkv", *gradients, strict=True):
        assert_parity(mine, other, name)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("kind", MASKS)
def test_the_last_query_alone_attends_as_among_all(kind: str, groups: int) -> None:
    query, key, value = (heads(2, count, seed=seed) for seed, count in enumerate((4, groups, groups)))
    expected = fused_attention(query, key, value, mask(**MASKS[kind]))[:, :, -1:]
    for its_mask in (mask(**MASKS[kind], num_queries=1), explicit_mask(**MASKS[kind], num_queries=1)):
        assert_parity(fused_attention(query[:, :, -1:], key, value, its_mask), expected)


def test_the_last_query_alone_copies_no_keys() -> None:
    query, key, value = heads(2, 4)[:, :, -1:], heads(2, 2, seed=1), heads(2, 2, seed=2)
    with RecordedOperations() as recorded:
        fused_attention(query, key, value, explicit_mask(num_queries=1))
    assert recorded.outputs
    assert max(output.numel() for output in recorded.outputs) <= key.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_masked_position_has_probability_zero_whatever_its_score(dtype: torch.dtype) -> None:
    query = torch.zeros(1, 1, SEQUENCE, 8, dtype=dtype)
    key = torch.zeros(1, 1, SEQUENCE, 8, dtype=dtype)
    query[..., 0] = 1.0
    key[..., -1, 0] = 20000.0 * 8**0.5  # a score of 20,000 for the last key, 0 for the others
    weights = attention_weights(query, key, explicit_mask())
    assert torch.all(weights.triu(1) == 0)
    value = torch.randn(1, 1, SEQUENCE, 8).to(dtype)
    poisoned = value.clone()
    poisoned[:, :, -1] = 1000.0
    plain, other = (fused_attention(query, key, x, None) for x in (value, poisoned))
    assert_bitwise(other[:, :, :-1], plain[:, :, :-1])


def test_a_second_derivative_of_rounded_weights_is_refused() -> None:
    query, key = (heads(1, 1, torch.bfloat16, seed).requires_grad_() for seed in (0, 1))
    weights = attention_weights(query, key, explicit_mask())
    (gradient,) = torch.autograd.grad(weights.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_grouped_queries_are_attention_with_repeated_keys_and_values() -> None:
    query, key, value = heads(2, 9), heads(2, 3, seed=1), heads(2, 3, seed=2)
    repeated = [tensor.repeat_interleave(3, dim=1) for tensor in (key, value)]
    assert_parity(fused_attention(query, key, value, None), fused_attention(query, *repeated, None))


def test_qkv_rows_of_nine_heads_in_three_groups() -> None:
    config = tiny_config(
        num_layers=1,
        hidden_size=576,
        num_attention_heads=9,
        group_query_attention=True,
        num_query_groups=3,
    )
    model = build(config, dtype=torch.float32)
    attention = model.decoder.layers["0"].self_attention
    assert attention.linear_qkv.weight.shape == ((9 + 6) * 64, 576)
    hidden = torch.randn(5, 2, 576)
    rows = attention.linear_qkv(hidden).view(5, 2, 15, 64)
    query, key, value = attention.project(hidden)
    assert_bitwise(query, rows[:, :, [0, 1, 2, 5, 6, 7, 10, 11, 12]])
    assert_bitwise(key, rows[:, :, [3, 8, 13]])
    assert_bitwise(value, rows[:, :, [4, 9, 14]])


def group_of(size: int, rank: int) -> CommGroup:
    """A group that is never communicated over; `process_group` only has to be there."""
    return CommGroup(name="tensor", ranks=tuple(range(size)), rank=rank, process_group=torch.distributed.group)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_rank_gets_whole_groups_in_one_run(size: int) -> None:
    config = tiny_config(hidden_size=96, num_attention_heads=12, group_query_attention=True, num_query_groups=6)
    part = (12 + 2 * 6) * 8 // size
    for rank in range(size):
        mine = local_heads(config, group_of(size, rank))
        assert mine.rows == (Piece(local=0, start=rank * part, length=part),)
        assert (mine.first, mine.queries, mine.groups) == (rank * 12 // size, 12 // size, 6 // size)


@pytest.mark.parametrize("size", [4, 8])
def test_with_fewer_groups_than_ranks_keys_and_values_are_held_by_several(size: int) -> None:
    config = tiny_config(hidden_size=64, num_attention_heads=8, group_query_attention=True, num_query_groups=2)
    queries, holders = 8 // size * 8, size // 2
    owned = set()
    for rank in range(size):
        mine = local_heads(config, group_of(size, rank))
        assert (mine.first, mine.queries, mine.groups) == (rank * 8 // size, 8 // size, 1)
        base, within = rank // holders * 6 * 8, rank % holders
        assert mine.rows == (
            Piece(local=0, start=base + within * queries, length=queries),
            Piece(local=queries, start=base + 4 * 8, length=16, holders=holders, owned=within == 0),
        )
        owned.update(
            row for piece in mine.rows if piece.owned for row in range(piece.start, piece.start + piece.length)
        )
    assert owned == set(range((8 + 4) * 8)), "each row of the global weight has one owner"


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(16)[:3] == pytest.approx([2**-0.5, 2**-1, 2**-1.5])
    assert alibi_slopes(12)[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_alibi_against_its_definition() -> None:
    query, key, value = (heads(2, 4, seed=seed) for seed in range(3))
    expected = torch.zeros_like(query)
    for head, slope in enumerate(alibi_slopes(4)):
        for i in range(SEQUENCE):
            scores = torch.einsum("bd,bjd->bj", query[:, head, i], key[:, head, : i + 1]) / math.sqrt(8)
            scores = scores + slope * (torch.arange(i + 1) - i)
            expected[:, head, i] = torch.einsum("bj,bjd->bd", scores.softmax(-1), value[:, head, : i + 1])
    assert_parity(fused_attention(query, key, value, mask(slopes=alibi_slopes(4))), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_is_added_to_the_scores_before_they_are_rounded(dtype: torch.dtype) -> None:
    """With scores of zero the weights are the softmax of the bias, rounded once."""
    slopes = alibi_slopes(12)
    query = key = torch.zeros(1, 12, SEQUENCE, 8, dtype=dtype)
    weights = attention_weights(query, key, explicit_mask(slopes=slopes, dtype=dtype))
    exact = explicit_mask(slopes=slopes, dtype=torch.float32).softmax(-1)
    assert_bitwise(weights, exact.to(dtype))


@pytest.mark.parametrize("explicit", [False, True])
def test_a_window_takes_one_byte_for_each_pair_of_positions_and_no_more(explicit: bool) -> None:
    with RecordedOperations() as recorded:
        mask(window=(5, 0), explicit=explicit)
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in recorded.outputs}
    assert sum(sizes.values()) == SEQUENCE * SEQUENCE


def test_layers_with_dropped_weights_share_one_mask() -> None:
    model = build(tiny_config(num_layers=3, attention_dropout=0.5))
    tokens, position_ids, labels = batch()
    with RecordedOperations() as recorded:
        model(tokens, position_ids, labels=labels, dropout=stream(2))
    assert [name for name in recorded.names if name.startswith("aten::tril")] == ["aten::tril_"]


def test_a_window_that_reaches_over_the_sequence_needs_no_mask() -> None:
    assert mask() is None
    assert mask(window=(-1, 0)) is None
    assert mask(window=(SEQUENCE - 1, 0)) is None
    window = mask(window=(SEQUENCE - 2, -1))
    assert window is not None
    assert not window[0, 0, -1, 0]
    assert window[0, 0, -1, 1:].all()


def test_dropout_is_a_matter_of_the_call_not_of_the_model() -> None:
    """An evaluation between two training steps changes neither of them."""
    config = tiny_config(hidden_dropout=0.5, attention_dropout=0.5)
    model = build(config)
    tokens, position_ids, labels = batch()

    def losses(dropout: DropoutStream | None) -> Tensor:
        return model(tokens, position_ids, labels=labels, dropout=dropout)

    first = losses(stream(2))
    plain = losses(None)
    assert_bitwise(losses(stream(2)), first)
    assert not torch.equal(first, plain)
    assert not torch.equal(losses(stream(2, iteration=2)), first)
    assert_bitwise(plain, build(tiny_config())(tokens, position_ids, labels=labels))


FAST = {"attention_dropout": 0.5, "fast_attention_dropout": True}


def test_fast_attention_dropout_follows_from_the_stream_and_leaves_the_generator_of_torch_alone() -> None:
    model = build(tiny_config(**FAST))
    tokens, position_ids, labels = batch()
    outputs = []
    for seed, iteration in ((1, 1), (2, 1), (2, 2)):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        outputs.append(model(tokens, position_ids, labels=labels, dropout=stream(2, iteration)))
        assert torch.equal(torch.get_rng_state(), before)
    assert_bitwise(outputs[1], outputs[0])
    assert not torch.equal(outputs[2], outputs[0])


@pytest.mark.parametrize("dropout", [FAST, {"attention_dropout": 0.5}], ids=["fast", "explicit"])
def test_a_layer_that_is_computed_again_in_the_backward_has_the_same_gradients(dropout: dict[str, Any]) -> None:
    """Nothing keeps the state of a generator for it."""
    model = build(tiny_config(**dropout, hidden_dropout=0.1))
    tokens, position_ids, labels = batch()
    results = []
    for recomputed in (False, True):
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            for layer in model.decoder.layers.values() if recomputed else ():
                again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
                patch.setattr(layer, "forward", again)
            model(tokens, position_ids, labels=labels, dropout=stream(2)).mean().backward()
        results.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in results[0].items():
        assert_bitwise(results[1][name], gradient, name)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "alibi"])
def test_compiled_layers_compute_the_same(architecture: str, fast: bool) -> None:
    config = tiny_config(
        **ARCHITECTURES[architecture], hidden_dropout=0.1, attention_dropout=0.1, fast_attention_dropout=fast
    )
    results = []
    for compiled in (False, True):
        model = build(config)
        if compiled:
            for layer in model.decoder.layers.values():
                layer.compile(backend="aot_eager")
        tokens, position_ids, labels = batch()
        model(tokens, position_ids, labels=labels, dropout=stream(2)).mean().backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_all_parity(results[1], results[0])
