"""Bigram entropy of a split of tokenized data: the loss of the best model that sees one token of context.

python tools/bigram_entropy.py --data-path corpus_text_document --split 95,5,0 --part valid

It is computed from the counts of that very split, so a model that beats it has learned more than pairs of tokens.
With --log-json of a training the program fails unless the last validation loss of it is below.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.config.data import DEFAULT_SPLIT, parse_split
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetError
from megatron.data.splits import Split, split_ranges


def bigram_entropy(tokens: npt.NDArray[np.int64]) -> float:
    """Mean of -log p(token | token before) in nats, with p from the counts of `tokens` themselves."""
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} token(s) hold no pair")
    vocabulary = int(tokens.max()) + 1
    pairs, pair_counts = np.unique(tokens[:-1] * vocabulary + tokens[1:], return_counts=True)
    firsts, first_counts = np.unique(tokens[:-1], return_counts=True)
    count_of_first = first_counts[np.searchsorted(firsts, pairs // vocabulary)]
    probabilities = pair_counts / count_of_first
    return float(-(pair_counts * np.log(probabilities)).sum() / pair_counts.sum())


def last_validation_loss(log: Path) -> float:
    """The last one in a `--log-json` file; NaN when it holds none."""
    losses = [row["lm loss validation"] for row in map(json.loads, log.open()) if "lm loss validation" in row]
    return float(losses[-1]) if losses else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True, help="prefix of a .bin and .idx file")
    parser.add_argument("--split", default=DEFAULT_SPLIT, help=f"as in training (default {DEFAULT_SPLIT})")
    parser.add_argument("--part", choices=[split.value for split in Split], default="valid", help="default valid")
    parser.add_argument("--log-json", type=Path, help="log of a training, to compare its validation loss with")
    options = parser.parse_args()
    try:
        dataset = IndexedDataset(options.data_path)
        number = [split.value for split in Split].index(options.part)
        part = split_ranges(parse_split(options.split), len(dataset))[number]
        if part is None:
            raise ValueError(f"--split {options.split} gives {options.part} nothing")
        tokens = np.concatenate([dataset[index] for index in part] or [np.empty(0)]).astype(np.int64)
        entropy = bigram_entropy(tokens)
    except (ValueError, IndexedDatasetError) as error:
        sys.exit(f"bigram_entropy.py: error: {error}")
    print(f"bigram entropy of the {len(tokens):,} {options.part} tokens: {entropy:.4f} nats per token")
    if options.log_json is not None:
        loss = last_validation_loss(options.log_json)
        if not loss < entropy:
            sys.exit(f"validation loss {loss:.4f} is not below: the model has not learned more than pairs of tokens")
        print(f"validation loss {loss:.4f} is below: the model has learned more than pairs of tokens")


if __name__ == "__main__":
    main()
