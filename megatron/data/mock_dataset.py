"""Made-up documents for `--mock-data`: the same on every machine, no file needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_SEED = 0
_NUM_DOCUMENTS = 100_000
_LENGTH_LIMIT = 4096


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

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Ids `offset` to `offset + length` (None: to its end) of document `index`."""
        available = int(self.sequence_lengths[index])
        ids = 1 + np.arange(available, dtype=np.int64) % max(1, self._vocab_size - 1)
        ids[-1] = self._eod
        return ids[offset : available if length is None else offset + length]
