"""Pieces of input files, and the texts in them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeVar

from text_tools import parse_record, value_under

from megatron.config.problems import UserError
from megatron.tokenizer.tokenizer import check_text
from preprocess import parquet
from preprocess.compression import opened
from preprocess.inputs import Format, InputFile

Source = TypeVar("Source")
Text = str | list[str]
"""A text, or its sentences where the input has them one by one."""

BLOCK_BYTES = 1 << 19
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a file that can be read without the rest.

    Attributes:
        begin, end: of a plain file of JSON lines the bytes in which its lines begin; of Parquet the row groups;
            other files are one piece, 0 to 1.
        size: bytes on disk.
    """

    file: InputFile
    begin: int
    end: int
    size: int

    def where(self, number: int) -> str:
        """The place of a record of the file, of which `number` (from 1) is the line or row."""
        places = {"lines": f", line {number}", "parquet": f", row {number}", "text": ""}
        return f"{self.file.path}{places[self.file.format]}"


class Record(NamedTuple):
    """A document: its text under each key, or why it has none.

    Attributes:
        number: of its line or row within the piece, from 1.
    """

    number: int
    texts: tuple[Text, ...]
    problem: str


class Block(NamedTuple):
    """Records that follow each other: of so many rows (or lines, also blank ones), which take `size` bytes on disk."""

    records: list[Record]
    rows: int
    size: int


def pieces_of(file: InputFile, size: int) -> list[Piece]:
    """The pieces of a file, each of about `size` bytes where it can be cut."""
    total = file.path.stat().st_size
    if file.format == "parquet":
        return [
            Piece(file=file, begin=begin, end=end, size=bytes_)
            for begin, end, bytes_ in parquet.row_group_runs(file.path, size)
        ]
    if file.format == "lines" and not file.compression:
        begins = range(0, total, size)
        ends = [min(begin + size, total) for begin in begins]
        return [Piece(file=file, begin=begin, end=end, size=end - begin) for begin, end in zip(begins, ends)]
    return [Piece(file=file, begin=0, end=1, size=total)]


def read_blocks(piece: Piece, keys: Sequence[str]) -> Iterator[Block]:
    """The records of a piece in their order.

    Raises:
        UserError: the file is damaged, so that nobody knows what is missing.
    """
    return _READERS[piece.file.format](piece, keys)


def count_before(piece: Piece) -> int:
    """How many lines or rows of the file stand before the piece."""
    if piece.file.format == "parquet":
        return parquet.rows_of(piece.file.path, 0, piece.begin)
    if piece.begin == 0:
        return 0
    lines, left, last = 0, piece.begin, b""
    with piece.file.path.open("rb", buffering=0) as file:
        while left > 0 and (part := file.read(min(left, 1 << 24))):
            lines += part.count(b"\n")
            left -= len(part)
            last = part[-1:]
    return lines + (last != b"\n")


def _read_lines(piece: Piece, keys: Sequence[str]) -> Iterator[Block]:
    with opened(piece.file) as (stream, consumed):
        if piece.begin > 0:
            stream.seek(piece.begin - 1)
            stream.readline()  # it began before the piece
        number, done = 1, consumed()
        while lines := _some_lines(stream, BLOCK_BYTES if piece.file.compression else piece.end - stream.tell()):
            if number == 1 and piece.begin == 0:
                lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)  # it is not part of the JSON
            records = [
                _record(index, parse_record, line, keys)
                for index, line in enumerate(lines, start=number)
                if line.strip()
            ]
            now = consumed()
            yield Block(records, len(lines), now - done)
            number, done = number + len(lines), now


def _some_lines(stream: BinaryIO, within: int) -> list[bytes]:
    """Lines that begin within the next bytes, not many more than a block; the last one is read to its end."""
    if within <= 1:
        return [line] if within == 1 and (line := stream.readline()) else []
    return stream.readlines(min(within, BLOCK_BYTES) - 1)  # lines until they have more bytes than that


def _read_text(piece: Piece, keys: Sequence[str]) -> Iterator[Block]:
    with opened(piece.file) as (stream, consumed):
        data = stream.read().removeprefix(BYTE_ORDER_MARK)
        yield Block([_record(1, _text_record, data, keys)], 1, consumed())


def _text_record(data: bytes) -> dict[str, Any]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start + 1} of the text is not valid UTF-8; convert the file to UTF-8") from None


def _read_parquet(piece: Piece, keys: Sequence[str]) -> Iterator[Block]:
    number = 1
    read = 0
    rows_left = parquet.rows_of(piece.file.path, piece.begin, piece.end)
    for rows in parquet.read_rows(piece.file.path, piece.begin, piece.end, keys):
        records = [_record(index, dict, row, keys) for index, row in enumerate(rows, start=number)]
        number += len(rows)
        size = round((piece.size - read) * len(rows) / rows_left)  # the bytes of a row are not known
        rows_left -= len(rows)
        read += size
        yield Block(records, len(rows), size)


def _record(number: int, parse: Callable[[Source], dict[str, Any]], source: Source, keys: Sequence[str]) -> Record:
    try:
        record = parse(source)
        texts = tuple(_text_of(record, key) for key in keys)
    except UserError as error:
        return Record(number, (), str(error))
    for key, text in zip(keys, texts):
        try:
            for part in parts_of(text):
                check_text(part)
        except UserError as error:
            return Record(number, (), f"key {key!r}: {error}")
    return Record(number, texts, "")


def _text_of(record: dict[str, Any], key: str) -> Text:
    """Raises UserError: no such key, or neither a text nor sentences under it."""
    text = value_under(record, key)
    if isinstance(text, str):
        return text
    if not isinstance(text, list):
        raise UserError(f"the value of {key!r} is {type(text).__name__}, it must be a string or a list of strings")
    for number, sentence in enumerate(text, start=1):
        if not isinstance(sentence, str):
            kind = type(sentence).__name__
            raise UserError(f"the value of {key!r} has {kind} as its sentence {number}, it must be a string")
    return text


def parts_of(text: Text) -> list[str]:
    """The strings that it is made of."""
    return [text] if isinstance(text, str) else text


_READERS: dict[Format, Callable[[Piece, Sequence[str]], Iterator[Block]]] = {
    "lines": _read_lines,
    "text": _read_text,
    "parquet": _read_parquet,
}
