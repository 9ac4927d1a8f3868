"""Token files: Megatron-LM's bytes, and errors that say which file is wrong and why."""

from __future__ import annotations

import filecmp
import mmap
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.indexed_dataset import (
    DTYPE_CODES,
    IndexedDataset,
    IndexedDatasetError,
    IndexedDatasetWriter,
    optimal_dtype,
)
from tests.data.corpora import FIXTURES, write_corpus

PREPROCESSED = FIXTURES / "preprocess"
GPT_DATA = FIXTURES / "gpt_dataset" / "data"


def assert_same_files(prefix: Path, expected: Path) -> None:
    for ending in (".bin", ".idx"):
        assert filecmp.cmp(f"{prefix}{ending}", f"{expected}{ending}", shallow=False), ending


@pytest.mark.parametrize(
    "original",
    [
        PREPROCESSED / "gpt2_eod_text_document",  # documents without tokens
        PREPROCESSED / "bert_ss_text_sentence",  # several sequences a document
        GPT_DATA / "alpha",
        GPT_DATA / "delta_int32",
        GPT_DATA / "multi_sentence",
    ],
    ids=lambda prefix: prefix.name,
)
@pytest.mark.parametrize("mmap", [True, False])
def test_reading_and_writing_gives_megatron_lm_bytes(original: Path, mmap: bool, tmp_path: Path) -> None:
    source = IndexedDataset(original, mmap=mmap)
    source.verify()
    with IndexedDatasetWriter(tmp_path / "by_item", dtype=source.dtype) as by_item:
        for begin, end in zip(source.document_indices[:-1], source.document_indices[1:]):
            for sequence in range(begin, end):
                by_item.add_item(source[sequence])
            by_item.end_document()
    assert_same_files(tmp_path / "by_item", original)
    with IndexedDatasetWriter(tmp_path / "by_document", dtype=source.dtype) as by_document:
        for begin, end in zip(source.document_indices[:-1], source.document_indices[1:]):
            sequences = [source[sequence] for sequence in range(begin, end)]
            ids = np.concatenate(sequences) if sequences else np.empty(0, source.dtype)
            by_document.add_document(ids, [len(sequence) for sequence in sequences])
    assert_same_files(tmp_path / "by_document", original)


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=8),
    mmap=st.booleans(),
)
def test_whatever_is_written_is_read_back(
    documents: list[list[list[int]]], mmap: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = write_corpus(tmp_path_factory.mktemp("corpus") / "name.with.dots", documents)
    dataset = IndexedDataset(prefix, mmap=mmap)
    dataset.verify()
    sequences = [sequence for document in documents for sequence in document]
    assert [dataset[number].tolist() for number in range(len(dataset))] == sequences
    assert dataset.num_documents == len(documents)
    assert np.diff(dataset.document_indices).tolist() == [len(document) for document in documents]
    assert dataset.num_tokens == sum(map(len, sequences))


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_document_is_kept_wherever_it_stands(empty: int, tmp_path: Path) -> None:
    documents = [[[1, 2]], [[3]], [[4]]]
    documents[empty] = []
    dataset = IndexedDataset(write_corpus(tmp_path / "corpus", documents))
    assert dataset.num_documents == 3
    assert len(dataset) == 2
    assert dataset.document_indices.tolist()[0] == 0
    assert dataset.document_indices.tolist()[-1] == 2


@pytest.mark.parametrize("dtype", DTYPE_CODES.values(), ids=str)
def test_every_type_of_the_format_is_written_and_read(dtype: np.dtype, tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "corpus", [[[1, 2, 3]]], dtype))
    assert dataset.dtype == dtype
    assert dataset[0].tolist() == [1, 2, 3]


def test_ids_are_stored_in_the_type_that_megatron_lm_chooses() -> None:
    assert optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == np.int32
    assert optimal_dtype(None) == np.int32


@pytest.mark.parametrize("mmap", [True, False])
def test_part_of_a_sequence_is_read(mmap: bool, tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "corpus", [[[1, 2], [3, 4, 5, 6]]]), mmap=mmap)
    assert dataset.get(1, 1).tolist() == [4, 5, 6]
    assert dataset.get(1, 1, 2).tolist() == [4, 5]
    assert dataset.get(1, 4).tolist() == []
    for index, offset, length in [(2, 0, None), (-1, 0, None), (0, 0, 3), (0, 3, None), (0, -1, 1)]:
        with pytest.raises(IndexError):
            dataset.get(index, offset, length)


def test_ids_that_do_not_fit_the_type_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "corpus", dtype=np.uint16) as writer:
        for ids in ([65536], [-1], [0.5]):
            with pytest.raises(ValueError, match="do not fit uint16"):
                writer.add_item(ids)
        with pytest.raises(ValueError, match=r"3 ids with sequences of \[1, 1\]"):
            writer.add_document([1, 2, 3], [1, 1])


