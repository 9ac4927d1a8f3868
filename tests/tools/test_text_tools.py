"""From text to .bin/.idx, by the tools as a user starts them."""

import json
import os
import random
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.helpers.datasets import documents, same_files, write_lines
from tests.helpers.tokenizer_files import (
    BOTCHAN_MODEL,
    FIXTURES,
    gpt2_merge_file,
    gpt2_vocab_file,
    mistral_model,
)
from tests.helpers.tools import ROOT, Arguments, command, names, run

PREPROCESS = FIXTURES / "preprocess"
GPT2 = [
    "--tokenizer-type",
    "GPT2BPETokenizer",
    "--vocab-file",
    gpt2_vocab_file(),
    "--merge-file",
    gpt2_merge_file(),
]
BYTES = ["--tokenizer-type", "ByteTokenizer"]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("name", "corpus", "arguments"),
    [
        ("gpt2_eod", "corpus", [*GPT2, "--append-eod"]),
        ("gpt2_noeod", "corpus", GPT2),
        ("gpt2_small_eod", "corpus_small", [*GPT2, "--append-eod"]),
        (
            "gptsp_bpe1000_eod",
            "corpus",
            [
                "--tokenizer-type",
                "GPTSentencePieceTokenizer",
                "--tokenizer-model",
                BOTCHAN_MODEL,
                "--append-eod",
            ],
        ),
        (
            "llama2_sp_eod",
            "corpus",
            ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", mistral_model(), "--append-eod"],
        ),
    ],
)
def test_the_files_are_megatrons_byte_for_byte(
    tmp_path: Path, name: str, corpus: str, arguments: Arguments, workers: int
) -> None:
    prefix = tmp_path / name
    run(
        "preprocess_data",
        *("--input", PREPROCESS / f"{corpus}.jsonl", "--output-prefix", prefix, "--workers", str(workers)),
        *arguments,
    )
    assert same_files(Path(f"{prefix}_text_document"), PREPROCESS / f"{name}_text_document")


@pytest.mark.parametrize("workers", [1, 2])
def test_each_key_gets_its_own_complete_dataset(tmp_path: Path, workers: int) -> None:
    run(
        "preprocess_data",
        *("--input", PREPROCESS / "corpus.jsonl", "--output-prefix", tmp_path / "x", "--workers", str(workers)),
        *("--json-keys", "text", "title", "--append-eod", *GPT2),
    )
    assert same_files(tmp_path / "x_text_document", PREPROCESS / "gpt2_eod_text_document")
    assert same_files(tmp_path / "x_title_document", PREPROCESS / "gpt2_2keys_title_document")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_document_is_kept_wherever_it_stands(tmp_path: Path, place: int) -> None:
    texts = ["ab", "c"]
    texts.insert(place, "")
    source = write_lines(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    run("preprocess_data", "--input", source, "--output-prefix", tmp_path / "x", "--append-eod", *BYTES)
    assert documents(tmp_path / "x_text_document") == [[*text.encode(), 256] if text else [] for text in texts]
    assert len(IndexedDataset(tmp_path / "x_text_document")) == 2


def test_workers_keep_the_order_over_many_batches_and_files(tmp_path: Path) -> None:
    """Batches of very different cost, so that workers end in another order than they began."""
    generator = random.Random(5)
    texts = [f"{i} " * generator.choice([1, 10, 20_000]) for i in range(400)]
    files = [write_lines(tmp_path / f"{part}.jsonl", [{"text": text} for text in texts[part::2]]) for part in range(2)]
    run(
        "preprocess_data",
        *("--input", tmp_path / "*.jsonl", "--output-prefix", tmp_path / "x", "--workers", "3", *BYTES),
    )
    assert sum(file.stat().st_size for file in files) > 8e6  # 16 batches or more
    written = [bytes(ids).decode() for ids in documents(tmp_path / "x_text_document")]
    assert written == texts[0::2] + texts[1::2]


def test_ids_beyond_uint16_are_stored_whole(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "0 69999 65535 65536"}])
    run(
        "preprocess_data",
        *("--input", source, "--output-prefix", tmp_path / "x", "--append-eod"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "70000", "--null-tokenizer-eod-id", "7"),
    )
    assert IndexedDataset(tmp_path / "x_text_document").dtype == np.int32
    assert documents(tmp_path / "x_text_document") == [[0, 69999, 65535, 65536, 7]]


