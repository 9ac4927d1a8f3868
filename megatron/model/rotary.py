"""Rotary position embedding: pairs of channels of queries and keys turn by an angle that grows with position.

RoFormer, https://arxiv.org/abs/2104.09864. Angles, cosines and sines are computed in float32 and rounded once
to the dtype of the model, float64 included: in half precision positions beyond 256 would collide, and float64
tables would not be those that trained weights have seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.transformer import TransformerConfig


class RotaryTable(NamedTuple):
    """Cosine and sine of each angle, both [s, b, 1, r/2] for r rotated channels of a head."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """The frequencies of Llama 3.1: slow pairs turn `factor` times slower, fast ones as before.

    Attributes:
        factor: how many times longer the context becomes.
        low_frequency_factor: pairs that turn fewer times than this over the original context are slowed in
            full.
        high_frequency_factor: pairs that turn more times than this are left alone.
        original_context: the positions of the first training, in tokens.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.original_context / (2 * pi / frequencies)
        ramp = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        between = (1 - ramp) * frequencies / self.factor + ramp * frequencies
        scaled = torch.where(turns < self.low_frequency_factor, frequencies / self.factor, between)
        return torch.where(turns > self.high_frequency_factor, frequencies, scaled)


def rotary_frequencies(config: TransformerConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair of channels, float32 [r/2]."""
    dim = config.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies = 1.0 / (config.rotary_base**exponents)
    if config.use_rope_scaling:
        frequencies = Llama3Scaling(factor=config.rope_scaling_factor)(frequencies)
    return frequencies


def rotary_table(config: TransformerConfig, position_ids: Tensor, dtype: torch.dtype) -> RotaryTable:
    """The table for the positions [b, s] of a micro-batch, shared by all layers of a stage."""
    positions = position_ids.t().to(torch.float32)  # [s, b]
    if config.rotary_seq_len_interpolation_factor is not None:
        positions = positions * (1.0 / config.rotary_seq_len_interpolation_factor)
    frequencies = rotary_frequencies(config, position_ids.device)
    angles = positions[:, :, None, None] * frequencies  # [s, b, 1, r/2]
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rotary(x: Tensor, table: RotaryTable, *, interleaved: bool) -> Tensor:
    """Rotate the first r channels of each head of `x` [s, b, a, d]; the others pass.

    Channel i is paired with channel i + r/2 (GPT-NeoX, Hugging Face), or, `interleaved`, 2i with 2i + 1 (GPT-J, Meta).
    """
    half = table.cos.shape[-1]
    parts = [2 * half, x.shape[-1] - 2 * half]
    rotated, passed = torch.split(x, parts, dim=-1)  # [s, b, a, r], [s, b, a, d - r]
    if interleaved:
        first, second = rotated.reshape(*x.shape[:-1], half, 2).unbind(-1)  # [s, b, a, r/2] each
    else:
        first, second = rotated.chunk(2, dim=-1)  # [s, b, a, r/2] each
    turned = (first * table.cos - second * table.sin, second * table.cos + first * table.sin)
    if interleaved:
        return torch.cat((torch.stack(turned, dim=-1).flatten(-2), passed), dim=-1)  # [s, b, a, d]
    return torch.cat((*turned, passed), dim=-1)  # [s, b, a, d]
