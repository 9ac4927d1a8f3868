"""Many texts to ids at once, by the fastest library that gives exactly the ids of the tokenizer itself.

`fastokens` reads the tokenizers of the `tokenizers` library and is ten times as fast. That it gives the same ids is
not believed but seen, on a part of the input and on texts that set libraries apart, before anything is written.
"""

import os
import sys
import unicodedata
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.tokenizers_tokenizer import TokenizersTokenizer

EXTRA = "pip install 'megatron-pretraining[fast]'"

# All ids, and how many of them each text has.
Ids = tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]


class BatchTokenizer(Protocol):
    def __call__(self, texts: Sequence[str]) -> Ids:
        """The ids of the texts, one after another; texts hold no lone surrogate.

        Raises:
            UserError: the tokenizer refuses a text.
        """


class OneByOne:
    """The tokenizer itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: Sequence[str]) -> Ids:
        ids = [self._tokenizer.encode(text) for text in texts]
        lengths = np.array([len(each) for each in ids], dtype=np.int64)
        return np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum())), lengths


class Fastokens:
    """The `fastokens` library, in one thread of the process that calls it.

    Raises:
        UserError: the library knows no such tokenizer.
    """

    def __init__(self, tokenizer: TokenizersTokenizer) -> None:
        from fastokens import Tokenizer as Backend

        try:
            self._backend = Backend.from_json_str(tokenizer.tokenizer_json())
        except ValueError as error:
            raise UserError(f"fastokens does not know this tokenizer ({error})") from None
        self._special = tokenizer.include_special_tokens

    def __call__(self, texts: Sequence[str]) -> Ids:
        ids, offsets = self._backend.encode_batch_flat(list(texts), add_special_tokens=self._special)
        return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(offsets, np.uint64).astype(np.int64))

    def added_tokens(self) -> list[str]:
        """The tokens that are looked for in a text before it is cut: <|endoftext|> and such."""
        return [token["content"] for token in self._backend.added_tokens()]

    def start_alone(self) -> None:
        """Make the library's threads now, none: processes are the parallelism, and each would have one a core."""
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})  # it makes as many threads as it sees further cores
        try:
            self(["a b"])
        finally:
            os.sched_setaffinity(0, cores)


def fast_tokenizer(tokenizer: Tokenizer) -> tuple[Fastokens | None, str]:
    """The fast library for a tokenizer, not yet proven; or None and why not."""
    if not isinstance(tokenizer, TokenizersTokenizer):
        return None, f"{tokenizer.name} has no faster library than its own"
    if find_spec("fastokens") is None:
        return None, f"fastokens, which is ten times as fast, is not installed: {EXTRA}"
    try:
        return Fastokens(tokenizer), ""
    except UserError as error:
        return None, str(error)


def difference(fast: BatchTokenizer, exact: BatchTokenizer, texts: Sequence[str]) -> str | None:
    """The first text of which two tokenizers give different ids, None when there is none."""
    (ids, lengths), (wanted_ids, wanted_lengths) = fast(texts), exact(texts)
    if np.array_equal(lengths, wanted_lengths) and np.array_equal(ids, wanted_ids):
        return None
    begins, wanted_begins = np.cumsum(lengths) - lengths, np.cumsum(wanted_lengths) - wanted_lengths
    for text, begin, length, wanted, wanted_length in zip(texts, begins, lengths, wanted_begins, wanted_lengths):
        if not np.array_equal(ids[begin : begin + length], wanted_ids[wanted : wanted + wanted_length]):
            return text
    raise AssertionError("all texts have equal ids, and the ids of all differ")


def telling_texts(added: Sequence[str]) -> list[str]:
    """Short texts that libraries are known to tokenize differently: odd characters, and `added` tokens."""
    categories: dict[str, list[str]] = {}
    for code in range(0, sys.maxunicode + 1, 41):
        categories.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    del categories["Cs"]
    shown = [characters[:: len(characters) // 100 + 1] for characters in categories.values()]
    return [
        *(
            "",
            " ",
            "  ",
            "\n",
            " \n ",
            "\r\n\r\n",
            "\t\t x",
            "a  b   c    d",
            "x" + " " * 70 + "y",
            "\0",
            "a\0b",
            "\ufeffa",
        ),
        *("don't I'LL we've 'S 's", "1234567890 12.5e-3 1,000", "$$$ !!!??? ...", "http://a.b/c?d=e&f"),
        *("a" * 3000, "é" * 500, "你好，世界。日本語", "مرحبا \u200f\u202e", "\u2028\u2029\u0085\u200b\u3000\u00a0"),
        *("😀 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308", "İ ß ſ ﬁ ² ｶﾞ"),
        *(unicodedata.normalize(form, "é ñ Å 한국어") for form in ("NFC", "NFD")),
        *(joint.join(characters) for characters in shown for joint in ("", " ", "a")),
        *(form.format(token) for token in added[:64] for form in ("a{0}b", "{0}{0}", " {0} \n", "<{0}")),
    ]
