"""What a tool has written down of the files that it made, in a record beside them; of a dataset its tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.indexed_dataset import bin_path

RECORD_ENDING = ".done.json"
# How much of each end of an output is hashed: enough to notice truncated, appended or swapped files at any
# size, and a record can be checked in a blink even for terabytes.
EDGE_BYTES = 1 << 20


class Origin(NamedTuple):
    """The tokenizer that the ids of a dataset come from: its type, and its fingerprint."""

    tokenizer_type: str
    fingerprint: str

    def arguments(self) -> dict[str, str]:
        """As it stands among the arguments of a record."""
        return {"tokenizer_type": self.tokenizer_type, "tokenizer": self.fingerprint}


def origin_of(prefix: str | Path) -> Origin | None:
    """None where there is no record of the ids that are there now."""
    ids = bin_path(prefix)
    try:
        done = json.loads(record_path(ids).read_text())
        arguments, state = done["arguments"], done["outputs"][ids.name]
        origin = Origin(str(arguments["tokenizer_type"]), str(arguments["tokenizer"]))
        return origin if state == output_state(ids) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record_path(output: Path) -> Path:
    return output.with_name(output.name + RECORD_ENDING)


def is_record(path: Path) -> bool:
    """Whether a file is the record of a tool, and so no text, whatever folder or pattern it is found by."""
    return path.name.endswith(RECORD_ENDING)


def output_state(path: Path) -> dict[str, Any]:
    """What a record says of an output: its bytes, and a digest of both of its ends."""
    size = path.stat().st_size
    result = hashlib.sha256()
    with path.open("rb") as file:
        result.update(file.read(EDGE_BYTES))
        file.seek(max(EDGE_BYTES, size - EDGE_BYTES))
        result.update(file.read(EDGE_BYTES))
    return {"bytes": size, "edges_sha256": result.hexdigest()}
