"""Train a tokenizer on texts.

    python tools/train_tokenizer.py --input corpus.jsonl --output-prefix tokenizer --vocab-size 8192

writes tokenizer.model, a lossless SentencePiece BPE. Its defaults fold a page of code into one line; here nothing is
changed: no normalisation, no space added or removed, newline, tab and runs of spaces are tokens of their own, and what
the vocabulary does not know is written in bytes. --tokenizer-type GPT2BPETokenizer writes tokenizer-vocab.json and
tokenizer-merges.txt, a byte-level BPE, and --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase writes
tokenizer-vocab.txt, with the special tokens of BERT. What is learnt is read as a training reads it before the files
get their names; of the first two kinds decode(encode(x)) == x is checked on a sample and on a list of nasty texts.
"""

import argparse
import tempfile
import time
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from command_line import Parser, elapsed, progress, run_tool, say
from preprocess.inputs import ENDINGS, InputFile, find_inputs
from preprocess.records import count_before, parts_of, pieces_of, read_blocks
from text_tools import Work, prepare_output
from vocabulary_trainers import (
    BPE_RESERVED,
    END_OF_DOCUMENT,
    SENTENCEPIECE_BYTES,
    SENTENCEPIECE_NAMES,
    SENTENCEPIECE_RESERVED,
    USER_SYMBOLS,
    WORDPIECE_SPECIAL,
    train_byte_level_bpe,
    train_sentencepiece,
    train_wordpiece,
)

from megatron.config.options import flag_name
from megatron.config.problems import UserError
from megatron.config.tokenizer import TokenizerConfig, TokenizerType
from megatron.core.whole_file import whole_file
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.sentencepiece_tokenizer import LITERAL_SPACE_SYMBOL, SPACE_SYMBOL, SentencePieceTokenizer
from megatron.tokenizer.tokenizer import Tokenizer

