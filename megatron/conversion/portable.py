"""A model on its way from one form to another: what every reader returns and every writer takes.

A reader opens files and reads no tensor; a writer reads one tensor after the other, writes it and lets go of it. So a
model that is larger than the memory can be converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.bert import BertConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.config.problems import UserError, listing
from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import narrow_
from megatron.core.shard import Shard, shard_of
from megatron.core.tensor_parallel.placement import Placement
from megatron.model.bert_model import BertModel
from megatron.model.gpt_model import GPTModel

AT_ONCE = 2**20  # elements of a tensor that are looked at together


class ConversionError(UserError):
    """A model cannot be read from, or written in, a form; the text says which file, which tensor and why."""


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is read when it is needed, and not kept.

    Attributes:
        read: the whole tensor of this shape and dtype, contiguous, on the CPU; each call reads it again.
        source: where that is from, for messages: a file, or a name in one. "" says nothing.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    source: str = ""


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
        bert: what does so besides, of a BERT; None for a GPT.
        vocab_size: rows of the embedding that are the model's own.
        seq_length: tokens of the context that it was trained on.
        tensors: by the key of a native checkpoint: weights as `model.<name>`, with a training state also its moments as
            `optimizer.<kind>.<name>`. Shapes are global, without rows that were added as padding.
        tokenizer_files: files that make its tokenizer, by the names that Hugging Face has for them.
        tokenizer_settings: what `tokenizer_config.json` must say of them, where it is not there itself.
        generation: what `generation_config.json` of Hugging Face says: the ids that begin and end a text, for one.
        training: of a model whose training can go on.
        notes: what its user should know of how it was read, a line each.
    """

    config: TransformerConfig
    bert: BertConfig | None = field(default=None)
    vocab_size: int
    seq_length: int
    tensors: Mapping[str, LazyTensor]
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    tokenizer_settings: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    training: TrainingState | None = field(default=None)
    notes: tuple[str, ...] = field(default=())


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

    return LazyTensor(shape=lazy.shape, dtype=dtype, read=read, source=lazy.source)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Of two tensors of a shape, in double precision. NaN is as NaN, and infinitely far from any number."""
    largest = 0.0
    for mine, theirs in zip(parts_of(one), parts_of(other)):
        mine, theirs = mine.double(), theirs.double()
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        if not same.all():
            apart = (mine - theirs).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
            largest = max(largest, float(apart.max()))
    return largest


def not_finite(values: Tensor) -> str:
    """How many of the numbers are none to compute with, in words; "" for none."""
    nan = infinite = 0
    for part in parts_of(values):
        if not part.isfinite().all():
            nan += int(part.isnan().sum())
            infinite += int(part.isinf().sum())
    counts = (f"{nan:,} NaN" if nan else "", f"{infinite:,} infinite" if infinite else "")
    return " and ".join(filter(None, counts))


def parts_of(values: Tensor) -> tuple[Tensor, ...]:
    """Some elements at a time: what is computed of all at once would take several tensors."""
    return torch.split(values.flatten(), AT_ONCE)


def build_chunk(
    config: TransformerConfig, bert: BertConfig | None, vocab_size: int, layers: range, *, device: str
) -> GPTModel | BertModel:
    """Some layers of our model in float32, without values; with the first the embedding, with the last the output."""
    stage = StageLayout(
        stage=0,
        chunk=0,
        layers=layers,
        has_embedding=layers.start == 0,
        has_output=layers.stop == config.num_layers,
    )
    placement = Placement(
        group=CommGroup.single("tensor"), sequence_parallel=False, dtype=torch.float32, device=torch.device(device)
    )
    if bert is None:
        return GPTModel(config, stage=stage, vocab_size=vocab_size, padded_vocab_size=vocab_size, placement=placement)
    return BertModel(
        config, bert, stage=stage, vocab_size=vocab_size, padded_vocab_size=vocab_size, placement=placement
    )


def global_shards(config: TransformerConfig, bert: BertConfig | None, vocab_size: int) -> dict[str, Shard]:
    """The global parameters of a model by their names; no memory is taken for them."""
    model = build_chunk(config, bert, vocab_size, range(config.num_layers), device="meta")
    return {shard_of(parameter).name: shard_of(parameter) for parameter in model.parameters()}


def global_shapes(config: TransformerConfig, bert: BertConfig | None, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The same with nothing but their shapes."""
    return {name: shard.global_shape for name, shard in global_shards(config, bert, vocab_size).items()}


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
