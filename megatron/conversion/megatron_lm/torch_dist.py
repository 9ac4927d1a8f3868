"""Megatron-LM's `torch_dist` layout: global tensors, in chunks that a pickled index says where to find.

    iter_0000100/metadata.json   names the layout; written last
                 .metadata       the index of `torch.distributed.checkpoint`
                 __R_N.distcp    chunks one after the other, each a file of torch.save
                 common.pt       what all ranks have alike; new versions keep it among the chunks

The layers of a model are stacked: one tensor [layers, …] holds those of all, under a name without a number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.slices import Box, tiling_fault
from megatron.config.bert import BertConfig
from megatron.config.transformer import TransformerConfig
from megatron.conversion.megatron_lm.arguments import arguments_of, read_bert, read_config
from megatron.conversion.megatron_lm.contents import ADVICE, NOT_THE_FORM, STATES, MegatronContents
from megatron.conversion.megatron_lm.flat_buffers import IN_BUFFERS, bucket_limit, flat_buckets
from megatron.conversion.megatron_lm.names import EMBEDDING, OUTPUT, native_name, task_of
from megatron.conversion.megatron_lm.optimizer import SavedOptimizer, training_state
from megatron.conversion.megatron_lm.pickles import (
    StandIn,
    StridedTensor,
    errors_named,
    is_shape,
    read_pickle,
    read_torch_file,
)
from megatron.conversion.megatron_lm.shards import ChunkTensors, assembled, cut_shape, model_chunks, with_tied_copy
from megatron.conversion.portable import ConversionError, LazyTensor, global_shapes

_MARKER = "metadata.json"
_INDEX = ".metadata"
_COMMON = "common.pt"
_STACKED = re.compile(r"(decoder|encoder)\.layers\.(?!\d+\.)")
_BUFFER = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(.*\)\.bucket_idx_(\d+)\.(\w+)"
)
# What the distributed optimizer's ranks have alike, of the first of them.
_DISTRIBUTED = "optimizer.distributed.dp_group_idx_0."
# Kinds of the optimizer's tensors that have the names of parameters.
_STATE_KINDS = {f"optimizer.state.{name}.": f"{kind}." for name, kind in STATES.items()}


def has_torch_dist_layout(folder: Path) -> bool:
    return (folder / _MARKER).is_file() or (folder / _INDEX).is_file()


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where bytes are: in a file of the checkpoint."""

    path: Path
    start: int
    length: int

    def read(self) -> Any:
        return read_torch_file(self.path, start=self.start, length=self.length)


