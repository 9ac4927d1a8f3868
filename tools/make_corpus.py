"""Gather a corpus of real text as JSON lines, without a download.

    python tools/make_corpus.py --output corpus.jsonl         # the standard library of Python: 30 MB
    python tools/make_corpus.py --output corpus.jsonl --input ~/notes src '*.md'
    python tools/make_corpus.py --output prose.jsonl --docstrings

Each file becomes one line {"text", "source"}; with --docstrings each docstring of a Python file does, and nothing else:
English prose, in sentences. Files of equal content are kept once. The order is that of a
hash of seed and content: as good as shuffled, so that any split by position mixes all sources, and the same
on every machine.
"""

import argparse
import ast
import hashlib
import json
import os
import sysconfig
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from command_line import Parser, elapsed, progress, run_tool, say, size_of
from text_tools import Work, prepare_output

from megatron.config.problems import UserError, counted
from megatron.core.whole_file import whole_file
from megatron.data.origin import record_path

TOOL = "make_corpus 2"
STANDARD_LIBRARY_SUFFIXES = (".py", ".txt", ".rst")
# fmt: off
SUFFIXES = (
    ".py", ".pyi", ".txt", ".md", ".rst", ".tex", ".html", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh",
    ".cs", ".f90", ".go", ".hs", ".java", ".jl", ".js", ".json", ".kt", ".lua", ".m", ".pl", ".php", ".r",
    ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts", ".toml", ".yaml", ".yml",
)
# fmt: on
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "node_modules", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    name: str  # as it will stand in the corpus: relative, the same on every machine


@dataclass(frozen=True, kw_only=True)
class Document:
    key: bytes  # place in the order
    source: Source
    docstrings: Sequence[str]  # kept, for they are small and take long to find; none where the file is the text
    size: int  # bytes of text that is taken from it


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON-lines file to write")
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="folders, files or glob patterns; default: the standard library of this Python",
    )
    parser.add_argument(
        "--suffixes",
        nargs="+",
        metavar="SUFFIX",
        help=(
            "which files of a folder to take; default: .py .txt .rst of the standard library, else the "
            "usual text and code"
        ),
    )
    parser.add_argument(
        "--docstrings", action="store_true", help="take the docstrings of Python files in place of the files"
    )
    parser.add_argument("--max-megabytes", type=float, help="stop when the texts reach this size; default: no limit")
    parser.add_argument("--seed", type=int, default=1234, help="of the order; default 1234")
    return parser.read()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    if arguments.max_megabytes is not None and not arguments.max_megabytes > 0:
        raise UserError(f"--max-megabytes {arguments.max_megabytes}: must be above 0")
    prepare_output(arguments.output, flag="--output")
    if arguments.input is None:
        suffixes = arguments.suffixes or STANDARD_LIBRARY_SUFFIXES
        sources = _folder_sources(Path(sysconfig.get_path("stdlib")), "", suffixes)
    else:
        sources = find_sources(arguments.input, arguments.suffixes or SUFFIXES)
    # A corpus that is made again must not read its own last result.
    own = {arguments.output.resolve(), record_path(arguments.output).resolve()}
    sources = [source for source in sources if source.path.resolve() not in own]
    work = Work(
        tool=TOOL,
        arguments={
            "sources": hashlib.sha256("\n".join(source.name for source in sources).encode()).hexdigest(),
            "docstrings": arguments.docstrings,
            "max_megabytes": arguments.max_megabytes,
            "seed": arguments.seed,
        },
        inputs=[source.path for source in sources],
        outputs=[arguments.output],
    )
    if work.skip():
        return
    inputs_digest = work.inputs_digest()
    documents, without_text, duplicates = read_documents(sources, seed=arguments.seed, docstrings=arguments.docstrings)
    kept = choose(documents, arguments.max_megabytes)
    because = "without docstrings, not Python or not UTF-8" if arguments.docstrings else "empty or not UTF-8"
    if not kept:
        raise UserError(
            f"--input: no {'docstring' if arguments.docstrings else 'text'} found in {counted(len(sources), 'file')} "
            f"({because}); give other folders or --suffixes"
        )
    count, size = write(kept, arguments.output, seed=arguments.seed)
    work.finish(inputs_digest, documents=count, text_bytes=size)
    say(
        f"{arguments.output}: {counted(count, 'document')}, {size_of(size)} of text, in {elapsed(started)} "
        f"({counted(duplicates, 'duplicate')} and {counted(without_text, 'file')}, {because}, left out, "
        f"{len(documents) - len(kept):,} beyond --max-megabytes)"
    )