def test_blank_lines_windows_newlines_and_a_byte_order_mark_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b\\r\\n"}\n  \n{"text": "c"}')
    run("preprocess_data", "--input", tmp_path / "c.jsonl", "--output-prefix", tmp_path / "x", *BYTES)
    assert documents(tmp_path / "x_text_document") == [[97], [98, 13, 10], [99]]


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"title": "x"}', "the record has no key 'text'; its keys: 'title'"),
        (b'{"text": 7}', "the value of 'text' is int, it must be a string"),
        (b'{"text": null}', "the value of 'text' is NoneType"),
        (b'{"text": {"a": "b"}}', "the value of 'text' is dict"),
        (b'["text"]', "list instead of an object"),
        (b'{"text": "a"', "not valid JSON"),
        (b'{"text": "a"} {"text": "b"}', "not valid JSON: Extra data at character 15"),
        (b'{"text": "a\tb"}', "not valid JSON: Invalid control character"),
        (b'{"text": "\xff"}', "byte 11 of the line is not valid UTF-8"),
        (b'{"text": "\\ud800"}', "key 'text': character 0 of the text is the lone surrogate U+D800"),
        (b"[" * 100_000, "JSON nested too deeply"),
        (b'{"text": "a", "n": ' + b"1" * 6000 + b"}", "a number with more digits than the 4,300 allowed"),
    ],
)
def test_a_broken_line_is_named_with_file_and_number_and_leaves_nothing(
    tmp_path: Path, line: bytes, message: str, workers: int
) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_bytes(GOOD * 3 + line + b"\n" + GOOD)
    output = tmp_path / "out"
    error = run(
        "preprocess_data",
        *("--input", source, "--output-prefix", output / "x", "--workers", str(workers), *BYTES),
        status=2,
    )
    assert f"error: {source}, line 4" in error
    assert message in error
    assert names(output) == []


def test_a_broken_line_is_named_where_a_tokenizer_is_trained(tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_bytes(GOOD + b'{"text": "a", "n": ' + b"1" * 6000 + b"}\n")
    words = ["--input", source, "--output-prefix", tmp_path / "tokenizer"]
    assert f"error: {source}, line 2: a number with more digits" in run("train_tokenizer", *words, status=2)


def test_a_tokenizer_is_not_trained_on_what_no_tokenizer_can_keep(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}, {"text": "b \ud800"}])
    error = run("train_tokenizer", "--input", source, "--output-prefix", tmp_path / "t", status=2)
    assert f"error: {source}, line 2: key 'text': character 2 of the text is the lone surrogate U+D800" in error
    assert names(tmp_path) == ["c.jsonl"]


def test_the_line_number_is_right_in_a_later_batch(tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_bytes(GOOD * 100_000 + b"broken\n")
    error = run(
        "preprocess_data",
        *("--input", source, "--output-prefix", tmp_path / "x", "--workers", "2", *BYTES),
        status=2,
    )
    assert f"{source}, line 100001: not valid JSON" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "none.jsonl", *BYTES], "--input none.jsonl: there is no such file"),
        (["--workers", "0", *BYTES], "--workers: must be at least 1, not 0"),
        (["--json-keys", "text", "text", *BYTES], "each key can be named once"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "--vocab-file"),
        (["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "none.model"], "none.model"),
        (
            ["--tokenizer-type", "NullTokenizer", "--vocab-size", "x"],
            "--vocab-size: must be a whole number, 'x' is not",
        ),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "0"], "--vocab-size 0: must be at least 1"),
        (["--tokenizer-type", "WordTokenizer"], "NullTokenizer"),
        ([*BYTES, "--append-eos"], "--append-eos: is not a known flag; --append-eod is the nearest"),
        (["--tokenizer-typ", "ByteTokenizer"], "--tokenizer-typ: is not a known flag; --tokenizer-type is the nearest"),
    ],
)
def test_a_wrong_command_is_refused_in_words(tmp_path: Path, arguments: Arguments, message: str) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}])
    given = [] if "--input" in arguments else ["--input", source]
    error = run("preprocess_data", *given, "--output-prefix", tmp_path / "x", *arguments, status=2)
    assert message in error
    assert names(tmp_path) == ["c.jsonl"]


