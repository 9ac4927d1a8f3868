"""Adapter of the `tiktoken` library, an extra: byte-pair ranks in Megatron-LM's JSON or in Llama 3's lines."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError
from megatron.config.tokenizer import TiktokenPattern
from megatron.tokenizer.tokenizer import END_OF_DOCUMENT_TOKENS, check_text, digest, read_tokenizer_file

# How a text is cut into the pieces that byte pairs are merged in.
PATTERNS: Mapping[TiktokenPattern, str] = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_LARGEST_BY_DEFAULT = 2**17


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What a kind of file means where no flag says otherwise.

    special_first: the ids of the special tokens stand before those of the file, else after them.
    filler: the name of a special token that is not in use.
    """

    pattern: TiktokenPattern
    special_tokens: tuple[str, ...]
    num_special_tokens: int
    special_first: bool
    filler: str


_MEGATRON_JSON = _Form(
    pattern="v2",
    special_tokens=("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"),
    num_special_tokens=1000,
    special_first=True,
    filler="<SPECIAL_{}>",
)
_LLAMA_LINES = _Form(
    pattern="llama3",
    special_tokens=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    ),
    num_special_tokens=256,
    special_first=False,
    filler="<|reserved_special_token_{}|>",
)
_ROLES = {"pad": ("<pad>", "<|finetune_right_pad_id|>"), "cls": ("<cls>",), "sep": ("<sep>",), "mask": ("<mask>",)}


