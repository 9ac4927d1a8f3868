"""Tokenizers that need no file: ids as text, and bytes."""

from collections.abc import Sequence

from megatron.config.problems import UserError
from megatron.tokenizer.tokenizer import WithoutSentencePairs, check_text, digest

_MOST_DIGITS = 19  # of 64 bits; Python reads no number of thousands


class NullTokenizer(WithoutSentencePairs):
    """Text that is token ids already: "17 4 256" is [17, 4, 256].

    Args:
        vocab_size: number of ids, EOD included.
        eod_id: default `vocab_size - 1`.
        pad_id: negative for none.
    """

    name = "NullTokenizer"

    def __init__(self, vocab_size: int, *, eod_id: int | None = None, pad_id: int = -1) -> None:
        eod = vocab_size - 1 if eod_id is None else eod_id
        assert 0 <= eod < vocab_size and pad_id < vocab_size, (eod, pad_id, vocab_size)
        self.vocab_size = vocab_size
        self.eod = eod
        self.pad = pad_id if pad_id >= 0 else None

    def token_id(self, token: str) -> int | None:
        return None  # its ids have no names

    def is_special(self, token_id: int) -> bool:
        return token_id in (self.eod, self.pad)

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    def fingerprint(self) -> str:
        return digest("null", str(self.vocab_size), str(self.eod), str(self.pad))

    def _id(self, word: str) -> int:
        if not (word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS) or int(word) >= self.vocab_size:
            raise UserError(
                f"{word[:40]!r} is not a token id: --tokenizer-type NullTokenizer reads numbers from 0 to "
                f"{self.vocab_size - 1} between spaces"
            )
        return int(word)


class ByteTokenizer(WithoutSentencePairs):
    """The 256 bytes of UTF-8 and, as id 256, the end of a document, which does not show in decoded text."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod = 256
    pad: int | None = None

    def token_id(self, token: str) -> int | None:
        return None  # its ids have no names

    def is_special(self, token_id: int) -> bool:
        return token_id == self.eod

    def encode(self, text: str) -> list[int]:
        return list(check_text(text).encode())

    def decode(self, ids: Sequence[int]) -> str:
        wrong = [int(token) for token in ids if not 0 <= token <= self.eod]
        if wrong:
            raise UserError(f"{wrong[0]} is not an id of ByteTokenizer, which has 0 to {self.eod}")
        return bytes(int(token) for token in ids if token != self.eod).decode(errors="replace")

    def fingerprint(self) -> str:
        return digest("byte")