def test_a_tokenizer_file_of_an_interrupted_copy_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}])
    (tmp_path / "t.model").touch()
    error = run(
        "preprocess_data",
        *("--input", source, "--output-prefix", tmp_path / "x"),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "t.model"),
        status=2,
    )
    assert f"--tokenizer-model {tmp_path / 't.model'} is not a SentencePiece model (it is empty)" in error
    assert names(tmp_path) == ["c.jsonl", "t.model"]


@pytest.mark.parametrize("eod", [[], ["--append-eod"]])
def test_texts_that_are_all_empty_are_refused(tmp_path: Path, eod: list[str]) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a", "title": ""}, {"text": "b", "title": ""}])
    base = ["--input", source, "--json-keys", "text", "title", *eod, *BYTES]
    error = run("preprocess_data", *base, "--output-prefix", tmp_path / "x", status=2)
    assert f"--input {source}: holds no text under 'title'" in error
    assert names(tmp_path) == ["c.jsonl"]


def test_a_tokenizer_is_not_trained_on_empty_texts(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": ""}, {"text": ""}])
    error = run("train_tokenizer", "--input", source, "--output-prefix", tmp_path / "t", status=2)
    assert f"--input {source}: holds no text" in error
    assert names(tmp_path) == ["c.jsonl"]


def test_an_input_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("\n\n")
    error = run(
        "preprocess_data",
        "--input",
        tmp_path / "c.jsonl",
        "--output-prefix",
        tmp_path / "x",
        *BYTES,
        status=2,
    )
    assert "holds no document" in error
    assert names(tmp_path) == ["c.jsonl"]


def _touch_input(folder: Path) -> None:
    write_lines(folder / "c.jsonl", [{"text": "other"}])


def _truncate_output(folder: Path) -> None:
    path = folder / "x_text_document.bin"
    path.write_bytes(path.read_bytes()[:-1])


def _change_output(folder: Path) -> None:
    path = folder / "x_text_document.bin"
    path.write_bytes(b"\0" * path.stat().st_size)


def _remove_index(folder: Path) -> None:
    (folder / "x_text_document.idx").unlink()


def _spoil_record(folder: Path) -> None:
    (folder / "x_text_document.bin.done.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (_touch_input, [], "made again, the input has changed"),
        (_truncate_output, [], "is not the file that was written"),
        (_change_output, [], "is not the file that was written"),
        (_remove_index, [], "is not there"),
        (_spoil_record, [], "is not a record of this tool"),
        (lambda folder: None, ["--append-eod"], "what differs: append_eod False, now True"),
    ],
)
def test_finished_work_is_skipped_until_anything_differs(
    tmp_path: Path, change: Callable[[Path], None], arguments: Arguments, message: str
) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "abc"}])
    base = ["--input", source, "--output-prefix", tmp_path / "x", *BYTES]
    run("preprocess_data", *base)
    before = (tmp_path / "x_text_document.bin").stat()
    assert "already there and complete" in run("preprocess_data", *base, "--workers", "2")
    assert (tmp_path / "x_text_document.bin").stat().st_mtime_ns == before.st_mtime_ns
    change(tmp_path)
    assert message in run("preprocess_data", *base, *arguments)
    text = json.loads(source.read_text())["text"]
    assert documents(tmp_path / "x_text_document") == [[*text.encode(), *([256] if arguments else [])]]
    assert "already there and complete" in run("preprocess_data", *base, *arguments)


