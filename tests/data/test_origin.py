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
    write_corpus(prefix, [[[1, 2]]])
    assert origin_of(prefix) is None, "the record is of other ids"
    assert origin_of(tmp_path / "another") is None
    for text in ("", "[]", '{"arguments": 7}'):
        (tmp_path / "x_text_document.bin.done.json").write_text(text)
        assert origin_of(prefix) is None
