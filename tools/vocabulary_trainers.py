"""How `train_tokenizer.py` learns a vocabulary of each kind: from texts to the bytes of the files that make it."""

import io
import json
import multiprocessing
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

from command_line import progress
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, FixedLength
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from megatron.config.problems import UserError
from megatron.tokenizer.sentencepiece_tokenizer import LITERAL_SPACE_SYMBOL, SPACE_SYMBOL
from megatron.tokenizer.tokenizers_tokenizer import GPT2_END_OF_TEXT, only_merges_make
from megatron.tokenizer.wordpiece_tokenizer import SPECIAL_TOKENS, UNKNOWN

END_OF_DOCUMENT = GPT2_END_OF_TEXT
# What the library calls unknown, begin, end and padding, the last three of which a model here does without.
SENTENCEPIECE_NAMES = ["<unk>", "<s>", "</s>", "<pad>"]
USER_SYMBOLS = ["\n", "\t", "\r", *(SPACE_SYMBOL * count for count in range(2, 17))]
SENTENCEPIECE_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# unknown, end of document, the mark of a literal U+2581, the symbols above, a space, and the bytes
SENTENCEPIECE_RESERVED = 3 + len(USER_SYMBOLS) + 1 + len(SENTENCEPIECE_BYTES)
BPE_RESERVED = 256 + 1
WORDPIECE_SPECIAL = [SPECIAL_TOKENS["pad"], UNKNOWN, *(SPECIAL_TOKENS[role] for role in ("cls", "sep", "mask"))]
LINE_CHARACTERS = 4096
# The time that a word takes grows with the square of its length.
SHORT_WORDS = FixedLength(LINE_CHARACTERS)
# Characters that a WordPiece vocabulary knows; the rarest of others are unknown, with the words that they stand in.
LARGEST_ALPHABET = 1000
# What occurs once teaches nothing.
LEAST_COUNT = 2


# ---- SentencePiece ----


def train_sentencepiece(
    documents: Sequence[str], vocab_size: int, special_tokens: Sequence[str]
) -> Mapping[str, bytes]:
    """A lossless SentencePiece BPE; special tokens are control symbols, which no text gives.

    The trainer runs in a child, because its only sign of progress is what it writes to the process's stderr.

    Raises:
        UserError: the text cannot fill the vocabulary, or the vocabulary cannot hold the text's characters.
    """
    log_end, log_start = os.pipe()
    result, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_train_in_child, args=(documents, vocab_size, special_tokens, log_start, sender)
    )
    child.start()
    os.close(log_start)
    sender.close()
    last_lines: deque[str] = deque(maxlen=3)
    num_merges = vocab_size - SENTENCEPIECE_RESERVED - len(special_tokens)
    with progress(num_merges, "learning merges", unit=" tokens") as bar:
        with os.fdopen(log_end) as log:
            for line in log:
                last_lines.append(line.strip())
                if learnt := re.search(r"(?:merges|size)=(\d+)", line):
                    bar.update(int(learnt[1]) - bar.n)
        bar.update(num_merges - bar.n)
    try:
        outcome = result.recv()
    except EOFError:
        outcome = RuntimeError(" | ".join(last_lines))
    child.join()
    if isinstance(outcome, bytes):
        return {"tokenizer_model": outcome}
    raise _refusal(str(outcome), vocab_size, SENTENCEPIECE_RESERVED + len(special_tokens))


def _refusal(said: str, vocab_size: int, reserved: int) -> UserError:
    """What SentencePiece says, in words of the options that there are here."""
    if needed := re.search(r"smaller than required_chars. \d+ vs (\d+)", said):
        return UserError(
            f"--vocab-size {vocab_size}: must be {int(needed[1]):,} or more, which bytes, fixed symbols and "
            "characters of the text take"
        )
    if given := re.search(r"too high .* <= (\d+)", said):
        return _not_filled(int(given[1]), vocab_size, reserved)
    if "sentences_.empty()" in said:  # newlines alone
        return _not_filled(0, vocab_size, reserved)
    refusal = said.rsplit("] ", 1)[-1]  # without the place in its source
    return UserError(f"--vocab-size {vocab_size}: SentencePiece refuses: {refusal}")


def _train_in_child(
    documents: Sequence[str], vocab_size: int, special_tokens: Sequence[str], log: int, sender: Connection
) -> None:
    os.dup2(log, 2)
    os.close(log)
    model = io.BytesIO()
    outcome: bytes | Exception
    try:
        SentencePieceTrainer.train(
            # An iterator and a stream, not paths: paths would be kept in the model and make each one different.
            sentence_iterator=_lines(documents),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            byte_fallback=True,
            user_defined_symbols=USER_SYMBOLS,
            control_symbols=[LITERAL_SPACE_SYMBOL, *special_tokens],
            # A space in bytes would come back as U+2581; texts in Chinese have none, or too few to be covered.
            required_chars=SPACE_SYMBOL,
            unk_id=0,
            eos_id=1,
            eos_piece=END_OF_DOCUMENT,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=4 * LINE_CHARACTERS,
        )
    except (RuntimeError, ValueError) as error:
        outcome = error
    else:
        outcome = model.getvalue()
    # The parent reads the log to its end before the outcome, which is larger than a pipe holds.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sender.send(outcome)


