"""Every form of input, sentences, bad records, and a run that goes on: by the tool as a user starts it."""

import errno
import gzip
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron.config.problems import UserError
from megatron.tokenizer.plain_tokenizers import ByteTokenizer
from tests.helpers.datasets import documents, same_files, sequences, write_lines
from tests.helpers.tokenizer_files import BERT_VOCABULARY, FIXTURES, gpt2_merge_file, gpt2_vocab_file
from tests.helpers.tools import ROOT, Arguments, command, names, names_of_tool, run

PREPROCESS = FIXTURES / "preprocess"
CORPUS = PREPROCESS / "corpus.jsonl"
GPT2 = [
    *("--tokenizer-type", "GPT2BPETokenizer"),
    *("--vocab-file", gpt2_vocab_file(), "--merge-file", gpt2_merge_file()),
]
BERT = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", BERT_VOCABULARY]
BYTES = ["--tokenizer-type", "ByteTokenizer"]
NO_SPECIAL = "--tokenizer-hf-no-include-special-tokens"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of the tool's package, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return lambda name: importlib.import_module(f"preprocess.{name}")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bert_ss", []),
        ("bert_ss_nospecial", [NO_SPECIAL]),
        ("bert_ss_keepnl_nospecial", [NO_SPECIAL, "--keep-newlines"]),
    ],
)
def test_one_run_writes_megatrons_sentences_byte_for_byte(tmp_path: Path, name: str, arguments: list[str]) -> None:
    prefix = tmp_path / "x"
    words = ["--input", CORPUS, "--output-prefix", prefix, "--split-sentences", *BERT, *arguments]
    said = run("preprocess_data", *words)
    assert same_files(Path(f"{prefix}_text_sentence"), PREPROCESS / f"{name}_text_sentence")
    assert ("each sentence gets the special tokens of the tokenizer" in said) == (NO_SPECIAL not in arguments)


@pytest.mark.parametrize("split", [["--split-sentences"], []])
def test_sentences_one_by_one_are_taken_as_they_are(tmp_path: Path, split: list[str]) -> None:
    sentences = PREPROCESS / "corpus_ss.jsonl"
    run("preprocess_data", "--input", sentences, "--output-prefix", tmp_path / "x", *split, *BERT)
    written = tmp_path / f"x_text_{'sentence' if split else 'document'}"
    assert same_files(written, PREPROCESS / "bert_ss_text_sentence")


def test_sentences_are_those_of_nltk(module: Callable[[str], ModuleType]) -> None:
    split = module("sentences").SentenceSplitter(keep_newlines=False)
    texts = [json.loads(line)["text"] for line in CORPUS.read_text().splitlines()]
    wanted = [json.loads(line)["text"] for line in (PREPROCESS / "corpus_ss.jsonl").read_text().splitlines()]
    assert [split(text) for text in texts] == wanted


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_a_sentence_is_not_cut_wherever_it_stands_in_a_long_text(
    module: Callable[[str], ModuleType], keep_newlines: bool
) -> None:
    split = module("sentences").SentenceSplitter(keep_newlines=keep_newlines)
    words = "a sentence that goes on and on over the millionth character " * 4
    text = "It ends here. " * 71_420 + words
    assert 999_000 < len(text) - len(words) < 1_000_000 < len(text)
    assert split(text)[-1].split() == words.split()


@pytest.mark.parametrize("text", ["a" * 300_000, "." * 100_000, "a." * 100_000, "\u3000a." * 100_000, " " * 300_000])
def test_texts_of_one_kind_take_no_longer_than_others(module: Callable[[str], ModuleType], text: str) -> None:
    """A rule that goes back over the text at each word or mark would take hours."""
    for keep_newlines in (False, True):
        assert len(module("sentences").SentenceSplitter(keep_newlines=keep_newlines)(text)) <= len(text)


def test_kept_newlines_make_the_sentences_the_whole_text(module: Callable[[str], ModuleType]) -> None:
    split = module("sentences").SentenceSplitter(keep_newlines=True)
    assert split("One.\n\nTwo is 3.14 Dr. Who!  Three\n") == ["One.\n\n", "Two is 3.14 Dr. Who!  ", "Three"]


