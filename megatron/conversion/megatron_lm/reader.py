"""Checkpoints of Megatron-LM, in any of its layouts, as models that can be written in another form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.contents import (
    ADVICE,
    NOT_THE_FORM,
    RELEASE,
    TRACKER,
    MegatronContents,
    iteration_folder,
)
from megatron.conversion.megatron_lm.names import EMBEDDING, OF_VOCABULARY
from megatron.conversion.megatron_lm.pickles import errors_named
from megatron.conversion.megatron_lm.shards import check_tensors
from megatron.conversion.megatron_lm.torch_dist import has_torch_dist_layout, read_torch_dist_layout
from megatron.conversion.megatron_lm.torch_layout import has_torch_layout, read_torch_layout
from megatron.conversion.portable import ConversionError, LazyTensor, PortableModel, parts_of


def read_megatron(
    folder: Path, step: int | None = None, *, true_vocab_size: int | None = None, weights_only: bool = False
) -> PortableModel:
    """The model in a folder that Megatron-LM saved into, in its `torch` or `torch_dist` layout.

    Args:
        folder: what `--save` named, or one checkpoint in it.
        step: the iteration; that of the tracker file when not given.
        true_vocab_size: rows of the vocabulary to keep. When not given, all rows are the model's own, those that
            Megatron-LM added for divisibility too: they took part in its loss.
        weights_only: leave out the optimizer, and with it the training.

    Raises:
        ConversionError: there is no checkpoint, it is damaged or incomplete, or its model is none that this version
            has.
    """
    checkpoint = _find(folder, step)
    with errors_named(checkpoint, NOT_THE_FORM):
        contents = _read(checkpoint, weights_only=weights_only)
        tensors = _with_main_weights(contents.tensors, checkpoint)
        rows = tensors[f"model.{EMBEDDING}"].shape[0]
        seq_length = int(contents.arguments.get("seq_length") or contents.arguments["max_position_embeddings"])
    check_tensors(tensors, contents.config, contents.bert, rows, str(checkpoint))
    if true_vocab_size is not None:
        if not 1 <= true_vocab_size <= rows:
            raise ConversionError(
                f"--true-vocab-size {true_vocab_size}: must be from 1 to {rows}, the rows of the vocabulary"
            )
        tensors = dict(_trimmed(tensors, true_vocab_size))
    return PortableModel(
        config=contents.config,
        bert=contents.bert,
        vocab_size=rows if true_vocab_size is None else true_vocab_size,
        seq_length=seq_length,
        tensors=tensors,
        training=contents.training,
    )


def _read(checkpoint: Path, *, weights_only: bool) -> MegatronContents:
    if has_torch_dist_layout(checkpoint):
        return read_torch_dist_layout(checkpoint, weights_only=weights_only)
    if has_torch_layout(checkpoint):
        return read_torch_layout(checkpoint, weights_only=weights_only)
    raise ConversionError(
        "has neither metadata.json (--ckpt-format torch_dist) nor folders mp_rank_00… "
        "(--ckpt-format torch) of Megatron-LM"
    )


def _find(folder: Path, step: int | None) -> Path:
    """The folder of one checkpoint."""
    if not folder.is_dir():
        raise ConversionError(f"{folder}: no such folder")
    if step is None and (has_torch_dist_layout(folder) or has_torch_layout(folder)):
        return folder
    if step is None:
        tracker = folder / TRACKER
        if not tracker.is_file():
            raise ConversionError(
                f"{folder}: has no {TRACKER}, which names the newest checkpoint; --ckpt-step names one"
            )
        text = tracker.read_text(errors="replace").strip()[:20]
        if text == RELEASE:
            name = RELEASE
        elif text.isascii() and text.isdigit():
            name = iteration_folder(int(text))
        else:
            raise ConversionError(f"{tracker}: names {text!r}, which is neither an iteration nor {RELEASE!r}")
    else:
        name = iteration_folder(step)
    if not (folder / name).is_dir():
        there = ", ".join(sorted(entry.name for entry in folder.iterdir() if entry.is_dir())[-5:])
        raise ConversionError(f"{folder}: has no checkpoint {name}; there are {there or 'none'}")
    return folder / name


def _with_main_weights(saved: Mapping[str, LazyTensor], checkpoint: Path) -> dict[str, LazyTensor]:
    """The tensors with the weights that the optimizer updates, where it keeps them apart, as those of the model."""
    tensors = dict(saved)
    for key in [key for key in tensors if key.startswith("main.")]:
        weight = f"model.{key.removeprefix('main.')}"
        if weight in tensors:  # else both are among the differences
            tensors[weight] = _main_weight(tensors.pop(key), tensors[weight], f"{checkpoint}: {weight}")
    if f"model.{EMBEDDING}" not in tensors:
        raise ConversionError(f"has no {EMBEDDING}; the model is neither GPT nor BERT, or incomplete")
    return tensors


def _main_weight(main: LazyTensor, rounded: LazyTensor, what: str) -> LazyTensor:
    """The weight that the optimizer updates, in place of the one that the model computes with, its rounding.

    That they agree shows that it was found at its place, and so were the moments beside it.
    """

    def read() -> Tensor:
        value = main.read()
        if main.shape != rounded.shape or not _is_rounding(rounded.read(), value):
            raise ConversionError(f"{what}: the weight that the optimizer keeps is not that of the model; {ADVICE}")
        return value

    return LazyTensor(shape=main.shape, dtype=main.dtype, read=read, source=main.source)


def _is_rounding(rounded: Tensor, value: Tensor) -> bool:
    """Whether one is the other in its own type."""
    limits = torch.finfo(rounded.dtype)
    for near, exact in zip(parts_of(rounded), parts_of(value)):
        near = near.to(exact.dtype)
        is_near = (exact - near).abs() <= limits.eps * exact.abs() + limits.tiny
        if not (is_near | (exact == near) | (exact.isnan() & near.isnan())).all():
            return False
    return True


def _trimmed(tensors: Mapping[str, LazyTensor], rows: int) -> Iterator[tuple[str, LazyTensor]]:
    for key, tensor in tensors.items():
        if key.endswith(OF_VOCABULARY):
            yield key, _first_rows(tensor, rows)
        else:
            yield key, tensor


def _first_rows(tensor: LazyTensor, rows: int) -> LazyTensor:
    return LazyTensor(
        shape=(rows, *tensor.shape[1:]),
        dtype=tensor.dtype,
        read=lambda: tensor.read()[:rows].contiguous(),
        source=tensor.source,
    )
