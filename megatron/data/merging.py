"""Several token files as one, as if their texts had been tokenized together.

Ids are copied within the kernel, from file to file; of the indices only what moves is changed: the offsets in `.bin`
by the bytes before, the sequences of documents by the sequences before.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron.core.whole_file import WholeFile
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetError, bin_path, publish

# The most that Linux moves in one call.
_CALL_BYTES = 0x7FFFF000
_ONLY_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def merge_datasets(
    prefixes: Sequence[str | Path], output: str | Path, *, copied: Callable[[int], object] = lambda size: None
) -> IndexedDataset:
    """Write the datasets one after another under the prefix `output`, whole or not at all, and open the result.

    Args:
        copied: gets the number of bytes of ids after each step.

    Raises:
        IndexedDatasetError: one is damaged, or they do not agree in the type of their ids or in having modes.
    """
    first = IndexedDataset(prefixes[0])
    have_modes = set()
    for dataset in _each(prefixes):
        dataset.verify()
        if dataset.dtype != first.dtype:
            raise IndexedDatasetError(
                f"{dataset.prefix} holds ids of {dataset.dtype}, {first.prefix} of {first.dtype}: they were made with "
                "different tokenizers, and a dataset has one type"
            )
        if len(dataset):
            have_modes.add(dataset.sequence_modes is not None)
    if len(have_modes) == 2:
        raise IndexedDatasetError(f"{', '.join(map(str, prefixes))}: only some of them have modes of their sequences")
    bin_file = WholeFile(bin_path(output))
    try:
        bytes_before, sequences_before = [], []
        total = sequences = 0
        for dataset in _each(prefixes):
            bytes_before.append(total)
            sequences_before.append(sequences)
            with _naming(bin_path(dataset.prefix), bin_path(output)):
                total += _append(bin_path(dataset.prefix), bin_file, copied)
            sequences += len(dataset)
        publish(
            output,
            bin_file,
            first.dtype,
            lengths=(dataset.sequence_lengths for dataset in _each(prefixes)),
            pointers=(dataset.pointers + before for dataset, before in zip(_each(prefixes), bytes_before)),
            documents=(
                dataset.document_indices[min(index, 1) :] + before  # only the first begins with the leading 0
                for index, (dataset, before) in enumerate(zip(_each(prefixes), sequences_before))
            ),
            modes=(dataset.sequence_modes for dataset in _each(prefixes) if dataset.sequence_modes is not None),
        )
    finally:
        bin_file.discard()
    return IndexedDataset(output)


def _each(prefixes: Sequence[str | Path]) -> Iterator[IndexedDataset]:
    """The datasets one after another: each keeps two files open while it is in use, and there may be thousands."""
    return map(IndexedDataset, prefixes)


@contextmanager
def _naming(source: Path, target: Path) -> Iterator[None]:
    """Have an error of copying say which file it is about, or both where it may be of either."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(target if error.errno in _ONLY_OF_WRITING else f"copying {source} to {target}")
        raise


def _append(source: Path, target: WholeFile, copied: Callable[[int], object]) -> int:
    """Copy a file to the end of another; returns its size."""
    with source.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        position = 0
        while position < size:
            done = os.sendfile(target.file.fileno(), file.fileno(), position, min(size - position, _CALL_BYTES))
            if done == 0:
                raise IndexedDatasetError(f"{source}: became shorter while it was copied")
            position += done
            copied(done)
    return size
