"""Self-attention with grouped queries, over the heads that this rank holds; what a token sees, a mask says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.shard import Init, Piece, even_pieces, set_matrices
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import apply_eagerly, eagerly
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import DropoutStream, attention_dropout, torch_draws
from megatron.core.tensor_parallel.recompute import recompute, with_input_again
from megatron.model.causal_attention import CausalAttention, wins_by_blocks
from megatron.model.dropout_sites import ATTENTION_WEIGHTS
from megatron.model.init import output_std
from megatron.model.masks import DocumentBlocks, Mask
from megatron.model.norms import Norm
from megatron.model.rotary import RotaryTable, apply_rotary


@dataclass(frozen=True, kw_only=True)
class LocalHeads:
    """The heads of a rank: a run of query heads, and the key and value of every group that they belong to.

    Attributes:
        first: global number of the first query head.
        queries: number of query heads, a/t.
        groups: number of keys and values, g/t, or one when there are fewer groups than ranks.
        rows: which rows of the global QKV weight [g, a/g queries + key + value, d] they are.
    """

    first: int
    queries: int
    groups: int
    rows: tuple[Piece, ...]


def local_heads(config: TransformerConfig, group: CommGroup) -> LocalHeads:
    """Cut the query heads evenly over the group; each rank gets the keys and values that its heads use.

    With fewer groups than ranks several ranks hold the same key and value, each with a part of their
    gradient; the one with the first query head of the group owns them.
    """
    (heads,) = even_pieces(config.num_attention_heads, group)
    per_group, dim = config.num_attention_heads // config.query_groups, config.head_dim
    rows: list[Piece] = []
    local = 0
    groups = range(heads.start // per_group, (heads.start + heads.length - 1) // per_group + 1)
    for number in groups:
        first, last = number * per_group, (number + 1) * per_group - 1
        start, stop = max(heads.start, first), min(heads.start + heads.length, last + 1)
        group_row = number * (per_group + 2) * dim
        queries = (stop - start) * dim
        holders = last // heads.length - first // heads.length + 1
        rows.append(Piece(local=local, start=group_row + (start - first) * dim, length=queries))
        rows.append(
            Piece(
                local=local + queries,
                start=group_row + per_group * dim,
                length=2 * dim,
                holders=holders,
                owned=start == first,
            )
        )
        local += queries + 2 * dim
    assert heads.length % len(groups) == 0, f"{heads.length} query heads of a rank over {len(groups)} groups"
    return LocalHeads(first=heads.start, queries=heads.length, groups=len(groups), rows=_merge(rows))


def _merge(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Join neighbours with the same holders and owner: without replication one run is left."""
    merged = pieces[:1]
    for piece in pieces[1:]:
        last = merged[-1]
        adjacent = (last.local + last.length, last.start + last.length) == (piece.local, piece.start)
        if adjacent and (last.holders, last.owned) == (piece.holders, piece.owned):
            length = last.length + piece.length
            merged[-1] = Piece(
                local=last.local, start=last.start, length=length, holders=last.holders, owned=last.owned
            )
        else:
            merged.append(piece)
    return tuple(merged)


class KeyValueStore(Protocol):
    """Keys and values of tokens that went through the model before, so that each is computed once."""

    @property
    def length(self) -> int:
        """Tokens that are held of each sequence; what is appended counts when all layers have it."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer for the tokens that follow, [q, b, g/t, d] -> those of all tokens [s, b, g/t, d].

        Keys come rotated: a position never changes.
        """


