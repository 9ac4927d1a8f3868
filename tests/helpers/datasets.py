"""Texts as tests write them, and the token files that come of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.data.indexed_dataset import IndexedDataset


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sequences(prefix: Path) -> list[list[list[int]]]:
    """The ids of each sequence of each document."""
    dataset = IndexedDataset(prefix)
    dataset.verify()
    bounds = dataset.document_indices
    return [
        [[int(token) for token in dataset[sequence]] for sequence in range(bounds[i], bounds[i + 1])]
        for i in range(len(bounds) - 1)
    ]


def documents(prefix: Path) -> list[list[int]]:
    """The ids of each document."""
    return [[token for sequence in document for token in sequence] for document in sequences(prefix)]


def same_files(prefix: Path, expected: Path) -> bool:
    return all(
        Path(f"{prefix}.{ending}").read_bytes() == Path(f"{expected}.{ending}").read_bytes()
        for ending in ("bin", "idx")
    )
