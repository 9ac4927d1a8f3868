"""Tiny BERT models and batches for the tests of this folder."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron.config.bert import BertConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.model.bert_model import BertModel, BertOutput
from megatron.model.init import initialize_weights
from tests.model.tiny import SEQUENCE, VOCAB, whole
from tests.tensor_parallel.ranks import placed


def build_bert(
    config: TransformerConfig,
    *,
    binary_head: bool = True,
    group: CommGroup | None = None,
    stage: StageLayout | None = None,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    vocab_size: int = VOCAB,
    padded_vocab_size: int | None = None,
    seed: int = 7,
) -> BertModel:
    """An initialised model chunk, by default the whole model on one rank."""
    group = CommGroup.single("tensor") if group is None else group
    model = BertModel(
        config,
        BertConfig(binary_head=binary_head),
        stage=whole(config) if stage is None else stage,
        vocab_size=vocab_size,
        padded_vocab_size=-(-vocab_size // group.size) * group.size if padded_vocab_size is None else padded_vocab_size,
        placement=placed(group, sequence_parallel, dtype),
    )
    initialize_weights(model, seed)
    return model


class BertInput(NamedTuple):
    """Tensors of the parameters of `BertModel.forward`, and which losses of tokens count."""

    tokens: Tensor
    token_types: Tensor
    is_real: Tensor
    labels: Tensor
    sentence_labels: Tensor
    loss_mask: Tensor


def bert_batch(lengths: tuple[int, ...] = (24, 17), sequence: int = SEQUENCE, seed: int = 3) -> BertInput:
    """Samples of so many real tokens; every fifth of these, or so, has a loss."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), sequence)
    is_real = torch.arange(sequence)[None, :] < torch.tensor(lengths)[:, None]
    return BertInput(
        tokens=torch.randint(0, VOCAB, shape, generator=generator),
        token_types=(torch.arange(sequence)[None, :] >= torch.tensor(lengths)[:, None] // 2).long(),
        is_real=is_real,
        labels=torch.randint(0, VOCAB, shape, generator=generator),
        sentence_labels=torch.randint(0, 2, shape[:1], generator=generator),
        loss_mask=(torch.rand(shape, generator=generator) < 0.2) & is_real,
    )


def output_of(model: BertModel, batch: BertInput, **more: Any) -> BertOutput:
    """Logits of a model that has its output."""
    return cast(BertOutput, model(batch.tokens, batch.token_types, batch.is_real, **more))


def losses_of(model: BertModel, batch: BertInput, **more: Any) -> BertOutput:
    return output_of(model, batch, labels=batch.labels, sentence_labels=batch.sentence_labels, **more)


def mean_loss(losses: BertOutput, batch: BertInput) -> Tensor:
    """Megatron-LM's: the mean over masked tokens, plus that over pairs."""
    tokens = (losses.tokens * batch.loss_mask).sum() / batch.loss_mask.sum()
    return tokens if losses.pairs is None else tokens + losses.pairs.mean()
