"""Merge datasets of .bin/.idx into one, in the order in which they are named.

    python tools/merge_datasets.py --input data/parts --output-prefix data/whole
    python tools/merge_datasets.py --input data/b_text_document data/a_text_document --output-prefix data/whole

The result is that of tokenizing all of their texts together. Of a folder the datasets in it are merged, sorted by name;
those in folders within it are not. Datasets whose records name different tokenizers are refused.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from command_line import Parser, elapsed, progress, run_tool, say, size_of
from text_tools import SHARDS_ENDING, Work, prepare_output

from megatron.config.problems import UserError, counted
from megatron.data.indexed_dataset import bin_path, idx_path
from megatron.data.merging import merge_datasets
from megatron.data.origin import Origin, origin_of

TOOL = "merge_datasets 1"


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="prefixes of datasets, the path without .bin and .idx, or folders of datasets",
    )
    parser.add_argument("--output-prefix", type=Path, required=True, help="writes PREFIX.bin and PREFIX.idx")
    return parser.read()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    prefixes = list(find_prefixes(arguments.input))
    output: Path = arguments.output_prefix
    if bin_path(output).resolve() in [bin_path(prefix).resolve() for prefix in prefixes]:
        raise UserError(f"--output-prefix {output}: is one of the inputs; write it to another folder")
    outputs = [bin_path(output), idx_path(output)]
    for path in outputs:
        prepare_output(path, flag="--output-prefix")
    origin = common_origin(prefixes)
    work = Work(
        tool=TOOL,
        arguments=origin.arguments() if origin else {},
        inputs=[bin_path(prefix) for prefix in prefixes],
        outputs=outputs,
    )
    inputs_digest = work.inputs_digest() if origin else ""
    work.forget()
    size = sum(bin_path(prefix).stat().st_size for prefix in prefixes if bin_path(prefix).exists())
    with progress(size, "merging", unit="B") as bar:
        merged = merge_datasets(prefixes, output, copied=bar.update)
    if origin:
        work.finish(inputs_digest, documents=merged.num_documents, tokens=merged.num_tokens)
    held = f"{counted(merged.num_documents, 'document')}, {counted(merged.num_tokens, 'token')} of {merged.dtype}"
    say(f"{output}: {held} from {counted(len(prefixes), 'dataset')}, {size_of(size)} in {elapsed(started)}")


def find_prefixes(arguments: Sequence[str]) -> Iterator[Path]:
    """The prefixes that are named, and those of the datasets in folders that are.

    Raises:
        UserError: a folder holds no dataset, or half of one.
    """
    for argument in arguments:
        path = Path(argument)
        if not path.is_dir():
            yield path
            continue
        halves = {
            ending: {file.name.removesuffix(ending) for file in path.glob(f"*{ending}")} for ending in (".bin", ".idx")
        }
        for name in sorted(halves[".bin"] ^ halves[".idx"]):
            here, missing = (".bin", ".idx") if name in halves[".bin"] else (".idx", ".bin")
            raise UserError(f"--input {argument}: holds {name}{here} without {name}{missing}, half of a dataset")
        if not halves[".bin"]:
            raise UserError(f"--input {argument}: the folder holds no dataset, neither .bin nor .idx")
        below = (file.relative_to(path).with_suffix("") for file in path.glob("*/**/*.idx"))
        # Shards of a run that waits to go on are no datasets.
        within = sorted(name for name in below if not any(part.endswith(SHARDS_ENDING) for part in name.parts[:-1]))
        if within:
            say(
                f"{argument}: {counted(len(within), 'dataset')} in folders within it left out, the first is {within[0]}"
            )
        yield from (path / name for name in sorted(halves[".bin"]))


def common_origin(prefixes: Sequence[Path]) -> Origin | None:
    """The tokenizer that the records of all datasets name; None where one has no record.

    Raises:
        UserError: two records name different ones. One tokenizer may go by several types.
    """
    origins = {prefix: origin_of(prefix) for prefix in prefixes}
    named = [(prefix, origin) for prefix, origin in origins.items() if origin is not None]
    for prefix, origin in named:
        first, common = named[0]
        if origin.fingerprint != common.fingerprint:
            raise UserError(
                f"--input {first} and {prefix}: made with different tokenizers ({shown(common)}, {shown(origin)}); "
                "merge those of one tokenizer, or tokenize again"
            )
    return named[0][1] if len(named) == len(origins) else None


def shown(origin: Origin) -> str:
    return f"{origin.tokenizer_type} {origin.fingerprint[:8]}"


if __name__ == "__main__":
    run_tool(main)