class SelfAttention(nn.Module):
    """Queries, keys and values from one projection, attention, and a projection back.

    Args:
        layer: global number of the layer, from 0: dropout masks depend on it.
        placement: the heads are cut over its group, and under sequence parallelism input and output along the sequence.
    """

    def __init__(self, config: TransformerConfig, *, layer: int, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.heads = local_heads(config, placement.group)
        self.score_divisor = layer + 1.0 if config.apply_query_key_layer_scaling else 1.0
        self.recomputes_core = "core_attn" in config.recomputed_modules
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            config.qkv_size,
            placement=placement,
            bias=config.add_bias_linear or config.add_qkv_bias,
            init=Init.normal(config.init_method_std),
            pieces=self.heads.rows,
        )
        self.linear_proj = RowParallelLinear(
            config.query_size,
            config.hidden_size,
            placement=placement,
            bias=config.add_bias_linear,
            init=Init.normal(output_std(config.init_method_std, config.num_layers)),
        )
        per_group = config.num_attention_heads // config.query_groups
        set_matrices(self.linear_qkv.weight, per_group * config.head_dim, config.head_dim, config.head_dim)
        set_matrices(self.linear_proj.weight, config.hidden_size)
        # A rank normalises its own heads only, so the gradient of the scale is a partial sum with or without
        # sequence parallelism.
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            self.q_layernorm, self.k_layernorm = (
                Norm(config, config.head_dim, placement=placement, partial_gradient=True) for _ in range(2)
            )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary: RotaryTable | None,
        mask: Mask,
        dropout: DropoutStream | None,
        again: Callable[[], Tensor] | None = None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """Attention of `hidden_states` [s/t or s, b, h] over itself and what is in the store, of the same shape.

        Args:
            rotary: the table for the positions of the tokens; None without rotary positions.
            mask: of `attention_mask`, explicit where `computes_weights` holds, of `padding_mask`, or of
                `document_blocks`, for the fused kernels. None: each token sees those before it.
            dropout: the masks of this micro-batch; None for no dropout.
            again: computes `hidden_states` once more, in the backward: then they are not kept.
            store: of the tokens before these, and takes those of these.
        """
        query, key, value = self.project(hidden_states, again)
        if rotary is not None:
            query = apply_rotary(query, rotary, interleaved=self.config.rotary_interleaved)
            key = apply_rotary(key, rotary, interleaved=self.config.rotary_interleaved)
            if self.q_layernorm is None:  # whose backward needs the whole projection anyway
                value = value.contiguous()  # a view would keep the unrotated queries and keys, too
        if store is not None:
            key, value = store.append(self.layer, key, value)
        attend = partial(self.attend, mask=mask, dropout=dropout)
        context = recompute(attend, query, key, value) if self.recomputes_core else attend(query, key, value)
        output: Tensor = self.linear_proj(context)  # [s, b, a d/t] -> [s/t or s, b, h]
        return output

    def project(
        self, hidden_states: Tensor, again: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values, unrotated: [s/t or s, b, h] -> [s, b, a/t, d] and twice [s, b, g/t, d]."""
        mixed = with_input_again(self.linear_qkv, hidden_states, again)  # [s, b, (a + 2g) d/t]
        per_group = self.heads.queries // self.heads.groups
        shape = (self.heads.groups, per_group + 2, self.config.head_dim)
        grouped = mixed.view(*mixed.shape[:-1], *shape)  # [s, b, g/t, a/g + 2, d]
        query, key, value = torch.split(grouped, [per_group, 1, 1], dim=3)
        query = query.flatten(2, 3)  # [s, b, a/t, d]
        key, value = key.squeeze(3), value.squeeze(3)  # [s, b, g/t, d] each
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, dropout: DropoutStream | None) -> Tensor:
        """Each query's mean of the values: [q, b, a/t, d] and twice [s, b, g/t, d] -> [q, b, a d/t].

        All tokens are queries, q = s, but for those of a `KeyValueStore`.
        """
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, a/t or g/t, q or s, d]
        if isinstance(mask, DocumentBlocks):
            context = eagerly(attention_by_blocks, query, key, value, mask)
        elif computes_weights(self.config, dropout):
            assert mask is not None
            weights = attention_weights(query, key, mask, divisor=self.score_divisor)
            context = weighted_values(self._dropped(weights, dropout), value)
        elif dropout is None or self.config.attention_dropout == 0.0:
            context = fused_attention(query, key, value, mask)
        else:
            context = eagerly(self._fused_attention_with_dropout, query, key, value, mask, dropout)
        return context.permute(2, 0, 1, 3).flatten(2)  # [b, a/t, q, d] -> [q, b, a d/t]

    def _dropped(self, weights: Tensor, dropout: DropoutStream | None) -> Tensor:
        """The weights after dropout: [b, a/t, s, s] -> the same shape."""
        if not drops_weights(self.config, dropout):
            return weights
        return attention_dropout(
            weights,
            self.config.attention_dropout,
            dropout,
            layer=self.layer,
            site=ATTENTION_WEIGHTS,
            head_offset=self.heads.first,
        )

    def _fused_attention_with_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: DropoutStream
    ) -> Tensor:
        """`fused_attention` whose kernel draws the masks: another one for each run of heads of each layer."""
        with torch_draws(dropout, layer=self.layer, site=ATTENTION_WEIGHTS, start=self.heads.first):
            return fused_attention(query, key, value, mask, dropout_probability=self.config.attention_dropout)


def drops_weights(config: TransformerConfig, dropout: DropoutStream | None) -> bool:
    """Whether weights are dropped by their global index, for which each of them must be in memory."""
    return dropout is not None and config.drops_attention_weights


def computes_weights(config: TransformerConfig, dropout: DropoutStream | None) -> bool:
    """Whether this pass has attention weights in memory, one by one; without dropout it is no training."""
    return config.computes_attention_weights(training=dropout is not None)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout_probability: float = 0.0
) -> Tensor:
    """Attention without the matrix of weights in memory, by the fastest kernel torch has for the case.

    Queries [b, a/t, q, d], keys and values [b, g/t, s, d]; returns [b, a/t, q, d]. Mask: see `SelfAttention.forward`.
    Dropout, if any, draws from torch's generator.
    """
    causal = mask is None and query.shape[2] == key.shape[2]  # else one query without a mask, which sees all keys
    if causal and dropout_probability == 0.0 and wins_by_blocks(query):
        return apply_eagerly(CausalAttention, query, key, value)
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1 and query.shape[2] == 1 and dropout_probability == 0.0:
        return _single_query_attention(query, key, value, mask)
    if mask is not None and groups > 1:
        # On GPUs only the kernels that take no mask know shared keys; with both, torch falls back to explicit weights.
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))  # [b, a/t, s, d]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_probability,
        is_causal=causal,
        enable_gqa=mask is None and groups > 1,
    )


def attention_by_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: DocumentBlocks) -> Tensor:
    """`fused_attention` over each block of each sample; shapes as there."""
    samples = []
    for lengths, masks, *rows in zip(blocks.lengths, blocks.masks, query, key, value, strict=True):
        parts = [row.unsqueeze(0).split(lengths, dim=2) for row in rows]  # of [1, a/t or g/t, s, d]
        contexts = [fused_attention(*part) for part in zip(*parts, masks, strict=True)]
        samples.append(torch.cat(contexts, dim=2))  # [1, a/t, s, d]
    return torch.cat(samples)


def _single_query_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """`fused_attention` of the last position alone, [b, a/t, 1, d]: heads that share keys are as queries of one head.

    So the keys and values of a whole text are not copied for each token that follows.
    """
    batch, groups, length, dim = key.shape
    by_group = query.reshape(batch, groups, -1, dim)  # [b, g/t, a/g, d]
    mask_by_group = mask.expand(-1, query.shape[1], -1, -1).reshape(-1, groups, query.shape[1] // groups, length)
    context = F.scaled_dot_product_attention(by_group, key, value, attn_mask=mask_by_group)
    return context.flatten(1, 2).unsqueeze(2)  # [b, a/t, 1, d]


def attention_weights(query: Tensor, key: Tensor, mask: Tensor, *, divisor: float = 1.0) -> Tensor:
    """The softmax of the scores, [b, a/t, q, s], exactly 0 where not allowed. Shapes: `fused_attention`.

    Args:
        mask: `padding_mask`, or an explicit one of `attention_mask`: a bias is added in float32 at least.
        divisor: scores are that much smaller where they are rounded, and what they should be in the softmax.
    """
    batch, heads, length, dim = query.shape
    by_group = query.reshape(batch, key.shape[1], -1, dim)  # [b, g/t, a/g q, d]
    scores: Tensor = by_group @ (key * (dim**-0.5 / divisor)).transpose(-1, -2)  # [b, g/t, a/g q, s]
    scores = scores.view(batch, heads, length, -1)  # [b, a/t, q, s]
    if divisor != 1.0:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * divisor
    scores = torch.where(mask, scores, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if torch.promote_types(query.dtype, torch.float32) == query.dtype:
        return scores.softmax(dim=-1, dtype=query.dtype)
    weights: Tensor = _RoundedSoftmax.apply(scores, query.dtype)  # type: ignore[no-untyped-call]
    return weights


class _RoundedSoftmax(torch.autograd.Function):
    """The softmax in float32, rounded, of which the rounded weights are kept: half the bytes that autograd keeps."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dtype: torch.dtype) -> Tensor:
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(dtype)
        ctx.save_for_backward(weights)
        ctx.scores_dtype = scores.dtype
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weights = ctx.saved_tensors[0].float()
        flowing = weights * gradient
        # weights x (gradient - the mean gradient by weight)
        return flowing.sub_(weights.mul_(flowing.sum(dim=-1, keepdim=True))).to(ctx.scores_dtype), None


def weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """Sum of the values by weight: [b, a/t, q, s] and [b, g/t, s, d] -> [b, a/t, q, d]."""
    batch, heads, queries, length = weights.shape
    by_group = weights.reshape(batch, value.shape[1], -1, length)  # [b, g/t, a/g q, s]
    context: Tensor = by_group @ value  # [b, g/t, a/g q, d]
    return context.view(batch, heads, queries, -1)  # [b, a/t, q, d]
