"""A user's own pretraining script: own data, own model of plain torch layers, own loss, own arguments.

torchrun --nproc-per-node 2 pretrain_mine.py --my-period 5 --num-layers 1 --hidden-size 16 …
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.training.data_loaders import Datasets
from megatron.training.pretrain import pretrain


def my_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--my-period", type=int, default=7, help="After how many numbers the series repeats.")


class Series:
    """Numbers that count up and begin again."""

    def __init__(self, length: int, period: int, samples: int) -> None:
        self.length, self.period, self.samples = length, period, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> Tensor:
        return (torch.arange(self.length + 1) + number) % self.period


@dataclass(frozen=True)
class SeriesBatch:
    numbers: Tensor  # [b, s + 1]
    sample_ids: Tensor  # [b]

    def loss_counts(self) -> dict[str, Tensor]:
        return {"series loss": torch.tensor(self.numbers[:, 1:].numel())}

    def to(self, device: torch.device) -> SeriesBatch:
        return SeriesBatch(self.numbers.to(device), self.sample_ids.to(device))


def collate(samples: Sequence[Tensor], positions: Sequence[int]) -> SeriesBatch:
    return SeriesBatch(torch.stack(list(samples)), torch.tensor(positions))


def my_datasets(context, vocabulary, counts) -> Datasets:  # type: ignore[no-untyped-def]
    length, period = context.config.data.seq_length, context.extra.my_period
    train, valid = (Series(length, period, samples) for samples in (sum(counts.train), counts.valid))
    return Datasets(train=train, valid={"validation": valid}, test=None, collate=collate)  # type: ignore[arg-type]


class MyModel(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same first weights on all ranks
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.hidden = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, numbers: Tensor) -> Tensor:
        logits: Tensor = self.output(torch.tanh(self.hidden(self.embedding(numbers))))
        return logits


def my_model(context, stage, vocabulary) -> MyModel:  # type: ignore[no-untyped-def]
    return MyModel(vocabulary.size, context.config.model.hidden_size)


def my_forward_step(batch: SeriesBatch, model: nn.Module, hidden_states, dropout) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    logits = model(batch.numbers[:, :-1])  # [b, s, v]
    return {"series loss": F.cross_entropy(logits.flatten(0, 1), batch.numbers[:, 1:].flatten(), reduction="sum")}


if __name__ == "__main__":
    pretrain(my_datasets, my_model, my_forward_step, extra_args_provider=my_arguments)
