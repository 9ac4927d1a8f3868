"""What BERT sees and what it gives: never padding, both directions, the same on every tensor-parallel layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.comm_group import CommGroup
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.attention import attention_weights
from megatron.model.bert_model import BertModel
from megatron.model.masks import padding_mask
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_all_parity, assert_bitwise, assert_parity
from tests.helpers.operations import RecordedOperations
from tests.model.bert import BertInput, bert_batch, build_bert, losses_of, mean_loss, output_of
from tests.model.test_attention import heads, stream
from tests.model.test_layouts import SIZES, tensor_group, whole_gradients
from tests.model.tiny import VOCAB, jitter, tiny_config

NORMS: dict[str, dict[str, Any]] = {
    "pre": {},
    "residual": {"apply_residual_connection_post_layernorm": True},
    "post": {"layernorm_placement": "post", "activation": "gelu"},
}
# Twice what plain torch errs by: `BertForPreTraining` of Hugging Face, of the same sizes, over five batches. Beside the
# largest loss.
LOSSES_IN_16_BITS = {torch.bfloat16: 2 * 1.8e-3, torch.float16: 2 * 3.3e-4}
each_norm = pytest.mark.parametrize("norms", NORMS)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_norm
def test_what_stands_in_padding_changes_no_bit_of_a_real_position(
    norms: str, dtype: torch.dtype, dropout: float
) -> None:
    model = build_bert(tiny_config(**NORMS[norms], attention_dropout=dropout), dtype=dtype)
    batch = bert_batch((24, 17, 1))
    other = torch.where(batch.is_real, batch.tokens, (batch.tokens + 1) % VOCAB)
    drops = stream(3) if dropout else None
    one, two = (output_of(model, batch._replace(tokens=tokens), dropout=drops) for tokens in (batch.tokens, other))
    assert_bitwise(two.tokens[batch.is_real], one.tokens[batch.is_real])
    assert one.pairs is not None and two.pairs is not None
    assert_bitwise(two.pairs, one.pairs)
    assert bool(one.tokens.isfinite().all()), "padding itself gives numbers"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_row_of_nothing_but_padding_gives_numbers_and_gradients(dropout: float) -> None:
    model = build_bert(tiny_config(attention_dropout=dropout))
    batch = bert_batch((24, 0))
    losses = losses_of(model, batch, dropout=stream(2) if dropout else None)
    assert bool(losses.tokens.isfinite().all())
    mean_loss(losses, batch).backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())  # type: ignore[union-attr]


def test_a_padded_key_has_a_weight_of_exactly_zero() -> None:
    is_real = bert_batch((24, 17)).is_real
    weights = attention_weights(heads(2, 4), heads(2, 4, seed=1), padding_mask(is_real))
    assert not weights[1, :, :, 17:].any()
    assert bool((weights[1, :, :, :17] > 0).all()), "and every other one is seen by every query, before and after it"


def test_no_tensor_has_an_element_for_each_pair_of_positions() -> None:
    length = 31  # a prime that is no other size
    model = build_bert(tiny_config())
    with RecordedOperations() as recorded:
        losses_of(model, bert_batch((31, 20), sequence=length))
    assert recorded.outputs
    assert not [output.shape for output in recorded.outputs if output.shape[-2:] == (length, length)]


def test_every_token_sees_those_after_it() -> None:
    model = build_bert(tiny_config())
    batch = bert_batch((24, 24))
    last = batch.tokens.clone()
    last[:, -1] = (last[:, -1] + 1) % VOCAB
    one, two = (output_of(model, batch._replace(tokens=tokens)).tokens for tokens in (batch.tokens, last))
    assert not bool((one == two).all(dim=-1).any())


def test_without_a_masked_token_the_loss_is_zero_and_no_gradient_is_nan() -> None:
    model = build_bert(tiny_config(), binary_head=False)
    batch = bert_batch((24, 17))
    loss = (losses_of(model, batch).tokens * torch.zeros_like(batch.loss_mask)).sum()
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not any(bool(parameter.grad.any()) for parameter in model.parameters())  # type: ignore[union-attr]


def test_a_residual_after_a_norm_is_the_output_of_the_norm() -> None:
    """Megatron-LM's --apply-residual-connection-post-layernorm, written out."""
    model = build_bert(tiny_config(num_layers=1, **NORMS["residual"]))
    jitter(model)
    layer = model.encoder.layers["0"]
    x = torch.randn(24, 2, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments: dict[str, Any] = {"rotary": None, "mask": padding_mask(bert_batch().is_real), "dropout": None}
    normed = layer.input_layernorm(x)
    attended = normed + layer.self_attention(normed, **arguments)
    again = layer.pre_mlp_layernorm(attended)
    assert_bitwise(layer(x, **arguments), again + layer.mlp(again))


def outputs(group: CommGroup, sequence_parallel: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Losses, logits of both heads and gradients of a model with dropout, on one rank of a layout."""
    config = tiny_config(**SIZES, **settings, hidden_dropout=0.2, attention_dropout=0.2)
    model = build_bert(config, group=group, sequence_parallel=sequence_parallel)
    batch = bert_batch((24, 13))
    drops = DropoutStream(seed=1, iteration=4, sample_ids=torch.tensor([17, 5]))
    losses = losses_of(model, batch, dropout=drops)
    mean_loss(losses, batch).backward()
    with torch.no_grad():
        logits = output_of(model, batch, dropout=drops)
    assert losses.pairs is not None and logits.pairs is not None
    return {
        "losses": losses.tokens.detach(),
        "losses of pairs": losses.pairs.detach(),
        "logits": logits.tokens,
        "logits of pairs": logits.pairs,
        **whole_gradients(model, group),
    }


def check_outputs(rank: int, world_size: int, sequence_parallel: bool, settings: dict[str, Any]) -> None:
    expected = outputs(CommGroup.single("tensor"), False, settings)
    assert_all_parity(outputs(tensor_group(rank, world_size), sequence_parallel, settings), expected)


@pytest.mark.parametrize(
    "norms, world_size, sequence_parallel",
    [
        ("pre", 2, True),
        ("post", 3, True),
        ("post", 4, False),
        pytest.param("residual", 4, True, marks=pytest.mark.full),
        pytest.param("pre", 4, False, marks=pytest.mark.full),
    ],
)
def test_tensor_parallel_ranks_agree_with_one(norms: str, world_size: int, sequence_parallel: bool) -> None:
    """The pooler takes the first token of the whole sequence also where a rank has a later part of it."""
    run_distributed(check_outputs, world_size, sequence_parallel, NORMS[norms])


@each_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_in_16_bits_are_near_the_exact_ones(dtype: torch.dtype, norms: str) -> None:
    batch = bert_batch((24, 17))
    config = tiny_config(**NORMS[norms], init_method_std=0.02)
    low, exact = build_bert(config, dtype=dtype), build_bert(config)
    jitter(low)
    exact.load_state_dict(low.state_dict())
    losses, expected = (real_losses(model, batch) for model in (low, exact))
    assert losses.dtype == torch.float32, "losses are not below float32"
    assert_parity(losses.double(), expected, bounds={torch.float64: LOSSES_IN_16_BITS[dtype]})


def real_losses(model: BertModel, batch: BertInput) -> Tensor:
    """Of all tokens but padding, and of all pairs, in one row."""
    losses = losses_of(model, batch)
    assert losses.pairs is not None
    return torch.cat([losses.tokens[batch.is_real], losses.pairs]).detach()


def test_a_vocabulary_that_is_padded_gives_the_same() -> None:
    batch: BertInput = bert_batch((24, 17))
    plain, padded = (build_bert(tiny_config(), padded_vocab_size=rows) for rows in (VOCAB, VOCAB + 3))
    for one, other in zip(losses_of(plain, batch), losses_of(padded, batch), strict=True):
        assert one is not None and other is not None
        assert_parity(other, one)
