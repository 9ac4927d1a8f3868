"""A model on its way from one form to another: what every reader returns and every writer takes.

A reader opens files and reads no tensor; a writer reads one tensor after the other, writes it and lets go of it. So a
model that is larger than the memory can be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.pipeline_layout import StageLayout
from megatron.config.problems import UserError, listing
from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import narrow_
from megatron.core.shard import shard_of
from megatron.core.tensor_parallel.placement import Placement
from megatron.model.gpt_model import GPTModel


class ConversionError(UserError):
    """A model cannot be read from, or written in, a form; the text says which file, which tensor and why."""


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is read when it is needed, and not kept.

    Attributes:
        read: the whole tensor of this shape and dtype, contiguous, on the CPU; each call reads it again.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What a resumed training needs besides tensors, as the metadata of a checkpoint hold it.

    Attributes:
        iteration: iterations done.
        consumed_samples: of the training data.
        scheduler: state of the learning rate's schedule.
        optimizer: state of the optimizer that is no tensor: the number of steps, the loss scale.
        flags: the values of the training's own flags, by our fields.
    """

    iteration: int
    consumed_samples: int
    scheduler: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    flags: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PortableModel:
    """A model between two forms.

    Attributes:
        config: what defines the model.
        vocab_size: rows of the embedding that are the model's own.
        seq_length: tokens of the context that it was trained on.
        tensors: by the key of a native checkpoint: weights as `model.<name>`, with a training state also its moments as
            `optimizer.<kind>.<name>`. Shapes are global, without rows that were added as padding.
        tokenizer_files: files that make its tokenizer, by the names that Hugging Face has for them.
        generation: what `generation_config.json` of Hugging Face says: the ids that begin and end a text, for one.
        training: of a model whose training can go on.
    """

    config: TransformerConfig
    vocab_size: int
    seq_length: int
    tensors: Mapping[str, LazyTensor]
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    training: TrainingState | None = field(default=None)


def in_dtype(model: PortableModel, dtype: torch.dtype) -> PortableModel:
    """The model with its weights in a dtype, rounded as a training rounds those that it computes with.

    Raises:
        ConversionError: a training goes along, whose main weights would be rounded; or, when a tensor is read, it has a
            number that the dtype does not reach.
    """
    if model.training is not None:
        raise ConversionError(
            "--dtype would round the weights that a training goes on from; --weights-only leaves it out"
        )
    return replace(model, tensors={key: _in_dtype(key, lazy, dtype) for key, lazy in model.tensors.items()})


def _in_dtype(key: str, lazy: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    def read() -> Tensor:
        values = lazy.read()
        if values.dtype in (torch.float32, torch.float64):
            rounded = torch.empty(values.shape, dtype=dtype)
            narrow_(values, rounded)
        else:
            rounded = values.to(dtype)
        reach = torch.finfo(dtype).max
        if reach < torch.finfo(values.dtype).max and rounded.isinf().sum() > values.isinf().sum():
            raise ConversionError(
                f"{key} has numbers beyond {reach:.5g}, the largest of {str(dtype).removeprefix('torch.')}: "
                "they would be infinite; choose another --dtype"
            )
        return rounded

    return LazyTensor(shape=lazy.shape, dtype=dtype, read=read)


def global_shapes(config: TransformerConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The global parameters of a model by their names, with their shapes; no memory is taken for them."""
    model = GPTModel(
        config,
        stage=StageLayout(stage=0, chunk=0, layers=range(config.num_layers), has_embedding=True, has_output=True),
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        placement=Placement(
            group=CommGroup.single("tensor"),
            sequence_parallel=False,
            dtype=torch.float32,
            device=torch.device("meta"),
        ),
    )
    return {shard_of(parameter).name: shard_of(parameter).global_shape for parameter in model.parameters()}


def refuse_differences(source: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, LazyTensor]) -> None:
    """Refuse tensors that are not those of the model.

    Raises:
        ConversionError: lists what is missing, what there is besides, and what has another shape.
    """
    lines = [f"{name} {list(shape)} is missing" for name, shape in wanted.items() if name not in found]
    lines += [f"{name} {list(found[name].shape)} is none of it" for name in found if name not in wanted]
    lines += [
        f"{name} is {list(found[name].shape)}, and should be {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    if lines:
        raise ConversionError(f"{source}: its tensors are not those of the model:\n{listing(lines)}")
