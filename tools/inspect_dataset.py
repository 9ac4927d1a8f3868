"""What is in a dataset of .bin/.idx: its documents, how long they are, which ids it holds, and whether it is whole.

    python tools/inspect_dataset.py data/corpus_text_document --head 3
    python tools/inspect_dataset.py data/corpus_text_document --check --histogram --png corpus.png \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

The index is verified in any case. --check and --histogram read every id, once and a part at a time, so that a dataset
may be larger than memory. With a tokenizer ids are held against its vocabulary, and --decode shows what they mean.

The exit status is 2 where anything is damaged.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from command_line import Parser, at_least, print_table, progress, run_tool, say, shown, size_of, write_json
from text_tools import prepare_output
from tokenizer_flags import add_tokenizer_flags, tokenizer_if_named

from megatron.config.options import LARGEST_VOCABULARY
from megatron.config.problems import UserError, counted
from megatron.core.whole_file import whole_file
from megatron.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megatron.tokenizer import Tokenizer

Counts = npt.NDArray[np.int64]

# Ids, or documents, that are looked at together: as int64, some 30 MB.
_AT_ONCE = 1 << 22
# Of each document of --head so many tokens are shown, and of the ids so many of the most frequent ones.
_SHOWN_TOKENS, _SHOWN_IDS = 100, 20
_BAR = 40
# Bits of the length of a document, which has less than 2**63 tokens.
_SIZES = 64


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of documents in tokens, by size: that of the number n holds those of 2**(n - 1) tokens up to less than 2**n.

    Attributes:
        documents, tokens: [_SIZES] how many documents there are of a size, and how many tokens these have together.
    """

    documents: Counts
    tokens: Counts
    shortest: int | None
    longest: int | None

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each size, from the least to the largest of which there are documents: the lengths, documents, tokens."""
        there = np.flatnonzero(self.documents)
        for size in range(there[0], there[-1] + 1) if there.size else ():
            least, most = (1 << size >> 1, (1 << size) - 1)
            yield least, most, int(self.documents[size]), int(self.tokens[size])


@dataclass(frozen=True, kw_only=True)
class Ids:
    """How often each id occurs.

    Attributes:
        counts: [largest id within the limit + 1].
        limit: ids must be below it.
        outside: how many are not.
        first_outside: the position of the first of these among all tokens, and the id.
    """

    counts: Counts
    limit: int
    outside: int
    first_outside: tuple[int, int] | None

    def most_frequent(self) -> list[tuple[int, int]]:
        """Ids and how often they occur, by that."""
        order = np.argsort(-self.counts, kind="stable")[:_SHOWN_IDS]
        return [(int(token), int(self.counts[token])) for token in order if self.counts[token]]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("prefix", help="prefix of the dataset: its path without .bin and .idx")
    parser.add_argument("--head", type=at_least(1), metavar="N", help="show the first N documents")
    parser.add_argument("--decode", action="store_true", help="show texts beside ids; needs the flags of a tokenizer")
    parser.add_argument("--histogram", action="store_true", help="how long documents are, and how often ids occur")
    parser.add_argument("--png", type=Path, metavar="FILE", help="with --histogram: draw it, too")
    parser.add_argument("--check", action="store_true", help="read all ids: whether they are within the vocabulary")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is found here, too")
    add_tokenizer_flags(parser, required=False)
    return parser.read()


def main() -> None:
    arguments = parse_arguments()
    if arguments.png is not None and not arguments.histogram:
        raise UserError(f"--png {arguments.png}: shows what --histogram counts, and that is not given")
    if arguments.decode and arguments.tokenizer_type is None:
        raise UserError("--decode: needs the tokenizer of the dataset, --tokenizer-type and its files")
    if arguments.decode and not (arguments.head or arguments.histogram):
        raise UserError("--decode: shows the texts of --head and --histogram, and neither is given")
    for flag, path in (("--png", arguments.png), ("--json", arguments.json)):
        if path is not None:
            prepare_output(path, flag=flag)
    dataset = IndexedDataset(arguments.prefix)
    tokenizer = tokenizer_if_named(arguments)
    reads_ids = arguments.check or arguments.histogram
    if reads_ids or tokenizer:
        dataset.require_ids()
    verify(dataset)
    lengths = lengths_of(dataset)
    found = facts(dataset, lengths)
    print_table([[f"{name}:", shown(value)] for name, value in found.items()])
    decoder = tokenizer if arguments.decode else None
    if arguments.head:
        found["head"] = show_head(dataset, arguments.head, decoder)
    if reads_ids:
        ids = ids_of(dataset, tokenizer.vocab_size if tokenizer else LARGEST_VOCABULARY)
        if arguments.histogram:
            found |= show_histogram(lengths, ids, decoder)
        if arguments.png is not None:
            draw(arguments.png, dataset.prefix, lengths, ids)
        if arguments.check:
            check_ids(dataset, ids, tokenizer)
            found["checked"] = True
    if arguments.json is not None:
        write_json(arguments.json, found)


def verify(dataset: IndexedDataset) -> None:
    with progress(len(dataset) + dataset.num_documents, "index", unit=" entries") as bar:
        dataset.verify(bar.update)


def facts(dataset: IndexedDataset, lengths: Lengths) -> dict[str, Any]:
    documents, tokens = dataset.num_documents, int(lengths.tokens.sum())
    return {
        "dataset": dataset.prefix,
        "type of ids": str(dataset.dtype),
        "documents": documents,
        "without tokens": int(lengths.documents[0]),
        "sequences": len(dataset),
        "tokens": tokens,
        "tokens of the shortest document": lengths.shortest,
        "tokens of the longest document": lengths.longest,
        "tokens of a document, on average": tokens / documents if documents else None,
        "modes": "one a sequence" if dataset.sequence_modes is not None else None,
        "size": size_of(sum(path(dataset.prefix).stat().st_size for path in (bin_path, idx_path))),
    }


# ---- documents ----


def lengths_of(dataset: IndexedDataset) -> Lengths:
    """Of a dataset that is verified, so that its tokens lie in the order of its documents."""
    documents, tokens = np.zeros(_SIZES, np.int64), np.zeros(_SIZES, np.int64)
    shortest, longest = [], []
    for begin in range(0, dataset.num_documents, _AT_ONCE):
        bounds = dataset.document_indices[begin : begin + _AT_ONCE + 1]
        ended = bounds == len(dataset)
        starts = np.full(bounds.size, bin_path(dataset.prefix).stat().st_size, np.int64)
        starts[~ended] = dataset.pointers[bounds[~ended]]
        lengths = np.diff(starts) // dataset.dtype.itemsize
        sizes = np.frexp(lengths.astype(np.float64))[1]  # the bits of a number, 0 of 0
        documents += np.bincount(sizes, minlength=_SIZES)
        np.add.at(tokens, sizes, lengths)
        shortest.append(int(lengths.min()))
        longest.append(int(lengths.max()))
    return Lengths(
        documents=documents, tokens=tokens, shortest=min(shortest, default=None), longest=max(longest, default=None)
    )


def show_head(dataset: IndexedDataset, number: int, decoder: Tokenizer | None) -> list[dict[str, Any]]:
    """Print the first documents, of long ones the beginning; the same as JSON."""
    found = []
    for document in range(min(number, dataset.num_documents)):
        first, end = (int(bound) for bound in dataset.document_indices[document : document + 2])
        tokens = int(dataset.sequence_lengths[first:end].sum(dtype=np.int64))
        say(f"\ndocument {document:,}: {counted(end - first, 'sequence')}, {counted(tokens, 'token')}")
        sequences = [ids.tolist() for ids in beginning(dataset, first, end)]
        for ids in sequences:
            text = json.dumps(decoded(decoder, ids), ensure_ascii=False) if decoder else " ".join(map(str, ids))
            say(f"  {text}")
        if more := tokens - sum(map(len, sequences)):
            say(f"  ... and {counted(more, 'token')} more")
        texts = {"texts": [decoded(decoder, ids) for ids in sequences]} if decoder else {}
        found.append({"sequences": end - first, "tokens": tokens, "ids": sequences, **texts})
    return found


def beginning(dataset: IndexedDataset, first: int, end: int) -> Iterator[npt.NDArray[Any]]:
    """The ids of a document that are shown, by sequence."""
    left = _SHOWN_TOKENS
    for sequence in range(first, end):
        if left <= 0:
            return
        ids = dataset.get(sequence, 0, min(left, int(dataset.sequence_lengths[sequence])))
        yield ids
        left -= max(1, ids.size)  # also sequences without ids come to an end


def decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids, also of a dataset that has others than the tokenizer."""
    if wrong := [token for token in ids if not 0 <= token < tokenizer.vocab_size]:
        return f"(the id {wrong[0]} is outside the vocabulary of {tokenizer.vocab_size:,} entries)"
    return tokenizer.decode(ids)


