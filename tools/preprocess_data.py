"""Tokenize JSON lines, text files and Parquet into Megatron-LM's .bin/.idx, byte for byte.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix my-corpus --append-eod --workers 2 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

writes my-corpus_text_document.bin and .idx. Each line, row or text file is one document, in the order of the input
whatever the number of workers. A document without tokens is kept as a document without sequences, and gets no
end-of-document id. With --split-sentences each sentence is a sequence, and the names end in _sentence.

Work is done in shards, in the folder my-corpus.shards. A run that was killed goes on from those that are finished
when the same command is given again; they go when the dataset is whole.
"""

import argparse
import errno
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from pathlib import Path

from command_line import Parser, at_least, elapsed, progress, run_tool, say, size_of
from preprocess.encoder import Encoder
from preprocess.fast_tokenizer import Fastokens, fast_tokenizer
from preprocess.inputs import ENDINGS, find_inputs
from preprocess.shards import (
    LOCK,
    ShardRecord,
    finished,
    is_of_shard,
    left_out,
    plan_shards,
    remove_shards,
    require_unchanged,
    shard_group,
)
from preprocess.workers import Job, make_shards
from text_tools import SHARDS_ENDING, Work, prepare_output
from tokenizer_flags import add_tokenizer_flags, named_tokenizer

from megatron.config.problems import UserError, counted
from megatron.core.file_lock import NoLocksError, holder_of, try_lock
from megatron.core.whole_file import whole_file
from megatron.data.indexed_dataset import bin_path, idx_path, optimal_dtype
from megatron.data.merging import merge_datasets
from megatron.data.origin import Origin
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.tokenizers_tokenizer import TokenizersTokenizer

TOOL = "preprocess_data 2"
# The workers of a run that was killed end a moment after it.
LOCK_SECONDS = 5.0


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files, folders or glob patterns; the ending says what a file holds: {ENDINGS}",
    )
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
        help="which values of a line are texts, or which columns of Parquet; a text file has text; default: text",
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    parser.add_argument(
        "--split-sentences", action="store_true", help="make each sentence a sequence, as BERT needs them (English)"
    )
    parser.add_argument(
        "--keep-newlines", action="store_true", help="with --split-sentences: keep the white space after a sentence"
    )
    parser.add_argument("--workers", type=at_least(1), default=1, help="processes that tokenize; default 1")
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="leave out records that are broken or have no text, and list them in "
        "PREFIX_<first key>_document_bad_records.tsv",
    )
    add_tokenizer_flags(parser, required=True)
    return parser.read()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    keys: list[str] = arguments.json_keys
    if len(set(keys)) < len(keys):
        raise UserError(f"--json-keys {' '.join(keys)}: each key can be named once")
    if arguments.keep_newlines and not arguments.split_sentences:
        raise UserError("--keep-newlines: says what --split-sentences leaves of a text, and that is not given")
    files = find_inputs(arguments.input, flag="--input")
    level = "sentence" if arguments.split_sentences else "document"
    prefixes = [f"{arguments.output_prefix}_{key}_{level}" for key in keys]
    outputs = [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)]
    bad_list = Path(f"{prefixes[0]}_bad_records.tsv")
    if arguments.keep_going:
        outputs.append(bad_list)
    for output in outputs:
        prepare_output(output, flag="--output-prefix")
    tokenizer = named_tokenizer(arguments)
    if arguments.split_sentences and isinstance(tokenizer, TokenizersTokenizer) and tokenizer.surrounds_texts:
        say(
            "each sentence gets the special tokens of the tokenizer, such as [CLS] and [SEP], as in Megatron-LM; the "
            "samples of BERT get their own, and --tokenizer-hf-no-include-special-tokens leaves these out"
        )
    settings = {
        "json_keys": keys,
        "append_eod": arguments.append_eod,
        "split_sentences": arguments.split_sentences,
        "keep_newlines": arguments.keep_newlines,
        **Origin(tokenizer.name, tokenizer.fingerprint()).arguments(),
        "special_tokens": arguments.tokenizer_hf_include_special_tokens,
    }
    work = Work(
        tool=TOOL,
        arguments={**settings, "keep_going": arguments.keep_going},
        inputs=[file.path for file in files],
        outputs=outputs,
    )
    folder, group = Path(f"{arguments.output_prefix}{SHARDS_ENDING}"), shard_group(level, keys)
    if work.skip():
        if folder.is_dir():
            _remove_leftovers(folder, group)
        return
    inputs_digest = work.inputs_digest()
    shards = plan_shards(files, [TOOL, settings], group)
    with shard_folder(folder):
        job = Job(
            shards=shards,
            folder=folder,
            encoder=_encoder(arguments, tokenizer),
            tokenizer=tokenizer,
            fast=_fast(tokenizer),
            dtype=optimal_dtype(tokenizer.vocab_size),
            keep_going=arguments.keep_going,
        )
        records = make_shards(job, _made(job), workers=arguments.workers)
        require_unchanged(shards)
        if nothing := _nothing(records, keys, arguments.input):
            remove_shards(folder, group)
            raise UserError(nothing)
        _join(job, prefixes)
        bad = _list_bad_records(bad_list, job, records)
        documents = sum(record.documents for record in records)
        tokens = [sum(record.tokens[key] for record in records) for key in range(len(keys))]
        work.finish(inputs_digest, documents=documents, tokens=dict(zip(keys, tokens)), bad_records=bad)
        remove_shards(folder, group)
    for prefix, count in zip(prefixes, tokens):
        say(f"{prefix}: {counted(documents, 'document')}, {counted(count, 'token')} of {job.dtype}")
    size = sum(file.path.stat().st_size for file in files)
    seconds = time.perf_counter() - started
    rates = f"{size / 1e6 / seconds:.1f} MB/s, {sum(tokens) / seconds:,.0f} tokens/s"
    say(f"{size_of(size)} in {elapsed(started)}: {rates}")


