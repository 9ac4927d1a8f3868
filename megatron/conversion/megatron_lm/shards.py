"""Tensors that Megatron-LM has cut, over tensor-parallel ranks, stages and model chunks, as whole ones; and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron.checkpointing.slices import Box
from megatron.config.bert import BertConfig
from megatron.config.transformer import TransformerConfig
from megatron.conversion.megatron_lm.contents import ADVICE
from megatron.conversion.megatron_lm.names import (
    EMBEDDING,
    OF_FIRST,
    OF_LAST,
    OF_VOCABULARY,
    OUTPUT,
    chunk_names,
    layer_of,
    with_layer,
)
from megatron.conversion.megatron_lm.pickles import StridedTensor
from megatron.conversion.portable import (
    AT_ONCE,
    ConversionError,
    LazyTensor,
    global_shapes,
    largest_difference,
    refuse_differences,
)

# A model chunk of one rank: by kind ("model", "optimizer.exp_avg", …) and then by name, with layers counted from 0.
ChunkTensors = Mapping[str, Mapping[str, LazyTensor]]

_ROWS = (*OF_VOCABULARY, "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_GATED_ROWS = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")
_COLUMNS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")


def split_dimension(name: str) -> int | None:
    """Along which dimension Megatron-LM splits a tensor over tensor-parallel ranks; None: each has it whole."""
    if name.endswith((*_ROWS, *_GATED_ROWS)):
        return 0
    return 1 if name.endswith(_COLUMNS) else None


def merged(key: str, parts: Sequence[LazyTensor], *, gated: bool) -> LazyTensor:
    """The whole of a tensor from its parts on the tensor-parallel ranks, in their order.

    Args:
        key: its kind and its name.
        gated: the first projection of the MLP is [gate; up], on each rank of its own.

    Raises:
        ConversionError: the parts do not fit each other; or, when the tensor is read, ranks that have it whole have
            other values.
    """
    first, dim, size = parts[0], split_dimension(key), len(parts)
    if size == 1:
        return first
    blocks = 2 if gated and key.endswith(_GATED_ROWS) else 1
    fits = dim is None or (len(first.shape) > dim and first.shape[dim] % blocks == 0)
    if not fits or any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts):
        shapes = ", ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
        raise ConversionError(f"{key}: its parts on the tensor-parallel ranks do not fit each other: {shapes}")
    if dim is None:
        return _same_on_all(key, parts)
    shape = (*first.shape[:dim], first.shape[dim] * size, *first.shape[dim + 1 :])

    def read() -> Tensor:
        whole = torch.empty(shape, dtype=first.dtype)
        places = [block.chunk(size, dim) for block in whole.chunk(blocks, dim)]
        for rank, part in enumerate(parts):
            _read_blocks(part, [place[rank] for place in places], dim)
        return whole

    sources = dict.fromkeys(part.source for part in parts)
    return LazyTensor(shape=shape, dtype=first.dtype, read=read, source=" and ".join(sources))


def _same_on_all(key: str, parts: Sequence[LazyTensor]) -> LazyTensor:
    """A tensor that each rank has whole, and that is compared when it is read: ranks compute the same with it, and have
    the same gradients of it."""
    first, *others = parts

    def read() -> Tensor:
        values = first.read()
        for other in others:
            if apart := _difference(values, other):
                raise ConversionError(
                    f"{key} of {other.source} differs from that of {first.source}, by up to {apart:.3g}, and "
                    f"tensor-parallel ranks have it alike{_advice(key)}"
                )
        return values

    return LazyTensor(shape=first.shape, dtype=first.dtype, read=read, source=first.source)


def with_tied_copy(whole: dict[str, LazyTensor], kind: str, copy: Sequence[LazyTensor]) -> None:
    """Have the word embeddings compared, when they are read, with the copy that an output layer has of them.

    Args:
        whole: tensors by kind and our name; those of the kind are looked at.
        copy: its parts on the tensor-parallel ranks.

    Raises:
        ConversionError: the copy is of another shape; or, when the embeddings are read, of other values.
    """
    key, copied = f"{kind}.{EMBEDDING}", f"{kind}.{OUTPUT}"
    original = whole.get(key)
    if original is None:
        return
    shape = (copy[0].shape[0] * len(copy), *copy[0].shape[1:]) if copy[0].shape else ()
    if shape != original.shape or any(part.shape != copy[0].shape for part in copy):
        raise ConversionError(f"{copied} is {list(shape)}, and {key}, of which it is a copy, {list(original.shape)}")

    def read() -> Tensor:
        values = original.read()
        for part, rows in zip(copy, values.chunk(len(copy))):
            if apart := _difference(rows, part):
                raise ConversionError(
                    f"{copied} of {part.source} differs from {key} of {original.source}, by up to {apart:.3g}, and is "
                    f"tied to it: they are of two trainings, or one is damaged{_advice(key)}"
                )
        return values

    whole[key] = LazyTensor(shape=original.shape, dtype=original.dtype, read=read, source=original.source)


def _advice(key: str) -> str:
    return "" if key.startswith("model.") else f"; {ADVICE}"


def _difference(values: Tensor, other: LazyTensor) -> float:
    """The largest one from another tensor of the same shape, of which a part is in memory if it is stored as it is."""
    if not isinstance(other, StridedTensor) or not other.shape:
        return largest_difference(values, other.read())
    rows = max(1, AT_ONCE // max(1, math.prod(other.shape[1:])))
    boxes = [
        Box(offset=(first, *(0,) * (len(other.shape) - 1)), shape=(min(rows, other.shape[0] - first), *other.shape[1:]))
        for first in range(0, other.shape[0], rows)
    ]
    return max((largest_difference(values[box.index], other.part(box).read()) for box in boxes), default=0.0)


def _read_blocks(part: LazyTensor, places: Sequence[Tensor], dim: int) -> None:
    """Read a tensor, block for block along a dimension, into the places of its blocks.

    What is stored as it is goes straight there: of a large vocabulary there is no second copy beside the whole.
    """
    if not isinstance(part, StridedTensor):
        for place, values in zip(places, part.read().chunk(len(places), dim)):
            place.copy_(values)
        return
    for number, place in enumerate(places):
        block = Box.whole(tuple(place.shape))
        start = (*block.offset[:dim], number * place.shape[dim], *block.offset[dim + 1 :])
        part.part(block.moved_by(start)).read_into(place)


def cut(name: str, whole: Tensor, rank: int, size: int, *, gated: bool) -> Tensor:
    """A tensor-parallel rank's part of a tensor; the other way round."""
    dim = split_dimension(name)
    if dim is None:
        return whole
    blocks = whole.chunk(2 if gated and name.endswith(_GATED_ROWS) else 1, dim)
    return torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim)


