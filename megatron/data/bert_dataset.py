"""What a BERT is trained on: pairs of neighbouring segments, in their order or exchanged, with some tokens hidden.

The samples are Megatron-LM's, number for number. A sample is a run of whole sentences of one document (`SentenceWalk`),
cut in two at random; in half of the pairs the segments are exchanged, which is the second thing that a BERT learns to
tell (the sentence order of Z. Lan et al., ALBERT, 2019, §3.1). What is too long is cut off at both ends of the longer
segment. Without pairs a sample is one segment. Everything that is random in sample i is a function of (seed, i).
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron.config.bert import BertConfig
from megatron.config.data import DataConfig
from megatron.config.problems import UserError, counted
from megatron.data.bert_mapping import LONGEST_SENTENCE, SentenceWalk, build_bert_mapping
from megatron.data.build import REMEDY, Recipe, Requested, Splits, build_splits
from megatron.data.index_builder import Allocate, IntArray
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.masked_lm import BertVocabulary, BoolArray, Int64Array, TokenMasker
from megatron.data.mock_dataset import MockSentences
from megatron.data.sample_dataset import TokenSource, check_vocabulary
from megatron.data.splits import Split

logger = logging.getLogger(__name__)

_MAPPING_VERSION = 1  # counts changes of what a mapping holds, so that one of another version is built anew
_SENTENCES_OF_SECONDS = 50_000_000  # a walk over so many takes seconds, which are announced
_SENTENCES_TO_SEE = 1 << 16  # of a corpus, until one has two tokens: where none has, the rest are likely as short
_CUTS_AT_ONCE = 1 << 16


class SentenceSource(TokenSource, Protocol):
    """Sentences of documents: an `IndexedDataset` made with --split-sentences, or made up ones."""

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """[documents + 1] first sentence of each document, then the number of sentences."""


@dataclass(frozen=True, kw_only=True)
class BertSample:
    """One sample, without padding: [CLS] segment [SEP] segment [SEP].

    Attributes:
        tokens: [n] int64, some of them hidden.
        token_types: [n] int64, 0 up to the first [SEP] and 1 after it.
        labels: [n] int64 what stood there before.
        loss_mask: [n] bool, where a token was hidden.
        exchanged: whether the second segment of the text stands first.
        truncated: whether tokens were cut off.
    """

    tokens: Int64Array
    token_types: Int64Array
    labels: Int64Array
    loss_mask: BoolArray
    exchanged: bool
    truncated: bool


class _Generators(threading.local):
    """A generator for each thread, which each sample seeds: to make one takes longer than to make a sample."""

    def __init__(self) -> None:
        self.random = np.random.RandomState()


class BertDataset:
    """The samples of one split of one source, in the order of `mapping`.

    Args:
        source: the sentences.
        mapping: from `build_bert_mapping`.
        split: which part this is, for messages.
        bert: how samples are made and masked.
        vocabulary: ids must be below its size.
        seed: of all samples.
    """

    def __init__(
        self,
        source: SentenceSource,
        mapping: IntArray,
        *,
        split: Split,
        bert: BertConfig,
        vocabulary: BertVocabulary,
        seed: int,
    ) -> None:
        self.source = source
        self.mapping = mapping
        self.split = split
        self._pairs = bert.binary_head
        self._vocabulary = vocabulary
        self._seed = seed
        self._masker = TokenMasker(
            vocabulary,
            mask_prob=bert.mask_prob,
            max_ngram=bert.masking_max_ngram,
            whole_words=bert.whole_word_masking,
        )
        self._generators = _Generators()

    def __len__(self) -> int:
        return int(self.mapping.shape[0])

    def __getitem__(self, index: int) -> BertSample:
        """Sample `index`.

        Raises:
            IndexError: there is no such sample.
            UserError: an id is outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample {index} of the {self.split.value} split of {self.source.prefix}, which has {len(self)}"
            )
        first, end, target = self.mapping[index].tolist()
        random = self._generators.random
        random.seed((self._seed + index) % 2**32)
        border = end
        exchanged = False
        if self._pairs:
            border = first + (int(random.randint(1, end - first)) if end - first > 2 else 1)
            exchanged = bool(random.random_sample() < 0.5)
        segments = [self._read(first, border), self._read(border, end)]
        if exchanged:
            segments.reverse()
        kept = cut_pair(segments[0].size, segments[1].size, target, random)
        labels, types = self._joined([segment[part] for segment, part in zip(segments, kept)])
        check_vocabulary(labels, self._vocabulary.size, self.source.prefix)
        tokens, hidden = self._masker.hide(labels, target_length=target, random=random)
        return BertSample(
            tokens=tokens,
            token_types=types,
            labels=labels,
            loss_mask=hidden,
            exchanged=exchanged,
            truncated=sum(segment.size for segment in segments) > target,
        )

    def _read(self, first: int, end: int) -> IntArray:
        """The tokens of a run of sentences."""
        if end - first == 1:
            return self.source.get(first)
        sentences = [self.source.get(sentence) for sentence in range(first, end)]
        return np.concatenate(sentences) if sentences else np.empty(0, dtype=np.int64)

    def _joined(self, segments: Sequence[IntArray]) -> tuple[Int64Array, Int64Array]:
        """The tokens of a whole sample and their types; an empty second segment has no [SEP]."""
        first, second = (segment.size for segment in segments)
        tokens = np.full(first + second + (3 if second else 2), self._vocabulary.sep, dtype=np.int64)
        tokens[0] = self._vocabulary.cls
        tokens[1 : 1 + first] = segments[0]
        tokens[2 + first : 2 + first + second] = segments[1]
        types = np.zeros(tokens.size, dtype=np.int64)
        types[2 + first :] = 1
        return tokens, types


