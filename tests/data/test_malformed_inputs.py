"""Whatever is given as data: an error that names the file, and the line, or the right result. Nothing is lost."""

from __future__ import annotations

import builtins
import errno
import gzip
import io
import os
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron.config.problems import UserError
from tests.data.corpora import write_corpus
from tests.data.test_bert_dataset import build as bert_datasets
from tests.data.test_build_datasets import build as gpt_datasets
from tests.helpers.datasets import documents
from tests.helpers.tools import names_of_tool, run

INSPECT, MERGE = names_of_tool("inspect_dataset"), names_of_tool("merge_datasets")
BYTES = ["--tokenizer-type", "ByteTokenizer"]
GOOD = b'{"text": "a"}\n'


def contents(folder: Path) -> dict[str, tuple[int, int, int] | None]:
    """What is in a folder and in those in it: each file as itself, unchanged; of folders, that they are there."""
    states = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {
        name: None if stat.S_ISDIR(state.st_mode) else (state.st_ino, state.st_size, state.st_mtime_ns)
        for name, state in states.items()
    }


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def two_columns_of_one_name() -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table([pyarrow.array(["a"])] * 2, names=["text", "text"]), sink)
    return sink.getvalue()


def preprocess(folder: Path, *arguments: str | Path, status: int = 0) -> str:
    return run("preprocess_data", "--output-prefix", folder / "x", *BYTES, *arguments, status=status)


# ---- texts ----

