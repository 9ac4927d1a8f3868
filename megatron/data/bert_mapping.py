"""Which sentences make up a sample of BERT: Megatron-LM's numbers and order.

Compiled in csrc/bert_mapping.cpp; the references here give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.core.kernels.extension import compiled_function
from megatron.data.index_builder import Allocate, IntArray, builder_threads, in_memory

LONGEST_SENTENCE = 512
_SPACING = 1 << 16  # samples that a thread is woken for; the result is the same for any
_UINT32_MAX = np.iinfo(np.uint32).max
_REFERENCE_COST = "about a minute a million samples of BERT"


@dataclass(frozen=True, kw_only=True)
class SentenceWalk:
    """How documents are cut into samples.

    A sample is a run of whole sentences of one document. It aims at `sequence_length` tokens, or by chance at fewer,
    and ends with the sentence that reaches them, but leaves no sentence of the document alone behind it. A document of
    fewer than `least_sentences` gives none, nor does one of several sentences of which one has over 512 tokens. The
    rules do not bound a sample's tokens: those over its target are cut off when it is read.

    Attributes:
        sequence_length: tokens of a sample without [CLS] and [SEP]; at least 2.
        short_probability: share of the samples that aim at 2 to `sequence_length` tokens, counted as one in
            round(1 / share).
        least_sentences: of a sample: 2 for pairs, else 1.
        requested: samples wanted, for which all documents are walked as often as it takes; None: once.
        seed: 32 bits.
    """

    sequence_length: int
    short_probability: float
    least_sentences: int
    requested: int | None
    seed: int

    @property
    def short_every(self) -> int:
        """One sample in so many is short; 0: none."""
        return int(1 / self.short_probability + 0.5) if self.short_probability > 0 else 0

    @property
    def at_least(self) -> int:
        """Samples to stop after, at the end of an epoch."""
        return 1 if self.requested is None else self.requested


def build_bert_mapping(
    lengths: IntArray,
    documents: IntArray,
    walk: SentenceWalk,
    allocate: Allocate = in_memory,
) -> IntArray:
    """The samples in the order in which they are read.

    Args:
        lengths: [n] int32 tokens of each sentence of the file.
        documents: [d + 1] first sentence of each document, then the end of the last one.
        allocate: asked for `mapping`.

    Returns:
        [samples, 3] uint32 (uint64 where there are more sentences than it counts): first sentence, end, and the tokens
        that the sample aims at. None where no document gives a sample; else at least as many as requested.

    Raises:
        IndexError: a document has sentences that there are not.
    """
    dtype = np.uint32 if lengths.size <= _UINT32_MAX else np.uint64
    build = compiled_function(f"build_bert_mapping_{np.dtype(dtype).name}", reference_cost=_REFERENCE_COST)
    if build is None:
        reference = bert_mapping_reference(lengths, documents, walk)
        rows: IntArray = allocate("mapping", reference.shape, dtype)
        rows[:] = reference
        return rows
    mark = compiled_function("mark_bert_samples", reference_cost=_REFERENCE_COST)
    assert mark is not None  # as it is of the same operation
    arguments = {
        "lengths": np.require(lengths, np.int32, ["C", "A"]),  # in an .idx file they are not aligned
        "documents": np.require(documents, np.int64, ["C", "A"]),
        "sequence_length": walk.sequence_length,
        "short_every": walk.short_every,
        "least_sentences": walk.least_sentences,
        "requested": walk.at_least,
        "seed": walk.seed,
    }
    marks = mark(**arguments, spacing=_SPACING)
    *_, samples = marks[-1]
    rows = allocate("mapping", (samples, 3), dtype)
    build(**arguments, marks=marks, threads=builder_threads(), rows=rows)
    return rows


def bert_mapping_reference(lengths: IntArray, documents: IntArray, walk: SentenceWalk) -> npt.NDArray[np.int64]:
    """`build_bert_mapping` in Python, a sentence at a time: [samples, 3]."""
    rows: list[tuple[int, int, int]] = []
    draws = _random32(walk.seed)
    while len(rows) < walk.at_least:
        epoch = list(_epoch(lengths, documents, walk, draws))
        if not epoch:
            break
        rows += epoch
    order = np.arange(len(rows))
    for sample, number in zip(range(len(rows) - 1, 0, -1), _random64(walk.seed + 1)):
        other = number % (sample + 1)
        order[[sample, other]] = order[[other, sample]]
    unshuffled = np.array(rows, dtype=np.int64).reshape(-1, 3)
    shuffled: npt.NDArray[np.int64] = unshuffled[order]
    return shuffled


def _epoch(
    lengths: IntArray, documents: IntArray, walk: SentenceWalk, draws: Iterator[int]
) -> Iterator[tuple[int, int, int]]:
    """Samples of one walk over the documents: first sentence, end, target."""

    def draw_target() -> int:
        if walk.short_every == 0:
            return walk.sequence_length
        number = next(draws)
        return 2 + number % (walk.sequence_length - 1) if number % walk.short_every == 0 else walk.sequence_length

    for first, end in zip(documents[:-1].tolist(), documents[1:].tolist()):
        if not 0 <= first <= end <= lengths.size:
            raise IndexError(f"sentences {first} to {end} of a file with {lengths.size}")
        sentences = lengths[first:end].tolist()
        if len(sentences) < walk.least_sentences or (len(sentences) > 1 and max(sentences) > LONGEST_SENTENCE):
            continue
        target, tokens = draw_target(), 0
        for after, length in enumerate(sentences, start=end - len(sentences) + 1):
            tokens += length
            full = tokens >= target and end - after > 1 and after - first >= walk.least_sentences
            if full or after == end:
                yield first, after, target
                first, target, tokens = after, draw_target(), 0


def _random32(seed: int) -> Iterator[int]:
    """C++'s `std::mt19937`."""
    bits = np.random.MT19937()
    bits._legacy_seeding(seed)
    while True:
        yield from bits.random_raw(1024).tolist()


def _random64(seed: int) -> Iterator[int]:
    """C++'s `std::mt19937_64`, which numpy has not: M. Matsumoto, T. Nishimura, mt19937-64 (2004)."""
    low, every = (1 << 31) - 1, (1 << 64) - 1
    state = [seed]
    for number in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ state[-1] >> 62) + number) & every)
    while True:
        for number in range(312):
            joined = state[number] & ~low | state[(number + 1) % 312] & low
            twisted = joined >> 1 ^ (0xB5026F5AA96619E9 if joined & 1 else 0)
            state[number] = state[(number + 156) % 312] ^ twisted
        for drawn in state:
            drawn ^= drawn >> 29 & 0x5555555555555555
            drawn ^= drawn << 17 & 0x71D67FFFEDA60000
            drawn ^= drawn << 37 & 0xFFF7EEE000000000
            yield drawn ^ drawn >> 43
