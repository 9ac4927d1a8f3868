"""Linear layers and the embedding, split over a tensor-parallel group. Shoeybi et al. 2019, section 3.

Over a group of one rank each layer is the plain dense layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.comm_group import CommGroup
from megatron.core.main_grad import main_grad_if_any, summed
from megatron.core.shard import Init, Piece, even_pieces
from megatron.core.tensor_parallel.async_linear import parallel_linear
from megatron.core.tensor_parallel.mappings import (
    apply_eagerly,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.placement import Placement


def _check_divisible(what: str, value: int, group: CommGroup) -> None:
    below = value // group.size * group.size
    if below != value:
        raise ValueError(
            f"{what} ({value}) must be divisible by the tensor-parallel size ({group.size}), "
            f"as {below} and {below + group.size} are"
        )


def _sum_over_ranks(partial: Tensor, placement: Placement) -> Tensor:
    """[s, b, ..] -> the same shape, or [s/t, b, ..] under sequence parallelism: leave the tensor-parallel region."""
    if placement.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial, placement.group)
    return reduce_from_tensor_parallel_region(partial, placement.group)


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, placement: Placement) -> Tensor:
    """The product of `ColumnParallelLinear`, with a weight [out/t, in] from elsewhere: a tied embedding, say."""
    return parallel_linear(
        x,
        weight,
        bias,
        group=placement.group,
        sequence_parallel=placement.sequence_parallel,
        input_gradient_reduce=not placement.sequence_parallel,
    )


class ColumnParallelLinear(nn.Module):
    """Y = X A + b with A split by its columns (the rows of `weight`, which is A transposed).

          [ A_1 | A_2 | .. | A_t ]          X is whole on each rank (gathered along the sequence first, under
      X * [     |     |    |     ]          sequence parallelism); rank i gets Y_i = X A_i + b_i.

    Args:
        in_features, out_features: size of the global A.
        padded_out_features: rows in all; those from `out_features` on are padding that we add, in no piece.
        pieces: which rows this rank holds, when not an even part: grouped K/V heads, stacked gate and up.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        placement: Placement,
        bias: bool,
        init: Init,
        padded_out_features: int | None = None,
        pieces: tuple[Piece, ...] | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.placement = in_features, out_features, placement
        group = placement.group
        if pieces is None:
            padded = out_features if padded_out_features is None else padded_out_features
            _check_divisible("output size of a column-parallel layer", padded, group)
            pieces = even_pieces(out_features, group, padded=padded)
            self.local_out_features = padded // group.size
        else:
            assert padded_out_features is None, "pieces say what is padding"
            self.local_out_features = sum(piece.length for piece in pieces)
        self.weight = placement.split_parameter(
            out_features, in_features, dim=0, pieces=pieces, local_length=self.local_out_features, init=init
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = placement.split_parameter(
                out_features, dim=0, pieces=pieces, local_length=self.local_out_features, init=Init.zeros()
            )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in], or [s/t, b, in] with sequence parallelism -> [s, b, out/t]."""
        return column_parallel_linear(x, self.weight, self.bias, self.placement)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, local_out={self.local_out_features}"


class RowParallelLinear(nn.Module):
    """Y = X A + b with A split by its rows (the columns of `weight`), X by its columns.

                            [ A_1 ]
      [ X_1 | X_2 | .. ]  * [ A_2 ]  =  X_1 A_1 + X_2 A_2 + ..      summed over the ranks, the bias once after.
                            [ ..  ]

    Args:
        in_features, out_features: size of the global A.
    """

    def __init__(self, in_features: int, out_features: int, *, placement: Placement, bias: bool, init: Init) -> None:
        super().__init__()
        self.in_features, self.out_features, self.placement = in_features, out_features, placement
        _check_divisible("input size of a row-parallel layer", in_features, placement.group)
        self.local_in_features = in_features // placement.group.size
        self.weight = placement.split_parameter(
            out_features,
            in_features,
            dim=1,
            pieces=even_pieces(in_features, placement.group),
            local_length=self.local_in_features,
            init=init,
        )
        self.bias: nn.Parameter | None = None
        if bias:
            # Under sequence parallelism the bias sees only the positions of its rank.
            self.bias = placement.whole_parameter(
                out_features, init=Init.zeros(), partial_gradient=placement.sequence_parallel
            )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in/t] -> [s, b, out], or [s/t, b, out] under sequence parallelism."""
        group = self.placement.group
        # In a group of one the bias goes into the product; otherwise it must not be summed t times.
        fused_bias = self.bias if group.size == 1 else None
        output = parallel_linear(
            x,
            self.weight,
            fused_bias,
            group=group,
            sequence_parallel=False,
            input_gradient_reduce=False,
        )  # [s, b, out], a partial sum
        output = _sum_over_ranks(output, self.placement)  # [s/t or s, b, out]
        return output if self.bias is None or group.size == 1 else output + self.bias

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, local_in={self.local_in_features}"