# name of the file, what it holds, what is said after its path
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "broken JSON": ("c.jsonl", GOOD + b'{"text": "a"\n' + GOOD, ", line 2: not valid JSON: Expecting ',' delimiter"),
    "a line cut short": ("c.jsonl", GOOD + GOOD + b'{"text": "ab', ", line 3: not valid JSON: Unterminated string"),
    "two objects in a line": ("c.jsonl", b'{"text": "a"} {"text": "b"}\n', ", line 1: not valid JSON: Extra data"),
    "lines that end as on old Macs": ("c.jsonl", GOOD[:-1] + b"\r" + GOOD, ", line 1: not valid JSON: Extra data"),
    "one JSON array": ("c.json", b'[\n{"text": "a"},\n{"text": "b"}\n]\n', ", line 1: not valid JSON"),
    "a bad line after blank ones": ("c.jsonl", b"\n \n\r\n" + GOOD + b"\n{\n", ", line 6: not valid JSON"),
    "an array": ("c.jsonl", GOOD + b'["a"]\n', ", line 2: list instead of an object"),
    "a text alone": ("c.jsonl", b'"a"\n', ", line 1: str instead of an object"),
    "null": ("c.jsonl", b"null\n", ", line 1: NoneType instead of an object"),
    "a missing key": ("c.jsonl", GOOD + b'{"body": "a"}\n', ", line 2: the record has no key 'text'; its keys: 'body'"),
    "no key": ("c.jsonl", b"{}\n", ", line 1: the record has no key 'text'; its keys: none"),
    "a key in capitals": ("c.jsonl", b'{"Text": "a"}\n', ", line 1: the record has no key 'text'; its keys: 'Text'"),
    "a number": ("c.jsonl", b'{"text": 1}\n', ", line 1: the value of 'text' is int, it must be a string"),
    "a null value": ("c.jsonl", b'{"text": null}\n', ", line 1: the value of 'text' is NoneType"),
    "a list of other things": (
        "c.jsonl",
        b'{"text": ["a", 1]}\n',
        ", line 1: the value of 'text' has int as its sentence 2",
    ),
    "a lone surrogate in a list": (
        "c.jsonl",
        b'{"text": ["a", "\\ud800"]}\n',
        ", line 1: key 'text': character 0 of the text",
    ),
    "a lone surrogate": ("c.jsonl", b'{"text": "ab\\ud800"}\n', ", line 1: key 'text': character 2 of the text is the"),
    "a number without end": ("c.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", ", line 1: a number with more"),
    "nesting without end": ("c.jsonl", b'{"text": ' + b"[" * 100_000, ", line 1: JSON nested too deeply"),
    "Latin 1": ("c.jsonl", GOOD + b'{"text": "\xfc"}\n', ", line 2: byte 11 of the line is not valid UTF-8; convert"),
    "half a character": ("c.jsonl", b'{"text": "\xe2\x82"}\n', ", line 1: byte 11 of the line is not valid UTF-8"),
    "a surrogate in UTF-8": ("c.jsonl", b'{"text": "\xed\xa0\x80"}\n', ", line 1: byte 11 of the line is not valid"),
    "UTF-16": ("c.jsonl", GOOD.decode().encode("utf-16"), ", line 1: byte 1 of the line is not valid UTF-8"),
    "zeros": ("c.jsonl", GOOD + bytes(100) + b"\n", ", line 2: not valid JSON"),
    "a zero byte in a text": ("c.jsonl", b'{"text": "a\0"}\n', ", line 1: not valid JSON: Invalid control character"),
    "a page": ("c.jsonl", b"<!DOCTYPE html>\n<html>404</html>\n", ", line 1: not valid JSON"),
    "a mark in the middle": ("c.jsonl", GOOD + b"\xef\xbb\xbf" + GOOD, ", line 2: not valid JSON"),
    "gzip under another name": ("c.jsonl", gzip.compress(GOOD), ", line 1: byte 2 of the line is not valid UTF-8"),
    "a .txt in Latin 1": ("c.txt", b"a\xfc", ": byte 2 of the text is not valid UTF-8; convert"),
    "a broken line in .gz": ("c.jsonl.gz", gzip.compress(GOOD + b"{\n"), ", line 2: not valid JSON"),
    "a truncated .gz": ("c.jsonl.gz", gzip.compress(GOOD * 99)[:-9], ": truncated or damaged"),
    "a .gz with a wrong checksum": ("c.jsonl.gz", gzip.compress(GOOD)[:-8] + bytes(8), ": truncated or damaged"),
    "a .gz that is none": ("c.jsonl.gz", GOOD, ": truncated or damaged"),
    "a .gz with more behind it": ("c.jsonl.gz", gzip.compress(GOOD) + GOOD, ": truncated or damaged"),
    "an empty .gz": ("c.jsonl.gz", b"", ": truncated or damaged, it cannot be decompressed to its end (it is empty)"),
    "a truncated .zst": ("c.jsonl.zst", zstandard.compress(os.urandom(999))[:-9], ": truncated or damaged"),
    "a .zst that is none": ("c.jsonl.zst", GOOD, ": truncated or damaged"),
    "an empty .zst": ("c.txt.zst", b"", ": truncated or damaged, it cannot be decompressed to its end (it is empty)"),
    "a column that is not there": ("c.parquet", parquet(body=["a"]), ": has no column 'text'; its columns: 'body'"),
    "two columns of one name": ("c.parquet", two_columns_of_one_name(), ": has 2 columns 'text'; which of them"),
    "a column of numbers": ("c.parquet", parquet(text=[1]), ", row 1: the value of 'text' is int, it must be a string"),
    "a column of lists": (
        "c.parquet",
        parquet(text=[["a"], [None]]),
        ", row 2: the value of 'text' has NoneType as its",
    ),
    "a null in a column": ("c.parquet", parquet(text=["a", None]), ", row 2: the value of 'text' is NoneType"),
    "a truncated .parquet": ("c.parquet", parquet(text=["a"] * 99)[:-9], ": not a whole Parquet file"),
    "an empty .parquet": ("c.parquet", b"", ": not a whole Parquet file"),
    "an empty file": ("c.jsonl", b"", ": holds no document"),
    "blank lines": ("c.jsonl", b"\n  \n\r\n\t\n", ": holds no document"),
    "a mark alone": ("c.jsonl", b"\xef\xbb\xbf", ": holds no document"),
    "an empty .txt": ("c.txt", b"", ": holds no text under 'text', all of its values are empty"),
    "an empty table": ("c.parquet", parquet(text=pyarrow.array([], pyarrow.string())), ": holds no document"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_text_that_cannot_be_read_is_refused_by_file_and_line(tmp_path: Path, case: str) -> None:
    name, content, message = REFUSED[case]
    write_corpus(tmp_path / "x_text_document", [[[1, 2]]])  # of an earlier run
    path = tmp_path / name
    path.write_bytes(content)
    before = contents(tmp_path)
    error = preprocess(tmp_path, "--input", path, status=2)
    assert f"{path}{message}" in error
    assert contents(tmp_path) == before


RIGHT: dict[str, tuple[str, bytes, list[bytes]]] = {
    "lines of Windows": ("c.jsonl", b'{"text": "a"}\r\n{"text": "b\\r\\n"}\r\n', [b"a", b"b\r\n"]),
    "a mark at the beginning": ("c.jsonl", b"\xef\xbb\xbf" + GOOD, [b"a"]),
    "no newline at the end": ("c.jsonl", GOOD + GOOD[:-1], [b"a", b"a"]),
    "blank lines between": ("c.jsonl", b"\n\n" + GOOD + b" \t\n" + GOOD, [b"a", b"a"]),
    "an empty document": ("c.jsonl", GOOD + b'{"text": ""}\n' + GOOD, [b"a", b"", b"a"]),
    "an escaped zero": ("c.jsonl", b'{"text": "a\\u0000b"}\n', [b"a\0b"]),
    "a pair of surrogates": ("c.jsonl", b'{"text": "\\ud83d\\ude00"}\n', ["😀".encode()]),
    "other ends of lines in a text": ("c.jsonl", '{"text": "a\x85b\u2028c"}\n'.encode(), ["a\x85b\u2028c".encode()]),
    "a key twice": ("c.jsonl", b'{"text": "a", "text": "b"}\n', [b"b"]),
    "no number": ("c.jsonl", b'{"n": NaN, "text": "a"}\n', [b"a"]),
    "zeros and ends of lines in a .txt": ("c.txt", b"a\0\r\nb\r\n", [b"a\0\r\nb\r\n"]),
    "a mark in a .txt": ("c.txt", b"\xef\xbb\xbfa", [b"a"]),
    "two .gz in one": ("c.jsonl.gz", gzip.compress(GOOD) + gzip.compress(b"") + gzip.compress(GOOD), [b"a", b"a"]),
    "capitals in the ending": ("C.JSONL.GZ", gzip.compress(GOOD), [b"a"]),
    "a table in parts": ("c.parquet", parquet(text=pyarrow.chunked_array([["a"], [], ["b"]])), [b"a", b"b"]),
}


@pytest.mark.parametrize("case", RIGHT)
def test_an_unusual_text_is_read_as_it_is(tmp_path: Path, case: str) -> None:
    name, content, texts = RIGHT[case]
    (tmp_path / name).write_bytes(content)
    preprocess(tmp_path, "--input", tmp_path / name)
    assert documents(tmp_path / "x_text_document") == [[*text] for text in texts]
    assert len(contents(tmp_path)) == 4, "the text, .bin, .idx, and the record of the run"


# ---- paths ----


def denied(path: Path) -> PermissionError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def forbid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read every file, so this is as it is for others."""

    def open_others(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path) == str(file):
            raise denied(path)
        return opened(path, *arguments, **named)

    opened = io.open
    monkeypatch.setattr(io, "open", open_others)
    monkeypatch.setattr(builtins, "open", open_others)


def unreadable_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(folder / "in" / "a.jsonl", monkeypatch)


def unreadable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan_others(path: Any) -> Any:
        if str(path).endswith("in/more"):
            raise denied(path)
        return scanned(path)

    scanned = os.scandir
    (folder / "in" / "more").mkdir()
    monkeypatch.setattr(os, "scandir", scan_others)


def read_only_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allows_others(path: Any, mode: int) -> bool:
        return not (mode == os.W_OK and path == folder) and allows(path, mode)

    allows = os.access
    monkeypatch.setattr(os, "access", allows_others)


def nothing_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def link_to_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "in" / "z.jsonl").symlink_to("nowhere.jsonl")


def linked_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "in" / "more").symlink_to(folder / "other")


def folder_of_that_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "y_text_document.idx").mkdir()


def folder_for_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "x.shards").mkdir()
    (folder / "x.shards" / "notes").mkdir()


Prepare = Callable[[Path, pytest.MonkeyPatch], None]
# what there is beside in/a.jsonl and other/b.jsonl, the words of the command, what is said
WRONG_PATHS: dict[str, tuple[Prepare, list[str], str]] = {
    "no such file": (nothing_more, ["--input", "{}/in/b.jsonl"], "--input {}/in/b.jsonl: there is no such file"),
    "no match": (nothing_more, ["--input", "{}/in/*.zst"], "--input {}/in/*.zst: there is no such file"),
    "one of two patterns": (nothing_more, ["--input", "{}/in/*", "{}/x/*"], "--input {}/x/*: there is no such file"),
    "a folder without texts": (nothing_more, ["--input", "{}/csv"], "--input {}/csv: the folder holds no file that"),
    "another ending": (nothing_more, ["--input", "{}/csv/c.csv"], "c.csv: its ending does not say what it holds"),
    "an empty word": (nothing_more, ["--input", ""], "--input: one of its words is empty"),
    "named twice": (nothing_more, ["--input", "{}/in", "{}/in/a.jsonl"], "in/a.jsonl: is named twice"),
    "named twice in two ways": (nothing_more, ["--input", "{}/in/a.jsonl", "{}/in/../in/a.jsonl"], "is named twice"),
    "a link to nothing": (link_to_nothing, ["--input", "{}/in/z.jsonl"], "z.jsonl: is a link to a file that is not"),
    "a link to nothing in a folder": (link_to_nothing, ["--input", "{}/in"], "in/z.jsonl: is a link to a file that"),
    "a link out of a folder": (linked_folder, ["--input", "{}/in"], "in/more: is a link to a folder, and links are"),
    "an unreadable file": (unreadable_file, ["--input", "{}/in"], "{}/in/a.jsonl: Permission denied"),
    "an unreadable folder": (unreadable_folder, ["--input", "{}/in"], "{}/in/more: Permission denied"),
    "a read-only folder": (read_only_folder, ["--input", "{}/in"], "x_text_document.bin: its folder cannot be written"),
    "an output in a file": (
        nothing_more,
        ["--input", "{}/in", "--output-prefix", "{}/in/a.jsonl/y"],
        "--output-prefix {}/in/a.jsonl/y_text_document.bin: its folder cannot be made",
    ),
    "an output that is a folder": (
        folder_of_that_name,
        ["--input", "{}/in", "--output-prefix", "{}/y"],
        "--output-prefix {}/y_text_document.idx: is a folder",
    ),
    "a folder that is not for shards": (folder_for_shards, ["--input", "{}/in"], "{}/x.shards is for shards"),
    "a key twice": (nothing_more, ["--input", "{}/in", "--json-keys", "text", "text"], "each key can be named once"),
    "a key of none": (nothing_more, ["--input", "{}/in", "--json-keys", "body"], "in/a.jsonl, line 1: the record has"),
}


@pytest.mark.parametrize("case", WRONG_PATHS)
def test_a_path_that_is_wrong_is_named(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, words, message = WRONG_PATHS[case]
    for name, content in (("in/a.jsonl", GOOD), ("other/b.jsonl", GOOD), ("csv/c.csv", b"a,b\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    write_corpus(tmp_path / "x_text_document", [[[1, 2]]])
    prepare(tmp_path, monkeypatch)
    before = contents(tmp_path)
    error = preprocess(tmp_path, *(word.replace("{}", str(tmp_path)) for word in words), status=2)
    assert message.replace("{}", str(tmp_path)) in error
    assert contents(tmp_path) == before


def test_folders_of_the_output_are_made_and_one_of_its_name_is_left_alone(tmp_path: Path) -> None:
    """A folder of the name of a dataset is where its indices are kept."""
    (tmp_path / "c.jsonl").write_bytes(GOOD)
    (tmp_path / "new" / "y_text_document" / "cache").mkdir(parents=True)
    preprocess(tmp_path, "--input", tmp_path / "c.jsonl", "--output-prefix", tmp_path / "new" / "y")
    preprocess(tmp_path, "--input", tmp_path / "c.jsonl", "--output-prefix", tmp_path / "deep" / "er" / "y")
    for folder in ("new", "deep/er"):
        assert documents(tmp_path / folder / "y_text_document") == [[*b"a"]]


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"tool": 1}', b"\xff"])
def test_a_damaged_record_of_a_finished_run_is_no_record(tmp_path: Path, record: bytes) -> None:
    (tmp_path / "c.jsonl").write_bytes(GOOD)
    (tmp_path / "x_text_document.bin.done.json").write_bytes(record)
    said = preprocess(tmp_path, "--input", tmp_path / "c.jsonl")
    assert "x_text_document.bin.done.json is not a record of this tool" in said
    assert documents(tmp_path / "x_text_document") == [[*b"a"]]


@pytest.mark.parametrize(
    ("ending", "content"),
    [(".done", b""), (".done", b"{}"), (".done", b"[0]"), (".done", b"\xff"), ("-0.bin", b""), ("-0.idx", None)],
)
def test_a_damaged_shard_of_an_ended_run_is_made_again(tmp_path: Path, ending: str, content: bytes | None) -> None:
    """Damaged by a disk or a hand; None: it is not there any more."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(GOOD + b" " * (9 << 20), compresslevel=0))
    (tmp_path / "b.jsonl").write_bytes(b"{")
    words = ["--input", tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"]
    preprocess(tmp_path, *words, status=2)
    (record,) = (tmp_path / "x.shards").glob("*.done")
    damaged = record.with_name(record.stem + ending)
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    assert "finished already" not in preprocess(tmp_path, *words)
    assert documents(tmp_path / "x_text_document") == [[*b"a"], [*b"a"]]
    assert not (tmp_path / "x.shards").exists()


# ---- datasets ----

HEADER = struct.Struct("<9sQBQQ")
# An index of 3 sequences of 3, 1 and 2 ids of uint16, in 2 documents, of 2 sequences and of one.
LENGTHS, POINTERS, DOCUMENTS = HEADER.size, HEADER.size + 12, HEADER.size + 36


def index(offset: int, form: str, *values: Any) -> Callable[[Path], None]:
    """Other values at a place of the index."""

    def damage(prefix: Path) -> None:
        with Path(f"{prefix}.idx").open("r+b") as file:
            file.seek(offset)
            file.write(struct.pack(form, *values))

    return damage


def cut(ending: str, size: int) -> Callable[[Path], None]:
    return lambda prefix: os.truncate(f"{prefix}{ending}", size)


def without(ending: str) -> Callable[[Path], None]:
    return lambda prefix: Path(f"{prefix}{ending}").unlink()


def longer(ending: str) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        with Path(f"{prefix}{ending}").open("ab") as file:
            file.write(bytes(10))

    return damage


def text_in_place_of(ending: str) -> Callable[[Path], None]:
    return lambda prefix: Path(f"{prefix}{ending}").write_bytes(GOOD * 10) and None


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no .bin": (without(".bin"), "{}.bin: no such file; a dataset is given by its prefix"),
    "no .idx": (without(".idx"), "{}.idx: no such file; a dataset is given by its prefix"),
    "an empty .idx": (cut(".idx", 0), "{}.idx: 0 bytes, less than the 34 of a header"),
    "half a header": (cut(".idx", 20), "{}.idx: 20 bytes, less than the 34 of a header"),
    "a header alone": (cut(".idx", 34), "{}.idx: 34 bytes, but 3 sequences and 2 documents take 94"),
    "a truncated .idx": (cut(".idx", 90), "{}.idx: 90 bytes, but 3 sequences and 2 documents take 94"),
    "a longer .idx": (longer(".idx"), "{}.idx: 104 bytes, but 3 sequences and 2 documents take 94"),
    "an empty .bin": (cut(".bin", 0), "{}.bin: 0 bytes, but {}.idx describes 12"),
    "a truncated .bin": (cut(".bin", 11), "{}.bin: 11 bytes, but {}.idx describes 12"),
    "a longer .bin": (longer(".bin"), "{}.bin: 22 bytes, but {}.idx describes 12"),
    "a text": (text_in_place_of(".idx"), """{}.idx: begins with b'{"text": '"""),
    "another magic": (index(0, "<9s", b"TNTIDX"), "{}.idx: begins with b'TNTIDX"),
    "another version": (index(9, "<Q", 2), "{}.idx: version 2, only 1 is known"),
    "an unknown type": (index(17, "<B", 9), "{}.idx: type code 9, known are [1, 2, 3"),
    "another type": (index(17, "<B", 4), "{}.bin: 12 bytes, but {}.idx describes 16"),
    "more sequences than there are": (index(18, "<Q", 2**63), "{}.idx: 94 bytes, but 9223372036854775808 sequences"),
    "no document index": (index(18, "<QQ", 5, 0), "{}.idx: no document index, not even the first entry"),
    "a wrong length": (index(LENGTHS, "<i", 2), "{}.idx: sequence 1 begins at byte 6, the sequences before it end"),
    "a negative length": (index(LENGTHS + 4, "<i", -1), "{}.idx: sequence 1 has a negative length, -1"),
    "a last length": (index(LENGTHS + 8, "<i", 3), "{}.bin: 12 bytes, but {}.idx describes 14"),
    "a wrong pointer": (index(POINTERS + 8, "<q", 2), "{}.idx: sequence 1 begins at byte 2, the sequences before it"),
    "a negative pointer": (index(POINTERS + 8, "<q", -4), "{}.idx: sequence 1 begins at byte -4, the sequences before"),
    "a pointer out of the file": (index(POINTERS + 8, "<q", 2**40), "{}.idx: sequence 1 begins at byte 1099511627776"),
    "documents that go back": (index(DOCUMENTS + 8, "<q", 4), "{}.idx: document 1 begins at sequence 4 and ends at 3"),
    "a negative document": (index(DOCUMENTS + 8, "<q", -1), "{}.idx: document 0 begins at sequence 0 and ends at -1"),
    "a first document that is not": (index(DOCUMENTS, "<q", 1), "{}.idx: documents cover sequences 1 to 3, the file"),
    "a last document too few": (index(DOCUMENTS + 16, "<q", 2), "{}.idx: documents cover sequences 0 to 2, the file"),
}


def refusal(tool: dict[str, Any], *words: str | Path) -> str:
    """What a tool says that ends without a result; it runs in this process, which is faster than a fork."""
    with patch.object(sys, "argv", ["tool", *map(str, words)]), pytest.raises(UserError) as raised:
        tool["main"]()
    return str(raised.value)


def inspect_it(prefix: Path, cache: Path) -> str:
    return refusal(INSPECT, prefix)


def merge_it(prefix: Path, cache: Path) -> str:
    whole = write_corpus(cache / "whole", [[[1]]])
    return refusal(MERGE, "--input", whole, prefix, "--output-prefix", whole.with_name("merged"))


def train_gpt_on_it(prefix: Path, cache: Path) -> str:
    with pytest.raises(UserError) as raised:
        gpt_datasets(cache / "cache", data_path=[str(prefix)], split="1")
    return str(raised.value)


def train_bert_on_it(prefix: Path, cache: Path) -> str:
    with pytest.raises(UserError) as raised:
        bert_datasets(cache, data_path=[str(prefix)], split="1")
    return str(raised.value)


@pytest.mark.parametrize("use", [inspect_it, merge_it, train_gpt_on_it, train_bert_on_it])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_dataset_is_refused_by_file_and_place(
    tmp_path: Path, case: str, use: Callable[[Path, Path], str]
) -> None:
    damage, message = DAMAGED[case]
    (tmp_path / "cache").mkdir()
    prefix = write_corpus(tmp_path / "corpus", [[[1, 2, 3], [4]], [[5, 6]]])
    damage(prefix)
    before = contents(tmp_path)
    error = use(prefix, tmp_path / "cache")
    assert message.replace("{}", str(prefix)) in error
    assert "a dataset is given by its prefix" in error or "copy .bin and .idx again" in error
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if "merged" in name or name.endswith((".tmp", ".npy"))]


