"""Train a lossless SentencePiece BPE tokenizer on JSON lines.

    python tools/train_tokenizer.py --input corpus.jsonl --output-prefix tokenizer --vocab-size 8192

writes tokenizer.model. SentencePiece's defaults fold a page of code into one line; here nothing is changed:
no normalisation, no space added or removed, newline, tab and runs of spaces are tokens of their own, and what
the vocabulary does not know is written in bytes. decode(encode(x)) == x is checked on a sample and on a list
of nasty texts before the model gets its name.
"""

import argparse
import io
import multiprocessing
import os
import re
import time
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from command_line import Parser, elapsed, progress, run_tool, say
from sentencepiece import SentencePieceTrainer
from text_tools import Work, find_files, prepare_output, read_text, text_of

from megatron.config.problems import UserError
from megatron.core.whole_file import whole_file
from megatron.tokenizer.sentencepiece_tokenizer import (
    LITERAL_SPACE_SYMBOL,
    SPACE_SYMBOL,
    SentencePieceTokenizer,
)

TOOL = "train_tokenizer 1"
END_OF_DOCUMENT = "<|endoftext|>"
USER_SYMBOLS = ["\n", "\t", "\r", *(SPACE_SYMBOL * count for count in range(2, 17))]
# unknown, end of document, the mark of a literal U+2581, the symbols above, and the 256 bytes
RESERVED = 3 + len(USER_SYMBOLS) + 256
LINE_CHARACTERS = 4096
CHECKED_BYTES = 4_000_000

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
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="JSON-lines files or glob patterns")
    parser.add_argument("--output-prefix", type=Path, required=True, help="writes PREFIX.model")
    parser.add_argument("--json-key", default="text", help="which value of a line is the text; default: text")
    parser.add_argument("--vocab-size", type=int, default=8192, help="number of tokens in all; default 8192")
    parser.add_argument(
        "--sample-megabytes",
        type=float,
        default=16.0,
        help="how much of the input is trained on, spread evenly over it; default 16",
    )
    return parser.read()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    if arguments.vocab_size <= RESERVED:
        raise UserError(
            f"--vocab-size {arguments.vocab_size}: must be above {RESERVED}, which bytes and fixed symbols take; "
            "4096 or more is useful"
        )
    if not arguments.sample_megabytes > 0:
        raise UserError(f"--sample-megabytes {arguments.sample_megabytes}: must be above 0")
    files = find_files(arguments.input, flag="--input")
    output = arguments.output_prefix.with_name(arguments.output_prefix.name + ".model")
    prepare_output(output, flag="--output-prefix")
    work = Work(
        tool=TOOL,
        arguments={
            "json_key": arguments.json_key,
            "vocab_size": arguments.vocab_size,
            "sample_megabytes": arguments.sample_megabytes,
        },
        inputs=files,
        outputs=[output],
    )
    if work.skip():
        return
    inputs_digest = work.inputs_digest()
    documents = list(sample(files, arguments.json_key, int(arguments.sample_megabytes * 1e6)))
    if not any(documents):
        raise UserError(f"--input {' '.join(arguments.input)}: holds no text")
    model = train(documents, arguments.vocab_size)
    with whole_file(output) as file:
        file.write(model)
        file.flush()
        bytes_per_token = check(Path(file.name), documents)
    work.finish(inputs_digest, bytes_per_token=bytes_per_token)
    say(
        f"{output}: {arguments.vocab_size:,} tokens, {bytes_per_token:.2f} bytes of text a token, lossless on "
        f"{len(NASTY_TEXTS)} nasty texts and a sample, in {elapsed(started)}"
    )


def sample(files: Sequence[Path], key: str, limit: int) -> Iterator[str]:
    """Texts of about `limit` bytes of lines in all, spread evenly over the files; always the same ones.

    Raises:
        UserError: a broken line, with file and line.
    """
    total = sum(file.stat().st_size for file in files)
    rate = min(1.0, limit / total) if total else 1.0
    seen = kept = 0
    with progress(total, "reading", unit="B") as bar:
        for path in files:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    seen += len(line)
                    bar.update(len(line))
                    # Keep a line when what is kept lags behind its share, counted to the middle of the line.
                    if kept + len(line) / 2 > rate * seen or not line.strip():
                        continue
                    kept += len(line)
                    where = f"{path}, line {number}"
                    text = text_of(read_text(line, where), key, where)
                    # A lone surrogate cannot be learnt from; tokenizing the corpus will report it.
                    yield text.encode(errors="replace").decode()


def train(documents: Sequence[str], vocab_size: int) -> bytes:
    """The trained model, as the bytes of a .model file.

    The trainer runs in a child, because its only sign of progress is what it writes to the process's stderr.

    Raises:
        UserError: the text cannot fill the vocabulary, or the vocabulary cannot hold the text's characters.
    """
    log_end, log_start = os.pipe()
    result, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_train_in_child, args=(documents, vocab_size, log_start, sender)
    )
    child.start()
    os.close(log_start)
    sender.close()
    last_lines: deque[str] = deque(maxlen=3)
    with progress(vocab_size - RESERVED, "learning merges", unit=" tokens") as bar, os.fdopen(log_end) as log:
        for line in log:
            last_lines.append(line.strip())
            if learnt := re.search(r"(?:merges|size)=(\d+)", line):
                bar.update(int(learnt[1]) - bar.n)
        bar.update(vocab_size - RESERVED - bar.n)
    try:
        outcome = result.recv()
    except EOFError:
        outcome = RuntimeError(" | ".join(last_lines))
    child.join()
    if isinstance(outcome, bytes):
        return outcome
    refusal = str(outcome).rsplit("] ", 1)[-1]  # without the place in its source
    raise UserError(f"--vocab-size {vocab_size}: SentencePiece refuses: {refusal}")


def _train_in_child(documents: Sequence[str], vocab_size: int, log: int, sender: Connection) -> None:
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
            control_symbols=[LITERAL_SPACE_SYMBOL],
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


def check(model: Path, documents: Sequence[str]) -> float:
    """Bytes of text a token, after every check of the model file has passed.

    Raises:
        UserError: some text does not come back as it was.
    """
    tokenizer = SentencePieceTokenizer(model)
    if tokenizer.encode(END_OF_DOCUMENT) == [tokenizer.eod]:
        raise UserError(f"the text {END_OF_DOCUMENT} gives the id that ends a document")
    size = sum(len(document) for document in documents)
    step = max(1, round(size / CHECKED_BYTES))
    checked_bytes = checked_tokens = 0
    with progress(len(NASTY_TEXTS) + len(documents[::step]), "checking", unit=" texts") as bar:
        for index, text in enumerate([*NASTY_TEXTS, *documents[::step]]):
            ids = tokenizer.encode(text)
            back = tokenizer.decode(ids)
            if back != text:
                place = next((i for i, (a, b) in enumerate(zip(text, back)) if a != b), min(len(text), len(back)))
                raise UserError(
                    f"not lossless: {text[max(0, place - 20) : place + 20]!r} comes back as "
                    f"{back[max(0, place - 20) : place + 20]!r}; no model was written"
                )
            if index >= len(NASTY_TEXTS):
                checked_bytes += len(text.encode())
                checked_tokens += len(ids)
            bar.update()
    return checked_bytes / max(1, checked_tokens)


if __name__ == "__main__":
    run_tool(main)
