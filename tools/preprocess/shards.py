"""Shards: parts of the input that are tokenized by themselves, each into token files of its own.

Note [Which shard is it]
A shard is named by a digest of all that its content depends on: which bytes of which files, their sizes and times, and
the settings. Its record is written last, so a shard that has one is whole, and is that of the same work whoever made
it and with how many workers. A run that goes on where another ended makes those that have none; a file that has
changed since, or another setting, leads to other names. A file that changes while a shard is made of it is an error.

The names of all shards of one dataset begin alike, whatever input and settings they are of: so those of another one,
whose run waits in the same folder to go on, are told from them.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.config.problems import UserError
from megatron.core.whole_file import whole_file
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from preprocess.encoder import Documents, Encoder
from preprocess.fast_tokenizer import BatchTokenizer
from preprocess.inputs import InputFile
from preprocess.records import Block, Piece, Record, pieces_of, read_blocks

# Small enough that few workers share out a small input evenly and a kill costs little; of a large one there are
# some thousands.
SMALLEST_BYTES = 8 << 20
MOST_SHARDS = 4096
LOCK = "lock"
_NAMES = re.compile(rf"[0-9a-f]{{32}}(\.done|-\d+\.(bin|idx))(\..*\.tmp)?|{LOCK}")
# The most that one shard collects of small files, each of which is opened by itself.
MOST_PIECES = 10_000


class FileState(NamedTuple):
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of the input.

    Attributes:
        states: of the file of each piece, as the shards were planned.
    """

    name: str
    pieces: tuple[Piece, ...]
    states: tuple[FileState, ...]

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(piece.size for piece in self.pieces)

    def prefix(self, folder: Path, key: int) -> Path:
        """Of its token files for the key of that number."""
        return folder / f"{self.name}-{key}"


class BadRecord(Exception):
    """A record that is no document: of the piece `piece` of a shard, line or row `number`."""

    def __init__(self, shard: Shard, piece: int, number: int, problem: str) -> None:
        super().__init__(shard, piece, number, problem)  # all of them, so that it passes from process to process
        self.piece, self.number, self.problem = shard.pieces[piece], number, problem