def cut_pair(first: int, second: int, target: int, random: np.random.RandomState) -> tuple[slice, slice]:
    """What is left of segments of so many tokens when both together are cut to `target`.

    A token at a time is taken from the longer segment, of equals the second, at its front or its end by chance. Which
    segment comes next can be told ahead: the longer one until both are equal, then each in turn.
    """
    excess = first + second - target
    if excess <= 0:
        return slice(0, first), slice(0, second)
    of_longer = abs(first - second)
    fronts, ends = [0, 0], [0, 0]
    for begin in range(0, excess, _CUTS_AT_ONCE):
        steps = np.arange(begin, min(begin + _CUTS_AT_ONCE, excess))
        at_front = random.random_sample(steps.size) < 0.5
        of_first = np.where(steps < of_longer, first > second, (steps - of_longer) % 2 == 1)
        for number, chosen in enumerate((of_first, ~of_first)):
            fronts[number] += int((chosen & at_front).sum())
            ends[number] += int((chosen & ~at_front).sum())
    return slice(fronts[0], first - ends[0]), slice(fronts[1], second - ends[1])


@dataclass(frozen=True, kw_only=True)
class _BertRecipe(Recipe[SentenceSource, BertSample]):
    bert: BertConfig
    vocabulary: BertVocabulary

    def open(self, prefix: str) -> SentenceSource:
        corpus = IndexedDataset(prefix, mmap=self.data.mmap_bin_files, random_order=True)
        corpus.require_ids(self.vocabulary.size)
        # More sentences than documents need no look at each document.
        pairs = len(corpus) > corpus.num_documents or bool((np.diff(corpus.document_indices) > 1).any())
        if self.bert.binary_head and not pairs:
            raise UserError(
                f"{prefix}: no document has two sentences, and --bert-binary-head learns from pairs of them; make the "
                "corpus with `tools/preprocess_data.py --split-sentences`, or train with --bert-no-binary-head"
            )
        self._check_special_tokens(corpus)
        return corpus

    def _check_special_tokens(self, corpus: IndexedDataset) -> None:
        """Warns of sentences that a tokenizer has put between [CLS] and [SEP], as the samples are once more."""
        long = np.flatnonzero(corpus.sequence_lengths[:_SENTENCES_TO_SEE] > 1)
        first = corpus.get(int(long[0])) if len(long) else None
        if first is not None and (first[0], first[-1]) == (self.vocabulary.cls, self.vocabulary.sep):
            logger.warning(
                "%s: its sentences begin with [CLS] and end with [SEP], and each sample gets its own besides; "
                "tools/preprocess_data.py leaves them out with --tokenizer-hf-no-include-special-tokens",
                corpus.prefix,
            )

    def mock(self) -> SentenceSource:
        return MockSentences(vocab_size=self.vocabulary.size)

    def size(self, source: SentenceSource) -> int:
        return len(source.document_indices) - 1

    def dataset(
        self, source: SentenceSource, split: Split, elements: range, requested: int | None, seed: int, share: str
    ) -> BertDataset:
        mapping = self._mapping(source, split, elements, requested, seed)
        if requested and not len(mapping):
            raise UserError(
                f"{share} leaves {split.value} {len(elements)} of the {self.size(source)} documents of "
                f"{source.prefix}, and none of them gives a sample ({self._unused(source, elements)}), but {requested} "
                f"are requested; {REMEDY[split]}"
            )
        dataset = BertDataset(source, mapping, split=split, bert=self.bert, vocabulary=self.vocabulary, seed=seed)
        report = logger.info if len(dataset) else logger.warning
        report(
            "%s: %s from %s of %s",
            split.value,
            counted(len(dataset), "sample"),
            counted(len(elements), "document"),
            source.prefix,
        )
        return dataset

    def _mapping(
        self, source: SentenceSource, split: Split, elements: range, requested: int | None, seed: int
    ) -> IntArray:
        walk = SentenceWalk(
            sequence_length=self.data.seq_length - 3,
            short_probability=self.bert.short_seq_prob,
            least_sentences=2 if self.bert.binary_head else 1,
            requested=requested,
            seed=seed,
        )
        documents = source.document_indices[elements.start : elements.stop + 1]

        def build(allocate: Allocate) -> None:
            source.verify()
            sentences = int(documents[-1] - documents[0])
            if max(sentences, walk.at_least) >= _SENTENCES_OF_SECONDS:
                logger.info("walking over %s sentences for %s", f"{sentences:,}", split.value)
            logger.info("%s: %s", split.value, self._unused(source, elements))
            build_bert_mapping(source.sequence_lengths, documents, walk, allocate)

        description = {
            "version": _MAPPING_VERSION,
            "dataset": source.prefix,
            "lengths": source.fingerprint,
            "documents": f"{zlib.crc32(np.ascontiguousarray(documents).data):08x}",
            "elements": [elements.start, elements.stop],
            **asdict(walk),
        }
        cache = self.index_cache(source, "BertDataset_indices")
        return cache.get(f"BertDataset-{split.value}", description, build)["mapping"]

    def _unused(self, source: SentenceSource, elements: range) -> str:
        """How many documents give no sample, and why."""
        documents = source.document_indices[elements.start : elements.stop + 1]
        sentences = np.diff(documents)
        first, end = (int(documents[0]), int(documents[-1])) if len(elements) else (0, 0)
        long = first + np.flatnonzero(source.sequence_lengths[first:end] > LONGEST_SENTENCE)
        holders = np.unique(np.searchsorted(documents, long, side="right") - 1)
        parts = [f"{counted(int((sentences == 0).sum()), 'document')} without a sentence"]
        if self.bert.binary_head:
            parts.append(f"{int((sentences == 1).sum())} of one sentence")
        parts.append(f"{int((sentences[holders] > 1).sum())} with a sentence of over {LONGEST_SENTENCE} tokens")
        return ", ".join(parts)


def build_bert_datasets(
    data: DataConfig,
    bert: BertConfig,
    *,
    num_samples: tuple[Requested, Requested, Requested],
    seed: int,
    vocabulary: BertVocabulary,
) -> Splits[BertSample]:
    """The training, validation and test samples of a BERT. See `build_splits`; --split divides the documents."""
    return build_splits(_BertRecipe(data=data, bert=bert, vocabulary=vocabulary), num_samples, seed)
