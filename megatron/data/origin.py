"""What `tools/preprocess_data.py` has written down of a dataset, in a record beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from megatron.data.indexed_dataset import bin_path

RECORD_ENDING = ".done.json"


class Origin(NamedTuple):
    """The tokenizer that the ids of a dataset come from: its type, and its fingerprint."""

    tokenizer_type: str
    fingerprint: str


def origin_of(prefix: str | Path) -> Origin | None:
    """None where there is no record of the ids that are there now."""
    ids = bin_path(prefix)
    try:
        done = json.loads(ids.with_name(ids.name + RECORD_ENDING).read_text())
        arguments, size = done["arguments"], done["outputs"][ids.name]["bytes"]
        origin = Origin(str(arguments["tokenizer_type"]), str(arguments["tokenizer"]))
        return origin if size == ids.stat().st_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