TOOL = "train_tokenizer 3"
CHECKED_BYTES = 4_000_000
# Of a large input only the pieces are read in which something is taken.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of tokenizer that can be trained.

    Attributes:
        endings: of the files that make it, after the prefix, by the field of `TokenizerConfig`.
        reserved: ids that no text takes part in.
        taken: tokens of the format, which no --special-tokens can be.
        lossless: whether every text comes back as it was.
        train: from texts, the size of the vocabulary and special tokens to the bytes of the files, by field.
    """

    endings: Mapping[str, str]
    reserved: int
    taken: Collection[str]
    lossless: bool
    train: Callable[[Sequence[str], int, Sequence[str]], Mapping[str, bytes]]


KINDS: dict[TokenizerType, Kind] = {
    "SentencePieceTokenizer": Kind(
        endings={"tokenizer_model": ".model"},
        reserved=SENTENCEPIECE_RESERVED,
        taken={
            *SENTENCEPIECE_NAMES,
            *(END_OF_DOCUMENT, LITERAL_SPACE_SYMBOL, SPACE_SYMBOL),
            *USER_SYMBOLS,
            *SENTENCEPIECE_BYTES,
        },
        lossless=True,
        train=train_sentencepiece,
    ),
    "GPT2BPETokenizer": Kind(
        endings={"vocab_file": "-vocab.json", "merge_file": "-merges.txt"},
        reserved=BPE_RESERVED,
        taken=[END_OF_DOCUMENT],
        lossless=True,
        train=train_byte_level_bpe,
    ),
    "BertWordPieceLowerCase": Kind(
        endings={"vocab_file": "-vocab.txt"},
        reserved=len(WORDPIECE_SPECIAL),
        taken=WORDPIECE_SPECIAL,
        lossless=False,
        train=partial(train_wordpiece, lower_case=True),
    ),
    "BertWordPieceCase": Kind(
        endings={"vocab_file": "-vocab.txt"},
        reserved=len(WORDPIECE_SPECIAL),
        taken=WORDPIECE_SPECIAL,
        lossless=False,
        train=partial(train_wordpiece, lower_case=False),
    ),
}

# What tokenizers are known to lose or to fold.
NASTY_TEXTS = [
    "",
    " ",
    "    ",
    " " * 37 + "x",
    "trailing spaces   ",
    "\t\tif x:\n\t\t\treturn  # two\n",
    "a\r\nb\r\n\r\nc\rd",
    "\n\n\n",
    "nul \0 inside",
    "".join(map(chr, range(0x20))) + "\x7f\x80\x9f\xa0\xad",
    "\ufefftext after a byte order mark",
    unicodedata.normalize("NFC", "é ñ ü Å ｶﾞ ﬁ ² ①"),
    unicodedata.normalize("NFD", "é ñ ü Å 한국어"),
    "你好，世界。日本語のテキスト　全角空白",
    "مرحبا بالعالم \u200f\u200e \u202eRTL",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "\u2028\u2029\u0085\u200b\u3000",
    "\ufffd \ufdd0 \uffff \ue000 \U0010ffff",
    f"U+2581 itself: {SPACE_SYMBOL} a{SPACE_SYMBOL}b {SPACE_SYMBOL}{SPACE_SYMBOL}",
    "▅ ⁇ are reserved inside SentencePiece",
    f"{END_OF_DOCUMENT} <s> </s> <unk> <0x0A> {LITERAL_SPACE_SYMBOL} <|im_start|>",
]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files, folders or glob patterns; what a file holds is said by its ending: {ENDINGS}",
    )
    parser.add_argument(
        "--output-prefix", type=Path, required=True, help="writes PREFIX.model, or PREFIX-vocab.json and so on"
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=list(KINDS),
        default="SentencePieceTokenizer",
        help="kind of tokenizer; default: SentencePieceTokenizer",
    )
    parser.add_argument("--json-key", default="text", help="which value of a record is the text; default: text")
    parser.add_argument("--vocab-size", type=int, default=8192, help="number of tokens in all; default 8192")
    parser.add_argument(
        "--special-tokens",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="tokens beside those of the text, such as those of --fim-data: each is kept whole, as an id that counts "
        "in --vocab-size, and no text gives it; a WordPiece vocabulary cannot help it where TOKEN is a plain word",
    )
    parser.add_argument(
        "--sample-megabytes",
        type=float,
        default=16.0,
        help="how much text is trained on, spread evenly over the input; default 16",
    )
    return parser.read()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    name: TokenizerType = arguments.tokenizer_type
    kind = KINDS[name]
    special_tokens: list[str] = arguments.special_tokens
    check_names(special_tokens, kind.taken, name)
    reserved = kind.reserved + len(special_tokens)
    if arguments.vocab_size <= reserved:
        and_more = f" and {len(special_tokens)} --special-tokens" if special_tokens else ""
        raise UserError(
            f"--vocab-size {arguments.vocab_size}: must be above {reserved}, which bytes and fixed symbols{and_more} "
            "take; 4096 or more is useful"
        )
    if not arguments.sample_megabytes > 0:
        raise UserError(f"--sample-megabytes {arguments.sample_megabytes}: must be above 0")
    files = find_inputs(arguments.input, flag="--input")
    prefix: Path = arguments.output_prefix
    outputs = {field: prefix.with_name(prefix.name + ending) for field, ending in kind.endings.items()}
    for output in outputs.values():
        prepare_output(output, flag="--output-prefix")
    work = Work(
        tool=TOOL,
        arguments={
            "tokenizer_type": name,
            "json_key": arguments.json_key,
            "vocab_size": arguments.vocab_size,
            "sample_megabytes": arguments.sample_megabytes,
            "special_tokens": special_tokens,
        },
        inputs=[file.path for file in files],
        outputs=list(outputs.values()),
    )
    if work.skip():
        return
    inputs_digest = work.inputs_digest()
    documents = list(sample(files, arguments.json_key, int(arguments.sample_megabytes * 1e6)))
    if not any(documents):
        raise UserError(f"--input {' '.join(arguments.input)}: holds no text")
    contents = kind.train(documents, arguments.vocab_size, special_tokens)
    with tempfile.TemporaryDirectory(prefix="train_tokenizer-") as folder:
        drafts = {field: Path(folder) / output.name for field, output in outputs.items()}
        for field, draft in drafts.items():
            draft.write_bytes(contents[field])
        bytes_per_token = check(_build(name, drafts), documents, special_tokens, lossless=kind.lossless)
    for field, output in outputs.items():
        with whole_file(output) as file:
            file.write(contents[field])
    work.finish(inputs_digest, bytes_per_token=bytes_per_token)
    flags = " ".join(f"{flag_name(field)} {output}" for field, output in outputs.items())
    proof = f", lossless on {len(NASTY_TEXTS)} nasty texts and a sample" if kind.lossless else ""
    say(
        f"--tokenizer-type {name} {flags}: {arguments.vocab_size:,} tokens, {bytes_per_token:.2f} bytes of text a token"
        f"{proof}, in {elapsed(started)}"
    )


def check_names(special_tokens: Sequence[str], taken: Collection[str], kind: TokenizerType) -> None:
    """Refuse what can be no special token of this kind.

    Raises:
        UserError: a token is empty, cannot be written in a line, is given twice, or is one of the format.
    """
    for index, token in enumerate(special_tokens):
        if not token or " " in token or not token.isprintable():
            raise UserError(
                f"--special-tokens {token!r}: must be visible characters without a space, such as <fim_prefix>"
            )
        if token in special_tokens[:index]:
            raise UserError(f"--special-tokens {token}: is given twice; give each token once")
        if token in taken:
            raise UserError(
                f"--special-tokens {token}: is a token that every {kind} has or reserves; leave it out, or give "
                "another name"
            )


def _build(name: TokenizerType, files: Mapping[str, Path]) -> Tokenizer:
    paths = {field: str(path) for field, path in files.items()}
    return build_tokenizer(
        TokenizerConfig(tokenizer_type=name, tokenizer_hf_include_special_tokens=False, **paths)  # type: ignore[arg-type]
    )


def sample(files: Sequence[InputFile], key: str, limit: int) -> Iterator[str]:
    """Texts of about `limit` bytes in all, spread evenly over the files; always the same ones.

    Raises:
        UserError: a broken record, with file and line.
    """
    total = sum(file.path.stat().st_size for file in files)
    rate = limit / total if total else 0.0
    seen, kept = 0, 0
    with progress(total, "reading", unit="B") as bar:
        for piece in (piece for file in files for piece in pieces_of(file, PIECE_BYTES)):
            end = seen + piece.size
            for block in read_blocks(piece, [key]) if kept < rate * end else ():
                for index, record in enumerate(block.records, start=1):
                    if record.problem:
                        raise UserError(f"{piece.where(count_before(piece) + record.number)}: {record.problem}")
                    text = " ".join(parts_of(record.texts[0]))  # of the one key, sentence by sentence perhaps
                    # Keep a text when what is kept lags behind its share, counted to the middle of the text.
                    position = seen + block.size * index / len(block.records)
                    size = len(text.encode())
                    if kept + size / 2 <= rate * position:
                        kept += size
                        yield text
                seen += block.size
            bar.update(end - bar.n)
            seen = end


def check(tokenizer: Tokenizer, documents: Sequence[str], special_tokens: Sequence[str], *, lossless: bool) -> float:
    """Bytes of text a token, after every check of the tokenizer has passed.

    Raises:
        UserError: some text or special token does not come back as it was, or a text gives a special token.
    """
    for token in special_tokens:
        token_id = tokenizer.token_id(token)
        back = "" if token_id is None else tokenizer.decode([token_id])
        # What controls a model of SentencePiece does not show in its texts.
        if token_id is None or back != ("" if isinstance(tokenizer, SentencePieceTokenizer) else token):
            raise UserError(
                f"--special-tokens {token}: comes back as {back!r} from this kind of vocabulary; give a name of ASCII "
                "characters in brackets, such as <fim_prefix>"
            )
        # A list of WordPiece has no place for special tokens that are words.
        is_plain_word = tokenizer.continues_word is not None and token.isalnum()
        if token_id in tokenizer.encode(token) and not is_plain_word:
            raise UserError(
                f"--special-tokens {token}: is given by a text in which it stands; give a name in brackets, such as "
                "<fim_prefix>"
            )
    if isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.encode(END_OF_DOCUMENT) == [tokenizer.eod]:
        raise UserError(f"the text {END_OF_DOCUMENT} gives the id that ends a document")
    size = sum(len(document) for document in documents)
    step = max(1, round(size / CHECKED_BYTES))
    nasty_texts = [*NASTY_TEXTS, *special_tokens, f"a{''.join(special_tokens)}b"]
    checked_bytes = checked_tokens = 0
    with progress(len(nasty_texts) + len(documents[::step]), "checking", unit=" texts") as bar:
        for index, text in enumerate([*nasty_texts, *documents[::step]]):
            ids = tokenizer.encode(text)
            back = tokenizer.decode(ids)
            if lossless and back != text:
                place = next((i for i, (a, b) in enumerate(zip(text, back)) if a != b), min(len(text), len(back)))
                raise UserError(
                    f"not lossless: {text[max(0, place - 20) : place + 20]!r} comes back as "
                    f"{back[max(0, place - 20) : place + 20]!r}; no model was written"
                )
            if index >= len(nasty_texts):
                checked_bytes += len(text.encode())
                checked_tokens += len(ids)
            bar.update()
    return checked_bytes / max(1, checked_tokens)


if __name__ == "__main__":
    run_tool(main)
