"""Samples stacked to a micro-batch, with masks and positions. Pure functions of the ids.

Megatron-LM's meaning of the three options, with e the id of the end of a document:
  eod_mask_loss          no loss where the *input* is e: no next document's first id is predicted from it.
                         Without it every label counts, e itself and the first id after it.
  reset_position_ids     positions begin again at 0 after each e.
  reset_attention_mask   an id attends only to ids of its own document; e belongs to the one that it closes.

Padding is known by its position, never by its value: a vocabulary may use one id for padding and for e.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.device import to_device
from megatron.data.sample_dataset import TokenArray

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class GPTBatch:
    """One micro-batch.

    Attributes:
        tokens: [b, s] int64 inputs.
        labels: [b, s] int64 the id after each input.
        loss_mask: [b, s] bool, whether the label counts. Not a number, so that it has no precision to lose or to
            force on a loss.
        position_ids: [b, s] int64.
        document_ids: [b, s] int64 number of documents that end before the position, or None where attention
            does not stop at their borders.
        sample_ids: [b] int64 position of each sample in the order of the run, counted over all data-parallel
            ranks.
        document_lengths: of each sample the lengths of its runs of one document id, on the host on any device.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor | None
    sample_ids: Tensor
    document_lengths: tuple[tuple[int, ...], ...] | None = None

    def loss_counts(self) -> dict[str, Tensor]:
        """Tokens that each loss term is a sum over; float64, which counts beyond float32's 2**24 exactly."""
        return {"lm loss": self.loss_mask.sum(dtype=torch.float64)}

    def to(self, device: torch.device) -> Self:
        """The same batch on another device; the host does not wait for the copy."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            labels=to_device(self.labels, device),
            loss_mask=to_device(self.loss_mask, device),
            position_ids=to_device(self.position_ids, device),
            document_ids=None if self.document_ids is None else to_device(self.document_ids, device),
            sample_ids=to_device(self.sample_ids, device),
        )


@dataclass(frozen=True, kw_only=True)
class GPTCollator:
    """Turns samples into a `GPTBatch`.

    Attributes:
        seq_length: s.
        eod: id that ends a document.
        pad: id that fills short samples; None or a negative one, which no embedding has a row for: 0.
        reset_position_ids, reset_attention_mask, eod_mask_loss: see above.
    """

    seq_length: int
    eod: int
    pad: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __call__(self, samples: Sequence[TokenArray], sample_ids: Sequence[int]) -> GPTBatch:
        """Stack samples of at most s + 1 ids each."""
        tokens, labels, has_label = pad_samples(samples, seq_length=self.seq_length, pad=self.pad)  # [b, s]
        ends = document_ends(tokens, samples, eod=self.eod)
        loss_mask = has_label & ~ends if self.eod_mask_loss else has_label
        positions = (
            restarting_positions(ends)
            if self.reset_position_ids
            else np.broadcast_to(np.arange(self.seq_length, dtype=np.int64), tokens.shape).copy()
        )
        return GPTBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(loss_mask),
            position_ids=torch.from_numpy(positions),
            document_ids=torch.from_numpy(documents_before(ends)) if self.reset_attention_mask else None,
            sample_ids=torch.tensor(sample_ids, dtype=torch.int64),
            document_lengths=run_lengths(ends) if self.reset_attention_mask else None,
        )


def pad_samples(
    samples: Sequence[TokenArray], *, seq_length: int, pad: int | None
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Inputs, labels, and where there is a label: [b, s] each. A sample of n ids has n - 1 labels."""
    fill = pad if pad is not None and pad >= 0 else 0
    shape = (len(samples), seq_length)
    tokens = np.full(shape, fill, dtype=np.int64)
    labels = np.full(shape, fill, dtype=np.int64)
    has_label = np.zeros(shape, dtype=np.bool_)
    for row, ids in enumerate(samples):
        assert ids.size <= seq_length + 1, (ids.size, seq_length)
        inputs = ids[:seq_length]
        tokens[row, : inputs.size] = inputs
        num_labels = max(0, ids.size - 1)
        labels[row, :num_labels] = ids[1:]
        has_label[row, :num_labels] = True
    return tokens, labels, has_label


def document_ends(tokens: Int64Array, samples: Sequence[TokenArray], *, eod: int) -> BoolArray:
    """Where an input ends its document: [b, s]. Padding ends none, whatever its id."""
    lengths = np.array([ids.size for ids in samples], dtype=np.int64)
    real: BoolArray = np.arange(tokens.shape[1]) < lengths[:, None]
    ends: BoolArray = (tokens == eod) & real
    return ends


def documents_before(ends: BoolArray) -> Int64Array:
    """Number of documents that end before each position: [b, s]."""
    counts: Int64Array = np.cumsum(ends, axis=1, dtype=np.int64) - ends
    return counts


def run_lengths(ends: BoolArray) -> tuple[tuple[int, ...], ...]:
    """Of each sample the lengths of its documents, whole or not: of [b, s], each sums to s."""
    length = ends.shape[1]
    borders = [[0, *(np.flatnonzero(row[:-1]) + 1).tolist(), length] for row in ends]
    return tuple(tuple(stop - start for start, stop in pairwise(of_row)) for of_row in borders)


def restarting_positions(ends: BoolArray) -> Int64Array:
    """Positions that begin at 0 in each document: [b, s]."""
    positions = np.arange(ends.shape[1], dtype=np.int64)
    starts = np.zeros(ends.shape, dtype=np.int64)
    starts[:, 1:] = np.where(ends[:, :-1], positions[1:], 0)
    restarted: Int64Array = positions - np.maximum.accumulate(starts, axis=1)
    return restarted
