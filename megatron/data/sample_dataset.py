"""What the loader reads: numbered samples, each a window of ids."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[Any]


class SampleDataset(Protocol):
    """Numbered samples. Reading one must be safe from several threads."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> TokenArray:
        """The ids of sample `index`, without padding: sequence length + 1, fewer at the end of a split."""


class TokenSource(Protocol):
    """Sequences of ids that samples are cut from: an `IndexedDataset`, or made up ones."""

    @property
    def prefix(self) -> str:
        """Names the source in messages and descriptions."""

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence."""

    @property
    def fingerprint(self) -> str:
        """Names all that an index of samples depends on."""

    @property
    def content(self) -> str:
        """Tells ids from others of the same lengths, without reading all of them."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> TokenArray:
        """`length` ids of sequence `index` from `offset` on; None: to its end."""
