"""Where a module's tensors live: one value that each constructor hands on to the modules inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.comm_group import CommGroup
from megatron.core.shard import Init, Piece, Shard, set_shard, whole_pieces


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a model is spread over a tensor-parallel group, and what its parameters are made of.

    Parameters are made without values, with a `Shard` that says which part of which global tensor they are;
    `initialize_weights` gives them their values.

    Attributes:
        group: the tensor-parallel group.
        sequence_parallel: whether norms, dropout and residuals are cut along the sequence over the same group.
        dtype: of the parameters.
        device: of the parameters.
    """

    group: CommGroup
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device

    def split_parameter(
        self, *global_shape: int, dim: int, pieces: tuple[Piece, ...], local_length: int, init: Init
    ) -> nn.Parameter:
        """This rank's `pieces` of a tensor that the group splits along `dim`.

        Args:
            local_length: along `dim`; what is in no piece is padding.
        """
        local_shape = list(global_shape)
        local_shape[dim] = local_length
        shard = Shard(global_shape=global_shape, dim=dim, pieces=pieces, group=self.group, init=init)
        return self._parameter(local_shape, shard)

    def whole_parameter(self, *shape: int, init: Init, partial_gradient: bool) -> nn.Parameter:
        """A tensor that each rank of the group holds whole.

        Args:
            partial_gradient: whether each rank sees only a part of the tokens or heads, so that its gradients must be
                summed over the group.
        """
        shard = Shard(
            global_shape=shape,
            dim=None,
            pieces=whole_pieces(shape[0], self.group),
            group=self.group,
            init=init,
            partial_gradient=partial_gradient,
        )
        return self._parameter(shape, shard)

    def _parameter(self, local_shape: Sequence[int], shard: Shard) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(*local_shape, dtype=self.dtype, device=self.device))
        set_shard(parameter, shard)
        return parameter
