"""What `data.py` measures of samples: building their indices, and reading them.

Each measurement runs in a process of its own, whose memory is then that of the measurement.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from megatron.config.bert import BertConfig
from megatron.config.data import DataConfig
from megatron.data.batches import GPTCollator
from megatron.data.bert_batches import BertCollator
from megatron.data.bert_dataset import build_bert_datasets
from megatron.data.bert_mapping import SentenceWalk, build_bert_mapping
from megatron.data.build import build_gpt_datasets
from megatron.data.index_builder import (
    build_blend_index,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.loader import MicrobatchLoader
from megatron.data.masked_lm import BertVocabulary
from megatron.data.sample_dataset import SampleDataset, TokenArray
from megatron.data.samplers import SequentialOrder

SEQ_LENGTH = 2048
MICRO_BATCH = 8
VOCABULARY = 50_000
Numbers = dict[str, float]
Sample = TypeVar("Sample")


def in_own_process(measure: Callable[[], Numbers]) -> Numbers:
    """What it returns, and by how many MB the memory of the process has grown at most."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_with_memory, measure).result()


def _with_memory(measure: Callable[[], Numbers]) -> Numbers:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numbers = measure()
    return numbers | {"memory MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3}


def walk(documents: int, tokens: int) -> Numbers:
    """Seconds of the index of an epoch of documents, 5 billion tokens of 10 million, and of numpy's shuffles in it."""
    lengths = np.random.default_rng(0).integers(1, 2 * tokens // documents, documents, dtype=np.int32)
    total = int(lengths.sum(dtype=np.int64))
    plan = plan_epochs(tokens_per_epoch=total, sequence_length=SEQ_LENGTH, requested=None)
    orders = np.arange(documents, dtype=np.int32), np.arange(plan.num_samples, dtype=np.uint32)
    random = np.random.RandomState(1234)

    def shuffle() -> None:
        for order in orders:
            random.shuffle(order)

    alone = _timed(shuffle)
    random = np.random.RandomState(1234)

    def build() -> None:
        order = build_document_index(np.arange(documents, dtype=np.int32), plan, random)
        build_sample_index(lengths, order, sequence_length=SEQ_LENGTH, num_samples=plan.num_samples, total_tokens=total)
        build_shuffle_index(plan, random)

    return _timed(build) | {"numpy's shuffles s": alone["s"]}


def blend(samples: int, corpora: int) -> Numbers:
    """Seconds of the order of a blend with uneven weights, and before it of filling as much memory.

    A virtual machine may have to ask its host for memory at its first use, which takes seconds for a gigabyte; what is
    filled before is there.
    """
    weights = np.arange(1, corpora + 1) / (corpora * (corpora + 1) / 2)
    filled = _timed(lambda: np.empty(10 * samples, dtype=np.uint8).fill(1))
    built = _timed(lambda: build_blend_index(weights.tolist(), samples))
    return built | {"filling as much memory s": filled["s"]}


def _timed(run: Callable[[], object]) -> Numbers:
    start, cpu_start = time.perf_counter(), time.process_time()
    run()
    return {"s": time.perf_counter() - start, "processor s": time.process_time() - cpu_start}


def write_corpus(prefix: Path, megabytes: float) -> None:
    """Documents of 1 to 2,000 tokens, on the disk and in no cache."""
    random = np.random.default_rng(0)
    ids = random.integers(1, VOCABULARY, 2**20, dtype=np.uint16)
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for length in random.integers(1, 2000, int(megabytes * 1e6 / 2000)).tolist():
            start = int(random.integers(0, ids.size - length))
            writer.add_item(ids[start : start + length])
            writer.end_document()
    forget(prefix)


def write_sentences(prefix: Path, megabytes: float) -> None:
    """Documents of 1 to 40 sentences of 1 to 60 tokens, on the disk and in no cache."""
    random = np.random.default_rng(0)
    ids = random.integers(1, VOCABULARY, 2**20, dtype=np.uint16)
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for sentences in random.integers(1, 41, int(megabytes * 1e6 / 1250)).tolist():
            for length in random.integers(1, 61, sentences).tolist():
                start = int(random.integers(0, ids.size - length))
                writer.add_item(ids[start : start + length])
            writer.end_document()
    forget(prefix)


def forget(prefix: Path) -> None:
    """Have the system drop what it keeps of the ids in memory."""
    with Path(f"{prefix}.bin").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def samples_of(prefix: Path, cache: Path) -> SampleDataset[TokenArray]:
    data = DataConfig(data_path=(str(prefix),), split="1", seq_length=SEQ_LENGTH, data_cache_path=str(cache))
    train, _, _ = build_gpt_datasets(data, num_samples=(None, 0, 0), seed=1234, vocab_size=VOCABULARY, eod=0)
    assert train is not None
    return train


def read_gpt(prefix: Path, cache: Path, seconds: float) -> Numbers:
    """See `read`."""
    return read(samples_of(prefix, cache), GPTCollator(seq_length=SEQ_LENGTH, eod=0), SEQ_LENGTH, prefix, seconds)


def read_bert(prefix: Path, cache: Path, seconds: float) -> Numbers:
    """See `read`."""
    data = DataConfig(data_path=(str(prefix),), split="1", seq_length=512, data_cache_path=str(cache))
    train, _, _ = build_bert_datasets(
        data,
        BertConfig(),
        num_samples=(None, 0, 0),
        seed=1234,
        vocabulary=BertVocabulary(
            size=VOCABULARY + 3,
            cls=VOCABULARY,
            sep=VOCABULARY + 1,
            mask=VOCABULARY + 2,
            pad=0,
            continues_word=np.arange(VOCABULARY + 3) % 3 == 0,
        ),
    )
    assert train is not None
    return read(train, BertCollator(seq_length=512, pad=0, pairs=True), 512, prefix, seconds)


def read(
    dataset: SampleDataset[Sample],
    collate: Callable[[list[Sample], Sequence[int]], object],
    seq_length: int,
    prefix: Path,
    seconds: float,
) -> Numbers:
    """Tokens that one worker reads in a second from a mapped file that is in no cache, and what its memory becomes."""
    own = [_own_megabytes()]
    start, cpu_start, position = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        numbers = range(position, position + MICRO_BATCH)
        collate([dataset[number % len(dataset)] for number in numbers], numbers)
        position += MICRO_BATCH
        if position == 64 * MICRO_BATCH:
            own = [_own_megabytes()]
    passed, tokens = time.perf_counter() - start, position * seq_length
    return {
        "s": passed,
        "processor s": time.process_time() - cpu_start,
        "million tokens/s": tokens / passed / 1e6,
        "million tokens/processor s": tokens / (time.process_time() - cpu_start) / 1e6,
        "MB of the file": Path(f"{prefix}.bin").stat().st_size / 1e6,
        "own memory grew by MB": _own_megabytes() - own[0],
        "share of what was read": min(1.0, position / len(dataset)),
    }


def _own_megabytes() -> float:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1e3


def train(prefix: Path, cache: Path, steps: int) -> Numbers:
    """How long steps of one thread wait for a loader of two workers: a product in the place of a model."""
    torch.set_num_threads(1)
    dataset = samples_of(prefix, cache)
    weight = torch.randn(1024, 1024)
    waited = 0.0
    with MicrobatchLoader(
        dataset,
        order=SequentialOrder(len(dataset), wrap=True),
        collate=GPTCollator(seq_length=SEQ_LENGTH, eod=0),
        micro_batch_size=MICRO_BATCH,
        dp_rank=0,
        dp_size=1,
        num_workers=2,
    ) as loader:
        start = time.perf_counter()
        for step in range(steps):
            before = time.perf_counter()
            (batch,) = loader.microbatches(step * MICRO_BATCH, 1)
            waited += (time.perf_counter() - before) * (step > 0)  # of the first nothing could be read ahead
            hidden = weight[batch.tokens % 1024].flatten(0, 1)  # [b s, h]
            for _ in range(2):
                hidden = hidden @ weight
        passed = time.perf_counter() - start
    return {"s": passed, "of it waiting": waited, "ms a step": 1e3 * passed / steps, "ms waiting": 1e3 * waited / steps}


def map_sentences(sentences: int, samples: int) -> Numbers:
    """Seconds of the mapping of BERT, over as many epochs of documents of 1 to 40 sentences as the samples take."""
    random = np.random.default_rng(0)
    borders = np.concatenate([[0], np.cumsum(random.integers(1, 41, sentences // 20))])  # int64
    lengths = random.integers(1, 61, int(borders[-1]), dtype=np.int32)
    walk = SentenceWalk(sequence_length=509, short_probability=0.1, least_sentences=2, requested=samples, seed=1234)
    return _timed(lambda: build_bert_mapping(lengths, borders, walk))


def index_measurements(documents: int, samples: int) -> dict[str, Callable[[], Numbers]]:
    return {
        f"index of {documents:,} documents, {500 * documents:,} tokens": partial(walk, documents, 500 * documents),
        f"blend of {samples:,} samples over 8 corpora": partial(blend, samples, 8),
        f"mapping of {2 * documents:,} sentences to {documents:,} samples of BERT": partial(
            map_sentences, 2 * documents, documents
        ),
    }


def reading_measurements(folder: Path, megabytes: float, seconds: float) -> dict[str, Callable[[], Numbers]]:
    """On corpora in the folder, a GPT's of so many megabytes and a BERT's of a tenth of them."""
    gpt, bert, cache = folder / "read", folder / "sentences", folder / "cache"
    write_corpus(gpt, megabytes)
    write_sentences(bert, megabytes / 10)
    return {
        "random samples of one worker": partial(read_gpt, gpt, cache, seconds),
        "random samples of BERT of one worker": partial(read_bert, bert, cache, seconds),
        "a loader of two workers beside a step": partial(train, gpt, cache, 20),
    }
