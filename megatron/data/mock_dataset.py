"""Made-up documents for `--mock-data`: the same on every machine, no file needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_SEED = 0
_NUM_DOCUMENTS = 100_000
_LENGTH_LIMIT = 4096
_NUM_SENTENCES, _SENTENCES_OF_DOCUMENT, _SENTENCE_LIMIT = 100_000, 10, 64


class MockTokens:
    """100,000 documents of 1 to 4,095 ids that count up from 1 and end with `eod`, as Megatron-LM's.

    Where the vocabulary is smaller than a document, counting begins again at 1.

    Args:
        vocab_size: ids stay below it.
        eod: end-of-document id.
    """

    prefix = "mock data"

    def __init__(self, *, vocab_size: int, eod: int) -> None:
        self._vocab_size, self._eod = vocab_size, eod
        random = np.random.default_rng(_SEED)
        self.sequence_lengths: npt.NDArray[np.int32] = random.integers(
            1, _LENGTH_LIMIT, size=_NUM_DOCUMENTS, dtype=np.int32
        )
        self.fingerprint = f"mock data, {_NUM_DOCUMENTS} sequences"
        self.content = f"ids below {vocab_size}, the last {eod}"

    def __len__(self) -> int:
        return _NUM_DOCUMENTS

    def verify(self) -> None:
        """What is made up contradicts nothing."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Ids `offset` to `offset + length` (None: to its end) of document `index`."""
        available = int(self.sequence_lengths[index])
        ids = 1 + np.arange(available, dtype=np.int64) % max(1, self._vocab_size - 1)
        ids[-1] = self._eod
        return ids[offset : available if length is None else offset + length]


class MockSentences:
    """10,000 documents of ten sentences of 1 to 63 ids each. A document counts up from 1, over its sentences.

    Args:
        vocab_size: ids stay below it; behind its end counting begins again at 1.
    """

    prefix = "mock sentences"

    def __init__(self, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        random = np.random.default_rng(_SEED)
        self.sequence_lengths: npt.NDArray[np.int32] = random.integers(
            1, _SENTENCE_LIMIT, size=_NUM_SENTENCES, dtype=np.int32
        )
        self.document_indices = np.arange(0, _NUM_SENTENCES + 1, _SENTENCES_OF_DOCUMENT, dtype=np.int64)
        ends = np.cumsum(self.sequence_lengths.reshape(-1, _SENTENCES_OF_DOCUMENT), axis=1)
        self._starts = ends.ravel() - self.sequence_lengths
        self.fingerprint = f"mock sentences, {_NUM_SENTENCES} sequences"
        self.content = f"ids below {vocab_size}"

    def verify(self) -> None:
        """What is made up contradicts nothing."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Ids `offset` to `offset + length` (None: to its end) of sentence `index`."""
        available = int(self.sequence_lengths[index])
        ids: npt.NDArray[Any] = 1 + (self._starts[index] + np.arange(available, dtype=np.int64)) % max(
            1, self._vocab_size - 1
        )
        return ids[offset : available if length is None else offset + length]