def _lines(documents: Sequence[str]) -> Iterator[str]:
    """Lines of bounded length: a newline is a symbol, which no token crosses, so cutting there is free."""
    for document in documents:
        for line in document.split("\n"):
            for start in range(0, len(line), LINE_CHARACTERS):
                yield line[start : start + LINE_CHARACTERS]


# ---- byte-level BPE ----


def train_byte_level_bpe(
    documents: Sequence[str], vocab_size: int, special_tokens: Sequence[str]
) -> Mapping[str, bytes]:
    """GPT-2's kind: the 256 bytes, the merges in their order, the end of a document, and last the special tokens.

    No text gives those: there are no merges that make them.

    Raises:
        UserError: the text cannot fill the vocabulary, or a special token is a word.
    """
    added = [END_OF_DOCUMENT, *special_tokens]
    for token in special_tokens:
        if only_merges_make(token):
            raise UserError(
                f"--special-tokens {token}: is one word, as tokens of a text are; a special one is of letters and "
                "signs, such as <fim_prefix>"
            )
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = PreTokenizers([ByteLevel(add_prefix_space=False), SHORT_WORDS])
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(added),
        min_frequency=LEAST_COUNT,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(_read(documents), trainer)
    learnt = json.loads(backend.to_str())["model"]
    vocabulary = {**learnt["vocab"], **{token: index for index, token in enumerate(added, len(learnt["vocab"]))}}
    _check_filled(len(vocabulary), vocab_size, BPE_RESERVED + len(special_tokens))
    merges = "".join(f"{left} {right}\n" for left, right in learnt["merges"])
    return {
        "vocab_file": json.dumps(dict(sorted(vocabulary.items(), key=lambda item: item[1]))).encode(),
        "merge_file": f"#version: 0.2\n{merges}".encode(),
    }


# ---- WordPiece ----


def train_wordpiece(
    documents: Sequence[str], vocab_size: int, special_tokens: Sequence[str], *, lower_case: bool
) -> Mapping[str, bytes]:
    """BERT's kind: its special tokens, those given, the characters, those that continue a word, and longer pieces.

    A special token that is a plain word is given by that word, as there is only this one list; one with punctuation is
    given by no text.

    Raises:
        UserError: the text cannot fill the vocabulary, it gives a special token, or its characters do not fit in.
    """
    backend = Tokenizer(WordPiece(unk_token=UNKNOWN))
    backend.normalizer = BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = PreTokenizers([BertPreTokenizer(), SHORT_WORDS])
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(backend.normalizer.normalize_str(document))
    characters = [character for character in counts if not character.isspace()]
    alphabet = sorted(sorted(characters, key=lambda character: (-counts[character], character))[:LARGEST_ALPHABET])
    # Given to the trainer in an order: it would number what continues a word as its hash tables have it.
    continuing = [f"##{character}" for character in alphabet if _can_continue(character)]
    first = [*WORDPIECE_SPECIAL, *alphabet, *continuing]
    reserved = len(first) + len(special_tokens)
    if reserved >= vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size}: must be above the {reserved:,} that special tokens and "
            f"{len(alphabet):,} characters of the text take"
        )
    trainer = WordPieceTrainer(
        vocab_size=vocab_size - len(special_tokens),
        min_frequency=LEAST_COUNT,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(_read(documents), trainer)
    learnt = backend.get_vocab()
    _check_not_learnt(special_tokens, learnt)
    _check_filled(len(learnt) + len(special_tokens), vocab_size, reserved)
    tokens = sorted(learnt, key=lambda token: learnt[token])
    place = len(WORDPIECE_SPECIAL)
    tokens[place:place] = special_tokens
    return {"vocab_file": "".join(f"{token}\n" for token in tokens).encode()}


def _can_continue(character: str) -> bool:
    """Whether a word may go on with it; punctuation and Chinese characters are words of their own."""
    return len(BertPreTokenizer().pre_tokenize_str(f"a{character}")) == 1


# ---- both ----


def _read(documents: Sequence[str]) -> Iterator[str]:
    with progress(len(documents), "counting words", unit=" texts") as bar:
        for document in documents:
            yield document
            bar.update()


def _check_not_learnt(special_tokens: Sequence[str], learnt: Container[str]) -> None:
    for token in special_tokens:
        if token in learnt:
            raise UserError(
                f"--special-tokens {token}: is a token that the text gives; a special one must differ from those, as "
                f"<{token}> does"
            )


def _check_filled(learnt: int, vocab_size: int, reserved: int) -> None:
    if learnt != vocab_size:
        raise _not_filled(learnt, vocab_size, reserved, f", each of which occurs in it at least {LEAST_COUNT} times")


def _not_filled(learnt: int, vocab_size: int, reserved: int, rule: str = "") -> UserError:
    """That a text gives fewer tokens than are asked for; `reserved` of them are there before any is learnt."""
    if learnt <= reserved:
        return UserError(
            f"--vocab-size {vocab_size}: the text is too small, as it gives no token beyond the {reserved:,} that are "
            "there before one is learnt; give more text"
        )
    return UserError(f"--vocab-size {vocab_size}: the text gives {learnt:,} tokens{rule}; give that size, or more text")