def _remove_leftovers(folder: Path, group: str) -> None:
    """Remove what a run has left that was killed when its dataset was whole; shards of others are left to them."""
    try:
        lock = try_lock(folder / LOCK)
    except OSError:  # it can not be written, has no locks, or is gone by now
        return
    if lock is not None:
        with lock:
            remove_shards(folder, group)
            if not folder.exists():
                say(f"{folder}: removed, as the dataset is whole")


@contextmanager
def shard_folder(folder: Path) -> Iterator[None]:
    """The folder of a run, locked; one that ends early leaves it where a shard in it is finished.

    Raises:
        UserError: another run works in it, or it is a folder of something else.
    """
    if folder.exists() and (others := [path for path in folder.iterdir() if not is_of_shard(path)]):
        raise UserError(
            f"--output-prefix: {folder} is for shards, which are removed at the end; it holds {others[0].name}"
        )
    with _lock(folder / LOCK):
        try:
            yield
        finally:
            if any(folder.glob("*.done")):
                say(f"{folder}: finished shards are kept there; their command, given again, goes on from them")
            else:
                shutil.rmtree(folder, ignore_errors=True)  # it may be gone already


def _lock(path: Path) -> AbstractContextManager[object]:
    give_up = time.perf_counter() + LOCK_SECONDS
    while True:
        try:
            path.parent.mkdir(exist_ok=True)  # the run that had it may have taken it away
            lock = try_lock(path)
        except NoLocksError:
            return nullcontext()
        if lock is not None:
            return lock
        if time.perf_counter() > give_up:
            raise UserError(f"--output-prefix: another run writes it, {holder_of(path)}")
        time.sleep(0.1)


def _encoder(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Encoder:
    split = None
    if arguments.split_sentences:
        from preprocess.sentences import SentenceSplitter  # its model is not loaded for nothing

        split = SentenceSplitter(keep_newlines=arguments.keep_newlines)
    return Encoder(keys=arguments.json_keys, eod=tokenizer.eod if arguments.append_eod else None, split=split)


def _fast(tokenizer: Tokenizer) -> Fastokens | None:
    fast, reason = fast_tokenizer(tokenizer)
    if fast is None and isinstance(tokenizer, TokenizersTokenizer):
        say(f"tokenizing with tokenizers, which is slower: {reason}")
    return fast


def _made(job: Job) -> dict[int, ShardRecord]:
    """The shards that are there already; those that left out records are of use only to a run that does so too."""
    found = {index: finished(shard, job.folder) for index, shard in enumerate(job.shards)}
    made = {index: record for index, record in found.items() if record and (job.keep_going or not record.bad)}
    if made:
        say(f"{job.folder}: {len(made):,} of {counted(len(job.shards), 'shard')} are finished already")
    return made


def _join(job: Job, prefixes: Sequence[str]) -> None:
    for key, prefix in enumerate(prefixes):
        parts = [shard.prefix(job.folder, key) for shard in job.shards]
        size = sum(bin_path(part).stat().st_size for part in parts)
        try:
            with progress(size, "joining", unit="B") as bar:
                merge_datasets(parts, prefix, copied=bar.update)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"{error.filename}: {error.strerror}; until the shards are joined its ids, {size_of(size)}, are on the "
                "disk twice"
            ) from None


def _nothing(records: Sequence[ShardRecord], keys: Sequence[str], inputs: Sequence[str]) -> str:
    """Why the dataset would be of no use, "" when it is of use."""
    named = f"--input {' '.join(inputs)}"
    if not any(record.documents for record in records):
        return f"{named}: holds no document"
    empty = [key for index, key in enumerate(keys) if not any(record.tokens[index] for record in records)]
    return f"{named}: holds no text under {empty[0]!r}, all of its values are empty" if empty else ""


def _list_bad_records(path: Path, job: Job, records: Sequence[ShardRecord]) -> int:
    """Write which records were left out and why, a shard at a time; no file where none may be."""
    if not job.keep_going:
        path.unlink(missing_ok=True)
        return 0
    rows_before: Counter[Path] = Counter()
    with whole_file(path) as output:
        for shard, record in zip(job.shards, records):
            bads = left_out(shard, job.folder) if record.bad else []
            bad_of = {index: list(group) for index, group in groupby(bads, key=lambda bad: bad.piece)}
            for index, piece in enumerate(shard.pieces):
                file = piece.file.path
                for bad in bad_of.get(index, ()):
                    line = f"{file}\t{rows_before[file] + bad.number}\t{bad.problem}\n"
                    output.write(line.encode(errors="surrogateescape"))  # names of files need not be UTF-8
                rows_before[file] += record.rows[index]
    total = sum(record.bad for record in records)
    if total:
        say(f"{path}: {counted(total, 'bad record')} left out")
    return total


if __name__ == "__main__":
    run_tool(main)