def find_sources(arguments: Sequence[str], suffixes: Sequence[str]) -> list[Source]:
    """All files that the arguments name; files named themselves are taken whatever their suffix.

    Raises:
        UserError: an argument names nothing.
    """
    sources: list[Source] = []
    for argument in arguments:
        matches = [argument] if Path(argument).exists() else sorted(glob(argument, recursive=True))
        if not matches:
            raise UserError(f"--input {argument}: there is no such file or folder")
        for match in map(Path, matches):
            if match.is_dir():
                sources += _folder_sources(match, match.resolve().name, suffixes)
            else:
                sources.append(Source(path=match, name=match.name))
    if not sources:
        raise UserError(f"--input {' '.join(arguments)}: no file that ends in {' '.join(suffixes)}")
    return sources


def _folder_sources(folder: Path, name: str, suffixes: Sequence[str]) -> list[Source]:
    endings = tuple(suffix.lower() for suffix in suffixes)
    found: list[Source] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(child for child in folders if child not in SKIPPED_FOLDERS and not child.startswith("."))
        for file in sorted(files):
            path = Path(parent, file)
            if file.lower().endswith(endings) and path.is_file():
                found.append(Source(path=path, name=(Path(name) / path.relative_to(folder)).as_posix()))
    return found


def read_documents(sources: Sequence[Source], *, seed: int, docstrings: bool) -> tuple[list[Document], int, int]:
    """Every file of distinct content, in the order of the corpus; the number of files without text; of duplicates."""
    documents: dict[bytes, Document] = {}
    without_text = duplicates = 0
    with progress(len(sources), "reading", unit=" files") as bar:
        for source in sources:
            bar.update()
            content = source.path.read_bytes()
            texts = texts_of(content, docstrings=docstrings)
            if not texts:
                without_text += 1
                continue
            key = _key(content, seed)
            if key in documents:
                duplicates += 1
            else:
                size = sum(len(text.encode()) for text in texts)
                documents[key] = Document(key=key, source=source, docstrings=texts if docstrings else (), size=size)
    return [documents[key] for key in sorted(documents)], without_text, duplicates


def choose(documents: Sequence[Document], max_megabytes: float | None) -> Sequence[Document]:
    """The documents up to the limit, at least one."""
    if max_megabytes is None:
        return documents
    total = 0
    for index, document in enumerate(documents):
        total += document.size
        if total > max_megabytes * 1e6:
            return documents[: max(index, 1)]
    return documents


def write(documents: Sequence[Document], output: Path, *, seed: int) -> tuple[int, int]:
    """Write the corpus, whose files are read again: it need not fit in memory. Returns lines, and bytes of text.

    Raises:
        UserError: a file changed meanwhile.
    """
    lines, total = 0, sum(document.size for document in documents)
    with progress(total, "writing", unit="B") as bar, whole_file(output) as file:
        for document in documents:
            for text in document.docstrings or [_read_again(document, seed)]:
                line = json.dumps({"text": text, "source": document.source.name}, ensure_ascii=False)
                file.write(line.encode() + b"\n")
                lines += 1
            bar.update(document.size)
    return lines, total


def _read_again(document: Document, seed: int) -> str:
    content = document.source.path.read_bytes()
    if _key(content, seed) != document.key:
        raise UserError(f"{document.source.path} changed while it was read; run again")
    return content.decode()


def texts_of(content: bytes, *, docstrings: bool) -> list[str]:
    """The texts of a file: itself, or its docstrings; none where it is blank, not UTF-8, or not Python."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return []
    if not docstrings:
        return [text] if text.strip() else []
    try:
        with warnings.catch_warnings(action="ignore"):  # of the code that is read
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [docstring for docstring in found if docstring]


def _key(content: bytes, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:".encode() + content).digest()


if __name__ == "__main__":
    run_tool(main)