@pytest.mark.parametrize("ending", [".idx", ".bin"])
@pytest.mark.parametrize("use", [inspect_it, merge_it, train_gpt_on_it, train_bert_on_it])
def test_a_dataset_that_may_not_be_read_is_named(
    tmp_path: Path, use: Callable[[Path, Path], str], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[[1, 2, 3], [4]], [[5, 6]]])
    forbid(Path(f"{prefix}{ending}"), monkeypatch)
    assert f"{prefix}{ending}: Permission denied" in use(prefix, tmp_path)


WRONG_IDS: dict[str, tuple[list[list[list[float]]], str, str]] = {
    "ids above the vocabulary": ([[[1, 2, 3], [4, 70_000]], [[5, 6, 7]]], "int32", "70000"),
    "negative ids": ([[[1, 2, -3], [4, 5]], [[5, 6, 7]]], "int32", "-3"),
    "fractions": ([[[1, 2, 0.5], [4, 5]], [[5, 6, 7]]], "float32", "float32, and ids are whole numbers"),
}


@pytest.mark.parametrize("case", WRONG_IDS)
def test_ids_that_no_tokenizer_gave_are_refused(tmp_path: Path, case: str) -> None:
    content, dtype, message = WRONG_IDS[case]
    prefix = write_corpus(tmp_path / "corpus", content, dtype)  # type: ignore[arg-type]
    words = ["--check", "--tokenizer-type", "NullTokenizer", "--vocab-size", "65536"]
    error = refusal(INSPECT, prefix, *words)
    assert f"{prefix}" in error and message in error

    def read_all(build: Any) -> None:
        train = build(tmp_path / "cache", data_path=[str(prefix)], split="1", seq_length=7)[0]
        for sample in range(len(train)):
            assert train[sample] is not None

    for build in (gpt_datasets, bert_datasets):
        with pytest.raises(UserError) as raised:
            read_all(build)
        assert f"{prefix}: holds" in str(raised.value) and message in str(raised.value)


