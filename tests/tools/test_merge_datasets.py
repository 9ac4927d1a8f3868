"""Several datasets as one, by the tool as a user starts it."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.origin import origin_of
from tests.data.corpora import write_corpus
from tests.helpers.datasets import documents, same_files, sequences, write_lines
from tests.helpers.tokenizer_files import BOTCHAN_MODEL, FIXTURES
from tests.helpers.tools import Arguments, command, names, names_of_tool, run

PREPROCESS = FIXTURES / "preprocess"


def test_the_files_are_megatrons_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("gpt2_eod_text_document", "gpt2_small_eod_text_document"):
        for ending in ("bin", "idx"):
            shutil.copy(PREPROCESS / f"{name}.{ending}", tmp_path / "in")
    run("merge_datasets", "--input", tmp_path / "in", "--output-prefix", tmp_path / "merged")
    assert same_files(tmp_path / "merged", PREPROCESS / "merged_gpt2")


def test_documents_begin_where_they_did(tmp_path: Path) -> None:
    """Of several sequences, without any, in more than two files."""
    contents = [[[[1, 2]], [[3]]], [[], [[4], [5, 6, 7]], []], [], [[[8]], []]]
    prefixes = [write_corpus(tmp_path / str(index), content) for index, content in enumerate(contents)]
    said = run("merge_datasets", "--input", *prefixes, "--output-prefix", tmp_path / "merged")
    assert sequences(tmp_path / "merged") == [document for content in contents for document in content]
    assert ": 7 documents, 8 tokens of uint16 from 4 datasets" in said


def test_merging_is_tokenizing_all_texts_together(tmp_path: Path) -> None:
    texts = [["One. Two!", ""], ["Three."], ["", "Four. 5.", "Six"]]
    for index, part in enumerate(texts):
        write_lines(tmp_path / f"{index}.jsonl", [{"text": text} for text in part])
    base = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--split-sentences"]
    for index in range(3):
        words = ["--input", tmp_path / f"{index}.jsonl", "--output-prefix", tmp_path / "parts" / str(index)]
        run("preprocess_data", *words, *base)
    run("preprocess_data", "--input", tmp_path / "*.jsonl", "--output-prefix", tmp_path / "whole", *base)
    run("merge_datasets", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "merged")
    assert same_files(tmp_path / "merged", tmp_path / "whole_text_sentence")


def test_the_order_is_that_of_the_words_and_of_names_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in (10, 9, 1):
        write_corpus(tmp_path / "in" / f"part{number}", [[[number]]])
    words = ["--input", tmp_path / "in" / "part9", tmp_path / "in", "--output-prefix", tmp_path / "merged"]
    run("merge_datasets", *words)
    assert documents(tmp_path / "merged") == [[9], [1], [10], [9]]


def test_datasets_of_different_tokenizers_are_refused_where_their_records_say_so(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "1 2"}])
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size"]
    for name, words in (("a", ["--tokenizer-type", "ByteTokenizer"]), ("b", [*null, "9"]), ("c", [*null, "10"])):
        run("preprocess_data", "--input", source, "--output-prefix", tmp_path / name, *words)
    a, b, c = (tmp_path / f"{name}_text_document" for name in "abc")
    for others in ((a, b), (b, c)):
        said = run("merge_datasets", "--input", *others, "--output-prefix", tmp_path / "merged", status=2)
        assert f"--input {others[0]} and {others[1]}: made with different tokenizers (" in said
        assert re.search(r", NullTokenizer [0-9a-f]{8}\); merge those of one tokenizer, or tokenize again", said)
    run("merge_datasets", "--input", b, b, "--output-prefix", tmp_path / "merged")
    said = run("merge_datasets", "--input", tmp_path / "merged", a, "--output-prefix", tmp_path / "x", status=2)
    assert re.search(rf"{tmp_path}/merged and {a}: made with different tokenizers \(NullTokenizer \w+, Byte", said)
    unrecorded = write_corpus(tmp_path / "unrecorded", [[[1]]])
    run("merge_datasets", "--input", b, unrecorded, "--output-prefix", tmp_path / "merged")
    assert not (tmp_path / "merged.bin.done.json").exists()
    write_corpus(c, [[[1]]])  # its record is that of the file before
    run("merge_datasets", "--input", b, c, "--output-prefix", tmp_path / "merged")


def test_types_that_are_one_tokenizer_are_merged(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "some words"}])
    for name in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        words: Arguments = ["--tokenizer-type", name, "--tokenizer-model", BOTCHAN_MODEL]
        run("preprocess_data", "--input", source, "--output-prefix", tmp_path / "in" / name, *words)
    run("merge_datasets", "--input", tmp_path / "in", "--output-prefix", tmp_path / "merged")
    origin = origin_of(tmp_path / "merged")
    assert origin is not None and origin.tokenizer_type == "GPTSentencePieceTokenizer", "that of the first dataset"


def test_a_killed_merge_leaves_no_record_of_other_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}])
    words = ["--tokenizer-type", "ByteTokenizer"]
    run("preprocess_data", "--input", source, "--output-prefix", tmp_path / "a", *words)
    merge: Arguments = ["--input", tmp_path / "a_text_document", "--output-prefix", tmp_path / "merged"]
    run("merge_datasets", *merge)
    assert (tmp_path / "merged.bin.done.json").exists()
    main = names_of_tool("merge_datasets")["main"]
    merge_files = main.__globals__["merge_datasets"]

    def killed(*parts: object, **options: object) -> None:
        merge_files(*parts, **options)
        raise KeyboardInterrupt

    monkeypatch.setitem(main.__globals__, "merge_datasets", killed)
    monkeypatch.setattr(sys, "argv", command("merge_datasets", *merge)[1:])
    with pytest.raises(KeyboardInterrupt):
        main()
    assert not (tmp_path / "merged.bin.done.json").exists()


def test_datasets_in_folders_within_a_folder_are_left_out_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "x.shards").mkdir()  # of a run that waits to go on
    for name in ("a", "sub/b", "sub/deep/c", "x.shards/d"):
        write_corpus(tmp_path / "in" / name, [[[1]]])
    said = run("merge_datasets", "--input", tmp_path / "in", "--output-prefix", tmp_path / "merged")
    assert f"{tmp_path / 'in'}: 2 datasets in folders within it left out, the first is sub/b" in said
    assert documents(tmp_path / "merged") == [[1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/a", "{folder}/wide"], "wide holds ids of int32"),
        (["{folder}/a", "{folder}/none"], "none.idx: no such file; a dataset is given by its prefix"),
        (["{folder}/half"], "half: holds b.bin without b.idx, half of a dataset"),
        (["{folder}/empty"], "empty: the folder holds no dataset"),
        (["{folder}/a", "{folder}/short"], "short.bin: 2 bytes, but"),
        (["{folder}/a", "{folder}/merged"], "merged: is one of the inputs"),
    ],
)
def test_what_cannot_be_merged_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    folder = tmp_path / "in"
    for name in ("half", "empty"):
        (folder / name).mkdir(parents=True)
    write_corpus(folder / "a", [[[1]]])
    write_corpus(folder / "wide", [[[1]]], np.int32)
    write_corpus(folder / "half" / "b", [[[1]]])
    (folder / "half" / "b.idx").unlink()
    write_corpus(folder / "short", [[[1, 2]]])
    (folder / "short.bin").write_bytes(np.array([1], np.uint16).tobytes())
    before = names(folder)
    words = [word.format(folder=folder) for word in arguments]
    error = run("merge_datasets", "--input", *words, "--output-prefix", folder / "merged", status=2)
    assert message in error
    assert names(folder) == before
