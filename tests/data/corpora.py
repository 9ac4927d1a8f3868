"""Tiny corpora for the data tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from megatron.data.indexed_dataset import IndexedDatasetWriter

FIXTURES = Path(__file__).parent.parent / "fixtures"


def write_corpus(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: DTypeLike = np.uint16) -> Path:
    """Write documents, each a list of sequences of ids."""
    with IndexedDatasetWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_item(sequence)
            writer.end_document()
    return prefix


def numbered_corpus(prefix: Path, lengths: Sequence[int], *, first: int = 1) -> Path:
    """One sequence a document; ids count up over the corpus, so each token is known by its value."""
    documents, start = [], first
    for length in lengths:
        documents.append([list(range(start, start + length))] if length else [])
        start += length
    return write_corpus(prefix, documents)
