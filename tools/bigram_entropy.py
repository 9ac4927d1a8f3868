"""Bigram entropy of a split of tokenized data: the loss of the best model that sees one token of context.

python tools/bigram_entropy.py --data-path corpus_text_document --split 95,5,0 --part valid

A model that beats it has learned more than pairs of tokens. It need not be reached for that: it is computed from the
counts of that very split, and on a small one it is lower than any model without those counts can reach.
With --log-json of a training the exit status is 1 unless the last validation loss of it is below; --output keeps the
entropy for `plot_loss.py --lines-from`.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from command_line import Parser, progress, run_tool, say
from text_tools import prepare_output
from training_log import read_losses

from megatron.config.data import DEFAULT_SPLIT
from megatron.config.problems import UserError, counted
from megatron.core.whole_file import whole_file
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import Split, part_of_split

# Tokens that are counted at a time: enough for the sorting to be worth it, and a bound on memory.
CHUNK_TOKENS = 1 << 22
VALIDATION_LOSS = "lm loss validation"

Tokens = npt.NDArray[np.int64]


def bigram_entropy(chunks: Iterable[Tokens]) -> tuple[int, float]:
    """Number of tokens, and the mean of -log p(token | token before) in nats, with p from the counts of the tokens.

    Args:
        chunks: the tokens, cut anywhere.

    Raises:
        UserError: there is no pair.
    """
    num_tokens = 0
    last = np.empty(0, dtype=np.int64)
    pairs, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for chunk in chunks:
        num_tokens += len(chunk)
        tokens = np.concatenate([last, chunk])
        last = tokens[-1:]
        new_pairs, new_counts = np.unique((tokens[:-1] << 32) | tokens[1:], return_counts=True)
        pairs, places = np.unique(np.concatenate([pairs, new_pairs]), return_inverse=True)
        counts = np.bincount(places, weights=np.concatenate([counts, new_counts]), minlength=len(pairs))
    if not len(pairs):
        raise UserError(f"a part of {counted(num_tokens, 'token')} holds no pair")
    _, firsts = np.unique(pairs >> 32, return_inverse=True)
    count_of_first = np.bincount(firsts, weights=counts)[firsts]
    return num_tokens, float((counts * np.log(count_of_first / counts)).sum() / counts.sum())


def read_chunks(dataset: IndexedDataset, documents: range) -> Iterator[Tokens]:
    """The tokens of the documents in chunks, with a progress bar."""
    waiting, size = [], 0
    with progress(len(documents), "counting pairs", unit=" sequences") as bar:
        for index in documents:
            waiting.append(dataset[index].astype(np.int64))
            size += len(waiting[-1])
            if size >= CHUNK_TOKENS:
                yield np.concatenate(waiting)
                waiting, size = [], 0
            bar.update()
        if waiting:
            yield np.concatenate(waiting)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--data-path", required=True, help="prefix of a .bin and .idx file")
    parser.add_argument("--split", default=DEFAULT_SPLIT, help=f"as in training (default {DEFAULT_SPLIT})")
    parser.add_argument("--part", choices=[split.value for split in Split], default="valid", help="default valid")
    parser.add_argument("--log-json", type=Path, help="log of a training, to compare its validation loss with")
    parser.add_argument("--output", type=Path, help="JSON file that the entropy is written to")
    options = parser.read()
    if options.output is not None:
        prepare_output(options.output, flag="--output")
    dataset = IndexedDataset(options.data_path)
    part = part_of_split(Split(options.part), options.split, len(dataset))
    num_tokens, entropy = bigram_entropy(read_chunks(dataset, part))
    say(f"bigram entropy of part {options.part} ({num_tokens:,} tokens): {entropy:.4f} nats per token")
    if options.output is not None:
        with whole_file(options.output) as file:
            file.write(json.dumps({"bigram entropy": entropy}).encode() + b"\n")
    if options.log_json is not None:
        compare(options.log_json, entropy)


def compare(log: Path, entropy: float) -> None:
    """Say whether the last validation loss of a log is below the entropy; exit status 1 when it is not.

    Raises:
        UserError: the log holds no such loss.
    """
    losses = read_losses(log).get(VALIDATION_LOSS)
    if losses is None:
        raise UserError(f"--log-json {log}: holds no validation loss; train with --eval-iters and --eval-interval")
    loss = losses[max(losses)]
    if not loss < entropy:
        say(f"validation loss {loss:.4f} is not below the bigram entropy {entropy:.4f}: no more than pairs is learned")
        sys.exit(1)
    say(f"validation loss {loss:.4f} is below the bigram entropy {entropy:.4f}: more than pairs of tokens is learned")


if __name__ == "__main__":
    run_tool(main)
