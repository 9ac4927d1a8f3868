"""Rows of Parquet files. pyarrow takes half a second to import, so only a command that reads such files does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.problems import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

# Rows that are in memory at once.
_ROWS = 256


def row_group_runs(path: Path, size: int) -> Iterator[tuple[int, int, int]]:
    """First and last + 1 of row groups that follow each other, of about `size` bytes on disk, and their bytes."""
    with _opened(path) as file:
        begin = total = 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            total += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
            if total >= size or index + 1 == file.num_row_groups:
                yield begin, index + 1, total
                begin, total = index + 1, 0


def rows_of(path: Path, begin: int, end: int) -> int:
    """Rows of the row groups `begin` to `end`."""
    with _opened(path) as file:
        return sum(file.metadata.row_group(index).num_rows for index in range(begin, end))


def read_rows(path: Path, begin: int, end: int, keys: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Some rows after another, each with the values of the columns `keys`.

    Raises:
        UserError: the file is damaged, or has no such column, or more than one.
    """
    with _opened(path) as file:
        columns = file.schema_arrow.names
        for key in keys:
            if key not in columns:
                raise UserError(f"{path}: has no column {key!r}; its columns: {', '.join(map(repr, columns[:10]))}")
            if columns.count(key) > 1:
                raise UserError(
                    f"{path}: has {columns.count(key)} columns {key!r}; which of them is meant is not known"
                )
        groups = range(begin, end)
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=list(keys), use_threads=False):
            values = [[_value(cell) for cell in batch.column(key)] for key in keys]
            yield [dict(zip(keys, row)) for row in zip(*values)]


def _value(cell: Any) -> Any:
    """The value of a cell; where a text is not UTF-8 its bytes, which will be refused as other values are."""
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return cell.as_buffer().to_pybytes()


@contextmanager
def _opened(path: Path) -> Iterator[ParquetFile]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            yield file
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole Parquet file ({error})") from None