class TikTokenizer:
    """Byte-pair ranks of a file, and special tokens, of which unused ones fill up to their number.

    A special token that stands literally in a text becomes its id, as in Megatron-LM.

    Args:
        model_file: Megatron-LM's JSON, a list of {"rank", "token_bytes", "token_str"}, or lines of a token in base64
            and its rank, as Llama 3's tokenizer.model. Nothing is unpickled.
        pattern: how texts are cut; None for what is usual with the form of the file ("v2" and "llama3").
        num_special_tokens: None for what is usual with the form of the file (1000 and 256).
        special_tokens: the first of them; empty for what is usual. One of them ends a document.
        vocab_size: ids of the JSON form, whose file may have more entries; None for at most 131,072.

    Raises:
        UserError: the library is not installed, the file is of neither form, or the special tokens or the size do not
            fit it.
    """

    name = "TikTokenizer"
    continues_word: npt.NDArray[np.bool_] | None = None

    def __init__(
        self,
        model_file: str | Path,
        *,
        pattern: TiktokenPattern | None = None,
        num_special_tokens: int | None = None,
        special_tokens: Sequence[str] = (),
        vocab_size: int | None = None,
    ) -> None:
        if find_spec("tiktoken") is None:
            raise UserError(
                "--tokenizer-type TikTokenizer needs the package tiktoken, which is not installed: pip install tiktoken"
            )
        from tiktoken import Encoding

        source = f"--tokenizer-model {model_file}"
        content = read_tokenizer_file(
            model_file, flag="--tokenizer-model", tokenizer_type=self.name, what="tiktoken's JSON or .model file"
        )
        is_json = content.lstrip()[:1] in (b"[", b"{")
        form = _MEGATRON_JSON if is_json else _LLAMA_LINES
        count = form.num_special_tokens if num_special_tokens is None else num_special_tokens
        special = _special_tokens(form, tuple(special_tokens), count)
        tokens = list(_read_json(content, source) if is_json else _read_lines(content, source))
        if form.special_first:
            tokens = _cut(tokens, count, vocab_size, source)
        _check_tokens(tokens, source)
        shift, special_shift = (count, 0) if form.special_first else (0, len(tokens))
        ids = {token: special_shift + index for index, token in enumerate(special)}
        cut_by = PATTERNS[pattern or form.pattern]
        self._encoding = Encoding(
            name=self.name,
            pat_str=cut_by,
            mergeable_ranks={token: shift + rank for rank, token in enumerate(tokens)},
            special_tokens=ids,
        )
        self.vocab_size = len(tokens) + count
        self.eod = ids[_end_of_document(special)]
        self.pad, self.cls, self.sep, self.mask = (
            next((ids[token] for token in names if token in ids), None) for names in _ROLES.values()
        )
        self._fingerprint = digest("tiktoken", content, cut_by, str(len(tokens)), *special)

    def token_id(self, token: str) -> int | None:
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None

    def is_special(self, token_id: int) -> bool:
        return self._encoding.is_special_token(token_id)

    def encode(self, text: str) -> list[int]:
        check_text(text)
        try:
            return self._encoding.encode(text, allowed_special="all")
        except ValueError as error:
            raise UserError(
                f"a text of {len(text):,} characters is too much for tiktoken ({error}); a run of hundreds of "
                "thousands of spaces is: shorten such runs"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        wrong = [int(token) for token in ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise UserError(f"{wrong[0]} is not an id of {self.name}, which has 0 to {self.vocab_size - 1}")
        return self._encoding.decode([int(token) for token in ids])

    def fingerprint(self) -> str:
        return self._fingerprint


def _special_tokens(form: _Form, given: tuple[str, ...], count: int) -> list[str]:
    """So many special tokens: those given or usual, and fillers, of which Megatron-LM's are numbered by their ids."""
    special = given or form.special_tokens
    if len(special) > count:
        raise UserError(
            f"--tiktoken-num-special-tokens {count} is less than the {len(special)} special tokens: {' '.join(special)}"
        )
    numbers = itertools.count(len(special) if form.special_first else 0)
    fillers = (name for name in map(form.filler.format, numbers) if name not in special)
    return [*special, *itertools.islice(fillers, count - len(special))]


def _end_of_document(special: Sequence[str]) -> str:
    found = [token for token in END_OF_DOCUMENT_TOKENS if token in special]
    if len(found) != 1:
        raise UserError(
            f"--tiktoken-special-tokens: {' and '.join(found) or 'none'} of them would end a document; exactly one of "
            f"{', '.join(END_OF_DOCUMENT_TOKENS)} must be among them"
        )
    return found[0]


def _read_json(content: bytes, source: str) -> Iterator[bytes]:
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON ({error})") from None
    if not isinstance(entries, list):
        raise UserError(
            f'{source} is no tiktoken vocabulary: a list of {{"rank", "token_bytes", "token_str"}} is needed'
        )
    for rank, entry in enumerate(entries):
        if not (isinstance(entry, dict) and entry.get("rank") == rank and isinstance(entry.get("token_bytes"), str)):
            raise UserError(
                f"{source}: entry {rank} must have the rank {rank} and token_bytes in base64, "
                f"it is {json.dumps(entry)[:80]}"
            )
        yield _from_base64(entry["token_bytes"].encode(errors="surrogatepass"), f"{source}: entry {rank}")


def _read_lines(content: bytes, source: str) -> Iterator[bytes]:
    for rank, line in enumerate(content.splitlines()):
        words = line.split()
        if len(words) != 2 or words[1] != b"%d" % rank:
            raise UserError(
                f"{source}: line {rank + 1} must be a token in base64 and the rank {rank}, it is {line[:60]!r}; a "
                "SentencePiece model is read by --tokenizer-type SentencePieceTokenizer"
            )
        yield _from_base64(words[0], f"{source}: line {rank + 1}")


def _from_base64(text: bytes, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise UserError(f"{where}: {text[:40]!r} is not base64 ({error})") from None


def _cut(tokens: list[bytes], count: int, vocab_size: int | None, source: str) -> list[bytes]:
    """The entries that the vocabulary has room for, as in Megatron-LM, beside the special tokens."""
    room = (_LARGEST_BY_DEFAULT if vocab_size is None else vocab_size) - count
    if vocab_size is not None and room > len(tokens):
        raise UserError(
            f"--vocab-size {vocab_size} is more than {source} has: {len(tokens):,} tokens, and {count:,} special ones "
            "(--tiktoken-num-special-tokens)"
        )
    if room < 256:
        raise UserError(
            f"--vocab-size {room + count} leaves no room for the 256 bytes beside {count:,} special tokens "
            "(--tiktoken-num-special-tokens)"
        )
    return tokens[:room]


def _check_tokens(tokens: Sequence[bytes], source: str) -> None:
    if len(set(tokens)) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise UserError(f"{source}: the token {twice!r} comes more than once")
    missing = {bytes([byte]) for byte in range(256)} - set(tokens)
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} of the 256 bytes ({min(missing)!r}): text with them could not be encoded"
        )
