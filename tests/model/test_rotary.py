"""Rotary positions: precise in every dtype, the same function in both conventions."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.model.rotary import apply_rotary, rotary_frequencies, rotary_table
from tests.helpers.numerics import assert_bitwise, assert_parity
from tests.model.tiny import tiny_config

CPU = torch.device("cpu")
CONFIG = tiny_config(
    hidden_size=512, num_attention_heads=4, position_embedding_type="rope", max_position_embeddings=4096
)


def positions(*values: int) -> Tensor:
    return torch.tensor(values)[None]  # [b, s]


def test_tables_are_those_of_float32_rounded_once() -> None:
    position_ids = torch.arange(4096)[None]
    exact = position_ids.double().t()[:, :, None, None] / 10000 ** (torch.arange(0, 128, 2).double() / 128)
    wide = rotary_table(CONFIG, position_ids, torch.float32)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        table = rotary_table(CONFIG, position_ids, dtype)
        assert_bitwise(table.cos, wide.cos.to(dtype))
        assert_bitwise(table.sin, wide.sin.to(dtype))
        assert float((table.cos.double() - exact.cos()).abs().max()) < 1e-2
        assert float((table.sin.double() - exact.sin()).abs().max()) < 1e-2


def test_neighbours_far_from_the_start_differ_in_bfloat16() -> None:
    cos, sin = rotary_table(CONFIG, positions(1000, 1001), torch.bfloat16)
    assert not torch.equal(cos[0], cos[1])
    assert not torch.equal(sin[0], sin[1])


def test_scores_depend_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 128, generator=generator, dtype=torch.float64)

    def score(i: int, j: int) -> Tensor:
        turned = (
            apply_rotary(x, rotary_table(CONFIG, positions(place), torch.float64), interleaved=False)
            for x, place in ((query, i), (key, j))
        )
        return torch.stack(tuple(turned)).prod(0).sum()

    assert torch.allclose(score(9, 4), score(105, 100), atol=1e-4)  # angles are of float32
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-4)


def test_both_conventions_are_one_function_of_permuted_channels() -> None:
    table = rotary_table(CONFIG, positions(*range(50)), torch.float64)
    x = torch.randn(50, 1, 3, 128, dtype=torch.float64)
    interleaved_from_halves = torch.stack((torch.arange(64), torch.arange(64, 128)), dim=1).flatten()
    halves = apply_rotary(x, table, interleaved=False)
    interleaved = apply_rotary(x[..., interleaved_from_halves], table, interleaved=True)
    assert_bitwise(interleaved, halves[..., interleaved_from_halves])


def test_rotation_keeps_lengths_and_the_channels_beyond_its_part() -> None:
    config = tiny_config(hidden_size=512, num_attention_heads=4, position_embedding_type="rope", rotary_percent=0.25)
    table = rotary_table(config, positions(*range(50)), torch.float64)
    x = torch.randn(50, 1, 3, 128, dtype=torch.float64)
    for interleaved in (False, True):
        y = apply_rotary(x, table, interleaved=interleaved)
        assert_bitwise(y[..., 32:], x[..., 32:])
        # The cosine and sine come from float32, so their squares sum to one only so far.
        assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
        assert not torch.equal(y[1:, ..., :32], x[1:, ..., :32])


def test_llama3_scaling_slows_only_the_slow_pairs() -> None:
    config = tiny_config(hidden_size=512, num_attention_heads=4, position_embedding_type="rope", use_rope_scaling=True)
    plain, scaled = rotary_frequencies(CONFIG, CPU), rotary_frequencies(config, CPU)
    turns = 8192 * plain / (2 * torch.pi)
    assert_bitwise(scaled[turns > 4], plain[turns > 4])
    assert_parity(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert torch.all((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8))


def test_interpolation_divides_positions() -> None:
    config = tiny_config(
        hidden_size=512,
        num_attention_heads=4,
        position_embedding_type="rope",
        rotary_seq_len_interpolation_factor=4.0,
    )
    stretched = rotary_table(config, positions(0, 40, 400), torch.float64)
    plain = rotary_table(CONFIG, positions(0, 10, 100), torch.float64)
    assert_bitwise(stretched.cos, plain.cos)
    assert_bitwise(stretched.sin, plain.sin)