# ---- ids ----


def ids_of(dataset: IndexedDataset, limit: int) -> Ids:
    """Count all ids of the file, one part after another."""
    counts = np.zeros(0, np.int64)
    outside, first_outside, position = 0, None, 0
    path = bin_path(dataset.prefix)
    with path.open("rb") as file, progress(path.stat().st_size, "ids", unit="B") as bar:
        while (part := np.fromfile(file, dataset.dtype, _AT_ONCE)).size:
            within = part
            if int(part.min()) < 0 or int(part.max()) >= limit:
                wrong = (part < 0) | (part >= limit)
                if first_outside is None:
                    index = int(np.argmax(wrong))
                    first_outside = position + index, int(part[index])
                outside += int(wrong.sum())
                within = part[~wrong]
            of_part = np.bincount(within.astype(np.int64), minlength=counts.size)
            of_part[: counts.size] += counts
            counts = of_part
            position += part.size
            bar.update(part.nbytes)
    return Ids(counts=counts, limit=limit, outside=outside, first_outside=first_outside)


def check_ids(dataset: IndexedDataset, ids: Ids, tokenizer: Tokenizer | None) -> None:
    """Raises UserError: an id is outside the vocabulary, or without a tokenizer outside any."""
    vocabulary = f"the vocabulary of {ids.limit:,} entries" if tokenizer else f"any vocabulary, 0 to {ids.limit - 1:,}"
    if ids.first_outside is not None:
        position, token = ids.first_outside
        sequence = bisect_right(dataset.pointers, position * dataset.dtype.itemsize) - 1  # numpy's would copy them
        document = bisect_right(dataset.document_indices, sequence) - 1
        offset = position - int(dataset.pointers[sequence]) // dataset.dtype.itemsize
        works = "name the tokenizer that the dataset was made with" if tokenizer else "make it again from the texts"
        raise UserError(
            f"{bin_path(dataset.prefix)}: {counted(ids.outside, 'id')} outside {vocabulary}; the first is {token}, "
            f"token {offset} of sequence {sequence}, in document {document}; {works}"
        )
    say(f"\nwhole: the index agrees with itself and with .bin, and no id is outside {vocabulary}")


