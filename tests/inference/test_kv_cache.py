"""A model that remembers keys and values predicts what it predicts from the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.inference.kv_cache import KeyValueCache
from megatron.model.gpt_model import GPTModel
from tests.helpers.numerics import assert_parity
from tests.model.tiny import ARCHITECTURES, SEQUENCE, VOCAB, batch, build, jitter, tiny_config


def with_cache(model: GPTModel, tokens: Tensor, cuts: Sequence[int]) -> Tensor:
    """Logits [b, s, v] of tokens that come in several parts."""
    cache = KeyValueCache(model, batch_size=tokens.shape[0], slots=tokens.shape[1])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    found = []
    for start, stop in zip([0, *cuts], [*cuts, tokens.shape[1]]):
        found.append(model(tokens[:, start:stop], positions[:, start:stop], store=cache))
        cache.advance(stop - start)
    return torch.cat(found, dim=1)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Any variant of a small model."""
    heads = draw(st.sampled_from([2, 4, 6]))
    groups = draw(st.sampled_from([number for number in (1, 2, 3, 6) if heads % number == 0]))
    return {
        "num_attention_heads": heads,
        "kv_channels": draw(st.sampled_from([4, 8])),
        "group_query_attention": groups < heads,
        "num_query_groups": groups if groups < heads else None,
        "position_embedding_type": draw(st.sampled_from(["learned_absolute", "rope", "alibi", "none"])),
        "rotary_percent": draw(st.sampled_from([0.5, 1.0])),
        "rotary_interleaved": draw(st.booleans()),
        "rotary_seq_len_interpolation_factor": draw(st.sampled_from([None, 2.0])),
        "window_size": draw(st.sampled_from([None, (5, 0), (0, 0), (30, 0)])),
        "normalization": draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        "activation": draw(st.sampled_from(["gelu", "swiglu"])),
        "add_bias_linear": draw(st.booleans()),
        "qk_layernorm": draw(st.booleans()),
        "apply_query_key_layer_scaling": draw(st.booleans()),
        "untie_embeddings_and_output_weights": draw(st.booleans()),
    }


@torch.no_grad()
@settings(max_examples=60, deadline=None)
@given(models(), st.sets(st.integers(1, SEQUENCE - 1)), st.integers(1, 3))
def test_logits_with_a_cache_are_those_of_the_whole_text(variant: dict[str, Any], cuts: set[int], size: int) -> None:
    model = build(tiny_config(**variant))
    jitter(model)
    tokens, position_ids, _ = batch(size)
    assert_parity(with_cache(model, tokens, sorted(cuts)), model(tokens, position_ids))


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_token_after_token_is_the_whole_text(architecture: str) -> None:
    model = build(tiny_config(**ARCHITECTURES[architecture]))
    jitter(model)
    tokens, position_ids, _ = batch()
    assert_parity(with_cache(model, tokens, range(5, SEQUENCE)), model(tokens, position_ids))


@torch.no_grad()
def test_logits_of_the_last_token_are_those_among_all() -> None:
    model = build(tiny_config())
    tokens, position_ids, _ = batch()
    last = model(tokens, position_ids, last_only=True)
    assert_parity(last, model(tokens, position_ids)[:, -1:])


@torch.no_grad()
def test_bfloat16_takes_the_kernels_that_it_has_without_a_cache() -> None:
    model = build(tiny_config(**ARCHITECTURES["llama"]), dtype=torch.bfloat16)
    tokens, position_ids, _ = batch()
    exact = build(tiny_config(**ARCHITECTURES["llama"]))(tokens, position_ids)
    plain = model(tokens, position_ids)
    found = with_cache(model, tokens, range(5, SEQUENCE))
    assert float((found - exact).abs().max()) <= 2 * float((plain - exact).abs().max())


def test_what_was_there_before_is_forgotten() -> None:
    model = build(tiny_config())
    cache = KeyValueCache(model, batch_size=1, slots=SEQUENCE)
    tokens, position_ids, _ = batch(1)
    with torch.no_grad():
        first = model((tokens + 1) % VOCAB, position_ids, store=cache)
        cache.advance(SEQUENCE)
        cache.clear()
        again = model(tokens, position_ids, store=cache)
        assert_parity(again, model(tokens, position_ids))
    assert not torch.equal(first, again)


def test_more_tokens_than_there_are_slots_are_a_bug() -> None:
    model = build(tiny_config())
    cache = KeyValueCache(model, batch_size=2, slots=SEQUENCE - 1)
    tokens, position_ids, _ = batch()
    with torch.no_grad(), pytest.raises(AssertionError, match="24 tokens in 23 slots"):
        model(tokens, position_ids, store=cache)