def test_nothing_has_the_final_name_before_it_is_complete(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "corpus", dtype=np.uint16)
    writer.add_document([1, 2], [2])
    assert not (tmp_path / "corpus.bin").exists()
    with pytest.raises(IndexedDatasetError, match=r"corpus\.idx: no such file"):
        IndexedDataset(tmp_path / "corpus")
    writer.finalize()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]
    assert IndexedDataset(tmp_path / "corpus")[0].tolist() == [1, 2]


def test_an_old_index_never_stands_beside_new_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[[1, 2]]])
    writer = IndexedDatasetWriter(prefix, dtype=np.uint16)
    writer.add_document([3, 4], [2])

    def killed(path: Path, target: Path) -> None:
        raise KeyboardInterrupt(target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.finalize()
    with pytest.raises(IndexedDatasetError, match=r"corpus\.idx: no such file"):
        IndexedDataset(prefix)


def damage_magic(prefix: Path) -> None:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[0:4] = b"XXXX"
    Path(f"{prefix}.idx").write_bytes(content)


def damage_version(prefix: Path) -> None:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[9:17] = struct.pack("<Q", 2)
    Path(f"{prefix}.idx").write_bytes(content)


def damage_type(prefix: Path) -> None:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[17] = 77
    Path(f"{prefix}.idx").write_bytes(content)


def damage_documents(prefix: Path) -> None:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[-8:] = struct.pack("<q", 1)
    Path(f"{prefix}.idx").write_bytes(content)


def cut(name: str, size: int):
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}{name}")
        path.write_bytes(path.read_bytes()[:size])

    return damage


def lengthen(name: str):
    def damage(prefix: Path) -> None:
        with Path(f"{prefix}{name}").open("ab") as file:
            file.write(b"xxxx")

    return damage


@pytest.mark.parametrize(
    "damage, message",
    [
        (cut(".idx", 0), r"corpus\.idx: 0 bytes, less than the 34 of a header"),
        (cut(".idx", 60), r"corpus\.idx: 60 bytes, but 2 sequences and 2 documents take 82; .*truncated"),
        (lengthen(".idx"), r"corpus\.idx: 86 bytes, but 2 sequences .*damaged"),
        (cut(".bin", 6), r"corpus\.bin: 6 bytes, but .*corpus\.idx describes 12; .*truncated or belongs"),
        (lengthen(".bin"), r"corpus\.bin: 16 bytes, but .*corpus\.idx describes 12"),
        (damage_magic, r"corpus\.idx: begins with b'XXXX"),
        (damage_version, r"corpus\.idx: version 2, only 1 is known"),
        (damage_type, r"corpus\.idx: type code 77"),
        (damage_documents, r"corpus\.idx: documents cover sequences 0 to 1, the file has 0 to 2"),
        (lambda prefix: Path(f"{prefix}.bin").unlink(), r"corpus\.bin: no such file"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_the_reason(damage, message: str, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5, 6]]])
    damage(prefix)
    with pytest.raises(IndexedDatasetError, match=message):
        IndexedDataset(prefix)


def test_two_more_bytes_are_the_modes_of_two_sequences(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5, 6]]])
    with Path(f"{prefix}.idx").open("ab") as file:
        file.write(b"\x00\x01")
    modes = IndexedDataset(prefix).sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 1]