# ---- histograms ----


def show_histogram(lengths: Lengths, ids: Ids, decoder: Tokenizer | None) -> dict[str, Any]:
    """Print how long documents are and which ids are the most frequent; the same as JSON."""
    sizes = list(lengths.rows())
    documents, tokens = int(lengths.documents.sum()), int(lengths.tokens.sum())
    if sizes:
        most = max(row[2] for row in sizes)
        rows = [["tokens", "documents", "share", "of all tokens", ""]]
        for least, highest, number, held in sizes:
            span = f"{least:,}" if least == highest else f"{least:,} to {highest:,}"
            rows.append([span, f"{number:,}", share(number, documents), share(held, tokens), bar(number, most)])
        say("")
        print_table(rows)
    frequent = ids.most_frequent()
    different = int(np.count_nonzero(ids.counts))
    if frequent:
        rows = [["id", "times", "share", *(["text"] if decoder else []), ""]]
        for token, times in frequent:
            text = [json.dumps(decoded(decoder, [token]), ensure_ascii=False)] if decoder else []
            rows.append([str(token), f"{times:,}", share(times, tokens), *text, bar(times, frequent[0][1])])
        say("")
        print_table(rows)
        outside = f"; {counted(ids.outside, 'id')} outside the vocabulary" if ids.outside else ""
        say(f"{different:,} different ids, the largest {ids.counts.size - 1:,}{outside}")
    return {
        "lengths": [
            {"least": least, "most": highest, "documents": number, "tokens": held}
            for least, highest, number, held in sizes
        ],
        "ids": {
            "different": different,
            "outside": ids.outside,
            "most frequent": [{"id": token, "times": times} for token, times in frequent],
        },
    }


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def bar(part: int, longest: int) -> str:
    return "#" * -(-_BAR * part // longest)


def draw(path: Path, name: str, lengths: Lengths, ids: Ids) -> None:
    """Two pictures side by side: documents by their length, and ids by how often they occur."""
    import matplotlib  # takes half a second, and most calls draw nothing

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
    sizes = list(lengths.rows())
    left.bar([f"{least:,}" for least, *_ in sizes], [number for _, _, number, _ in sizes], width=0.9)
    left.tick_params(axis="x", rotation=60)
    left.set_xlabel("tokens, from this number to less than the next")
    left.set_ylabel("documents")
    frequencies = np.sort(ids.counts[ids.counts > 0])[::-1]
    right.loglog(np.arange(1, frequencies.size + 1), frequencies)
    right.set_xlabel("ids, the most frequent first")
    right.set_ylabel("times")
    right.grid(alpha=0.3)
    figure.suptitle(name, wrap=True)
    figure.tight_layout()
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)
    say(f"wrote {path}")


if __name__ == "__main__":
    run_tool(main)
