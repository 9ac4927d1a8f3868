"""A tiny BERT, trained like the GPT of `tests.helpers.tiny`, on samples that are functions of their numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.config.arguments import parse_arguments
from megatron.config.megatron_config import MegatronConfig
from megatron.data.bert_batches import BertCollator
from megatron.data.bert_dataset import BertSample
from megatron.training.bert import bert_model
from megatron.training.data_loaders import Datasets, SampleCounts
from megatron.training.initialize import MegatronContext
from megatron.training.pretrain import build_run
from megatron.training.run import Run
from megatron.training.setup import Vocabulary
from pretrain_bert import forward_step
from tests.helpers.tiny import StepResult, context_of_rank, steps_of

# Every tensor-parallel size up to 8 divides it but the vocabulary, which no size does.
TINY_BERT = [
    *("--num-layers", "4", "--hidden-size", "48", "--num-attention-heads", "24", "--kv-channels", "4"),
    *("--ffn-hidden-size", "96", "--seq-length", "24", "--max-position-embeddings", "24"),
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "3"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "251", "--mock-data"),
    *("--lr", "1e-2", "--lr-decay-style", "cosine", "--clip-grad", "0.5", "--weight-decay", "0.1"),
    *("--adam-eps", "1e-6"),  # see TINY_GPT
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0", "--num-workers", "0"),
]


@dataclass(frozen=True)
class NumberedSamples:
    """Samples of 5 to `longest` tokens; in every fourth, which is as long as one can be, no token is masked."""

    count: int
    longest: int
    vocabulary: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> BertSample:
        random = np.random.default_rng(number)
        length = self.longest if number % 4 == 3 else int(random.integers(5, self.longest + 1))
        labels = random.integers(0, self.vocabulary, length)
        loss_mask = random.random(length) < (0.0 if number % 4 == 3 else 0.3)
        tokens = np.where(loss_mask, 4, labels)
        return BertSample(
            tokens=tokens,
            token_types=(np.arange(length) >= length // 2).astype(np.int64),
            labels=labels,
            loss_mask=loss_mask,
            exchanged=bool(random.random() < 0.5),
            truncated=False,
        )


def numbered_datasets(context: MegatronContext, vocabulary: Vocabulary, counts: SampleCounts) -> Datasets:
    """In the place of `bert_datasets`."""
    data, bert = context.config.data, context.config.bert
    assert bert is not None
    train, valid, test = (
        NumberedSamples(count, data.seq_length, vocabulary.size)
        for count in (sum(counts.train), counts.valid, counts.test)
    )
    collate = BertCollator(seq_length=data.seq_length, pad=0, pairs=bert.binary_head)
    return Datasets(train=train, valid={"validation": valid} if valid else {}, test=test or None, collate=collate)


def tiny_bert_config(*arguments: str, world_size: int = 1) -> MegatronConfig:
    """`TINY_BERT` with further arguments; of a flag given twice the last one counts."""
    config, _ = parse_arguments([*TINY_BERT, *arguments], task="bert", world_size=world_size, say=lambda text: None)
    return config


def tiny_bert_run(rank: int, world_size: int, *arguments: str) -> Run:
    config = tiny_bert_config(*arguments, world_size=world_size)
    return build_run(context_of_rank(config, rank, world_size), numbered_datasets, bert_model, forward_step)


def train_bert_steps(rank: int, world_size: int, steps: int, *arguments: str) -> list[StepResult]:
    """Train and report after each step; run it with `run_distributed`."""
    return steps_of(tiny_bert_run(rank, world_size, *arguments), steps)
