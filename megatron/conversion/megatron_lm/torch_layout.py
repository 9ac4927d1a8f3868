"""Megatron-LM's `torch` layout: one folder a rank of the model, with a file for all that it holds.

iter_0000100/mp_rank_TT/          tensor-parallel rank TT, or mp_rank_TT_PPP with pipeline stage PPP
    model_optim_rng.pt            arguments, weights, optimizer, schedule
    distrib_optim.pt              moments and main weights of the distributed optimizer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.config.megatron_config import Task
from megatron.config.transformer import TransformerConfig
from megatron.conversion.megatron_lm.arguments import arguments_of, read_bert, read_config
from megatron.conversion.megatron_lm.contents import (
    BUFFERS_FILE,
    NOT_THE_FORM,
    RANK_FILE,
    MegatronContents,
    rank_folder,
    rank_of,
)
from megatron.conversion.megatron_lm.names import flat_names, is_before_core, native_name, task_of
from megatron.conversion.megatron_lm.optimizer import (
    SavedOptimizer,
    states_by_parameter,
    states_in_buffers,
    training_state,
)
from megatron.conversion.megatron_lm.pickles import StandIn, errors_named, read_torch_file
from megatron.conversion.megatron_lm.shards import ChunkTensors, assembled
from megatron.conversion.portable import ConversionError, LazyTensor


def has_torch_layout(folder: Path) -> bool:
    return any(rank_of(entry.name) for entry in folder.iterdir())


@dataclass(frozen=True, kw_only=True)
class _RankFile:
    """What one rank of the model has saved."""

    path: Path
    content: Mapping[str, Any]
    arguments: Mapping[str, Any]

    def size(self, name: str) -> int:
        return int(self.arguments.get(name) or 1)


def read_torch_layout(folder: Path, *, weights_only: bool) -> MegatronContents:
    """The model, and unless told otherwise its training, in a folder of the layout.

    Raises:
        ConversionError: a rank's folder is missing or does not belong here; a file can not be read, or holds no model
            that this version has.
    """
    grid = _read_ranks(folder)
    first = grid[0][0]
    names = _names(grid)
    config = read_config(first.arguments, before_core=is_before_core(names))
    task = task_of(names)
    with_training = "optimizer" in first.content and not weights_only
    chunks: dict[tuple[int, int], list[ChunkTensors]] = {}
    for stage, ranks in enumerate(grid):
        for rank in ranks:
            with errors_named(rank.path, NOT_THE_FORM):
                for number, chunk in enumerate(_rank_chunks(rank, config, task, with_training=with_training)):
                    chunks.setdefault((number, stage), []).append(chunk)
    training = None
    if with_training:
        training = training_state(first.content, first.arguments, SavedOptimizer.of(first.content["optimizer"]))
    return MegatronContents(
        config=config,
        bert=read_bert(first.arguments) if task == "bert" else None,
        arguments=first.arguments,
        tensors=assembled(chunks, config),
        training=training,
    )


def _read_ranks(folder: Path) -> list[list[_RankFile]]:
    """The files of all ranks, by stage and tensor-parallel rank."""
    ranks = {entry: rank_of(entry.name) for entry in sorted(folder.iterdir())}
    found = {rank: entry / RANK_FILE for entry, rank in ranks.items() if rank is not None}
    start = min(found)
    first = _read_rank(found[start])
    tensor, pipeline = first.size("tensor_model_parallel_size"), first.size("pipeline_model_parallel_size")
    wanted = {(stage, rank) for stage in range(pipeline) for rank in range(tensor)}
    for word, places in (("is missing", wanted - set(found)), ("is one too many", set(found) - wanted)):
        if places:
            stage, rank = min(places)
            raise ConversionError(
                f"{rank_folder(rank, stage, pipeline=pipeline)} {word}; the model was saved at tensor-parallel size "
                f"{tensor} and pipeline-parallel size {pipeline}, as {first.path} says"
            )
    files = {place: first if place == start else _read_rank(found[place]) for place in sorted(found)}
    for file in files.values():
        for name in ("iteration", "checkpoint_version"):
            if file.content.get(name) != first.content.get(name):
                raise ConversionError(f"{file.path}: its {name} is another than that of {first.path}")
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size"):
            if file.arguments.get(name) != first.arguments.get(name):
                raise ConversionError(f"{file.path}: its argument {name} is another than that of {first.path}")
    _check_places([files[place] for place in sorted(files)])
    return [[files[stage, rank] for rank in range(tensor)] for stage in range(pipeline)]


def _check_places(files: Sequence[_RankFile]) -> None:
    """Refuse files, by stage and tensor-parallel rank, that have been exchanged or copied over each other.

    In each order of ranks those that save grow in this way. Tools that cut a model say 0 for all, or nothing.
    """
    ranks = [file.arguments.get("rank") for file in files]
    cut_by_a_tool = not files[0].arguments.get("perform_initialization", True)
    if set(ranks) == {None} or (cut_by_a_tool and set(ranks) == {0}):
        return
    for (before, file), (earlier, rank) in zip(pairwise(files), pairwise(ranks)):
        if not (type(earlier) is type(rank) is int and earlier < rank):
            raise ConversionError(
                f"{file.path}: was saved by rank {rank}, and {before.path} by rank {earlier}: the files are not in the "
                "folders in which they were saved"
            )


def _read_rank(path: Path) -> _RankFile:
    if not path.is_file():
        raise ConversionError(f"{path} is missing, which a folder of a rank holds")
    content = read_torch_file(path)
    with errors_named(path, NOT_THE_FORM):
        fields = arguments_of(content)
    fields.setdefault("tensor_model_parallel_size", fields.get("model_parallel_size", 1))
    return _RankFile(path=path, content=content, arguments=fields)


def _names(grid: Sequence[Sequence[_RankFile]]) -> set[str]:
    """What the tensors of all stages are called."""
    names: set[str] = set()
    for first, *_ in grid:
        with errors_named(first.path, NOT_THE_FORM):
            names.update(name for state in _states_of_models(first) for name, _ in flat_names(state))
    return names


def _rank_chunks(rank: _RankFile, config: TransformerConfig, task: Task, *, with_training: bool) -> list[ChunkTensors]:
    """What a rank holds of each of its model chunks."""
    models = _models(rank, task)
    states = _states(rank, models) if with_training else [{}] * len(models)
    return [_rows_by_heads({"model": model, **state}, rank, config) for model, state in zip(models, states)]


def _states_of_models(rank: _RankFile) -> list[Mapping[str, Any]]:
    """What a rank has of each of its model chunks, as it was saved."""
    content = rank.content
    names = ["model"] if "model" in content else [f"model{number}" for number in range(len(content))]
    states = [content[name] for name in names if name in content]
    if not states or not all(isinstance(state, Mapping) for state in states):
        raise ConversionError("holds no model")
    return states


def _models(rank: _RankFile, task: Task) -> list[dict[str, LazyTensor]]:
    """The weights of a rank's model chunks by our names, in the order of their registration.

    Raises:
        ConversionError: a weight is no tensor.
    """
    models = []
    for state in _states_of_models(rank):
        model = {}
        for name, value in flat_names(state):
            ours = native_name(name, task)
            if ours is None or value is None:
                continue
            if not isinstance(value, LazyTensor):
                kind = value.name if isinstance(value, StandIn) else type(value).__name__
                raise ConversionError(f"{name} is no tensor, but of the type {kind}")
            model[ours] = value
        models.append(model)
    return models


def _rows_by_heads(tensors: ChunkTensors, rank: _RankFile, config: TransformerConfig) -> ChunkTensors:
    """Weights, and states in the same order, with the rows of queries, keys and values by heads, each [q, k, v].

    From version 2 on checkpoints have them so. Before, they were ordered [q, k, v] of all heads of the rank; in version
    1 heads came first and q, k, v last.
    """
    version = float(rank.content.get("checkpoint_version", 0))
    if version >= 2:
        return tensors
    heads = config.num_attention_heads // rank.size("tensor_model_parallel_size")
    return {
        kind: {
            name: _by_heads(tensor, heads, config.head_dim, version) if ".linear_qkv." in name else tensor
            for name, tensor in named.items()
        }
        for kind, named in tensors.items()
    }


def _by_heads(tensor: LazyTensor, heads: int, width: int, version: float) -> LazyTensor:
    if tensor.shape[0] != 3 * heads * width:
        raise ConversionError(f"{tensor.shape[0]} rows of queries, keys and values, and {heads} heads of {width} each")

    def read() -> Tensor:
        rows = tensor.read()
        if version == 0:
            rows = rows.view(3, heads, width, -1).transpose(0, 1)
        else:
            rows = rows.view(heads, width, 3, -1).transpose(1, 2)
        return rows.reshape(tensor.shape)

    return LazyTensor(shape=tensor.shape, dtype=tensor.dtype, read=read, source=tensor.source)


def _states(rank: _RankFile, models: list[dict[str, LazyTensor]]) -> list[ChunkTensors]:
    """Moments and main weights of a rank's model chunks."""
    if "optimizer" not in rank.content:
        raise ConversionError("has no state of the optimizer, which other ranks have")
    if not rank.arguments.get("use_distributed_optimizer"):
        return list(states_by_parameter(SavedOptimizer.of(rank.content["optimizer"]), models))
    path = rank.path.with_name(BUFFERS_FILE)
    if not path.is_file():
        raise ConversionError(f"{path} is missing, which holds the state of the distributed optimizer")
    with errors_named(path, NOT_THE_FORM):
        return states_in_buffers(read_torch_file(path), models, rank.arguments)