class WholeLinear(nn.Module):
    """Y = X A + b where each rank of the group holds the whole of A: for what is too small, or too seldom, to split.

    Args:
        partial_gradient: whether each rank sees only a part of the tokens, so that gradients must be summed.
    """

    def __init__(
        self, in_features: int, out_features: int, *, placement: Placement, init: Init, partial_gradient: bool
    ) -> None:
        super().__init__()
        self.placement = placement
        self.weight = placement.whole_parameter(out_features, in_features, init=init, partial_gradient=partial_gradient)
        self.bias = placement.whole_parameter(out_features, init=Init.zeros(), partial_gradient=partial_gradient)

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out], without communication."""
        return parallel_linear(
            x,
            self.weight,
            self.bias,
            group=self.placement.group,
            sequence_parallel=False,
            input_gradient_reduce=False,
        )


class _Lookup(torch.autograd.Function):
    """forward: rows of the weight; backward: add the gradients to these rows of `main_grad` only."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.main_grad = main_grad_if_any(weight)
        return F.embedding(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        (rows,) = ctx.saved_tensors
        # index_put_ adds repeated rows in a fixed order on every device, index_add_ does not.
        summed(ctx.main_grad).index_put_((rows,), gradient.to(ctx.main_grad.dtype), accumulate=True)
        return None, None


class VocabParallelEmbedding(nn.Module):
    """Rows of a table [v, h] that is split by rows over the group: rank i holds [v/t * i, v/t * (i+1)).

      tokens -> own rows, zero for those of other ranks -> summed over the ranks

    Args:
        vocab_size: rows of the model.
        padded_vocab_size: rows in all, divisible by the group's size; those from `vocab_size` on are in no
            piece.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        padded_vocab_size: int,
        placement: Placement,
        init: Init,
    ) -> None:
        super().__init__()
        _check_divisible("padded vocabulary size", padded_vocab_size, placement.group)
        self.vocab_size, self.hidden_size, self.placement = vocab_size, hidden_size, placement
        self.local_vocab_size = padded_vocab_size // placement.group.size
        self.weight = placement.split_parameter(
            vocab_size,
            hidden_size,
            dim=0,
            pieces=even_pieces(vocab_size, placement.group, padded=padded_vocab_size),
            local_length=self.local_vocab_size,
            init=init,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [s, b, h], or [s/t, b, h] under sequence parallelism."""
        group = self.placement.group
        rows = tokens.t() - group.rank * self.local_vocab_size  # [s, b]
        if group.size == 1:
            return self._lookup(rows)
        below, above = rows < 0, rows >= self.local_vocab_size
        # The ends of the vocabulary are not masked, so that a token outside of it is an IndexError on one rank.
        if group.is_first:
            elsewhere = above
        elif group.is_last:
            elsewhere = below
        else:
            elsewhere = below | above
        embedded = self._lookup(rows.masked_fill(elsewhere, 0))  # [s, b, h]
        return _sum_over_ranks(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.placement)

    def _lookup(self, rows: Tensor) -> Tensor:
        if main_grad_if_any(self.weight) is None or not self.weight.requires_grad:
            return F.embedding(rows, self.weight)
        return apply_eagerly(_Lookup, self.weight, rows)

    def extra_repr(self) -> str:
        return f"vocab={self.vocab_size}, hidden={self.hidden_size}, local_vocab={self.local_vocab_size}"
