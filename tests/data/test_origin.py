"""What is known of the tokenizer that a dataset comes from."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.data.origin import Origin, origin_of
from tests.data.corpora import write_corpus
from tests.helpers.tools import run


def test_it_is_what_preprocessing_has_written_down_of_the_ids_that_are_there(tmp_path: Path) -> None:
    source, prefix = tmp_path / "c.jsonl", tmp_path / "x_text_document"
    source.write_text(json.dumps({"text": "a text"}) + "\n")
    run("preprocess_data", "--input", source, "--output-prefix", tmp_path / "x", "--tokenizer-type", "ByteTokenizer")
    origin = origin_of(prefix)
    assert isinstance(origin, Origin) and origin.tokenizer_type == "ByteTokenizer" and len(origin.fingerprint) == 64
    ids = (tmp_path / "x_text_document.bin").read_bytes()
    (tmp_path / "x_text_document.bin").write_bytes(bytes(len(ids)))
    assert origin_of(prefix) is None, "the record is of other ids, as many"
    write_corpus(prefix, [[[1, 2]]])
    assert origin_of(prefix) is None, "the record is of other ids"
    assert origin_of(tmp_path / "another") is None
    for text in ("", "[]", '{"arguments": 7}'):
        (tmp_path / "x_text_document.bin.done.json").write_text(text)
        assert origin_of(prefix) is None


def test_each_key_of_a_run_has_its_own(tmp_path: Path) -> None:
    source, prefixes = tmp_path / "c.jsonl", [tmp_path / f"x_{key}_document" for key in ("text", "title")]
    source.write_text(json.dumps({"text": "a text", "title": "a title"}) + "\n")
    base = ["--input", source, "--output-prefix", tmp_path / "x", "--json-keys", "text", "title"]
    run("preprocess_data", *base, "--tokenizer-type", "ByteTokenizer")
    first, second = map(origin_of, prefixes)
    assert first is not None and first == second
    assert "already there and complete" in run("preprocess_data", *base, "--tokenizer-type", "ByteTokenizer")
    run("preprocess_data", *base, "--tokenizer-type", "ByteTokenizer", "--append-eod")
    assert first == origin_of(prefixes[1])
