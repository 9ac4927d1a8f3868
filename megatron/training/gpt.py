"""The task of `pretrain_gpt.py`: its model and its data. Nothing else in this package knows what GPT is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np

from megatron.config.data import DataConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.config.problems import UserError
from megatron.data.batches import GPTCollator
from megatron.data.build import build_gpt_datasets, token_sources
from megatron.data.fill_in_middle import FillInTheMiddleDataset, MiddleMover
from megatron.data.sample_dataset import SampleDataset, TokenArray
from megatron.model.gpt_model import GPTModel
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training.data_loaders import Datasets, SampleCounts
from megatron.training.initialize import MegatronContext
from megatron.training.setup import Vocabulary

# A text that is cut within a word.
_CUT_TEXT = ("the quic", "k brown fox")


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


def middle_mover(data: DataConfig, tokenizer: Tokenizer) -> MiddleMover:
    """What `--fim-data` asks for.

    Raises:
        UserError: a token is not in the vocabulary or has two roles, or the tokenizer adds something of its own to
            each text.
    """
    if tokenizer.encode(""):
        raise UserError(
            f"--fim-data tokenizes parts of documents, and --tokenizer-type {tokenizer.name} would add tokens of its "
            "own to each of them; --tokenizer-hf-no-include-special-tokens leaves them out"
        )
    _check_joins(tokenizer)

    def of(flag: str, token: str) -> int:
        found = tokenizer.token_id(token)
        if found is None:
            raise UserError(
                f"{flag} {token}: the vocabulary of --tokenizer-type {tokenizer.name} has no such token, and "
                f"--fim-data needs it; {flag} says what it is called there"
            )
        return found

    roles = {
        "--fim-prefix-token": of("--fim-prefix-token", data.fim_prefix_token),
        "--fim-middle-token": of("--fim-middle-token", data.fim_middle_token),
        "--fim-suffix-token": of("--fim-suffix-token", data.fim_suffix_token),
        "--fim-pad-token": of("--fim-pad-token", data.fim_pad_token),
        "--fim-eod-token": tokenizer.eod if data.fim_eod_token is None else of("--fim-eod-token", data.fim_eod_token),
    }
    if data.fim_split_sample is not None:
        roles["--fim-split-sample"] = of("--fim-split-sample", data.fim_split_sample)
    _check_distinct(roles, tokenizer)
    return MiddleMover(
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        fragment_rate=data.fim_fragment_rate,
        no_prefix=data.fim_no_prefix,
        prefix=roles["--fim-prefix-token"],
        middle=roles["--fim-middle-token"],
        suffix=roles["--fim-suffix-token"],
        pad=roles["--fim-pad-token"],
        eod=roles["--fim-eod-token"],
        split=roles.get("--fim-split-sample"),
        encode=tokenizer.encode,
        decode=tokenizer.decode,
    )


def ordinary_marks(data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """Flags and tokens of `--fim-data` that ordinary text gives too."""
    named = {
        "--fim-prefix-token": data.fim_prefix_token,
        "--fim-middle-token": data.fim_middle_token,
        "--fim-suffix-token": data.fim_suffix_token,
        "--fim-pad-token": data.fim_pad_token,
        "--fim-eod-token": data.fim_eod_token,
    }
    return [f"{flag} {token}" for flag, token in named.items() if token is not None and _is_ordinary(token, tokenizer)]


def _is_ordinary(token: str, tokenizer: Tokenizer) -> bool:
    token_id = tokenizer.token_id(token)
    if token_id is None or tokenizer.is_special(token_id):
        return False
    text = tokenizer.decode([token_id])
    # Twice: a model of SentencePiece that begins each text with a space knows other pieces further on.
    return token_id in tokenizer.encode(f"{text}\n{text}")


def _check_joins(tokenizer: Tokenizer) -> None:
    """That parts of a text, tokenized one by one, make the text again."""
    before, after = _CUT_TEXT
    back = tokenizer.decode([*tokenizer.encode(before), *tokenizer.encode(after)])
    if back != before + after:
        raise UserError(
            f"--fim-data tokenizes parts of documents, and --tokenizer-type {tokenizer.name} changes them where they "
            f"are joined: {before!r} and {after!r} come back as {back!r}; use a tokenizer that puts no space before a "
            "text, such as a byte-level BPE (GPT2BPETokenizer) or a SentencePiece of tools/train_tokenizer.py"
        )


def _check_distinct(roles: Mapping[str, int], tokenizer: Tokenizer) -> None:
    """That no id stands for two things, the end of documents among them, where --fim-eod-token names another."""
    if tokenizer.eod != roles["--fim-eod-token"]:
        roles = {**roles, "the tokenizer's end of a document": tokenizer.eod}
    for (one, token), (other, same) in combinations(roles.items(), 2):
        if token == same:
            raise UserError(
                f"{one} and {other} are one token, id {token}: --fim-data would take one for the other; give {one} "
                "a token of the vocabulary that nothing else is"
            )
