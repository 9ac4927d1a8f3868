"""Tokenize JSON lines into Megatron-LM's .bin/.idx, byte for byte.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix my-corpus --append-eod --workers 2 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

writes my-corpus_text_document.bin and .idx. Each line is one document, in the order of the input whatever the
number of workers. A document without tokens is kept as a document without sequences, and gets no end-of-document id.
"""

import argparse
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from command_line import Parser, elapsed, progress, run_tool, say, size_of
from text_tools import Work, find_files, prepare_output, read_text, text_of

from megatron.config.arguments import add_to_parser
from megatron.config.megatron_config import section_problems
from megatron.config.options import Option, section_options
from megatron.config.problems import ConfigError, UserError, counted
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path, optimal_dtype
from megatron.tokenizer import Tokenizer, build_tokenizer

TOOL = "preprocess_data 1"
BATCH_BYTES = 1 << 19
# Batches a worker may be ahead of the writer: enough to keep it busy, and a bound on memory.
BATCHES_AHEAD = 4
MODEL_ONLY = {"make_vocab_size_divisible_by", "padded_vocab_size"}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive lines of one file; `first` is the number of the first."""

    path: Path
    first: int
    lines: list[bytes]
    size: int


@dataclass(frozen=True, kw_only=True)
class TokenizedBatch:
    """For each key, all ids one after another and how many each document has; `size` in bytes of input."""

    ids: list[npt.NDArray[Any]]
    counts: list[list[int]]
    size: int


class Encoder:
    """From a batch of lines to ids. Copies of it live in the workers."""

    def __init__(self, tokenizer: Tokenizer, keys: Sequence[str], *, append_eod: bool) -> None:
        self.keys = keys
        self.dtype = optimal_dtype(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self._eod = [tokenizer.eod] if append_eod else []

    def __call__(self, batch: Batch) -> TokenizedBatch:
        """Raises UserError with file and line for a line that is not a record with texts under the keys."""
        ids: list[list[int]] = [[] for _ in self.keys]
        counts: list[list[int]] = [[] for _ in self.keys]
        for number, line in enumerate(batch.lines, start=batch.first):
            if not line.strip():
                continue
            where = f"{batch.path}, line {number}"
            record = read_text(line, where)
            for index, key in enumerate(self.keys):
                document = self._encode(text_of(record, key, where), key, where)
                ids[index].extend(document)
                counts[index].append(len(document))
        return TokenizedBatch(
            ids=[np.array(all_ids, dtype=self.dtype) for all_ids in ids], counts=counts, size=batch.size
        )

    def _encode(self, text: str, key: str, where: str) -> list[int]:
        try:
            document = self._tokenizer.encode(text)
        except UserError as error:
            raise UserError(f"{where}, key {key!r}: {error}") from None
        return document + self._eod if document else document


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="JSON-lines files or glob patterns")
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        help="writes PREFIX_<key>_document.bin and .idx for each key",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="which values of a line are texts; default: text",
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize; default 1")
    add_to_parser(parser.add_argument_group("tokenizer"), tokenizer_options())
    return parser.read()


def tokenizer_options() -> list[Option]:
    return [option for option in section_options("tokenizer", TokenizerConfig) if option.field not in MODEL_ONLY]


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    keys: list[str] = arguments.json_keys
    if arguments.workers < 1:
        raise UserError(f"--workers {arguments.workers}: must be at least 1")
    if len(set(keys)) < len(keys):
        raise UserError(f"--json-keys {' '.join(keys)}: each key can be named once")
    files = find_files(arguments.input, flag="--input")
    prefixes = [f"{arguments.output_prefix}_{key}_document" for key in keys]
    outputs = [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)]
    for output in outputs:
        prepare_output(output, flag="--output-prefix")
    tokenizer = build_tokenizer(_tokenizer_config(arguments))
    encoder = Encoder(tokenizer, keys, append_eod=arguments.append_eod)
    work = Work(
        tool=TOOL,
        arguments={
            "json_keys": keys,
            "append_eod": arguments.append_eod,
            "tokenizer_type": tokenizer.name,
            "tokenizer": tokenizer.fingerprint(),
        },
        inputs=files,
        outputs=outputs,
    )
    if work.skip():
        return
    inputs_digest = work.inputs_digest()
    documents, tokens = tokenize(files, encoder, prefixes, arguments.workers)
    work.finish(inputs_digest, documents=documents, tokens=dict(zip(keys, tokens)))
    for output, count in zip(outputs[::2], tokens):
        say(f"{output.with_suffix('')}: {counted(documents, 'document')}, {counted(count, 'token')} of {encoder.dtype}")
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in files)
    rates = f"{size / 1e6 / seconds:.1f} MB/s, {sum(tokens) / seconds:,.0f} tokens/s"
    say(f"{size_of(size)} in {elapsed(started)}: {rates}")


def tokenize(files: Sequence[Path], encoder: Encoder, prefixes: Sequence[str], workers: int) -> tuple[int, list[int]]:
    """Write the datasets, all or none; returns the number of documents, and of tokens for each key.

    Raises:
        UserError: a broken line, no document at all, or no text under a key.
    """
    documents = 0
    tokens = [0 for _ in prefixes]
    total = sum(path.stat().st_size for path in files)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype=encoder.dtype)) for prefix in prefixes]
        results = stack.enter_context(closing(_encode_all(files, encoder, workers)))
        bar = stack.enter_context(progress(total, "tokenizing", unit="B"))
        started = time.perf_counter()
        for result in results:
            for index, (writer, ids, counts) in enumerate(zip(writers, result.ids, result.counts)):
                _write_documents(writer, ids, counts)
                tokens[index] += len(ids)
            documents += len(result.counts[0])
            rate = documents / max(1e-9, time.perf_counter() - started)
            bar.set_postfix_str(f"{rate:,.0f} documents/s", refresh=False)
            bar.update(result.size)
        named = " ".join(map(str, files))
        if documents == 0:
            raise UserError(f"--input {named}: holds no document")
        for key, count in zip(encoder.keys, tokens):
            if count == 0:
                raise UserError(f"--input {named}: holds no text under {key!r}, all of its values are empty")
    return documents, tokens


def _write_documents(writer: IndexedDatasetWriter, ids: npt.NDArray[Any], counts: Sequence[int]) -> None:
    begin = 0
    for count in counts:
        writer.add_document(ids[begin : begin + count], [count] if count else [])
        begin += count


def read_batches(files: Sequence[Path]) -> Iterator[Batch]:
    """The lines of all files in batches of about BATCH_BYTES, so that a worker's answer is worth its way."""
    for path in files:
        with path.open("rb") as file:
            first = 1
            while lines := file.readlines(BATCH_BYTES):
                size = sum(map(len, lines))
                if first == 1:
                    lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")  # a byte order mark is not part of the JSON
                yield Batch(path=path, first=first, lines=lines, size=size)
                first += len(lines)


def _encode_all(files: Sequence[Path], encoder: Encoder, workers: int) -> Generator[TokenizedBatch, None, None]:
    """The encoded batches in the order of the input."""
    batches = read_batches(files)
    if workers == 1:
        yield from map(encoder, batches)
        return
    # Forked, so that each worker has the tokenizer at once; this process itself encodes nothing before.
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("fork"), initializer=_set_encoder, initargs=(encoder,)
    )
    waiting: deque[Future[TokenizedBatch]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) >= workers * BATCHES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"--workers {workers}: a worker was killed, most likely for want of memory; use fewer workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_encoder: Encoder | None = None


def _set_encoder(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Without this a worker whose parent is killed would wait for work for ever, with the output open."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: Batch) -> TokenizedBatch:
    assert _worker_encoder is not None
    return _worker_encoder(batch)


def _tokenizer_config(arguments: argparse.Namespace) -> TokenizerConfig:
    config = TokenizerConfig(**{option.field: getattr(arguments, option.field) for option in tokenizer_options()})
    problems = [*section_problems(config), *config.file_problems()]
    if problems:
        raise ConfigError(problems)
    return config


if __name__ == "__main__":
    run_tool(main)
