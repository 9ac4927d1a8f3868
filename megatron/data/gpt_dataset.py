"""What a GPT is trained on: a stream of documents, cut into windows of sequence length + 1 ids and shuffled.

Documents are neither truncated nor padded: windows cross their borders, neighbours share the id at the border
between them (last label of one, first input of the next), and only the tail of the last epoch is lost.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from megatron.data.index_builder import (
    Allocate,
    IntArray,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.data.index_cache import IndexCache
from megatron.data.sample_dataset import TokenArray, TokenSource, check_vocabulary
from megatron.data.splits import Split, as_indices

logger = logging.getLogger(__name__)

_INDEX_VERSION = 1  # counts changes of what an index holds, so that one of another version is built anew
_SAMPLES_OF_SECONDS = 10_000_000  # an index of so many takes seconds to build, which are announced


@dataclass(frozen=True, kw_only=True)
class GPTIndex:
    """Sample i reads from boundary j = shuffle[i] to boundary j + 1 of the documents in this order.

    Attributes:
        document: [epochs * documents] reading order of sequences.
        sample: [samples + 1, 2] rows (position in `document`, token offset in that sequence).
        shuffle: [samples] order in which samples are served.
    """

    document: IntArray
    sample: IntArray
    shuffle: IntArray


class GPTDataset:
    """The samples of one split of one source, in the order of `index`.

    Args:
        source: the documents.
        index: from `build_gpt_index`.
        split: which part this is, for messages.
        extra_tokens: 1: a sample carries the label of its last id; 0: it does not.
        vocab_size: ids must be below it.
    """

    def __init__(
        self, source: TokenSource, index: GPTIndex, *, split: Split, extra_tokens: int, vocab_size: int
    ) -> None:
        self.source = source
        self.index = index
        self.split = split
        self._extra_tokens = extra_tokens
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return int(self.index.shuffle.shape[0])

    def __getitem__(self, index: int) -> TokenArray:
        """The ids of sample `index`: sequence length + extra ids, fewer in a short last sample.

        Raises:
            IndexError: there is no such sample.
            UserError: an id is outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample {index} of the {self.split.value} split of {self.source.prefix}, which has {len(self)}"
            )
        row = int(self.index.shuffle[index])
        (first, first_offset), (last, last_offset) = self.index.sample[row : row + 2].tolist()
        end = last_offset + self._extra_tokens
        if first == last:
            ids = self.source.get(int(self.index.document[first]), first_offset, end - first_offset)
        else:
            inner = self.index.document[first : last + 1].tolist()
            ids = np.concatenate(
                [
                    self.source.get(inner[0], first_offset),
                    *(self.source.get(document) for document in inner[1:-1]),
                    self.source.get(inner[-1], 0, end),
                ]
            )
        check_vocabulary(ids, self._vocab_size, self.source.prefix)
        return ids


def build_gpt_index(
    source: TokenSource,
    elements: range,
    *,
    split: Split,
    requested: int | None,
    seed: int,
    sequence_length: int,
    extra_tokens: int,
    keep_last: bool,
    cache: IndexCache,
) -> GPTIndex:
    """The index of the sequences `elements` of a source, from the cache or built.

    One `RandomState(seed)` shuffles first the documents and then the samples, as in Megatron-LM.

    Args:
        requested: samples wanted; the split is repeated until it holds them. None: one pass.
        keep_last: keep the last sample of the split though it is short.

    Raises:
        UserError: the index can not be kept, see `IndexCache`.
        ValueError: the split has no token.
    """

    def build(allocate: Allocate) -> None:
        source.verify()  # by who builds, as nobody else reads all of it
        documents = as_indices(elements)
        tokens_per_epoch = int(source.sequence_lengths[elements.start : elements.stop].sum(dtype=np.int64))
        plan = plan_epochs(
            tokens_per_epoch=tokens_per_epoch,
            sequence_length=sequence_length,
            requested=requested,
            extra_tokens=extra_tokens,
            keep_last=keep_last,
        )
        if plan.num_samples >= _SAMPLES_OF_SECONDS:
            logger.info("building an index of %s samples for %s", f"{plan.num_samples:,}", split.value)
        random = np.random.RandomState(seed)
        document_index = build_document_index(documents, plan, random, allocate)
        build_sample_index(
            source.sequence_lengths,
            document_index,
            sequence_length=sequence_length,
            num_samples=plan.num_samples,
            total_tokens=plan.num_epochs * tokens_per_epoch,
            extra_tokens=extra_tokens,
            allocate=allocate,
        )
        build_shuffle_index(plan, random, allocate)

    description = {
        "version": _INDEX_VERSION,
        "dataset": source.prefix,
        "lengths": source.fingerprint,
        "elements": [elements.start, elements.stop],
        "requested": requested,
        "seed": seed,
        "sequence_length": sequence_length,
        "extra_tokens": extra_tokens,
        "keep_last": keep_last,
    }
    arrays = cache.get(f"GPTDataset-{split.value}", description, build)
    return GPTIndex(document=arrays["document_index"], sample=arrays["sample_index"], shuffle=arrays["shuffle_index"])