# ---- merging ----


def a_link(folder: Path) -> None:
    for ending in (".bin", ".idx"):
        (folder / f"link{ending}").symlink_to(folder / f"a{ending}")


def nothing_else(folder: Path) -> None:
    pass


MERGES: dict[str, tuple[Callable[[Path], None], list[str], str, str]] = {
    "other types of ids": (nothing_else, ["a", "wide"], "out", "{}/wide holds ids of int32, {}/a of uint16"),
    "only some with modes": (nothing_else, ["a", "modes"], "out", "{}/modes: only some of them have modes"),
    "half a dataset": (nothing_else, ["half"], "out", "half: holds b.bin without b.idx, half of a dataset"),
    "a folder without one": (nothing_else, ["empty"], "out", "empty: the folder holds no dataset"),
    "no such dataset": (nothing_else, ["a", "none"], "out", "{}/none.idx: no such file"),
    "a file in place of its prefix": (nothing_else, ["a.bin"], "out", "{}/a.bin.idx: no such file"),
    "into an input": (nothing_else, ["a", "b"], "b", "{}/b: is one of the inputs"),
    "into an input by another path": (nothing_else, ["a", "b"], "empty/../b", "empty/../b: is one of the inputs"),
    "into an input by a link": (a_link, ["link", "b"], "a", "{}/a: is one of the inputs"),
    "into an input of a folder": (nothing_else, ["whole"], "whole/a", "{}/whole/a: is one of the inputs"),
    "into a folder that is a file": (nothing_else, ["a", "b"], "a.bin/out", "a.bin/out.bin: its folder cannot be made"),
    "into what is a folder": (lambda folder: (folder / "out.idx").mkdir(), ["a", "b"], "out", "out.idx: is a folder"),
}


