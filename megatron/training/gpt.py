"""The task of `pretrain_gpt.py`: its model and its data. Nothing else in this package knows what GPT is."""

from __future__ import annotations

import numpy as np

from megatron.config.pipeline_layout import StageLayout
from megatron.data.batches import GPTCollator
from megatron.data.build import build_gpt_datasets, token_sources
from megatron.data.fill_in_middle import FillInTheMiddleDataset
from megatron.data.sample_dataset import SampleDataset, TokenArray
from megatron.model.gpt_model import GPTModel
from megatron.training.data_loaders import Datasets, SampleCounts
from megatron.training.fill_in_middle import middle_mover, ordinary_marks
from megatron.training.initialize import MegatronContext
from megatron.training.setup import Vocabulary


def gpt_model(context: MegatronContext, stage: StageLayout, vocabulary: Vocabulary) -> GPTModel:
    """The model provider."""
    return GPTModel(
        context.config.model,
        stage=stage,
        vocab_size=vocabulary.size,
        padded_vocab_size=vocabulary.padded_size,
        placement=context.placement,
    )


def gpt_datasets(context: MegatronContext, vocabulary: Vocabulary, counts: SampleCounts) -> Datasets:
    """The datasets provider."""
    data, tokenizer, seed = context.config.data, vocabulary.tokenizer, context.config.training.seed
    mover = middle_mover(data, tokenizer) if data.fim_data else None
    if data.fim_data and (ordinary := ordinary_marks(data, tokenizer)):
        context.say(
            f"warning: {', '.join(ordinary)}: ordinary text is encoded so too, and a model cannot tell it from the "
            "mark; --special-tokens of tools/train_tokenizer.py are tokens that no text gives"
        )
    train, valid, test = build_gpt_datasets(
        data,
        num_samples=(counts.train, counts.valid, counts.test),
        seed=seed,
        vocab_size=vocabulary.size,
        eod=tokenizer.eod,
    )

    def moved(dataset: SampleDataset[TokenArray], split: str) -> SampleDataset[TokenArray]:
        return dataset if mover is None else FillInTheMiddleDataset(dataset, mover, seed=seed, split=split)

    return Datasets(
        train=None if train is None else moved(train, "train"),
        valid={name: moved(dataset, name) for name, dataset in valid.items()},
        test=None if test is None else moved(test, "test"),
        sources=token_sources(train),
        blank=np.empty(0, dtype=np.int64),
        collate=GPTCollator(
            seq_length=data.seq_length,
            eod=tokenizer.eod,
            pad=tokenizer.pad if mover is None else mover.pad,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        ),
    )
