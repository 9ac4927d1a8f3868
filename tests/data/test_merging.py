"""Datasets as one, and documents many at once: the files are those of writing document after document."""

from __future__ import annotations

import errno
import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetError,
    IndexedDatasetWriter,
    bin_path,
    idx_path,
)
from megatron.data.merging import merge_datasets
from tests.data.corpora import write_corpus
from tests.helpers.datasets import same_files, sequences

Corpus = list[list[list[int]]]
CORPORA = st.lists(st.lists(st.lists(st.integers(0, 65_000), min_size=1, max_size=4), max_size=3), max_size=5)


@settings(max_examples=20, deadline=None)
@given(st.lists(CORPORA, min_size=1, max_size=4))
def test_a_merged_dataset_is_that_of_all_documents(
    tmp_path_factory: pytest.TempPathFactory, corpora: list[Corpus]
) -> None:
    folder = tmp_path_factory.mktemp("merged")
    parts = [write_corpus(folder / str(index), corpus) for index, corpus in enumerate(corpora)]
    whole = write_corpus(folder / "whole", [document for corpus in corpora for document in corpus])
    copied: list[int] = []
    merged = merge_datasets(parts, folder / "merged", copied=copied.append)
    merged.verify()
    assert same_files(folder / "merged", whole)
    assert sum(copied) == bin_path(whole).stat().st_size


@settings(max_examples=20, deadline=None)
@given(st.lists(CORPORA, max_size=4))
def test_documents_at_once_are_those_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[Corpus]
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    whole = write_corpus(folder / "whole", [document for block in blocks for document in block])
    with IndexedDatasetWriter(folder / "x", dtype=np.uint16) as writer:
        for block in blocks:
            flat = [sequence for document in block for sequence in document]
            writer.add_documents(
                np.array([token for sequence in flat for token in sequence], np.int64),
                np.array([len(sequence) for sequence in flat], np.int64),
                np.array([len(document) for document in block], np.int64),
            )
    assert same_files(folder / "x", whole)


@pytest.mark.parametrize(("lengths", "counts"), [([2], [1]), ([3, 1], [2]), ([3], [2]), ([4, -1], [2]), ([3], [2, -1])])
def test_numbers_that_do_not_add_up_are_refused(tmp_path: Path, lengths: list[int], counts: list[int]) -> None:
    with IndexedDatasetWriter(tmp_path / "x", dtype=np.uint16) as writer:
        with pytest.raises(ValueError, match="3 ids in"):
            writer.add_documents(np.arange(3), np.array(lengths), np.array(counts))


def test_more_datasets_are_merged_than_files_may_be_open(tmp_path: Path) -> None:
    part = write_corpus(tmp_path / "a", [[[1, 2]]])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        first_free = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 20, hard))
    try:
        merge_datasets([part] * 50, tmp_path / "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sequences(tmp_path / "merged") == [[[1, 2]]] * 50


def test_modes_are_merged_and_must_be_there_in_all(tmp_path: Path) -> None:
    parts = [write_corpus(tmp_path / name, [[[1], [2, 3]], [[4]]]) for name in "ab"]
    for part, modes in zip(parts, ([0, 1, 0], [1, 1, 0])):
        with idx_path(part).open("ab") as file:
            file.write(struct.pack("<3b", *modes))
    merged = merge_datasets([parts[0], write_corpus(tmp_path / "empty", []), parts[1]], tmp_path / "merged")
    assert merged.sequence_modes is not None
    assert merged.sequence_modes.tolist() == [0, 1, 0, 1, 1, 0]
    plain = write_corpus(tmp_path / "plain", [[[5]]])
    with pytest.raises(IndexedDatasetError, match="only some of them have modes"):
        merge_datasets([parts[0], plain], tmp_path / "other")


def test_a_failed_merge_leaves_an_older_dataset_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [write_corpus(tmp_path / name, [[[1, 2, 3]]]) for name in "ab"]
    write_corpus(tmp_path / "merged", [[[7]]])

    def full(size: int) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        merge_datasets(parts, tmp_path / "merged", copied=full)
    assert sequences(tmp_path / "merged") == [[[7]]]
    assert len(list(tmp_path.iterdir())) == 6
    assert IndexedDataset(tmp_path / "merged").num_tokens == 1


@pytest.mark.parametrize(
    ("number", "named"),
    [(errno.ENOSPC, "{}/merged.bin"), (errno.EIO, "copying {}/a.bin to {}/merged.bin")],
)
def test_an_error_of_copying_names_the_file_it_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, named: str
) -> None:
    part = write_corpus(tmp_path / "a", [[[1, 2, 3]]])

    def fail(*parts: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "sendfile", fail)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        merge_datasets([part], tmp_path / "merged")
    assert raised.value.filename == named.replace("{}", str(tmp_path))