def test_the_end_of_a_document_ends_its_last_sentence(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": text} for text in ("", "One. Two!", " \n", "Three")])
    base = ["--input", source, "--output-prefix", tmp_path / "x", "--split-sentences", "--append-eod", *BYTES]
    run("preprocess_data", *base)
    assert sequences(tmp_path / "x_text_sentence") == [
        [],
        [[*b"One."], [*b"Two!", 256]],
        [],
        [[*b"Three", 256]],
    ]


def gzipped(folder: Path) -> list[Path]:
    path = folder / "corpus.jsonl.gz"
    lines = CORPUS.read_bytes().splitlines(keepends=True)
    # two members, as `cat a.gz b.gz` makes them
    path.write_bytes(gzip.compress(b"".join(lines[:77])) + gzip.compress(b"".join(lines[77:])))
    return [path]


def zstandard_frames(folder: Path) -> list[Path]:
    path = folder / "corpus.jsonl.zst"
    lines = CORPUS.read_bytes().splitlines(keepends=True)
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(b"".join(compress(b"".join(part)) for part in (lines[:77], lines[77:])))
    return [path]


def parquet(folder: Path) -> list[Path]:
    records = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    table = pyarrow.Table.from_pylist([{"title": record["title"], "text": record["text"]} for record in records])
    pyarrow.parquet.write_table(table, folder / "corpus.parquet", row_group_size=37)
    return [folder / "corpus.parquet"]


def folder_of_parts(folder: Path) -> list[Path]:
    lines = CORPUS.read_bytes().splitlines(keepends=True)
    inside = folder / "parts" / "deep"
    inside.mkdir(parents=True)
    (folder / "parts" / "a.jsonl").write_bytes(b"".join(lines[:50]))
    (inside / "b.json").write_bytes(b"\xef\xbb\xbf" + b"".join(lines[50:120]))
    (folder / "parts" / "z.NDJSON").write_bytes(b"".join(lines[120:]).replace(b"\n", b"\r\n"))
    (folder / "parts" / "notes.md").write_text("not a part")
    (folder / "parts" / ".hidden.jsonl").write_text("not a part")
    (folder / "parts" / "a.jsonl.done.json").write_text("{}")
    return [folder / "parts"]


def mixed(folder: Path) -> list[Path]:
    lines = CORPUS.read_bytes().splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:50]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[50:90])))
    rows = [{"text": json.loads(line)["text"]} for line in lines[90:150]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "c.parquet")
    for index, line in enumerate(lines[150:]):
        text = json.loads(line)["text"].encode()
        if index % 2:
            (folder / f"d{index:02}.txt").write_bytes(text)
        else:
            (folder / f"d{index:02}.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    return [folder / "[a-c].*", folder / "d*"]


@pytest.mark.parametrize("workers", ["2"])
@pytest.mark.parametrize("written", [gzipped, zstandard_frames, parquet, folder_of_parts, mixed])
def test_every_form_of_input_gives_the_same_files(
    tmp_path: Path, written: Callable[[Path], list[Path]], workers: str
) -> None:
    inputs = written(tmp_path)
    prefix = tmp_path / "out" / "x"
    said = run(
        "preprocess_data",
        *("--input", *inputs, "--output-prefix", prefix, "--append-eod", "--workers", workers, *GPT2),
    )
    assert same_files(Path(f"{prefix}_text_document"), PREPROCESS / "gpt2_eod_text_document")
    assert ("1 file of other endings left out" in said) == (written is folder_of_parts)
    assert names(prefix.parent) == [f"x_text_document.{ending}" for ending in ("bin", "bin.done.json", "idx")]


def test_the_folder_of_the_input_can_be_that_of_the_output(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "ab"}])
    base = ["--input", tmp_path, "--output-prefix", tmp_path / "x", *BYTES]
    run("preprocess_data", *base)
    assert "already there and complete" in run("preprocess_data", *base)
    write_lines(source, [{"text": "ab"}, {"text": "c"}])
    assert "the input has changed" in run("preprocess_data", *base)
    assert documents(tmp_path / "x_text_document") == [[97, 98], [99]]


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_a_file_is_the_same_records_however_it_is_cut(
    tmp_path: Path, module: Callable[[str], ModuleType], size: int
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "bb"}\r\n{"text": "' + b"c" * 60 + b'"}\nbroken\n{"text": "d"}')
    records, inputs = module("records"), module("inputs")
    (file,) = inputs.find_inputs([str(path)], flag="--input")
    pieces = records.pieces_of(file, size)
    assert len(pieces) == -(-path.stat().st_size // size)
    read = [
        (records.count_before(piece) + record.number, *record.texts)
        for piece in pieces
        for block in records.read_blocks(piece, ["text"])
        for record in block.records
    ]
    assert read == [(1, "a"), (3, "bb"), (4, "c" * 60), (5,), (6, "d")]


def test_row_groups_are_the_same_records_however_they_are_cut(
    tmp_path: Path, module: Callable[[str], ModuleType]
) -> None:
    table = pyarrow.table({"text": [str(number) for number in range(1000)]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=300)
    records, inputs = module("records"), module("inputs")
    (file,) = inputs.find_inputs([str(tmp_path / "c.parquet")], flag="--input")
    for size, count in ((1, 4), (1 << 30, 1)):
        pieces = records.pieces_of(file, size)
        assert len(pieces) == count
        read = [
            (records.count_before(piece) + record.number, *record.texts)
            for piece in pieces
            for block in records.read_blocks(piece, ["text"])
            for record in block.records
        ]
        assert read == [(number + 1, str(number)) for number in range(1000)]
        blocks = [block for piece in pieces for block in records.read_blocks(piece, ["text"])]
        assert sum(block.size for block in blocks) == sum(piece.size for piece in pieces)


def truncated(data: bytes) -> bytes:
    return data[:-9]


@pytest.mark.parametrize("keep_going", [[], ["--keep-going"]])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.jsonl.gz", truncated(gzip.compress(b'{"text": "a"}\n' * 99)), "truncated or damaged"),
        ("c.jsonl.gz", b'{"text": "a"}\n', "truncated or damaged"),
        ("c.jsonl.zst", truncated(zstandard.ZstdCompressor().compress(os.urandom(999))), "truncated or damaged"),
        ("c.jsonl.zst", b'{"text": "a"}\n', "truncated or damaged"),
        ("c.parquet", b'{"text": "a"}\n', "not a whole Parquet file"),
    ],
)
def test_a_damaged_file_is_refused_and_never_shortened(
    tmp_path: Path, name: str, content: bytes, message: str, keep_going: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    words = ["--input", path, "--output-prefix", tmp_path / "x", *BYTES, *keep_going]
    assert f"error: {path}: {message}" in run("preprocess_data", *words, status=2)
    assert names(tmp_path) == [name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{folder}/c.csv"], "c.csv: its ending does not say what it holds; known are .jsonl"),
        (["--input", "{folder}/c.parquet.gz"], "its ending does not say what it holds"),
        (["--input", "{folder}/empty"], "empty: the folder holds no file that ends in .jsonl"),
        (["--input", "{folder}/pipe.jsonl"], "pipe.jsonl: is not a regular file"),
        (["--input", "{folder}", "{folder}/a.jsonl"], "a.jsonl: is named twice"),
        (["--input", "{folder}/a.jsonl", "--keep-newlines"], "--keep-newlines: says what --split-sentences leaves"),
        (["--input", "{folder}/t.txt", "--json-keys", "body"], "t.txt: the record has no key 'body'; its keys: 'text'"),
        (["--input", "{folder}/l.txt"], "l.txt: byte 2 of the text is not valid UTF-8"),
        (["--input", "{folder}/p.parquet", "--json-keys", "b"], "p.parquet: has no column 'b'; its columns: 'text'"),
        (["--input", "{folder}/p.parquet"], "p.parquet, row 2: the value of 'text' is NoneType"),
        (["--input", "{folder}/b.parquet"], "b.parquet, row 1: the value of 'text' is bytes, it must be a string"),
        (["--input", "{folder}/u.parquet"], "u.parquet, row 2: the value of 'text' is bytes, it must be a string"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    folder = tmp_path / "in"
    (folder / "empty").mkdir(parents=True)
    write_lines(folder / "a.jsonl", [{"text": "a"}])
    for name in ("c.csv", "c.parquet.gz"):
        (folder / name).write_text("a")
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "t.txt").write_text("a")
    (folder / "l.txt").write_bytes(b"a\xfc")
    invalid = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(np.array([0, 1, 2], np.int32)), pyarrow.py_buffer(b"a\xfc")]
    )
    for name, values in (("p", ["a", None]), ("b", [b"a"]), ("u", invalid)):
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), folder / f"{name}.parquet")
    words = [word.format(folder=folder) for word in arguments]
    assert message in run("preprocess_data", *words, "--output-prefix", tmp_path / "x", *BYTES, status=2)
    assert names(tmp_path) == ["in"]