@pytest.mark.parametrize("tool", ["make_corpus", "train_tokenizer", "preprocess_data"])
def test_a_tool_runs_as_a_script_and_explains_itself(tool: str) -> None:
    done = subprocess.run(
        command(tool, "--help"), capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert f"python tools/{tool}.py" in done.stdout


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder with text, a duplicate, and what must be left out."""
    folder = tmp_path / "notes"
    (folder / "deep" / "site-packages").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.py").write_bytes(b"def f():\r\n\treturn '\xc3\xbc'  \n")
    (folder / "b.md").write_text("# Title \u2581\n")
    (folder / "deep" / "same-as-a.py").write_bytes((folder / "a.py").read_bytes())
    (folder / "deep" / "c.txt").write_text("c")
    (folder / "latin.txt").write_bytes(b"\xfcber")
    (folder / "blank.txt").write_text(" \n")
    (folder / "picture.png").write_text("not text")
    (folder / "deep" / "site-packages" / "d.py").write_text("left out")
    (folder / ".git" / "e.txt").write_text("left out")
    return folder


def test_a_corpus_holds_each_text_once_unchanged(tmp_path: Path, notes: Path) -> None:
    output = tmp_path / "corpus.jsonl"
    said = run("make_corpus", "--output", output, "--input", notes)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {record["source"]: record["text"] for record in records} == {
        "notes/a.py": "def f():\r\n\treturn 'ü'  \n",
        "notes/b.md": "# Title \u2581\n",
        "notes/deep/c.txt": "c",
    }
    assert ": 3 documents, 0.0 kB of text" in said
    assert "(1 duplicate and 2 files, empty or not UTF-8, left out, 0 beyond --max-megabytes)" in said


def test_a_corpus_of_docstrings_holds_the_prose_of_python_files_alone(tmp_path: Path) -> None:
    folder, output = tmp_path / "code", tmp_path / "prose.jsonl"
    folder.mkdir()
    (folder / "a.py").write_text(
        '"""About a. Two sentences."""\nclass A:\n    """Of A.\n\n    More of A."""\n    def f(self):\n'
        "        'Of f.'\n    def g(self):\n        return 'no docstring'\n"
    )
    (folder / "broken.py").write_text('"""A docstring""" of no module')
    (folder / "none.py").write_text("x = 1\n")
    (folder / "b.md").write_text("Not Python.\n")
    said = run("make_corpus", "--output", output, "--input", folder, "--suffixes", ".py", "--docstrings")
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["text"] for record in records] == ["About a. Two sentences.", "Of A.\n\nMore of A.", "Of f."]
    assert {record["source"] for record in records} == {"code/a.py"}
    assert ": 3 documents" in said
    assert "(0 duplicates and 2 files, without docstrings, not Python or not UTF-8, left out, 0 beyond" in said
    assert "made again, what differs" in run("make_corpus", "--output", output, "--input", folder)


def test_a_corpus_is_made_again_when_a_file_is_added_and_says_so(tmp_path: Path, notes: Path) -> None:
    words = ["--output", tmp_path / "corpus.jsonl", "--input", notes]
    run("make_corpus", *words)
    (notes / "new.txt").write_text("new")
    assert "made again, what differs: sources\n" in run("make_corpus", *words)


def test_the_order_of_a_corpus_depends_on_content_and_seed_only(tmp_path: Path, notes: Path) -> None:
    for i in range(40):
        (notes / f"{i:02}.txt").write_text(f"text {i}")

    def texts(name: str, *arguments: str | Path) -> list[str]:
        run("make_corpus", "--output", tmp_path / name, *arguments)
        return [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]

    moved = tmp_path / "elsewhere"
    shutil.copytree(notes, moved)
    order = texts("1.jsonl", "--input", notes)
    assert texts("2.jsonl", "--input", moved) == order
    other = texts("3.jsonl", "--input", notes, "--seed", "7")
    assert sorted(other) == sorted(order)
    assert other != order != sorted(order)


def test_a_corpus_can_be_limited_and_takes_files_and_patterns(tmp_path: Path, notes: Path) -> None:
    for i in range(100):
        (notes / f"{i}.log").write_text(f"{i:04}" * 250)
    output = tmp_path / "corpus.jsonl"
    run("make_corpus", "--output", output, "--input", notes / "*.log", "--max-megabytes", "0.02")
    assert len(output.read_text().splitlines()) == 20
    run("make_corpus", "--output", output, "--input", notes / "picture.png")
    assert json.loads(output.read_text()) == {"text": "not text", "source": "picture.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "none"], "--input none: there is no such file or folder"),
        (["--input", "{notes}", "--suffixes", ".rs"], "no file that ends in .rs"),
        (["--input", "{notes}/latin.txt"], "no text found in 1 file (empty or not UTF-8)"),
        (["--input", "{notes}/b.md", "--docstrings"], "no docstring found in 1 file (without docstrings, not Python"),
        (["--input", "{notes}", "--max-megabytes", "0"], "--max-megabytes 0.0: must be above 0"),
    ],
)
def test_a_corpus_of_nothing_is_refused(tmp_path: Path, notes: Path, arguments: list[str], message: str) -> None:
    words = [word.format(notes=notes) for word in arguments]
    assert message in run("make_corpus", "--output", tmp_path / "c.jsonl", *words, status=2)
    assert names(tmp_path) == ["notes"]


def test_a_changed_folder_is_gathered_again(tmp_path: Path, notes: Path) -> None:
    base = ["--output", notes / "corpus.json", "--input", notes, "--suffixes", ".txt", ".json"]
    run("make_corpus", *base)
    assert "already there" in run("make_corpus", *base)  # its own output is no input
    (notes / "new.txt").write_text("new")
    assert "made again" in run("make_corpus", *base)
    assert len((notes / "corpus.json").read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def standard_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    run("make_corpus", "--output", path, "--max-megabytes", "3")
    return path


@pytest.fixture(scope="module")
def trained(standard_library: Path) -> Path:
    prefix = standard_library.with_name("tok.enizer")
    run("train_tokenizer", "--input", standard_library, "--output-prefix", prefix, "--vocab-size", "1024")
    return Path(f"{prefix}.model")


def test_the_standard_library_is_a_corpus(standard_library: Path) -> None:
    records = [json.loads(line) for line in standard_library.read_text().splitlines()]
    assert 2.5e6 < sum(len(record["text"].encode()) for record in records) <= 3e6
    assert all(record["text"].strip() and not record["source"].startswith("/") for record in records)
    assert not any("site-packages" in record["source"] for record in records)


def test_a_trained_tokenizer_keeps_every_character_of_unicode(trained: Path) -> None:
    tokenizer = SentencePieceTokenizer(trained)
    assert (tokenizer.vocab_size, tokenizer.pad) == (1024, None)
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for start in range(0, len(characters), 4096):
        text = " ".join(characters[start : start + 4096])
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_trained_tokenizer_keeps_unicode_forms_and_reserved_words(trained: Path) -> None:
    tokenizer = SentencePieceTokenizer(trained)
    for text in (
        unicodedata.normalize("NFC", "ñ"),
        unicodedata.normalize("NFD", "ñ"),
        "<unk></s><|endoftext|>",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.eod not in tokenizer.encode(text)


def test_code_has_newlines_tabs_and_indents_as_single_tokens(trained: Path) -> None:
    tokenizer = SentencePieceTokenizer(trained)
    for piece in ("\n", "\t", "    ", "        "):
        assert len(tokenizer.encode(piece)) == 1
    assert tokenizer.decode(tokenizer.encode("if x:\n    y()\n")[:-1]) == "if x:\n    y()"


def test_the_same_corpus_gives_the_same_tokenizer(tmp_path: Path, standard_library: Path, trained: Path) -> None:
    copy = shutil.copy(standard_library, tmp_path / "other-name.jsonl")
    base = ["--input", copy, "--output-prefix", tmp_path / "t", "--vocab-size", "1024"]
    run("train_tokenizer", *base)
    assert (tmp_path / "t.model").read_bytes() == trained.read_bytes()
    assert "already there and complete" in run("train_tokenizer", *base)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("278", "--vocab-size 278: must be above 278"),
        ("65536", "--vocab-size 65536: the text gives "),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path, size: str, message: str) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "the cat sat on the mat"}])
    error = run(
        "train_tokenizer",
        *("--input", source, "--output-prefix", tmp_path / "t", "--vocab-size", size),
        status=2,
    )
    assert message in error
    assert names(tmp_path) == ["c.jsonl"]


def test_a_tokenizer_can_be_trained_on_long_lines_and_odd_characters(tmp_path: Path) -> None:
    texts = ["word " * 50_000, "nul \0 and ▅ and ▁", "\r\n" * 100, ""]
    source = write_lines(tmp_path / "c.jsonl", [{"body": text} for text in texts])
    run(
        "train_tokenizer",
        *("--input", source, "--output-prefix", tmp_path / "t", "--vocab-size", "290", "--json-key", "body"),
    )
    tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    assert len(tokenizer.encode(" word word")) == 2


def test_from_the_standard_library_to_ids_and_back(tmp_path: Path, standard_library: Path, trained: Path) -> None:
    run(
        "preprocess_data",
        *("--input", standard_library, "--output-prefix", tmp_path / "x", "--workers", "2", "--append-eod"),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", trained),
    )
    tokenizer = SentencePieceTokenizer(trained)
    written = documents(tmp_path / "x_text_document")
    assert all(ids[-1] == tokenizer.eod and tokenizer.eod not in ids[:-1] for ids in written)
    texts = [json.loads(line)["text"] for line in standard_library.read_text().splitlines()]
    assert [tokenizer.decode(ids) for ids in written] == texts
