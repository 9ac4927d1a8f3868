"""What is said of a dataset is in it, and whatever is wrong with its ids is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from tests.data.corpora import write_corpus
from tests.helpers.tools import ROOT, command, names_of_tool, run

TOOL = names_of_tool("inspect_dataset")
BYTES = ["--tokenizer-type", "ByteTokenizer"]
# Documents of 5, 0, 1, 4 and 0 tokens.
DOCUMENTS = [[[*b"one"], [*b"tw"]], [], [[256]], [[], [*b"four"]], [[]]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", DOCUMENTS)


def inspect(*arguments: str | Path, found_in: Path) -> tuple[dict[str, Any], str]:
    """What the tool finds, as JSON and as printed."""
    printed = run("inspect_dataset", *arguments, "--json", found_in / "found.json")
    return json.loads((found_in / "found.json").read_text()), printed


def look_at_few_at_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setitem(TOOL["lengths_of"].__globals__, "_AT_ONCE", at_once)


def test_the_dataset_is_described(prefix: Path, tmp_path: Path) -> None:
    found, printed = inspect(prefix, found_in=tmp_path)
    assert found == {
        "dataset": str(prefix),
        "type of ids": "uint16",
        "documents": 5,
        "without tokens": 2,
        "sequences": 6,
        "tokens": 10,
        "tokens of the shortest document": 0,
        "tokens of the longest document": 5,
        "tokens of a document, on average": 2.0,
        "modes": None,
        "size": "0.2 kB",
    }
    lines = [line.split() for line in printed.splitlines()]
    assert ["documents:", "5"] in lines and ["type", "of", "ids:", "uint16"] in lines


def test_the_first_documents_are_shown_by_sequence(prefix: Path, tmp_path: Path) -> None:
    found, printed = inspect(prefix, "--head", "3", found_in=tmp_path)
    assert [document["ids"] for document in found["head"]] == DOCUMENTS[:3]
    assert "document 0: 2 sequences, 5 tokens\n  111 110 101\n  116 119\n\ndocument 1: 0 sequences" in printed
    assert len(inspect(prefix, "--head", "99", found_in=tmp_path)[0]["head"]) == 5


def test_texts_stand_in_place_of_ids(prefix: Path, tmp_path: Path) -> None:
    """Each on one line, whatever is in it; an id that the tokenizer has not is named."""
    write_corpus(tmp_path / "other", [[[*'"a\n\x1bé'.encode()]], [[65, 300]]])
    found, printed = inspect(prefix, "--head", "4", "--decode", *BYTES, found_in=tmp_path)
    assert [document["texts"] for document in found["head"]] == [["one", "tw"], [], [""], ["", "four"]]
    assert '  "one"\n  "tw"\n' in printed
    _, printed = inspect(tmp_path / "other", "--head", "2", "--decode", *BYTES, found_in=tmp_path)
    assert '  "\\"a\\n\\u001bé"\n' in printed
    assert "(the id 300 is outside the vocabulary of 257 entries)" in printed


def test_of_long_documents_the_beginning_is_shown(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[[1] * 60, [2] * 60, [3]], [[]] * 5000])
    found, printed = inspect(prefix, "--head", "2", found_in=tmp_path)
    assert [[len(ids) for ids in document["ids"]] for document in found["head"]] == [[60, 40], [0] * 100]
    assert "document 0: 3 sequences, 121 tokens\n" in printed and "  ... and 21 tokens more\n" in printed


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_lengths_are_those_of_the_documents(prefix: Path, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_few_at_once(monkeypatch, at_once)
    lengths = TOOL["lengths_of"](IndexedDataset(prefix))
    # lengths, documents, tokens
    assert list(lengths.rows()) == [(0, 0, 2, 0), (1, 1, 1, 1), (2, 3, 0, 0), (4, 7, 2, 9)]
    assert (lengths.shortest, lengths.longest) == (0, 5)


def test_the_borders_of_sizes_are_powers_of_two(tmp_path: Path) -> None:
    sizes = [0, 1, 2, 3, 4, 7, 8, 1023, 1024]
    prefix = write_corpus(tmp_path / "corpus", [[[1] * size] for size in sizes])
    rows = list(TOOL["lengths_of"](IndexedDataset(prefix)).rows())
    for least, most, documents, tokens in rows:
        held = [size for size in sizes if least <= size <= most]
        assert (documents, tokens) == (len(held), sum(held))
    assert sum(documents for _, _, documents, _ in rows) == len(sizes)


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int32", "int64"])
def test_each_id_is_counted(dtype: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_few_at_once(monkeypatch, at_once)
    signed = dtype.startswith("int")
    tokens = [5, 3, 100, 5, -2 if signed else 120, 99, 0, 5, 0, 127]
    prefix = write_corpus(tmp_path / "corpus", [[tokens[:4]], [tokens[4:]]], dtype)
    ids = TOOL["ids_of"](IndexedDataset(prefix), 100)
    assert {token: int(times) for token, times in enumerate(ids.counts) if times} == {0: 2, 3: 1, 5: 3, 99: 1}
    assert ids.most_frequent() == [(5, 3), (0, 2), (3, 1), (99, 1)]
    assert (ids.outside, ids.first_outside) == (3, (2, 100))


def test_histograms_are_printed(prefix: Path, tmp_path: Path) -> None:
    found, printed = inspect(prefix, "--histogram", "--decode", *BYTES, found_in=tmp_path)
    assert found["lengths"][-1] == {"least": 4, "most": 7, "documents": 2, "tokens": 9}
    assert found["ids"]["most frequent"][0] == {"id": ord("o"), "times": 2}
    assert (found["ids"]["different"], found["ids"]["outside"]) == (9, 0)
    rows = [line.split() for line in printed.splitlines()]
    assert ["4", "to", "7", "2", "40.00", "%", "90.00", "%", "#" * 40] in rows
    assert ["1", "1", "20.00", "%", "10.00", "%", "#" * 20] in rows
    assert ["111", "2", "20.00", "%", '"o"', "#" * 40] in rows
    assert "9 different ids, the largest 256" in printed


def test_a_picture_is_drawn_also_of_nothing(prefix: Path, tmp_path: Path) -> None:
    for number, corpus in enumerate((prefix, write_corpus(tmp_path / "empty", []))):
        dataset, picture = IndexedDataset(corpus), tmp_path / f"{number}.png"
        TOOL["draw"](picture, dataset.prefix, TOOL["lengths_of"](dataset), TOOL["ids_of"](dataset, 257))
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_dataset_without_a_document_is_whole(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [])
    found, printed = inspect(prefix, "--check", "--histogram", "--head", "2", found_in=tmp_path)
    assert (found["documents"], found["tokens of the longest document"], found["head"]) == (0, None, [])
    assert "\nwhole: " in printed


def test_a_whole_dataset_is_said_to_be_whole(prefix: Path, tmp_path: Path) -> None:
    found, printed = inspect(prefix, "--check", found_in=tmp_path)
    assert found["checked"] is True
    assert "no id is outside any vocabulary, 0 to 99,999,999" in printed
    assert "the vocabulary of 257 entries" in inspect(prefix, "--check", *BYTES, found_in=tmp_path)[1]


def test_ids_outside_the_vocabulary_are_counted_and_the_first_is_placed(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[[1]], [], [[2], [], [3, 257, 4]], [[70_000], [5]]], np.int32)
    error = run("inspect_dataset", prefix, "--check", *BYTES, status=2)
    assert (
        f"error: {prefix}.bin: 2 ids outside the vocabulary of 257 entries; the first is 257, token 1 of sequence 3, "
        "in document 2; name the tokenizer that the dataset was made with" in error
    )
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.write(np.array([-1], np.int32).tobytes())
    error = run("inspect_dataset", prefix, "--check", status=2)
    assert (
        "1 id outside any vocabulary, 0 to 99,999,999; the first is -1, token 0 of sequence 0, in document 0" in error
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--png", "x.png"], "--png x.png: shows what --histogram counts, and that is not given"),
        (["--decode", "--head", "1"], "--decode: needs the tokenizer of the dataset"),
        (["--decode", *BYTES], "--decode: shows the texts of --head and --histogram, and neither is given"),
        (["--head", "0"], "--head: must be at least 1, not 0"),
        (["--vocab-file", "x"], "--vocab-file: is of a tokenizer, and --tokenizer-type does not say which"),
        (["--tokenizer-type", "NullTokenizer"], "--vocab-size: not given, and NullTokenizer is made from --vocab-size"),
        (["--json", "/dev/null/found.json"], "--json /dev/null/found.json: its folder cannot be made"),
    ],
)
def test_what_cannot_be_done_is_refused(prefix: Path, arguments: list[str], message: str) -> None:
    assert message in run("inspect_dataset", prefix, *arguments, status=2)


def test_the_tool_imports_no_torch(prefix: Path, tmp_path: Path) -> None:
    words = [prefix, "--check", "--histogram", "--decode", "--head", "1", "--png", tmp_path / "new" / "x.png", *BYTES]
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); "
        f"sys.argv = {command('inspect_dataset', *words)[1:]!r}; "
        "runpy.run_path(sys.argv[0], run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new" / "x.png").is_file()