def large(path: Path, megabytes: int) -> Path:
    """Lines of 50 kB, each with a number of its own."""
    with path.open("w") as file:
        for number in range(20 * megabytes):
            file.write(json.dumps({"text": f"{number} " * (50_000 // len(f"{number} "))}) + "\n")
    return path


def test_a_long_run_of_equal_bytes_is_not_decompressed_at_once(
    tmp_path: Path, module: Callable[[str], ModuleType]
) -> None:
    """Four bytes of a zstd file can stand for 128 KiB: here 16 KiB for half a GiB."""
    block = (2**17 << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    path = tmp_path / "c.txt.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00\x38" + block * 4096)
    file = module("inputs").InputFile(path=path, format="text", compression=".zst")
    tracemalloc.start()
    try:
        with module("compression").opened(file) as (stream, _):
            assert stream.read(7) == b"aaaaaaa"
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


BAD_LINES = [
    (b'{"title": "x"}', "the record has no key 'text'; its keys: 'title'"),
    (b'{"text": null}', "the value of 'text' is NoneType, it must be a string or a list of strings"),
    (b'["text"]', 'list instead of an object such as {"text": "..."}'),
    (b'{"text": "a"', "not valid JSON: Expecting ',' delimiter at character 14 of the line"),
    (b'{"text": "\xff"}', "byte 11 of the line is not valid UTF-8; convert the file to UTF-8"),
    (b'{"text": "\\ud800", "title": ""}', "key 'text': character 0 of the text is the lone surrogate U+D800"),
    (b'{"text": "good", "title": 7}', "the value of 'title' is int, it must be a string"),
]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_that_keeps_going_lists_each_bad_record_and_loses_no_other(tmp_path: Path, workers: str) -> None:
    good = b'{"text": "' + b"good" * 1000 + b'", "title": "t\\u0000"}\n'
    many = 9_000_000 // len(good)  # more than a shard, so that lines are counted over shards
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"".join(good + line + b"\n\n" for line, _ in BAD_LINES) + good * many + b"{\n" + good)
    base = ["--input", path, "--output-prefix", tmp_path / "x", "--json-keys", "text", "title", "--keep-going"]
    said = run("preprocess_data", *base, "--workers", workers, *BYTES)
    assert f"{tmp_path / 'x_text_document_bad_records.tsv'}: 8 bad records left out" in said
    listed = [line.split("\t") for line in (tmp_path / "x_text_document_bad_records.tsv").read_text().splitlines()]
    numbers = [2 + 3 * index for index in range(len(BAD_LINES))]
    assert [(file, int(line)) for file, line, _ in listed] == [
        (str(path), line) for line in [*numbers, 3 * len(BAD_LINES) + many + 1]
    ]
    for (_, _, said_problem), (_, problem) in zip(listed, BAD_LINES):
        assert said_problem.startswith(problem)
    for key, ids in (("text", [*b"good"] * 1000), ("title", [*b"t\0"])):
        dataset = documents(tmp_path / f"x_{key}_document")
        assert len(dataset) == len(BAD_LINES) + many + 1
        assert all(document == ids for document in dataset)


def test_bad_records_are_read_a_shard_at_a_time(tmp_path: Path, module: Callable[[str], ModuleType]) -> None:
    """All of an input may be bad: what comes of a shard says how many there were, and its file says which."""
    shards, encoder = module("shards"), module("encoder").Encoder(keys=["text"], eod=None, split=None)
    file = module("inputs").InputFile(path=tmp_path / "c.jsonl", format="lines", compression="")
    file.path.write_bytes(b'{"text": "good"}\n' + b"{\n" * 20)
    group = shards.shard_group("document", ["text"])
    (shard,) = shards.plan_shards([file], [], group)
    folder = tmp_path / "shards"
    folder.mkdir()
    made = shards.make_shard(
        shard,
        folder,
        encoder,
        lambda texts: (np.arange(len(texts)), np.ones(len(texts), np.int64)),
        dtype=np.dtype(np.uint16),
        keep_going=True,
        made=lambda *counts: None,
    )
    assert made == shards.finished(shard, folder)
    assert made.bad == 20
    assert [(bad.piece, bad.number) for bad in shards.left_out(shard, folder)] == [(0, 2 + line) for line in range(20)]


def test_texts_that_the_tokenizer_refuses_are_bad_records(tmp_path: Path) -> None:
    texts = ["1 2", "x", "3", "99"]
    source = write_lines(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    base = ["--input", source, "--output-prefix", tmp_path / "x", "--tokenizer-type", "NullTokenizer"]
    error = run("preprocess_data", *base, "--vocab-size", "10", status=2)
    assert f"{source}, line 2: key 'text': 'x' is not a token id" in error
    run("preprocess_data", *base, "--vocab-size", "10", "--keep-going")
    assert documents(tmp_path / "x_text_document") == [[1, 2], [3]]
    lines = (tmp_path / "x_text_document_bad_records.tsv").read_text().splitlines()
    assert [line.split("\t")[1] for line in lines] == ["2", "4"]


def test_shards_with_records_left_out_are_made_again_by_a_run_that_leaves_none_out(tmp_path: Path) -> None:
    source = large(tmp_path / "a.jsonl", 9)
    source.write_bytes(b"{\n" + source.read_bytes())
    last = write_lines(tmp_path / "b.txt.gz", [])
    last.write_bytes(b"not gzip")
    base = ["--input", source, last, "--output-prefix", tmp_path / "x", *BYTES]
    error = run("preprocess_data", *base, "--keep-going", status=2)
    assert "truncated or damaged" in error and (tmp_path / "x.shards").is_dir()
    assert f"{source}, line 1: not valid JSON" in run("preprocess_data", *base, status=2)


@pytest.mark.parametrize(("how", "workers"), [(signal.SIGKILL, "2"), (signal.SIGINT, "1")])
def test_an_ended_run_goes_on_and_makes_no_finished_shard_again(
    tmp_path: Path, how: signal.Signals, workers: str
) -> None:
    source = large(tmp_path / "c.jsonl", 30)
    base = ["--input", source, "--append-eod", "--workers", workers, *BYTES, "--output-prefix"]
    run("preprocess_data", *base, tmp_path / "whole")
    process = subprocess.Popen(
        command("preprocess_data", *base, tmp_path / "x"),
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    shards = tmp_path / "x.shards"
    deadline = time.monotonic() + 120
    while not any(shards.glob("*.done")):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(how)
    said, _ = process.communicate()
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
    assert b"Traceback" not in said
    assert not any(name.startswith("x_text") for name in names(tmp_path))
    kept = len(list(shards.glob("*.done")))
    said = run("preprocess_data", *base, tmp_path / "x")
    assert f"{shards}: {kept} of 4 shards are finished already" in said
    assert same_files(tmp_path / "x_text_document", tmp_path / "whole_text_document")
    assert not shards.exists()


def test_a_run_that_fails_keeps_what_is_finished_until_it_succeeds(tmp_path: Path) -> None:
    """Also with other files at fault mended, and another number of workers; not with another setting."""
    source = large(tmp_path / "a.jsonl", 9)
    broken = tmp_path / "b.jsonl"
    broken.write_text("{\n")
    base = ["--input", source, broken, "--output-prefix", tmp_path / "x", *BYTES]
    error = run("preprocess_data", *base, status=2)
    assert f"{broken}, line 1: not valid JSON" in error
    shards = tmp_path / "x.shards"
    (data,) = [path for path in shards.glob("*.bin") if path.stat().st_size > 1_000_000]
    # A mark in the finished shard shows that it is used as it is.
    with data.open("r+b") as file:
        file.write(np.array([33, 33], np.uint16).tobytes())
    write_lines(broken, [{"text": "mended"}])
    said = run("preprocess_data", *base, "--append-eod", "--workers", "2")
    assert "finished already" not in said and documents(tmp_path / "x_text_document")[0][:2] == [*b"0 "]
    (tmp_path / "x_text_document.bin.done.json").unlink()
    broken.write_text("{\n")
    run("preprocess_data", *base, status=2)
    (data,) = [path for path in shards.glob("*.bin") if path.stat().st_size > 1_000_000]
    with data.open("r+b") as file:
        file.write(np.array([33, 33], np.uint16).tobytes())
    write_lines(broken, [{"text": "mended"}])
    assert "1 of 2 shards are finished already" in run("preprocess_data", *base, "--workers", "2")
    written = documents(tmp_path / "x_text_document")
    assert written[0][:2] == [33, 33] and written[-1] == [*b"mended"]
    assert not shards.exists()


def test_a_folder_that_holds_something_else_is_not_taken_for_shards(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}])
    (tmp_path / "x.shards").mkdir()
    (tmp_path / "x.shards" / "thesis.txt").write_text("mine")
    words = ["--input", source, "--output-prefix", tmp_path / "x", *BYTES]
    assert "x.shards is for shards, which are removed" in run("preprocess_data", *words, status=2)
    assert (tmp_path / "x.shards" / "thesis.txt").read_text() == "mine"


def test_shards_that_were_left_beside_a_whole_dataset_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the same command, where the run was killed before it had; not those of a run for another key."""
    source, shards = write_lines(tmp_path / "c.jsonl", [{"text": "a"}]), tmp_path / "x.shards"
    main = names_of_tool("preprocess_data")["main"]
    words: Arguments = ["--input", source, "--output-prefix", tmp_path / "x", *BYTES]
    monkeypatch.setattr(sys, "argv", command("preprocess_data", *words)[1:])

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            main()
    other = shards / f"{'0' * 32}-0.bin"
    other.write_text("")
    assert len(names(shards)) == 4, "the three files of the shard, and the other one"
    main()
    assert names(shards) == [other.name]
    other.unlink()
    main()
    assert not shards.exists()
    assert documents(tmp_path / "x_text_document") == [[*b"a"]]
    assert f"{shards}: removed, as the dataset is whole" in capsys.readouterr().out


def test_shards_of_another_key_are_left_to_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a", "title": "b"}])
    main = names_of_tool("preprocess_data")["main"]
    base = ["--input", source, "--output-prefix", tmp_path / "x", *BYTES, "--json-keys"]

    def start(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", command("preprocess_data", *base, *words)[1:])
        main()

    def killed(*parts: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setitem(main.__globals__, "merge_datasets", killed)
        for words in (["text"], ["text", "--append-eod"]):
            with pytest.raises(KeyboardInterrupt):
                start(*words)
    kept = names(tmp_path / "x.shards")
    assert len(kept) == 6
    start("title")
    assert names(tmp_path / "x.shards") == kept
    capsys.readouterr()
    start("text")
    assert "1 of 1 shard are finished already" in capsys.readouterr().out
    assert not (tmp_path / "x.shards").exists(), "those of another setting of this key are of no more use"
    assert documents(tmp_path / "x_text_document") == [[*b"a"]]
    assert documents(tmp_path / "x_title_document") == [[*b"b"]]


def test_a_disk_that_is_full_as_shards_are_joined_says_that_ids_are_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a" * 100}])
    main = names_of_tool("preprocess_data")["main"]

    def full(*parts: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x.bin")

    monkeypatch.setitem(main.__globals__, "merge_datasets", full)
    words: Arguments = ["--input", source, "--output-prefix", tmp_path / "x", *BYTES]
    monkeypatch.setattr(sys, "argv", command("preprocess_data", *words)[1:])
    with pytest.raises(UserError, match=r"^x\.bin: No space .*; until the shards are joined its ids, 0\.2 kB, are on"):
        main()
    assert names(tmp_path) == ["c.jsonl", "x.shards"]


def replaced(path: Path) -> None:
    path.with_suffix(".new").write_text('{"text": "new"}\n')
    path.with_suffix(".new").replace(path)


def grown(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"text": "new"}\n')


CHANGES = [replaced, grown, Path.unlink]


@pytest.mark.parametrize("change", CHANGES)
def test_a_dataset_is_not_made_of_an_input_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    sources = [write_lines(tmp_path / f"{name}.jsonl", [{"text": "old"}]) for name in "abc"]
    main = names_of_tool("preprocess_data")["main"]
    make_shards = main.__globals__["make_shards"]

    def make(*parts: object, **options: object) -> object:
        made = make_shards(*parts, **options)
        for source in sources[:2]:
            change(source)
        return made

    monkeypatch.setitem(main.__globals__, "make_shards", make)
    words: Arguments = ["--input", *sources, "--output-prefix", tmp_path / "x", *BYTES]
    monkeypatch.setattr(sys, "argv", command("preprocess_data", *words)[1:])
    with pytest.raises(UserError, match=f"^{sources[0]}, {sources[1]}: changed while this run went on"):
        main()
    assert not any(name.startswith("x_") for name in names(tmp_path))


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_of_a_file_that_changes_as_it_is_read_is_never_finished(
    tmp_path: Path, module: Callable[[str], ModuleType], change: Callable[[Path], None]
) -> None:
    shards, encoder = module("shards"), module("encoder").Encoder(keys=["text"], eod=None, split=None)
    path = write_lines(tmp_path / "c.jsonl", [{"text": "old"}])
    file = module("inputs").InputFile(path=path, format="lines", compression="")
    (shard,) = shards.plan_shards([file], [], "group")
    folder = tmp_path / "shards"
    folder.mkdir()
    with pytest.raises(UserError, match=f"^{path}: changed while this run went on"):
        shards.make_shard(
            shard,
            folder,
            encoder,
            lambda texts: (np.arange(len(texts)), np.ones(len(texts), np.int64)),
            dtype=np.dtype(np.uint16),
            keep_going=False,
            made=lambda *counts: change(path),
        )
    assert shards.finished(shard, folder) is None


def job_of(module: Callable[[str], ModuleType], folder: Path, paths: list[Path]) -> object:
    files = [module("inputs").InputFile(path=path, format="lines", compression="") for path in paths]
    return module("workers").Job(
        shards=module("shards").plan_shards(files, [], "group"),
        folder=folder,
        encoder=module("encoder").Encoder(keys=["text"], eod=None, split=None),
        tokenizer=ByteTokenizer(),
        fast=None,
        dtype=np.dtype(np.uint16),
        keep_going=False,
    )


@pytest.fixture
def another_end() -> Iterator[None]:
    """A process that takes SIGTERM in a way of its own, which its workers are not to have."""

    def end(number: int, frame: object) -> None:
        raise RuntimeError("of the parent alone")

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("how", "workers", "message"),
    [
        (signal.SIGTERM, 1, "--workers 1: a worker was ended by SIGTERM"),
        (signal.SIGKILL, 1, "--workers 1: a worker was ended by SIGKILL, most likely for want of memory"),
        (
            signal.SIGKILL,
            2,
            "--workers 2: a worker was ended by SIGKILL, most likely for want of memory; use fewer workers",
        ),
    ],
)
@pytest.mark.usefixtures("another_end")
def test_how_a_worker_has_ended_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Callable[[str], ModuleType],
    how: signal.Signals,
    workers: int,
    message: str,
) -> None:
    job = job_of(module, tmp_path, [large(tmp_path / f"{name}.jsonl", 9) for name in "ab"])
    monkeypatch.setattr(module("workers"), "make_shard", lambda *parts, **options: os.kill(os.getpid(), how))
    with pytest.raises(UserError) as raised:
        module("workers").make_shards(job, {}, workers=workers)
    assert str(raised.value) == message


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_cannot_start_is_not_said_to_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Callable[[str], ModuleType], workers: int
) -> None:
    def refuse(*parts: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a worker does
        raise RuntimeError("no library")

    job = job_of(module, tmp_path, [large(tmp_path / f"{name}.jsonl", 9) for name in "ab"])
    monkeypatch.setattr(module("workers"), "_start_worker", refuse)
    with pytest.raises(UserError) as raised:
        module("workers").make_shards(job, {}, workers=workers)
    assert str(raised.value) == f"--workers {workers}: a worker could not start, see above"


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        ([0, 0], "a worker could not start, see above"),
        ([-signal.SIGTERM, 0], "a worker could not start, see above"),
        ([-signal.SIGTERM], "a worker could not start, see above"),
        ([-signal.SIGTERM, -signal.SIGTERM], "a worker was ended by SIGTERM"),
        ([-signal.SIGTERM, 1], "a worker has ended with status 1"),
        ([-signal.SIGTERM, -40], "a worker was ended by signal 40"),
    ],
)
def test_why_workers_are_lost_is_what_the_first_of_them_has_ended_by(
    module: Callable[[str], ModuleType], codes: list[int], why: str
) -> None:
    assert module("workers")._why(codes, 2) == why


def test_a_list_of_bad_records_belongs_to_one_dataset(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}, {"title": "b"}, {"text": "c", "title": "d"}])
    base = ["--input", source, "--output-prefix", tmp_path / "x", *BYTES, "--keep-going", "--json-keys"]
    for key in ("text", "title"):
        run("preprocess_data", *base, key)
    for key, line in (("text", 2), ("title", 1)):
        assert f"{source}\t{line}\t" in (tmp_path / f"x_{key}_document_bad_records.tsv").read_text()
        assert "already there and complete" in run("preprocess_data", *base, key)
    listed = tmp_path / "x_text_document_bad_records.tsv"
    listed.unlink()
    assert f"made again, {listed} is not there" in run("preprocess_data", *base, "text")
    assert listed.exists()


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["a.jsonl", "sub/b.jsonl", "sub/deep/c.jsonl"]),
        ("**", ["a.jsonl", "sub/b.jsonl", "sub/deep/c.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "sub/b.jsonl", "sub/deep/c.jsonl"]),
        ("s*/*", ["sub/b.jsonl", "sub/deep/c.jsonl"]),
        ("*.jsonl", ["a.jsonl"]),
    ],
)
def test_a_folder_that_a_pattern_matches_is_as_one_that_is_named(
    tmp_path: Path, module: Callable[[str], ModuleType], pattern: str, found: list[str]
) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "x.shards").mkdir()  # of a run that was killed
    (tmp_path / "x.shards" / "lock").write_text("")
    for name in ("a.jsonl", "sub/b.jsonl", "sub/deep/c.jsonl"):
        write_lines(tmp_path / name, [{"text": name}])
    files = module("inputs").find_inputs([f"{tmp_path}/{pattern}"], flag="--input")
    assert [str(file.path.relative_to(tmp_path)) for file in files] == found


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("z*", "there is no such file"),
        ("s*", "matches folders, and no file in them ends in .jsonl"),
        ("*.done.json", "names what tools have written down of their files, and no text"),
        ("a.jsonl.done.json", "names what tools have written down of their files, and no text"),
        ("sub", "the folder holds no file that ends in .jsonl"),
    ],
)
def test_what_was_found_and_is_no_input_is_said(
    tmp_path: Path, module: Callable[[str], ModuleType], pattern: str, why: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "notes.md").write_text("")
    (tmp_path / "a.jsonl.done.json").write_text("{}")
    with pytest.raises(UserError) as raised:
        module("inputs").find_inputs([f"{tmp_path}/{pattern}"], flag="--input")
    assert str(raised.value).startswith(f"--input {tmp_path}/{pattern}: {why}")


def test_two_runs_do_not_write_one_dataset(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}])
    (tmp_path / "x.shards").mkdir()
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", holder, tmp_path / "x.shards" / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        words: Arguments = ["--input", source, "--output-prefix", tmp_path / "x", *BYTES]
        assert "--output-prefix: another run writes it" in run("preprocess_data", *words, status=2)
        assert names(tmp_path / "x.shards") == ["lock"]
    finally:
        process.communicate(b"\n")


def test_the_fast_tokenizer_is_used_where_it_is_exact(module: Callable[[str], ModuleType]) -> None:
    from megatron.tokenizer.tokenizers_tokenizer import gpt2_bpe_tokenizer
    from megatron.tokenizer.wordpiece_tokenizer import wordpiece_tokenizer

    fast_tokenizer = module("fast_tokenizer")
    gpt2 = gpt2_bpe_tokenizer(gpt2_vocab_file(), gpt2_merge_file())
    fast, reason = fast_tokenizer.fast_tokenizer(gpt2)
    assert fast is not None and reason == ""
    assert fast.added_tokens() == ["<|endoftext|>"]
    texts = [*fast_tokenizer.telling_texts(fast.added_tokens()), *(json.loads(line)["text"] for line in CORPUS.open())]
    assert fast_tokenizer.difference(fast, fast_tokenizer.OneByOne(gpt2), texts) is None
    bert = wordpiece_tokenizer(
        BERT_VOCABULARY, name="BertWordPieceLowerCase", lower_case=True, include_special_tokens=True
    )
    fast, reason = fast_tokenizer.fast_tokenizer(bert)
    assert fast is None and reason.startswith("fastokens does not know this tokenizer")


def test_without_the_fast_library_the_tool_says_so(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.tokenizer.tokenizers_tokenizer import gpt2_bpe_tokenizer

    fast_tokenizer = module("fast_tokenizer")
    monkeypatch.setattr(fast_tokenizer, "find_spec", lambda name: None)
    fast, reason = fast_tokenizer.fast_tokenizer(gpt2_bpe_tokenizer(gpt2_vocab_file(), gpt2_merge_file()))
    assert fast is None and "is not installed: pip install 'megatron-pretraining[fast]'" in reason


def test_another_id_anywhere_is_noticed(module: Callable[[str], ModuleType]) -> None:
    fast_tokenizer = module("fast_tokenizer")

    def exact(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return np.array([ord(c) for text in texts for c in text]), np.array([len(text) for text in texts])

    def other(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = exact(texts)
        return np.where(ids == ord("x"), 1, ids), lengths

    def longer(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return exact([text.replace("x", "xx") for text in texts])

    for wrong in (other, longer):
        assert fast_tokenizer.difference(wrong, exact, ["a", "", "bxa", "c"]) == "bxa"
        assert fast_tokenizer.difference(wrong, exact, ["a", "", "c"]) is None


def test_a_tokenizer_that_is_not_exact_is_not_used(tmp_path: Path) -> None:
    """The library is exchanged for one that gives 0 for everything."""
    source = write_lines(tmp_path / "c.jsonl", [{"text": "some words"}])
    words = command("preprocess_data", "--input", source, "--output-prefix", tmp_path / "x", *GPT2)[1:]
    program = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import fastokens
class Wrong:
    from_json_str = staticmethod(lambda text: Wrong())
    def added_tokens(self):
        return []
    def encode_batch_flat(self, texts, **options):
        return bytes(4 * len(texts)), b"".join(i.to_bytes(8, "little") for i in range(len(texts) + 1))
fastokens.Tokenizer = Wrong
sys.argv = {words!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert "fastokens gives other ids than tokenizers" in done.stdout
    assert documents(tmp_path / "x_text_document") == [[11246, 2456]]


def test_the_tool_imports_no_torch(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "One. Two."}])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "c.parquet")
    words = ["--input", source, tmp_path / "c.parquet", "--output-prefix", tmp_path / "x", "--split-sentences", *GPT2]
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); "
        f"sys.argv = {command('preprocess_data', *words)[1:]!r}; "
        "runpy.run_path(sys.argv[0], run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