@pytest.mark.parametrize(
    "offset, value, message",
    [
        (34, struct.pack("<ii", 4, 3), "sequence 1 begins at byte 6, the sequences before it end at byte 8"),
        (34, struct.pack("<ii", -1, 3), "sequence 0 has a negative length"),
        (34 + 8 + 16 + 8, struct.pack("<q", 5), "not in ascending order"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 100])
def test_verify_finds_what_opening_does_not_read(
    offset: int, value: bytes, message: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.indexed_dataset._VERIFIED_AT_ONCE", at_once)
    prefix = write_corpus(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5, 6]]])
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[offset : offset + len(value)] = value
    Path(f"{prefix}.idx").write_bytes(content)
    dataset = IndexedDataset(prefix)
    with pytest.raises(IndexedDatasetError, match=message):
        dataset.verify()


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_verify_counts_all_sequences_and_documents(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.indexed_dataset._VERIFIED_AT_ONCE", at_once)
    dataset = IndexedDataset(write_corpus(tmp_path / "corpus", [[[1], [2, 3]], [], [[4]], [[], [5, 6, 7]], []]))
    steps: list[int] = []
    dataset.verify(steps.append)
    assert sum(steps) == 5 + 5
    assert max(steps) <= at_once


@pytest.mark.parametrize("length", [1, 10, 3000, 500_000])
def test_the_content_tells_ids_from_others_of_the_same_lengths(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(length) % 50_000
    dataset = IndexedDataset(write_corpus(tmp_path / "a", [[ids]]))
    same = IndexedDataset(write_corpus(tmp_path / "b", [[ids]]), mmap=False)
    other = IndexedDataset(write_corpus(tmp_path / "c", [[ids + 1]]))
    assert dataset.fingerprint == other.fingerprint
    assert dataset.content == same.content != other.content
    for position in {0, length - 1, length // 2 if length <= 3000 else 0}:  # of a small file each id counts
        changed = ids.copy()
        changed[position] += 1
        assert IndexedDataset(write_corpus(tmp_path / "d", [[changed]])).content != dataset.content, position

    read = []
    monkeypatch.setattr("megatron.data.indexed_dataset._read_at", lambda *asked: read.append(asked[1]) or b"")
    assert IndexedDataset(tmp_path / "a").content
    assert sum(read) == 2**16, "bytes read at most, however large the file"


def test_byte_offsets_are_64_bits_wide(tmp_path: Path) -> None:
    """Sequences that begin beyond 2 GiB; the file is sparse."""
    long = 2**30
    with IndexedDatasetWriter(tmp_path / "corpus", dtype=np.int32) as writer:
        writer._bin.file.truncate(long * 4)
        writer._bin.file.seek(long * 4)
        writer._add_length(long)
        writer.add_item([7, 8, 9])
        writer.end_document()
    for mapped in (True, False):
        dataset = IndexedDataset(tmp_path / "corpus", mmap=mapped)
        dataset.verify()
        assert dataset[1].tolist() == [7, 8, 9]
        assert dataset.get(0, long - 2).tolist() == [0, 0]
        assert dataset.num_tokens == long + 3


def test_what_was_read_of_a_mapped_file_does_not_stay_in_the_memory_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, limit = 64 * 2**20, 2**20
    ids = np.arange(size // 2, dtype=np.uint32).astype(np.uint16).reshape(-1, 1024)
    with IndexedDatasetWriter(tmp_path / "large", dtype=np.uint16) as writer:
        for row in ids:
            writer.add_item(row)
        writer.end_document()
    monkeypatch.setattr("megatron.data.indexed_dataset._MAPPED_AT_MOST", limit)
    dataset = IndexedDataset(tmp_path / "large")
    first = dataset.get(0)
    for number in np.random.default_rng(0).permutation(len(ids)).tolist():
        assert dataset.get(number)[0] == ids[number][0]
    assert np.array_equal(first, ids[0]), "what was given stays readable"
    assert resident_bytes(tmp_path / "large.bin") < size / 4


@pytest.mark.parametrize("random_order", [False, True])
def test_in_random_order_the_system_is_told_to_read_nothing_besides(random_order: bool, tmp_path: Path) -> None:
    """What is read besides would drive other parts out of a memory that holds a part of the corpus."""
    ids = np.arange(3 * mmap.PAGESIZE, dtype=np.int32).reshape(3, -1)  # sequences of several pages
    dataset = IndexedDataset(write_corpus(tmp_path / "corpus", [list(ids)]), random_order=random_order)
    (flags,) = of_mapping(tmp_path / "corpus.bin", "VmFlags")
    assert ("rr" in flags.split()) == random_order, "random reads, to Linux"
    for number in (0, 2, 1):
        assert np.array_equal(dataset[number], ids[number])
        assert np.array_equal(dataset.get(number, 1000), ids[number][1000:])


@pytest.mark.parametrize("mapped, random_order", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("pointer", [6, 2**40])
def test_a_sequence_outside_the_file_is_refused_when_it_is_read(
    mapped: bool, random_order: bool, pointer: int, tmp_path: Path
) -> None:
    """One of more than a page; the sizes of the files, which is all that opening sees, are right."""
    prefix = write_corpus(tmp_path / "corpus", [[[1] * 4000], [[2, 3]]])
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[34 + 8 : 34 + 16] = struct.pack("<q", pointer)
    Path(f"{prefix}.idx").write_bytes(content)
    dataset = IndexedDataset(prefix, mmap=mapped, random_order=random_order)
    with pytest.raises(IndexedDatasetError, match=rf"corpus\.bin: ends within sequence 0, .* at byte {pointer}"):
        dataset.get(0)


def resident_bytes(path: Path) -> int:
    """How much of a mapped file this process has in its memory."""
    return 1024 * sum(int(kilobytes.split()[0]) for kilobytes in of_mapping(path, "Rss"))


def of_mapping(path: Path, name: str) -> list[str]:
    """What Linux says of each mapping of a file in this process."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:  # the addresses of a mapping, and its file
            inside = line.endswith(str(path))
        elif inside and line.startswith(f"{name}:"):
            found.append(line.split(":")[1])
    return found
