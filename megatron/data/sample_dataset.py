"""What the loader reads: numbered samples; and what they are cut from: sequences of ids."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError

TokenArray = npt.NDArray[Any]
Sample_co = TypeVar("Sample_co", covariant=True)


class SampleDataset(Protocol[Sample_co]):
    """Numbered samples: windows of ids for a GPT. Reading one must be safe from several threads."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> Sample_co:
        """Sample `index`, without padding."""


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

    def verify(self) -> None:
        """Raises UserError where the lengths, or the places of the sequences, contradict each other."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> TokenArray:
        """`length` ids of sequence `index` from `offset` on; None: to its end."""


def check_vocabulary(ids: TokenArray, vocab_size: int, prefix: str) -> None:
    """Raises UserError where an id, which was read from `prefix`, is outside the vocabulary."""
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"{prefix}: holds the id {low if low < 0 else high}, but the vocabulary has {vocab_size} entries; train "
            "with the tokenizer that the dataset was made with"
        )
