"""Samples of BERT stacked to a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from megatron.core.device import to_device
from megatron.data.bert_dataset import BertSample


@dataclass(frozen=True, kw_only=True)
class BertBatch:
    """One micro-batch.

    Attributes:
        tokens: [b, s] int64 inputs, some of them hidden.
        token_types: [b, s] int64, 1 in the second segment of a pair.
        labels: [b, s] int64 what stood there before.
        loss_mask: [b, s] bool, where a token was hidden: only these count.
        is_real: [b, s] bool, False behind the end of a sample.
        sentence_labels: [b] int64, 1 where the segments of the pair are exchanged; None where samples are no pairs.
        sample_ids: [b] int64 position of each sample in the order of the run, counted over all data-parallel
            ranks.
    """

    tokens: Tensor
    token_types: Tensor
    labels: Tensor
    loss_mask: Tensor
    is_real: Tensor
    sentence_labels: Tensor | None
    sample_ids: Tensor

    def loss_counts(self) -> dict[str, Tensor]:
        """What each loss term is a sum over, hidden tokens and pairs; float64 counts beyond 2**24 exactly."""
        counts = {"lm loss": self.loss_mask.sum(dtype=torch.float64)}
        if self.sentence_labels is not None:
            counts["sop loss"] = torch.tensor(len(self.sentence_labels), dtype=torch.float64, device=self.tokens.device)
        return counts

    def to(self, device: torch.device) -> Self:
        """The same batch on another device; the host does not wait for the copy."""
        tensors = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return replace(self, **{name: to_device(tensor, device) for name, tensor in tensors.items()})


@dataclass(frozen=True, kw_only=True)
class BertCollator:
    """Turns samples into a `BertBatch`.

    Attributes:
        seq_length: s.
        pad: id behind the end of a sample.
        pairs: whether samples are pairs of segments, which a second loss tells apart from exchanged ones.
    """

    seq_length: int
    pad: int
    pairs: bool

    def __call__(self, samples: Sequence[BertSample], sample_ids: Sequence[int]) -> BertBatch:
        """Stack samples of at most s tokens each."""
        shape = (len(samples), self.seq_length)
        tokens, labels = np.full((2, *shape), self.pad, dtype=np.int64)  # [b, s] each
        token_types = np.zeros(shape, dtype=np.int64)
        loss_mask, is_real = np.zeros((2, *shape), dtype=np.bool_)
        for row, sample in enumerate(samples):
            length = sample.tokens.size
            tokens[row, :length] = sample.tokens
            token_types[row, :length] = sample.token_types
            labels[row, :length] = sample.labels
            loss_mask[row, :length] = sample.loss_mask
            is_real[row, :length] = True
        exchanged = torch.tensor([sample.exchanged for sample in samples], dtype=torch.int64)
        return BertBatch(
            tokens=torch.from_numpy(tokens),
            token_types=torch.from_numpy(token_types),
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(loss_mask),
            is_real=torch.from_numpy(is_real),
            sentence_labels=exchanged if self.pairs else None,
            sample_ids=torch.tensor(sample_ids, dtype=torch.int64),
        )
