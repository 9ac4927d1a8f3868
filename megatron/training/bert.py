"""The task of `pretrain_bert.py`: its model and its data. Nothing else in this package knows what BERT is."""

from __future__ import annotations

from megatron.config.bert import BertConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.config.problems import UserError
from megatron.data.bert_batches import BertCollator
from megatron.data.bert_dataset import build_bert_datasets
from megatron.data.build import token_sources
from megatron.data.masked_lm import BertVocabulary
from megatron.model.bert_model import BertModel
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training.data_loaders import Datasets, SampleCounts
from megatron.training.initialize import MegatronContext
from megatron.training.setup import Vocabulary


def bert_model(context: MegatronContext, stage: StageLayout, vocabulary: Vocabulary) -> BertModel:
    """The model provider."""
    return BertModel(
        context.config.model,
        _section(context),
        stage=stage,
        vocab_size=vocabulary.size,
        padded_vocab_size=vocabulary.padded_size,
        placement=context.placement,
    )


def bert_datasets(context: MegatronContext, vocabulary: Vocabulary, counts: SampleCounts) -> Datasets:
    """The datasets provider.

    Raises:
        UserError: the tokenizer has no tokens for pairs of segments, or the data gives no samples.
    """
    data, bert = context.config.data, _section(context)
    tokens = bert_vocabulary(vocabulary.tokenizer, bert)
    train, valid, test = build_bert_datasets(
        data,
        bert,
        num_samples=(counts.train, counts.valid, counts.test),
        seed=context.config.training.seed,
        vocabulary=tokens,
    )
    return Datasets(
        train=train,
        valid=valid,
        test=test,
        sources=token_sources(train),
        collate=BertCollator(seq_length=data.seq_length, pad=tokens.pad, pairs=bert.binary_head),
    )


def bert_vocabulary(tokenizer: Tokenizer, bert: BertConfig) -> BertVocabulary:
    """What masking must know of a tokenizer.

    Raises:
        UserError: the tokenizer has no such tokens, or does not say which of its tokens continue a word.
    """
    names = {"[CLS]": tokenizer.cls, "[SEP]": tokenizer.sep, "[MASK]": tokenizer.mask, "[PAD]": tokenizer.pad}
    ids = {name: number for name, number in names.items() if number is not None and number >= 0}
    if missing := names.keys() - ids.keys():
        raise UserError(
            f"--tokenizer-type {tokenizer.name}: the vocabulary has no {', '.join(sorted(missing))}, of which samples "
            "of BERT are made; BertWordPieceLowerCase or BertWordPieceCase with a --vocab-file has"
        )
    if bert.whole_word_masking and tokenizer.continues_word is None:
        raise UserError(
            f"--tokenizer-type {tokenizer.name} does not say which tokens continue a word, and whole words are masked; "
            "--no-whole-word-masking masks tokens one by one"
        )
    return BertVocabulary(
        size=tokenizer.vocab_size,
        cls=ids["[CLS]"],
        sep=ids["[SEP]"],
        mask=ids["[MASK]"],
        pad=ids["[PAD]"],
        continues_word=tokenizer.continues_word,
    )


def _section(context: MegatronContext) -> BertConfig:
    bert = context.config.bert
    assert bert is not None, "initialize_megatron was not told that the task is BERT"
    return bert