def cut_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of such a part."""
    dim = split_dimension(name)
    return shape if dim is None else (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def assembled(
    chunks: Mapping[tuple[int, int], Sequence[ChunkTensors]], config: TransformerConfig
) -> dict[str, LazyTensor]:
    """Whole tensors, by kind and our name, from what all ranks hold.

    A model that is cut into chunks goes over the stages first and over the chunks of each second, so this order of the
    places counts the layers, however many each has.

    Args:
        chunks: by (chunk, stage), of each tensor-parallel rank.

    Raises:
        ConversionError: a rank lacks what its neighbour has, or a stage holds what belongs to another; or, when a
            tensor is read, two copies of it differ.
    """
    whole: dict[str, LazyTensor] = {}
    copies: dict[str, Sequence[LazyTensor]] = {}
    before = 0
    places = sorted(chunks)
    ends = {**dict.fromkeys(OF_FIRST, places[0]), **dict.fromkeys(OF_LAST, places[-1])}
    for place in places:
        ranks = chunks[place]
        for kind, tensors in ranks[0].items():
            for name in tensors:
                for prefix, end in ends.items():
                    if name.startswith(prefix) and place != end:
                        raise ConversionError(
                            f"{kind}.{name} is of pipeline stage {end[1]}, and pipeline stage {place[1]} holds it: the "
                            "files are not in the folders in which they were saved"
                        )
                parts = [rank[kind][name] for rank in ranks if name in rank.get(kind, {})]
                if len(parts) != len(ranks):
                    raise ConversionError(
                        f"{kind}.{name} of pipeline stage {place[1]}: {len(parts)} of {len(ranks)} tensor-parallel "
                        f"ranks have it"
                    )
                if name == OUTPUT and config.tied_embeddings:
                    copies[kind] = parts
                    continue
                key = f"{kind}.{with_layer(name, before)}"
                whole[key] = merged(key, parts, gated=config.gated)
        layers = [layer_of(name) for tensors in ranks[0].values() for name in tensors]
        before += max((layer + 1 for layer in layers if layer is not None), default=0)
    for kind, copy in copies.items():
        with_tied_copy(whole, kind, copy)
    return whole


def model_chunks(
    config: TransformerConfig, names: Iterable[str], *, pipeline: int, virtual: int, transformer_impl: str
) -> dict[tuple[int, int], dict[str, str]]:
    """The parameters of each model chunk, by (chunk, stage): by the name with layers counted from 0, our own name.

    They are in the order of their registration, and the stages have the same number of layers.

    Args:
        names: our names of all parameters.
    """
    layers = config.num_layers // (pipeline * virtual)
    chunks = {}
    for number, stage in itertools.product(range(virtual), range(pipeline)):
        here = chunk_names(
            names,
            layers,
            first=(number, stage) == (0, 0),
            last=(number, stage) == (virtual - 1, pipeline - 1),
            tied=config.tied_embeddings,
            transformer_impl=transformer_impl,
        )
        before = (number * pipeline + stage) * layers
        ours = {name: with_layer(name, before) for name in here}
        if config.tied_embeddings and OUTPUT in ours:
            ours[OUTPUT] = EMBEDDING
        chunks[number, stage] = ours
    return chunks


def check_tensors(
    tensors: Mapping[str, LazyTensor],
    config: TransformerConfig,
    bert: BertConfig | None,
    vocab_size: int,
    source: str,
) -> None:
    """Refuse tensors that are not those of the model, each kind for itself.

    Raises:
        ConversionError: lists what is missing, what there is besides, and what has another shape.
    """
    kinds = {".".join(key.split(".")[: 2 if key.startswith("optimizer.") else 1]) for key in tensors}
    shapes = global_shapes(config, bert, vocab_size)
    wanted = {f"{kind}.{name}": shape for kind in sorted(kinds | {"model"}) for name, shape in shapes.items()}
    refuse_differences(source, wanted, tensors)