@pytest.mark.parametrize("case", MERGES)
def test_a_merge_that_cannot_be_is_refused_and_changes_nothing(tmp_path: Path, case: str) -> None:
    prepare, inputs, output, message = MERGES[case]
    for folder in ("half", "empty", "whole"):
        (tmp_path / folder).mkdir()
    for name in ("a", "b", "wide", "modes", "half/b", "whole/a", "whole/b"):
        write_corpus(tmp_path / name, [[[1], [2]]], "int32" if name == "wide" else "uint16")
    with (tmp_path / "modes.idx").open("ab") as file:
        file.write(bytes(2))
    (tmp_path / "half" / "b.idx").unlink()
    prepare(tmp_path)
    before = contents(tmp_path)
    words = ["--input", *(tmp_path / name for name in inputs), "--output-prefix", f"{tmp_path}/{output}"]
    assert message.replace("{}", str(tmp_path)) in refusal(MERGE, *words)
    assert contents(tmp_path) == before


def test_a_dataset_that_is_named_twice_is_there_twice(tmp_path: Path) -> None:
    prefix, nothing = write_corpus(tmp_path / "a", [[[1], [2]], []]), write_corpus(tmp_path / "b", [])
    words = ["--input", prefix, nothing, prefix, "--output-prefix", tmp_path / "merged"]
    assert "4 documents, 4 tokens of uint16 from 3 datasets" in run("merge_datasets", *words)
    assert documents(tmp_path / "merged") == [[1, 2], [], [1, 2], []]
