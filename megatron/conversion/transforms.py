"""From the tensors of another form to ours and back: other names, and matrices that are cut or turned otherwise.

A transform is a pair of functions on whole tensors, each the other's inverse to the bit. Nothing is read until the
tensor that comes out of it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from megatron.config.transformer import TransformerConfig
from megatron.conversion.portable import LazyTensor


@dataclass(frozen=True, kw_only=True)
class Transform:
    """How one tensor of ours is made from one or several of theirs.

    Attributes:
        join: theirs to ours.
        split: ours to theirs.
    """

    join: Callable[[Sequence[Tensor], TransformerConfig], Tensor]
    split: Callable[[Tensor, TransformerConfig], tuple[Tensor, ...]]


def _by_group(parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    """Rows [q…q, k, v] of each query group, from all queries, all keys, all values."""
    groups = [part.reshape(config.query_groups, -1, *part.shape[1:]) for part in parts]  # [g, rows of a group, …]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _by_kind(ours: Tensor, config: TransformerConfig) -> tuple[Tensor, ...]:
    """The inverse of `_by_group`."""
    groups, dim = config.query_groups, config.head_dim
    grouped = ours.reshape(groups, -1, *ours.shape[1:])  # [g, (a/g + 2) d, …]
    rows = [config.query_size // groups, dim, dim]
    return tuple(part.flatten(0, 1) for part in torch.split(grouped, rows, dim=1))


def _reordered(rows: Tensor, config: TransformerConfig, pairs: tuple[int, int]) -> Tensor:
    """The channels of each head in another order: those that turn, as a matrix of this shape, are transposed.

    Args:
        rows: channels of some heads, [heads x d, …].
        pairs: (-1, 2), where they lie as --rotary-interleaved has them, or (2, -1), where as halves.
    """
    if not config.rotary_interleaved:
        return rows
    heads = rows.reshape(-1, config.head_dim, *rows.shape[1:])  # [heads, d, …]
    turned, passed = heads[:, : config.rotary_dim], heads[:, config.rotary_dim :]
    matrices = turned.reshape(len(heads), *pairs, *rows.shape[1:])  # [heads, r/2, 2, …] or [heads, 2, r/2, …]
    return torch.cat((matrices.transpose(1, 2).flatten(1, 2), passed), dim=1).flatten(0, 1)


_from_halves = partial(_reordered, pairs=(2, -1))
_in_halves = partial(_reordered, pairs=(-1, 2))


def _by_group_from_halves(parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    queries, keys, values = parts
    return _by_group([_from_halves(queries, config), _from_halves(keys, config), values], config)


def _by_kind_in_halves(ours: Tensor, config: TransformerConfig) -> tuple[Tensor, ...]:
    queries, keys, values = _by_kind(ours, config)
    return _in_halves(queries, config), _in_halves(keys, config), values


def _from_packed(parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    (packed,) = parts
    keys = config.query_groups * config.head_dim
    return _by_group(torch.split(packed, [config.query_size, keys, keys]), config)


SAME = Transform(join=lambda parts, config: parts[0], split=lambda ours, config: (ours,))
GATE_AND_UP = Transform(
    join=lambda parts, config: torch.cat(tuple(parts)), split=lambda ours, config: tuple(ours.chunk(2))
)
# Channels of heads, of which theirs turn in pairs (i, i + r/2), and ours, with --rotary-interleaved, (2i, 2i + 1).
IN_HALVES = Transform(
    join=lambda parts, config: _from_halves(parts[0], config),
    split=lambda ours, config: (_in_halves(ours, config),),
)
# Queries, keys and values as three matrices, the first two with channels in halves; and as one, without rotary
# positions, with all queries above all keys above all values.
QUERY_KEY_VALUE = Transform(join=_by_group_from_halves, split=_by_kind_in_halves)
PACKED_QUERY_KEY_VALUE = Transform(join=_from_packed, split=lambda ours, config: (torch.cat(_by_kind(ours, config)),))


def transposed(transform: Transform) -> Transform:
    """The same where their matrices are [in, out], as those of GPT-2. Biases are as they are."""
    return Transform(
        join=lambda parts, config: transform.join([part.t() for part in parts], config),
        split=lambda ours, config: tuple(part.t() for part in transform.split(ours, config)),
    )


@dataclass(frozen=True, kw_only=True)
class Match:
    """One line of a family's table: `{layer}` is the number of a layer, `{kind}` weight or bias.

    Attributes:
        ours: the global name of a parameter.
        theirs: the names of the tensors that it is made from.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME

    def names_for(self, name: str) -> tuple[str, ...] | None:
        """Theirs for one of our parameters; None when this line does not speak of it."""
        pattern = re.escape(self.ours).replace(r"\{layer\}", r"(?P<layer>\d+)")
        found = re.fullmatch(pattern.replace(r"\{kind\}", r"(?P<kind>weight|bias)"), name)
        return None if found is None else tuple(other.format(**found.groupdict()) for other in self.theirs)


def match_of(name: str, matches: Sequence[Match]) -> tuple[Match, tuple[str, ...]]:
    """The line of a table that speaks of a parameter, and their names for it. There must be one."""
    for match in matches:
        if (theirs := match.names_for(name)) is not None:
            return match, theirs
    raise AssertionError(f"the table has no line for {name}")


def their_shapes(match: Match, shape: tuple[int, ...], config: TransformerConfig) -> list[tuple[int, ...]]:
    """Of the tensors that one of ours is made from."""
    parts = match.transform.split(torch.empty(shape, device="meta"), config)
    return [tuple(part.shape) for part in parts]


def joined(
    match: Match, parts: Mapping[str, LazyTensor], shape: tuple[int, ...], config: TransformerConfig
) -> LazyTensor:
    """One of our tensors from theirs, by their names, whose shapes are right.

    Where theirs are of several dtypes, ours is of the narrowest that holds the numbers of all.
    """
    dtype = reduce(torch.promote_types, (part.dtype for part in parts.values()))
    return LazyTensor(
        shape=shape,
        dtype=dtype,
        read=lambda: match.transform.join([part.read().to(dtype) for part in parts.values()], config).contiguous(),
        source=" and ".join(part.source for part in parts.values()),
    )


def split(match: Match, names: Sequence[str], ours: LazyTensor, config: TransformerConfig) -> dict[str, LazyTensor]:
    """Their tensors, by their names, from one of ours."""
    once = _ReadOnce(match, names, ours, config)
    return {
        name: LazyTensor(shape=shape, dtype=ours.dtype, read=partial(once.take, name))
        for name, shape in zip(names, their_shapes(match, ours.shape, config), strict=True)
    }


class _ReadOnce:
    """Their tensors from one of ours, which is read once when each of them is asked for in turn.

    What has been given is not kept; when one is asked for again, ours is read again.
    """

    def __init__(self, match: Match, names: Sequence[str], ours: LazyTensor, config: TransformerConfig) -> None:
        self._match, self._names, self._ours, self._config = match, names, ours, config
        self._waiting: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        if name not in self._waiting:
            parts = self._match.transform.split(self._ours.read(), self._config)
            self._waiting = dict(zip(self._names, (part.contiguous() for part in parts), strict=True))
        return self._waiting.pop(name)
