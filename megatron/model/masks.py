"""Which positions a query may attend to, and with what bias: one tensor for all layers, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log2

import torch
from torch import Tensor

from megatron.config.transformer import TransformerConfig

# Documents of fewer tokens are joined to blocks of about so many: a kernel for each would cost more than its work.
_BLOCK = 512
# The longest samples with one mask for all of their tokens: masks of blocks would take as much.
LONGEST_WITH_ONE_MASK = 2 * _BLOCK


@dataclass(frozen=True, kw_only=True)
class DocumentBlocks:
    """Samples cut between documents, so that attention runs over each block by itself.

    Memory and operations are those of the documents, up to the size of a block, and not of all pairs of positions.

    Attributes:
        lengths: of each sample the tokens of its blocks.
        masks: of each block, [1, 1, n, n], or None for one of a single document: causal.
    """

    lengths: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[Tensor | None, ...], ...]


Mask = Tensor | DocumentBlocks | None
"""What a token sees. None: what comes before it, and itself."""


def goes_by_blocks(config: TransformerConfig, sequence_length: int, *, training: bool) -> bool:
    """Whether documents are attended to by blocks: where a mask of all pairs would be large, and nothing else asks for
    it or for the weights themselves."""
    plain = config.window_size is None and config.position_embedding_type != "alibi"
    fused = not config.computes_attention_weights(training=training) and not (training and config.attention_dropout > 0)
    return sequence_length > LONGEST_WITH_ONE_MASK and plain and fused


def document_blocks(document_ids: Tensor, document_lengths: Sequence[Sequence[int]]) -> DocumentBlocks:
    """Blocks of whole documents.

    Args:
        document_ids: [b, s].
        document_lengths: of each sample the lengths of its runs of one number, on the host, which waits for no device.
    """
    lengths, masks = [], []
    for ids, documents in zip(document_ids, document_lengths, strict=True):
        blocks = _blocks(documents)
        sizes = [sum(block) for block in blocks]
        lengths.append(tuple(sizes))
        masks.append(
            tuple(
                None if len(block) == 1 else _causal_within(of_block)
                for block, of_block in zip(blocks, ids.split(sizes), strict=True)
            )
        )
    return DocumentBlocks(lengths=tuple(lengths), masks=tuple(masks))


def _blocks(documents: Sequence[int]) -> list[list[int]]:
    """Lengths of documents by blocks: a long one by itself, short ones together."""
    blocks: list[list[int]] = []
    for length in documents:
        if blocks and length < _BLOCK and sum(blocks[-1]) < _BLOCK:
            blocks[-1].append(length)
        else:
            blocks.append([length])
    return blocks


def _causal_within(ids: Tensor) -> Tensor:
    """Of [n] numbers of documents, which pairs may attend: [1, 1, n, n]."""
    return (ids[:, None] == ids).tril_()[None, None]


def attention_mask(
    *,
    sequence_length: int,
    num_queries: int | None = None,
    document_ids: Tensor | None,
    window: tuple[int, int] | None,
    slopes: tuple[float, ...] | None,
    explicit: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """The mask of causal self-attention over one micro-batch; None is what `SelfAttention` takes as the plain one.

    Args:
        sequence_length: number of keys, s.
        num_queries: the last positions, q of them, are queries; None for all, q = s.
        document_ids: [b, s]; a token attends to tokens of its own document only.
        window: (left, right): query i attends to keys i - left … i + right, and never beyond i; -1 is
            unbounded.
        slopes: ALiBi slopes of the local heads.
        explicit: for `attention_weights`, which needs a mask in any case and takes a bias that is wider than the
            scores; the fused kernels know the causal one, and want the dtype of the queries.
        dtype: of the queries.

    Returns:
        What is allowed, boolean [1|b, 1, q, s]; with slopes, what is added to the scores, [1|b, a/t, q, s], -inf where
        not allowed. A query may always attend to itself. None, unless `explicit`, when every earlier position is
        allowed without bias, for all positions as queries or for the last one alone.
    """
    queries = sequence_length if num_queries is None else num_queries
    first = sequence_length - queries
    bounded = window is not None and 0 <= window[0] < sequence_length - 1
    if document_ids is None and slopes is None and queries in (1, sequence_length) and not (bounded or explicit):
        return None
    # One byte for each pair of positions: a long sequence has no room for their distances.
    allowed = torch.ones(queries, sequence_length, dtype=torch.bool, device=device).tril_(first)  # [q, s]
    if bounded:
        assert window is not None
        allowed.triu_(first - window[0])
    allowed = allowed[None, None]  # [1, 1, q, s]
    if document_ids is not None:
        same_document = document_ids[:, None, first:, None] == document_ids[:, None, None, :]  # [b, 1, q, s]
        allowed = same_document.logical_and_(allowed)
    if slopes is None:
        return allowed
    wide = torch.promote_types(dtype, torch.float32)
    position = torch.arange(sequence_length, dtype=wide, device=device)
    ahead = position[None, :] - position[first:, None]  # [q, s], of a key before its query: not positive where allowed
    bias = torch.tensor(slopes, dtype=wide, device=device)[None, :, None, None] * ahead  # [1, a/t, q, s]
    bias = torch.where(allowed, bias, float("-inf"))  # [1|b, a/t, q, s]
    return bias if explicit else bias.to(dtype)


def padding_mask(is_real: Tensor) -> Tensor:
    """The mask of self-attention in both directions: what of [b, s] is no padding -> [b, 1, 1, s], boolean.

    The first token always counts, so that also in a row of nothing but padding, which no loss looks at, each query
    has something to attend to and gives numbers.
    """
    allowed = is_real.clone()
    allowed[:, 0] = True
    return allowed[:, None, None, :]


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """How fast the attention of each head fades with distance: https://arxiv.org/abs/2108.12409.

    A geometric sequence that starts at its own ratio 2^(-8/n). When the number of heads is no power of two:
    those of the power below, then every other one of the power above, as the authors' program does.
    """
    power = 2 ** floor(log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    finer = [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * (num_heads - power), 2)]
    return tuple(slopes + finer)