class Bad(NamedTuple):
    """A record that was left out."""

    piece: int
    number: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What a shard came to.

    Attributes:
        tokens: of each key.
        rows: lines or rows of each piece.
        bad: records that were left out; `left_out` reads them.
    """

    documents: int
    tokens: list[int]
    rows: list[int]
    bad: int


def shard_group(level: str, keys: Sequence[str]) -> str:
    """What the names of all shards of these datasets begin with."""
    return hashlib.sha256(json.dumps([level, *keys]).encode()).hexdigest()[:8]


def plan_shards(files: Sequence[InputFile], settings: object, group: str) -> list[Shard]:
    """The shards of the input, in its order; with the same input and settings always the same.

    Args:
        settings: plain JSON, all but the input that the tokens depend on.
        group: of `shard_group`.
    """
    total = sum(file.path.stat().st_size for file in files)
    size = max(SMALLEST_BYTES, -(-total // MOST_SHARDS))
    runs: list[list[Piece]] = []
    room = 0
    for piece in (piece for file in files for piece in pieces_of(file, size)):
        if room <= 0 or len(runs[-1]) == MOST_PIECES:
            runs.append([])
            room = size
        runs[-1].append(piece)
        room -= piece.size
    return [_shard(run, settings, group) for run in runs]


def _shard(pieces: Sequence[Piece], settings: object, group: str) -> Shard:
    states = tuple(_state(piece.file.path) for piece in pieces)
    parts = [[str(piece.file.path.absolute()), *state, piece.begin, piece.end] for piece, state in zip(pieces, states)]
    digest = hashlib.sha256(json.dumps([settings, parts]).encode()).hexdigest()
    return Shard(name=group + digest[:24], pieces=tuple(pieces), states=states)


def _state(path: Path) -> FileState:
    state = path.stat()
    return FileState(state.st_size, state.st_mtime_ns)


def require_unchanged(shards: Iterable[Shard]) -> None:
    """Raises UserError: a file is no longer the one of which the shards were planned."""
    planned = {piece.file.path: state for shard in shards for piece, state in zip(shard.pieces, shard.states)}
    if changed := [str(path) for path, state in planned.items() if not path.exists() or _state(path) != state]:
        more = f" and {len(changed) - 10:,} more" if len(changed) > 10 else ""
        raise UserError(
            f"{', '.join(changed[:10])}{more}: changed while this run went on, so its dataset would be of old and new "
            "documents; give the same command again when nothing writes there"
        )


def finished(shard: Shard, folder: Path) -> ShardRecord | None:
    """What a shard came to that is there already, None when it is not, or is damaged."""
    try:
        values = json.loads(_record_path(shard, folder).read_text())
        record = ShardRecord(**{**values, "bad": len(values["bad"])})
        for key in range(len(record.tokens)):
            IndexedDataset(shard.prefix(folder, key))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return record


def left_out(shard: Shard, folder: Path) -> list[Bad]:
    """The records that a finished shard has left out, in their order. They stay on the disk, as all may be bad."""
    return [Bad(*bad) for bad in json.loads(_record_path(shard, folder).read_text())["bad"]]


def make_shard(
    shard: Shard,
    folder: Path,
    encoder: Encoder,
    tokenize: BatchTokenizer,
    *,
    dtype: np.dtype[np.integer],
    keep_going: bool,
    made: Callable[[int, int, int], object],
) -> ShardRecord:
    """Write the token files of a shard, one dataset a key, and last its record.

    Args:
        keep_going: leave bad records out, and say so in the record.
        made: gets after each step the bytes of input, documents and tokens so far; what it raises ends it.

    Raises:
        BadRecord: where `keep_going` is off.
        UserError: a file is damaged, or has changed since the shards were planned.
    """
    size = documents = 0
    tokens = [0 for _ in encoder.keys]
    rows = [0 for _ in shard.pieces]
    bads: list[Bad] = []
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(shard.prefix(folder, key), dtype=dtype))
            for key in range(len(encoder.keys))
        ]
        for piece, block in _blocks(shard, encoder.keys):
            encoded, bad = _encode(block.records, encoder, tokenize)
            if bad and not keep_going:
                raise BadRecord(shard, piece, *bad[0])
            bads += [Bad(piece, number, problem) for number, problem in bad]
            for key, (writer, parts) in enumerate(zip(writers, encoded)):
                writer.add_documents(*parts)
                tokens[key] += parts.ids.size
            documents += encoded[0].sequences.size
            rows[piece] += block.rows
            size += block.size
            made(size, documents, sum(tokens))
    require_unchanged([shard])
    record = ShardRecord(documents=documents, tokens=tokens, rows=rows, bad=len(bads))
    with whole_file(_record_path(shard, folder)) as file:
        file.write(json.dumps({**asdict(record), "bad": bads}).encode())
    return record


def _blocks(shard: Shard, keys: Sequence[str]) -> Iterator[tuple[int, Block]]:
    for index, piece in enumerate(shard.pieces):
        for block in read_blocks(piece, keys):
            yield index, block


def _encode(
    records: Sequence[Record], encoder: Encoder, tokenize: BatchTokenizer
) -> tuple[list[Documents], list[tuple[int, str]]]:
    """The documents of each key, and number and problem of each record that is none."""
    good = [record for record in records if not record.problem]
    bad = [(record.number, record.problem) for record in records if record.problem]
    try:
        return encoder(good, tokenize), bad
    except UserError:
        refusals = [(record, encoder.refusal(record, tokenize)) for record in good]
    bad += [(record.number, refusal) for record, refusal in refusals if refusal]
    return encoder([record for record, refusal in refusals if not refusal], tokenize), sorted(bad)


def is_of_shard(path: Path) -> bool:
    """Whether a file is one of those that stand in a folder of shards."""
    return _NAMES.fullmatch(path.name) is not None


def remove_shards(folder: Path, group: str) -> None:
    """Remove the shards of a group, also those of another input or setting; the folder, too, if it holds no others."""
    if all(path.name == LOCK or path.name.startswith(group) for path in folder.iterdir()):
        shutil.rmtree(folder)
    else:
        for path in folder.glob(f"{group}*"):
            path.unlink()


def _record_path(shard: Shard, folder: Path) -> Path:
    return folder / f"{shard.name}.done"  # not .json: an input may be the folder in which this one stands
