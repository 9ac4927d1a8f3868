"""What the text tools share: the record of finished work, files to be written, lines of text.

A step is skipped when its record says that the same tool, with the same arguments, made the files that lie
there from the inputs that lie there. Anything else is made anew, and one line says why.
"""

import hashlib
import json
import os
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import say

from megatron.config.problems import UserError
from megatron.core.whole_file import whole_file
from megatron.data.origin import output_state, record_path

# The folder of shards of a dataset that is not whole yet, after its prefix.
SHARDS_ENDING = ".shards"
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One run of a tool.

    Args:
        tool: name of the tool, with a version that is raised when its output changes.
        arguments: everything else the output depends on, as plain JSON.
        inputs: what is read; files are known by name, size and time of change, and are hashed by nobody.
        outputs: what is written; the record stands beside the first, and beside each .bin, as a dataset is moved and
            read by itself.
    """

    tool: str
    arguments: Mapping[str, Any]
    inputs: Sequence[Path]
    outputs: Sequence[Path]

    @property
    def record(self) -> Path:
        return record_path(self.outputs[0])

    @property
    def _records(self) -> list[Path]:
        return [self.record, *(record_path(path) for path in self.outputs[1:] if path.suffix == ".bin")]

    def reason_to_run(self) -> str | None:
        """None when the result is there and complete, else why it must be made."""
        if not self.record.is_file():
            return "it has not been made yet"
        try:
            done = json.loads(self.record.read_text())
            recorded = (done["tool"], done["arguments"], done["inputs"], done["outputs"])
        except (ValueError, KeyError, TypeError):
            return f"{self.record} is not a record of this tool"
        tool, arguments, inputs, outputs = recorded
        if tool != self.tool:
            return f"it was made by {tool}, this is {self.tool}"
        wanted = json.loads(json.dumps(self.arguments))
        if arguments != wanted:
            return f"what differs: {_difference(arguments, wanted)}"
        if inputs != _inputs_digest(self.inputs):
            return "the input has changed"
        for path in self.outputs:
            if not path.is_file():
                return f"{path} is not there"
            if outputs.get(path.name) != output_state(path):
                return f"{path} is not the file that was written"
        return None

    def skip(self) -> bool:
        """True, with a line, when there is nothing to do; otherwise the records, now untrue, are removed."""
        reason = self.reason_to_run()
        names = ", ".join(str(path) for path in self.outputs)
        if reason is None:
            say(f"{names}: already there and complete")
            return True
        if self.record.exists():
            say(f"{names}: made again, {reason}")
        self.forget()
        return False

    def forget(self) -> None:
        """Remove the records, before what they tell of is written over."""
        for record in self._records:
            record.unlink(missing_ok=True)

    def finish(self, inputs_digest: str, **summary: Any) -> None:
        """Write the records; `inputs_digest` was taken before the input was read."""
        done = {
            "tool": self.tool,
            "arguments": self.arguments,
            "inputs": inputs_digest,
            "outputs": {path.name: output_state(path) for path in self.outputs},
            "summary": summary,
        }
        for record in reversed(self._records):  # the first, by which all are known to be there, comes last
            with whole_file(record) as file:
                file.write((json.dumps(done, indent=1) + "\n").encode())

    def inputs_digest(self) -> str:
        return _inputs_digest(self.inputs)


def _inputs_digest(paths: Sequence[Path]) -> str:
    result = hashlib.sha256()
    for path in paths:
        state = path.stat()
        result.update(json.dumps([path.name, state.st_size, state.st_mtime_ns]).encode())
    return result.hexdigest()


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The names and values that differ; of digests, which say nothing to a reader, the names."""
    changed = [(key, old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return ", ".join(
        key if _DIGEST.fullmatch(str(now)) else f"{key} {reprlib.repr(before)}, now {reprlib.repr(now)}"
        for key, before, now in changed
    )


def prepare_output(path: Path, *, flag: str) -> None:
    """Create the folder of an output.

    Raises:
        UserError: the path cannot be written.
    """
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a folder; give the path of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {path}: its folder cannot be made ({error.strerror})") from None
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag} {path}: its folder cannot be written")


def parse_record(line: bytes) -> dict[str, Any]:
    """One line of JSON lines as an object.

    Raises:
        UserError: invalid UTF-8, invalid JSON, a number of thousands of digits, or not an object.
    """
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start + 1} of the line is not valid UTF-8; convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON: {error.msg} at character {error.pos + 1} of the line") from None
    except ValueError:  # the only other one that the reader raises
        raise UserError(f"a number with more digits than the {sys.get_int_max_str_digits():,} allowed") from None
    except RecursionError:
        raise UserError("JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise UserError(f'{type(record).__name__} instead of an object such as {{"text": "..."}}')
    return record


def text_under(record: Mapping[str, Any], key: str) -> str:
    """The text under a key of a record.

    Raises:
        UserError: no such key, or no text under it.
    """
    text = value_under(record, key)
    if not isinstance(text, str):
        raise UserError(f"the value of {key!r} is {type(text).__name__}, it must be a string")
    return text


def value_under(record: Mapping[str, Any], key: str) -> object:
    """Raises UserError: the record has no such key."""
    if key not in record:
        keys = ", ".join(map(repr, list(record)[:10])) or "none"
        raise UserError(f"the record has no key {key!r}; its keys: {keys}")
    return record[key]
