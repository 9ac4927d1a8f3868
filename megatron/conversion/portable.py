"""A model on its way from one form to another: what every reader returns and every writer takes.

A reader opens files and reads no tensor; a writer reads one tensor after the other, writes it and lets go of it. So a
model that is larger than the memory can be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.problems import UserError
from megatron.config.transformer import TransformerConfig


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
        tokenizer_files: files to be copied beside the model, as it came with them.
        training: of a model whose training can go on.
    """

    config: TransformerConfig
    vocab_size: int
    seq_length: int
    tensors: Mapping[str, LazyTensor]
    tokenizer_files: tuple[Path, ...] = ()
    training: TrainingState | None = field(default=None)
