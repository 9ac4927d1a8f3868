"""LayerNorm (https://arxiv.org/abs/1607.06450) and RMSNorm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.shard import Init, Shard, set_shard, whole_pieces


class LayerNorm(nn.Module):
    """Subtract the mean of the last dimension, divide by its standard deviation, scale and shift.

    Args:
        size: length of the last dimension.
        eps: added to the variance.
        group: the tensor-parallel group, all of whose ranks hold the whole parameters.
        partial_gradient: whether each of its ranks sees only a part of the tokens or heads, so that gradients
            must be summed.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        group: CommGroup,
        partial_gradient: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        for parameter, init in ((self.weight, Init.ones()), (self.bias, Init.zeros())):
            set_shard(parameter, whole_shard(self.shape, group, init, partial_gradient))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Divide the last dimension by its root mean square and scale. Arguments as for `LayerNorm`."""

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        group: CommGroup,
        partial_gradient: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        set_shard(self.weight, whole_shard(self.shape, group, Init.ones(), partial_gradient))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def whole_shard(shape: tuple[int, ...], group: CommGroup, init: Init, partial_gradient: bool) -> Shard:
    """The shard of a parameter that each rank of the tensor-parallel group holds whole."""
    return Shard(
        global_shape=shape,
        dim=None,
        pieces=whole_pieces(shape[0], group),
        group=group,
        init=init,
        partial_gradient=partial_gradient,
    )


def build_norm(
    config: TransformerConfig,
    size: int,
    *,
    group: CommGroup,
    partial_gradient: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> LayerNorm | RMSNorm:
    """The norm that the configuration names, over a last dimension of `size`."""
    norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return norm(
        size,
        eps=config.norm_epsilon,
        group=group,
        partial_gradient=partial_gradient,
        dtype=dtype,
        device=device,
    )
