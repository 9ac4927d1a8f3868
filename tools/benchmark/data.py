"""Time of making data ready for a training, beside what one would write without this project.

python tools/benchmark/data.py --json data.json
python tools/benchmark/data.py --megabytes 3 --vocab-size 8192 --turns 1
python tools/benchmark/data.py --parts indices reading

Preprocessing: the whole command `tools/preprocess_data.py --workers 2`, from its start to its end, beside the whole
program `tokenizers_loop.py` on two threads. Both make the same files of the same JSON lines, which is checked, with a
byte-level BPE of 32,000 tokens that is trained on them first. The text is that of packages that are installed.

Indices: that of 10 million documents, beside numpy's shuffles of these documents and their samples alone, the order of
a blend of 100 million samples, and which of 20 million sentences make up 10 million samples of BERT. Reading: samples
in random order from a mapped file that is in no cache, by one worker, and how long a training step waits for them.

Sides run by turns; medians are reported, and the median of the ratios within a turn. On a busy machine the processor
time, over all processes of a side, is the one to trust.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from samples import Numbers, in_own_process, index_measurements, reading_measurements
from turns import Times, cell, in_turn, markdown, ratios, shown, write_json

TOOLS = Path(__file__).resolve().parents[1]
# Large packages of Python, in the order in which their text is taken after that of the standard library.
PACKAGES = ("torch", "transformers", "sympy", "numpy", "matplotlib", "networkx")
PROCESSES = 2
PARTS = ("preprocessing", "indices", "reading")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of text (default: 100)")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="of the tokenizer (default: 32,000)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--documents", type=int, default=10_000_000, help="of the index (default: 10 million)")
    parser.add_argument("--samples", type=int, default=100_000_000, help="of the blend (default: 100 million)")
    parser.add_argument("--corpus-megabytes", type=float, default=2000.0, help="of the file to read (default: 2000)")
    parser.add_argument("--folder", type=Path, help="on the file system to measure (default: that of temporary files)")
    parser.add_argument("--json", type=Path, help="write every turn to this file")
    arguments = parser.parse_args()
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if "preprocessing" in arguments.parts:
            results["preprocessing"] = measure_preprocessing(Path(folder), arguments)
        if "indices" in arguments.parts:
            measurements = index_measurements(arguments.documents, arguments.samples)
            results["indices"] = measure_alone(measurements, arguments.turns)
        if "reading" in arguments.parts:
            measurements = reading_measurements(Path(folder), arguments.corpus_megabytes, seconds=5.0)
            results["reading"] = measure_alone(measurements, arguments.turns)
    if arguments.json is not None:
        write_json(arguments.json, results)


def measure_alone(measurements: Mapping[str, Callable[[], Numbers]], turns: int) -> dict[str, list[Numbers]]:
    """Each of them by turns, with the numbers that it gives."""
    results: dict[str, list[Numbers]] = {}
    for turn in shown(range(turns), "samples: turn"):
        for name in in_turn(list(measurements), turn):
            results.setdefault(name, []).append(in_own_process(measurements[name]))
    for name, found in results.items():
        print(markdown([name, ""], [[key, cell([one[key] for one in found], ".2f")] for key in found[0]]))
    return results


def measure_preprocessing(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """The command beside the loop, as a table and as numbers."""
    times = preprocessing(folder, arguments.megabytes, arguments.vocab_size, arguments.turns)
    size = (folder / "corpus.jsonl").stat().st_size
    command, loop = times.seconds
    rows = [
        [side, cell(times.seconds[side], ".2f"), cell(times.cpu[side], ".2f"), f"{size / 1e6:.0f}"]
        for side in times.seconds
    ]
    rows.append(
        [
            "ratio",
            cell(ratios(times.seconds[command], times.seconds[loop]), ".2f"),
            cell(ratios(times.cpu[command], times.cpu[loop]), ".2f"),
            "",
        ]
    )
    print(markdown(["preprocessing", "s", "processor s", "MB of JSON lines"], rows))
    return {"bytes": size, **asdict(times)}


def preprocessing(folder: Path, megabytes: float, vocab_size: int, turns: int) -> Times:
    """Seconds of the command and of the loop, on a corpus that is gathered in the folder.

    Raises:
        RuntimeError: their files differ.
    """
    corpus = folder / "corpus.jsonl"
    packages = [
        spec.submodule_search_locations[0]
        for name in PACKAGES
        if (spec := find_spec(name)) and spec.submodule_search_locations
    ]
    texts = ["--input", sysconfig.get_path("stdlib"), *packages, "--suffixes", ".py", ".pyi", ".txt", ".rst", ".md"]
    _run(TOOLS / "make_corpus.py", "--output", corpus, *texts, "--max-megabytes", str(megabytes))
    words = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-size", str(vocab_size)]
    _run(TOOLS / "train_tokenizer.py", "--input", corpus, "--output-prefix", folder / "tokenizer", *words)
    vocab, merges = folder / "tokenizer-vocab.json", folder / "tokenizer-merges.txt"
    sides: dict[str, list[str | Path]] = {
        f"preprocess_data.py, {PROCESSES} workers": [
            *(TOOLS / "preprocess_data.py", "--input", corpus, "--output-prefix", folder / "command", "--append-eod"),
            *("--workers", str(PROCESSES), "--tokenizer-type", "GPT2BPETokenizer"),
            *("--vocab-file", vocab, "--merge-file", merges),
        ],
        f"tokenizers, {PROCESSES} threads": [
            TOOLS / "benchmark" / "tokenizers_loop.py",
            *(corpus, vocab, merges, folder / "loop_text_document"),
        ],
    }
    times = Times()
    for turn in shown(range(turns), "preprocessing: turn"):
        for output in folder.glob("*_text_document.*"):
            output.unlink()
        for side in in_turn(list(sides), turn):
            start, cpu_start = time.perf_counter(), _cpu_of_children()
            _run(*sides[side])
            times.add(side, time.perf_counter() - start, _cpu_of_children() - cpu_start)
        for ending in (".bin", ".idx"):
            ours, theirs = (folder / f"{name}_text_document{ending}" for name in ("command", "loop"))
            if ours.read_bytes() != theirs.read_bytes():
                raise RuntimeError(f"the two {ending} files differ")
    return times


def _run(*program: str | Path) -> None:
    threads = f"RAYON_NUM_THREADS={PROCESSES}"  # of the loop
    command = ["env", threads, sys.executable, *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{program[0]} failed:\n{done.stdout}")


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
