"""What `--fim-data` asks of a tokenizer: tokens that mark the parts of a document, and parts that can be joined."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from megatron.config.data import DataConfig
from megatron.config.problems import UserError
from megatron.data.fill_in_middle import MiddleMover
from megatron.tokenizer.tokenizer import Tokenizer

# A text that is cut within a word.
_CUT_TEXT = ("the quic", "k brown fox")


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
    ids = {flag: _id_of(token, flag, tokenizer) for flag, token in _tokens(data).items() if token is not None}
    ids.setdefault("--fim-eod-token", tokenizer.eod)
    _check_distinct(ids, tokenizer)
    _check_joins(tokenizer)
    return MiddleMover(
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        fragment_rate=data.fim_fragment_rate,
        no_prefix=data.fim_no_prefix,
        prefix=ids["--fim-prefix-token"],
        middle=ids["--fim-middle-token"],
        suffix=ids["--fim-suffix-token"],
        pad=ids["--fim-pad-token"],
        eod=ids["--fim-eod-token"],
        split=ids.get("--fim-split-sample"),
        encode=tokenizer.encode,
        decode=tokenizer.decode,
    )


def ordinary_marks(data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """Flags and tokens of `--fim-data` that ordinary text gives too; the one at which it is cut is to be of it."""
    return [
        f"{flag} {token}"
        for flag, token in _tokens(data).items()
        if token is not None and flag != "--fim-split-sample" and _is_ordinary(token, tokenizer)
    ]


def _tokens(data: DataConfig) -> dict[str, str | None]:
    """Tokens by the flags that name them; None: a flag is not given."""
    return {
        "--fim-prefix-token": data.fim_prefix_token,
        "--fim-middle-token": data.fim_middle_token,
        "--fim-suffix-token": data.fim_suffix_token,
        "--fim-pad-token": data.fim_pad_token,
        "--fim-split-sample": data.fim_split_sample,
        "--fim-eod-token": data.fim_eod_token,
    }


def _id_of(token: str, flag: str, tokenizer: Tokenizer) -> int:
    found = tokenizer.token_id(token)
    if found is None:
        raise UserError(
            f"{flag} {token}: the vocabulary of --tokenizer-type {tokenizer.name} has no such token, and "
            f"--fim-data needs it; {flag} says what it is called there"
        )
    return found


def _is_ordinary(token: str, tokenizer: Tokenizer) -> bool:
    token_id = tokenizer.token_id(token)
    if token_id is None or tokenizer.is_special(token_id):
        return False
    text = tokenizer.decode([token_id])
    # Twice: a model of SentencePiece that begins each text with a space knows other pieces further on.
    return token_id in tokenizer.encode(f"{text}\n{text}")


def _check_distinct(ids: Mapping[str, int], tokenizer: Tokenizer) -> None:
    """That no id stands for two things, the end of documents among them, where --fim-eod-token names another."""
    if tokenizer.eod != ids["--fim-eod-token"]:
        ids = {**ids, "the tokenizer's end of a document": tokenizer.eod}
    for (one, token), (other, same) in combinations(ids.items(), 2):
        if token == same:
            raise UserError(
                f"{one} and {other} are one token, id {token}: --fim-data would take one for the other; give {one} "
                "a token of the vocabulary that nothing else is"
            )


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
