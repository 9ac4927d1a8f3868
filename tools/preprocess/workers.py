"""Processes that make shards, and what can be seen of them meanwhile."""

import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from command_line import progress, say

from megatron.config.problems import UserError
from megatron.tokenizer import Tokenizer
from preprocess.encoder import Encoder
from preprocess.fast_tokenizer import Fastokens, OneByOne, difference, telling_texts
from preprocess.records import Record, count_before, parts_of, read_blocks
from preprocess.shards import BadRecord, Shard, ShardRecord, make_shard

POLL_SECONDS = 0.2
# The fast tokenizer is tried on so many characters of so many shards, spread over the input.
TRIED_SHARDS, TRIED_CHARACTERS = 8, 16_000


class Stopped(Exception):
    """The run has ended elsewhere."""


class Board:
    """Memory that the processes share: how far each shard is, and whether all are to stop."""

    def __init__(self, num_shards: int) -> None:
        memory = mmap.mmap(-1, (num_shards + 1) * 3 * 8)
        self._values = np.frombuffer(memory, dtype=np.int64).reshape(num_shards + 1, 3)

    def set(self, shard: int, size: int, documents: int, tokens: int) -> None:
        """Raises Stopped: no more is wanted."""
        if self._values[-1, 0]:
            raise Stopped
        self._values[shard] = size, documents, tokens

    def stop(self) -> None:
        self._values[-1, 0] = 1

    def totals(self) -> tuple[int, int, int]:
        """Bytes of input, documents and tokens."""
        size, documents, tokens = self._values[:-1].sum(axis=0).tolist()
        return size, documents, tokens


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers know.

    Attributes:
        fast: the tokenizer's fast library, None when there is none.
        dtype: of the stored ids.
        keep_going: leave bad records out.
    """

    shards: Sequence[Shard]
    folder: Path
    encoder: Encoder
    tokenizer: Tokenizer
    fast: Fastokens | None
    dtype: np.dtype[np.integer]
    keep_going: bool


def make_shards(job: Job, made: Mapping[int, ShardRecord], *, workers: int) -> list[ShardRecord]:
    """Make the shards that are missing; returns the records of all, in order.

    Args:
        made: the records of shards that are there already.

    Raises:
        UserError: a bad record, with file and line, unless the job keeps going; a damaged file; a killed worker.
    """
    missing = [index for index in range(len(job.shards)) if index not in made]
    if not missing:
        return [made[index] for index in range(len(job.shards))]
    board = Board(len(job.shards))
    for index, record in made.items():
        board.set(index, job.shards[index].size, record.documents, sum(record.tokens))
    # Forked, so that each worker has the tokenizers at once; this process itself encodes nothing, as threads of
    # the libraries would be missing in the forks.
    count = min(workers, len(missing))
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(job, board),
    )
    # The library names its processes nowhere. It starts those that are forked all at once, with the first task, so
    # they are the children that there were not before it.
    before = multiprocessing.active_children()
    pool.submit(os.getpid)
    processes = [process for process in multiprocessing.active_children() if process not in before]
    try:
        use_fast = job.fast is not None and _is_exact(pool)
        futures = {pool.submit(_make_in_worker, index, use_fast): index for index in missing}
        records = dict(made)
        for done in _watched(futures, board, sum(shard.size for shard in job.shards)):
            records[futures[done]] = done.result()
        return [records[index] for index in range(len(job.shards))]
    except BadRecord as bad:
        place = bad.piece.where(count_before(bad.piece) + bad.number)
        raise UserError(f"{place}: {bad.problem}") from None
    except BrokenProcessPool:
        pool.shutdown(wait=True)  # of all workers it is known then how they have ended
        raise UserError(f"--workers {workers}: {_why([process.exitcode for process in processes], count)}") from None
    finally:
        board.stop()
        pool.shutdown(wait=True, cancel_futures=True)


def _why(codes: Sequence[int | None], count: int) -> str:
    """How the first of `count` workers has ended: what is left of them the pool ends by SIGTERM.

    Args:
        codes: with which they have ended; without those of workers that were gone before they could be listed.
    """
    code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), None)
    if codes.count(-signal.SIGTERM) == count:
        code = -signal.SIGTERM
    if code is None:  # the library has told what it raised, and ended it well
        return "a worker could not start, see above"
    if code > 0:
        return f"a worker has ended with status {code}"
    why = f"a worker was ended by {_name(-code)}"
    if code == -signal.SIGKILL:
        why += ", most likely for want of memory" + ("; use fewer workers" if count > 1 else "")
    return why


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals only the first and the last have one
        return f"signal {number}"


def _is_exact(pool: ProcessPoolExecutor) -> bool:
    text = pool.submit(_difference_in_worker).result()
    if text is not None:
        say(f"fastokens gives other ids than tokenizers, of {text[:60]!r}: tokenizing with tokenizers, which is slower")
    return text is None


def _watched(futures: Mapping[Future[ShardRecord], int], board: Board, total: int) -> Iterator[Future[ShardRecord]]:
    """The futures as they are done, with a progress bar meanwhile."""
    waiting = set(futures)
    started = time.perf_counter()
    begun, _, tokens_before = board.totals()
    with progress(total, "tokenizing", unit="B") as bar:
        bar.n = bar.initial = begun  # the rest is what its rate and ETA are about
        while waiting:
            done, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            size, documents, tokens = board.totals()
            rate = (tokens - tokens_before) / (time.perf_counter() - started)
            bar.set_postfix_str(f"{documents:,} documents, {rate:,.0f} tokens/s", refresh=False)
            bar.update(size - bar.n)
            yield from sorted(done, key=futures.__getitem__)


_job: Job
_board: Board


def _start_worker(job: Job, board: Board) -> None:
    global _job, _board
    _job, _board = job, board
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, which gets it too, says what is to be done
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does then
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if job.fast is not None:
        job.fast.start_alone()


def _end_with_parent() -> None:
    """Without this a worker whose parent is killed would wait for work for ever, with the output open."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _difference_in_worker() -> str | None:
    """The first text of which the fast tokenizer gives other ids, None when there is none."""
    assert _job.fast is not None
    texts = telling_texts(_job.fast.added_tokens())
    for shard in _job.shards[:: -(-len(_job.shards) // TRIED_SHARDS)]:
        left = TRIED_CHARACTERS
        block = next(read_blocks(shard.pieces[0], _job.encoder.keys), None)
        for text in _strings(block.records) if block else ():
            if left > 0:
                texts.append(text[:left])
                left -= len(text)
    return difference(_job.fast, OneByOne(_job.tokenizer), texts)


def _strings(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        for text in record.texts:
            yield from parts_of(text)


def _make_in_worker(index: int, use_fast: bool) -> ShardRecord:
    return make_shard(
        _job.shards[index],
        _job.folder,
        _job.encoder,
        _job.fast if use_fast and _job.fast is not None else OneByOne(_job.tokenizer),
        dtype=_job.dtype,
        keep_going=_job.keep_going,
        made=lambda size, documents, tokens: _board.set(index, size, documents, tokens),
    )
