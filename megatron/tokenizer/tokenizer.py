"""What the rest of the framework asks of a tokenizer, and what the adapters share."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError

# What ends a document in the vocabularies that there are.
END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<EOS>", "<eod>", "<EOD>")


class Tokenizer(Protocol):
    """Text to token ids and back.

    An adapter runs in one thread: processes are the parallelism (`--workers`), and threads below them would
    only fight for the same cores.
    """

    @property
    def name(self) -> str:
        """The `--tokenizer-type`."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that can come out; no padding included."""

    @property
    def eod(self) -> int:
        """Id that ends a document.

        Raises:
            UserError: the files name no such token (possible for HuggingFaceTokenizer only; the other types
                refuse to be built without one).
        """

    @property
    def pad(self) -> int | None:
        """Id of padding, None when the vocabulary has none."""

    @property
    def cls(self) -> int | None:
        """Id that stands before a pair of sentences (BERT's [CLS]), None when the vocabulary has none."""

    @property
    def sep(self) -> int | None:
        """Id that ends each sentence of a pair (BERT's [SEP]), None when the vocabulary has none."""

    @property
    def mask(self) -> int | None:
        """Id of a token to be guessed (BERT's [MASK]), None when the vocabulary has none."""

    @property
    def continues_word(self) -> npt.NDArray[np.bool_] | None:
        """[vocab_size], True where a WordPiece continues a word ("##..."); None for tokenizers of another kind."""

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary, such as <fim_prefix>; None when that has no such token."""

    def is_special(self, token_id: int) -> bool:
        """Whether an id is no piece of a text: where encoding gives it at all, the token's name stands in the text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without EOD; only what the tokenizer's own files ask for is added.

        Raises:
            UserError: `text` holds a lone surrogate, which no tokenizer can keep.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""

    def fingerprint(self) -> str:
        """Hex digest of all that ids mean: equal fingerprints, equal tokens. Neither paths take part, nor whether an
        encoded text gets special tokens around it."""


class WithoutSentencePairs:
    """What the vocabularies say that know nothing of BERT's pairs of sentences."""

    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    continues_word: npt.NDArray[np.bool_] | None = None


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts with their lengths, so that no two lists of parts collide by concatenation."""
    result = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        result.update(len(data).to_bytes(8, "little"))
        result.update(data)
    return result.hexdigest()


def read_tokenizer_file(path: str | Path, *, flag: str, tokenizer_type: str, what: str) -> bytes:
    """Content of a tokenizer's file.

    Raises:
        UserError: the flag names no readable file.
    """
    file = Path(path)
    if not file.is_file():
        state = "is a folder" if file.is_dir() else "does not exist"
        raise UserError(
            f"{flag} {path} {state}: --tokenizer-type {tokenizer_type} reads {what} from there; "
            "nothing is downloaded, give the path of a file on this machine"
        )
    return file.read_bytes()


def check_text(text: str) -> str:
    """`text` itself.

    Raises:
        UserError: it holds a lone surrogate (JSON's "\\ud800" gives one), which UTF-8 cannot write.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"character {error.start} of the text is the lone surrogate U+{ord(text[error.start]):04X}, which is not "
            "a Unicode character; repair the text where it was made"
        ) from None
    return text
