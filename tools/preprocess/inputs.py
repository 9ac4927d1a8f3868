"""Which files an input names. What a file holds is said by its ending."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from command_line import say

from megatron.config.problems import UserError, counted
from megatron.data.origin import is_record

# JSON lines: a document a line. Text: a document a file. Parquet: a document a row.
Format = Literal["lines", "text", "parquet"]
Compression = Literal["", ".gz", ".zst"]
_FORMATS: dict[str, Format] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".txt": "text",
    ".parquet": "parquet",
}
_COMPRESSIONS: tuple[Compression, ...] = (".gz", ".zst")
ENDINGS = f"{', '.join(_FORMATS)}, those of JSON and text also with {' or '.join(_COMPRESSIONS)}"


@dataclass(frozen=True, kw_only=True)
class InputFile:
    path: Path
    format: Format
    compression: Compression


def find_inputs(arguments: Sequence[str], *, flag: str) -> list[InputFile]:
    """The files that paths, folders and glob patterns name.

    They come in the order given; those of a folder, with the folders in it, and of a pattern sorted. A folder that a
    pattern matches is as one that is named. In a folder hidden files and files of other endings are left out, the
    latter with a line that says how many.

    Raises:
        UserError: an argument names nothing, a file has an ending that says nothing, or is named twice; or a link
            leads to nothing, or from within a folder to another.
        OSError: a folder cannot be read.
    """
    found = list(_find(arguments, flag))
    seen: set[Path] = set()
    for file in found:
        real = file.path.resolve()
        if real in seen:
            raise UserError(f"{flag} {file.path}: is named twice; each of its documents would be there twice")
        seen.add(real)
    return found


def _find(arguments: Iterable[str], flag: str) -> Iterator[InputFile]:
    for argument in arguments:
        if not argument:  # would be the present folder
            raise UserError(f"{flag}: one of its words is empty, as a variable that is not set")
        path = Path(argument)
        matches = [path] if path.exists() else _matches(argument)
        files = [file for match in matches for file in _files_of(match, flag)]
        if not files:
            raise UserError(f"{flag} {argument}: {_nothing(path, matches)}")
        yield from files


def _nothing(path: Path, matches: Sequence[Path]) -> str:
    """Why what was found under a path or pattern is no input."""
    if not matches:
        return "there is no such file"
    if path.is_dir():
        return f"the folder holds no file that ends in {ENDINGS}"
    if any(match.is_dir() for match in matches):
        return f"matches folders, and no file in them ends in {ENDINGS}"
    return "names what tools have written down of their files, and no text"


def _matches(pattern: str) -> list[Path]:
    """What a pattern matches, sorted; what stands in a folder that it matches comes with that one."""
    found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    folders = {path for path in found if path.is_dir()}
    return [path for path in found if folders.isdisjoint(path.parents)]


def _files_of(path: Path, flag: str) -> list[InputFile]:
    if path.is_dir():
        return _files_of_folder(path, flag)
    if is_record(path):
        return []
    _check_link(path, flag)
    if not path.is_file():
        raise UserError(f"{flag} {path}: is not a regular file; write what it gives to a file first")
    if (known := _known(path)) is None:
        raise UserError(f"{flag} {path}: its ending does not say what it holds; known are {ENDINGS}")
    return [known]


def _files_of_folder(folder: Path, flag: str) -> list[InputFile]:
    visible = [path for path in sorted(_visible(folder, flag)) if not is_record(path)]
    known = [file for path in visible if (file := _known(path)) is not None]
    if others := len(visible) - len(known):
        say(f"{folder}: {counted(others, 'file')} of other endings left out")
    return known


def _visible(folder: Path, flag: str) -> Iterator[Path]:
    """The files in a folder and in the folders in it; none of them is passed over in silence, as `rglob` would do."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (path := Path(parent, name)).is_symlink():
                raise UserError(f"{flag} {path}: is a link to a folder, and links are not followed; name it, too")
        for name in files:
            path = Path(parent, name)
            if not name.startswith("."):
                _check_link(path, flag)
                if path.is_file():
                    yield path


def _check_link(path: Path, flag: str) -> None:
    if path.is_symlink() and not path.exists():
        raise UserError(f"{flag} {path}: is a link to a file that is not there")


def _known(path: Path) -> InputFile | None:
    name = path.name.lower()
    compression: Compression = next((ending for ending in _COMPRESSIONS if name.endswith(ending)), "")
    name = name.removesuffix(compression)
    kind = next((kind for ending, kind in _FORMATS.items() if name.endswith(ending)), None)
    if kind is None or (kind == "parquet" and compression):
        return None
    return InputFile(path=path, format=kind, compression=compression)