@dataclass(frozen=True, kw_only=True)
class _ChunkedTensor:
    """A tensor of the index, in the chunks that tile it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[Box, _Place], ...]

    def part(self, box: Box, shape: tuple[int, ...]) -> LazyTensor:
        """A box of it, as a tensor of a shape of its own."""
        return LazyTensor(shape=shape, dtype=self.dtype, read=lambda: self._read(box).reshape(shape), source=self.key)

    def _read(self, box: Box) -> Tensor:
        whole = torch.empty(box.shape, dtype=self.dtype)
        for chunk, place in self.chunks:
            common = chunk.intersect(box)
            if common is not None:
                values = place.read()
                if not isinstance(values, StridedTensor) or (values.shape, values.dtype) != (chunk.shape, self.dtype):
                    raise ConversionError(f"{place.path}: what is there of {self.key} is not the chunk {chunk} of it")
                part = values.part(common.seen_from(chunk.offset))
                part.read_into(whole[common.seen_from(box.offset).index])
        return whole


def read_torch_dist_layout(folder: Path, *, weights_only: bool) -> MegatronContents:
    """The model, and unless told otherwise its training, in a folder of the layout.

    Raises:
        ConversionError: the index or a file is damaged, or the model is none that this version has.
    """
    _check_marker(folder)
    with errors_named(folder / _INDEX, NOT_THE_FORM):
        tensors, objects = _read_index(folder)
    common = _common_state(folder, objects)
    arguments = arguments_of(common)
    config = read_config(arguments)
    bert = read_bert(arguments) if task_of(tensors) == "bert" else None
    with_training = "optimizer" in common and not weights_only
    whole = _whole_tensors(tensors, config, with_training=with_training)
    training = None
    if with_training:
        optimizer = common["optimizer"]
        buffers = {key: tensor for key, tensor in tensors.items() if key.startswith("optimizer.distributed.")}
        if buffers:
            whole |= _from_buffers(buffers, config, bert, arguments, tensors[EMBEDDING].shape[0])
            optimizer = {**optimizer, "optimizer": _first_object(objects, f"{_DISTRIBUTED}optimizer/")}
            if any(key.startswith(f"{_DISTRIBUTED}grad_scaler/") for key in objects):
                optimizer["grad_scaler"] = _first_object(objects, f"{_DISTRIBUTED}grad_scaler/")
        training = training_state(common, arguments, SavedOptimizer.of(optimizer))
    return MegatronContents(config=config, bert=bert, arguments=arguments, tensors=whole, training=training)


def _check_marker(folder: Path) -> None:
    marker = folder / _MARKER
    if not marker.is_file():
        raise ConversionError(
            f"has no {_MARKER}, which Megatron-LM writes last: the save did not end, or the checkpoint is of "
            f"--ckpt-format torch_dcp or fsdp_dtensor, which can not be read; torch and torch_dist can"
        )
    with errors_named(marker, "names no sharded_backend"):
        backend = json.loads(marker.read_text())["sharded_backend"]
        if backend != "torch_dist":
            raise ConversionError(f"the layout is {backend!r}, which can not be read; torch_dist can")


def _read_index(folder: Path) -> tuple[dict[str, _ChunkedTensor], dict[str, _Place]]:
    """The tensors and the objects of a checkpoint, by key."""
    index = read_pickle(folder / _INDEX)
    fields = index.fields if isinstance(index, StandIn) else {}
    described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise ConversionError("is no index of torch.distributed.checkpoint")
    places: dict[tuple[str, tuple[int, ...]], _Place] = {}
    for key, value in stored.items():
        places[key.fields["fqn"], tuple(key.fields.get("offset") or ())] = _place(folder, value.fields)
    tensors, objects = {}, {}
    for key, entry in described.items():
        if entry.name.endswith(".TensorStorageMetadata"):
            tensors[key] = _chunked(key, entry.fields, places)
        elif (key, ()) in places:
            objects[key] = places[key, ()]
    return tensors, objects


def _place(folder: Path, fields: Mapping[str, Any]) -> _Place:
    name, start, length = fields["relative_path"], fields["offset"], fields["length"]
    if fields.get("transform_descriptors"):
        raise ConversionError(f"{name} is compressed or otherwise transformed, which can not be undone")
    if type(name) is not str:
        raise ConversionError(f"a file is named by a {type(name).__name__}")
    if Path(name).name != name or name in ("", ".", ".."):
        raise ConversionError(f"names the file {name!r}, which is not the plain name of one in the folder")
    if not (folder / name).is_file():
        raise ConversionError(f"{name} is missing, which it names")
    if not all(type(value) is int and value >= 0 for value in (start, length)):
        raise ConversionError(f"a place in {name} is no number of bytes")
    return _Place(path=folder / name, start=start, length=length)


def _chunked(
    key: str, fields: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...]], _Place]
) -> _ChunkedTensor:
    shape, properties = tuple(fields["size"]), fields["properties"]
    kept = properties.state if isinstance(properties.state, tuple) else tuple(properties.fields.values())
    dtypes = [value for value in kept if isinstance(value, torch.dtype)]
    if len(dtypes) != 1 or not is_shape(shape):
        raise ConversionError(f"{key} has no shape or type")
    chunks = []
    for chunk in fields["chunks"]:
        box = Box(offset=tuple(chunk.fields["offsets"]), shape=tuple(chunk.fields["sizes"]))
        if not (is_shape(box.offset) and is_shape(box.shape)):
            raise ConversionError(f"{key} has a chunk that is none")
        place = places.get((key, box.offset))
        if place is None:
            raise ConversionError(f"says of the chunk {box} of {key} not where it is")
        if box.volume * dtypes[0].itemsize > place.length:
            raise ConversionError(f"the chunk {box} of {key} should fit into {place.length} bytes, which it does not")
        chunks.append((box, place))
    fault = tiling_fault(shape, [box for box, _ in chunks])
    if fault is not None:
        raise ConversionError(f"{key}: {fault}")
    return _ChunkedTensor(key=key, shape=shape, dtype=dtypes[0], chunks=tuple(chunks))


def _common_state(folder: Path, objects: Mapping[str, _Place]) -> Any:
    """What is no tensor and all ranks have alike."""
    path = folder / _COMMON
    return read_torch_file(path) if path.is_file() else _first_object(objects, "common_state/")


def _first_object(objects: Mapping[str, _Place], prefix: str) -> Any:
    """What is under the key that begins so. It is kept as a list of what one rank had of it."""
    keys = [key for key in objects if key.startswith(prefix)]
    if not keys:
        raise ConversionError(f"has no {prefix.removesuffix('/')}")
    value = objects[keys[0]].read()
    return value[0] if isinstance(value, list) and value else value


def _whole_tensors(
    tensors: Mapping[str, _ChunkedTensor], config: TransformerConfig, *, with_training: bool
) -> dict[str, LazyTensor]:
    """Weights, and the states that are kept under the names of parameters, by kind and our name."""
    task = task_of(tensors)
    found: dict[str, LazyTensor] = {}
    for key, stored in tensors.items():
        kind, name = "model.", key
        if key.startswith("optimizer."):
            prefix = next((prefix for prefix in _STATE_KINDS if key.startswith(prefix)), None)
            if prefix is None or not with_training:
                continue
            kind, name = _STATE_KINDS[prefix], key.removeprefix(prefix)
            if name in tensors and tensors[name].shape != stored.shape:
                raise ConversionError(
                    f"{key}: has the shape {list(stored.shape)}, and the weight {list(tensors[name].shape)}: the "
                    f"distributed optimizer of older versions kept flat parts of tensors, which are not read; {ADVICE}"
                )
        for full, tensor in _layers(name, stored, config):
            ours = native_name(full, task)
            if ours is not None:
                found[f"{kind}{ours}"] = tensor
    for copy in [key for key in found if config.tied_embeddings and key.endswith(f".{OUTPUT}")]:
        with_tied_copy(found, copy.removesuffix(f".{OUTPUT}"), [found.pop(copy)])
    return found


def _layers(name: str, stored: _ChunkedTensor, config: TransformerConfig) -> Iterator[tuple[str, LazyTensor]]:
    """The tensor by its name, or one of each layer where all are stacked in it."""
    if not _STACKED.match(name):
        yield name, stored.part(Box.whole(stored.shape), stored.shape)
        return
    if not stored.shape or stored.shape[0] != config.num_layers:
        raise ConversionError(
            f"{stored.key}: has the shape {list(stored.shape)}, and should hold {config.num_layers} layers"
        )
    inner = stored.shape[1:]
    for layer in range(config.num_layers):
        box = Box(offset=(layer, *(0,) * len(inner)), shape=(1, *inner))
        yield _STACKED.sub(rf"\1.layers.{layer}.", name, count=1), stored.part(box, inner)


def _from_buffers(
    buffers: Mapping[str, _ChunkedTensor],
    config: TransformerConfig,
    bert: BertConfig | None,
    arguments: Mapping[str, Any],
    vocab_size: int,
) -> dict[str, LazyTensor]:
    """Moments and main weights from the flat buffers that each rank of the model had with its data-parallel peers."""
    by_place: dict[tuple[int, int, int, str], _ChunkedTensor] = {}
    for key, stored in buffers.items():
        match = _BUFFER.fullmatch(key)
        if match is None:
            raise ConversionError(f"{key} belongs to a form of the optimizer that is not known; {ADVICE}")
        by_place[int(match[1]), int(match[2]), int(match[3]), match[4]] = stored
    tensor, pipeline = (int(arguments.get(f"{kind}_model_parallel_size") or 1) for kind in ("tensor", "pipeline"))
    virtual = int(arguments.get("virtual_pipeline_model_parallel_size") or 1)
    uneven = arguments.get("pipeline_model_parallel_layout") or config.num_layers % (pipeline * virtual)
    if uneven or any(arguments.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")):
        raise ConversionError(f"its stages have different numbers of layers, and so its buffers; {ADVICE}")
    shapes = global_shapes(config, bert, vocab_size)
    impl = str(arguments.get("transformer_impl"))
    named = model_chunks(config, shapes, pipeline=pipeline, virtual=virtual, transformer_impl=impl)
    chunks: dict[tuple[int, int], list[ChunkTensors]] = {}
    for (number, stage), names in named.items():
        buckets = flat_buckets(
            {name: cut_shape(name, shapes[ours], tensor) for name, ours in names.items()},
            limit=bucket_limit(arguments, number),
            shared_embedding=pipeline > 1 and config.tied_embeddings,
        )
        for rank in range(tensor):
            states: dict[str, dict[str, LazyTensor]] = {}
            for which, bucket in enumerate(buckets):
                for state in IN_BUFFERS:
                    flat = by_place.get((stage * tensor + rank, number, which, state))
                    if flat is None or flat.shape[0] < bucket.length:
                        raise ConversionError(
                            f"bucket {which} of model chunk {number} on stage {stage} should hold "
                            f"{bucket.length} elements of {state}, and does not; {ADVICE}"
                        )
                    for name, (start, shape) in bucket.places.items():
                        box = Box(offset=(start,), shape=(math.prod(shape),))
                        states.setdefault(STATES[state], {})[name] = flat.part(box, shape)
            chunks.setdefault((number, stage), []).append(states)
    return assembled(chunks, config)
