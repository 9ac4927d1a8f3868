"""The task of `pretrain_gpt.py`: its model and its data. Nothing else in this package knows what GPT is."""

from __future__ import annotations

import numpy as np

from megatron.config.pipeline_layout import StageLayout
from megatron.core.tensor_parallel.placement import Placement
from megatron.data.batches import GPTCollator
from megatron.data.build import build_gpt_datasets, token_sources
from megatron.model.gpt_model import GPTModel
from megatron.training.data_loaders import Datasets, SampleCounts
from megatron.training.initialize import MegatronContext
from megatron.training.setup import Vocabulary


def gpt_model(context: MegatronContext, stage: StageLayout, vocabulary: Vocabulary) -> GPTModel:
    """The model provider."""
    config = context.config
    return GPTModel(
        config.model,
        stage=stage,
        vocab_size=vocabulary.size,
        padded_vocab_size=vocabulary.padded_size,
        placement=Placement(
            group=context.state.tensor,
            sequence_parallel=config.parallel.sequence_parallel,
            dtype=config.optimizer.params_dtype,
            device=context.device,
        ),
    )


def gpt_datasets(context: MegatronContext, vocabulary: Vocabulary, counts: SampleCounts) -> Datasets:
    """The datasets provider."""
    data, tokenizer = context.config.data, vocabulary.tokenizer
    train, valid, test = build_gpt_datasets(
        data,
        num_samples=(counts.train, counts.valid, counts.test),
        seed=context.config.training.seed,
        vocab_size=vocabulary.size,
        eod=tokenizer.eod,
    )
    return Datasets(
        train=train,
        valid=valid,
        test=test,
        sources=token_sources(train, valid, test),
        blank=np.empty(0, dtype=np.int64),
        collate=GPTCollator(
            seq_length=data.seq_length,
            eod=tokenizer.eod,
            pad=tokenizer.pad,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        ),
    )
