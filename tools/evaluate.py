"""How well a trained model predicts texts, whatever layout its checkpoint was written in.

python tools/evaluate.py --load checkpoints --text book.txt
python tools/evaluate.py --load checkpoints --data-path data/corpus_text_document --split 949,50,1 --stride 512
python tools/evaluate.py --load checkpoints --last-word lambada.jsonl --json scores.json

--text and --data-path (tokens, as training reads them) are scored token by token: the perplexity is exp(loss). Every
token counts, the first being predicted from the token that ended the document before. The model looks at windows of
the length that it was trained with; --stride lets them overlap, so that each token has more before it. With the
--split of a training those documents alone are scored that it was validated on, or those of another --part.

--last-word reads one {"text": ...} a line, as LAMBADA has them, and asks for the last word of each.

A model that one process has no room for runs over several:

torchrun --nproc-per-node 2 tools/evaluate.py --load checkpoints --text book.txt --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from math import inf, log
from pathlib import Path
from typing import Any

import numpy as np
from command_line import Parser, at_least, print_table, progress, run_tool, shown, write_json
from model_tools import UsedModel, add_model_flags, content_of, decoded, model_in_use, texts_of
from text_tools import prepare_output

from megatron.config.problems import UserError
from megatron.data.indexed_dataset import IndexedDataset, bin_path
from megatron.data.splits import Split, part_of_split
from megatron.inference.perplexity import LastWord, Score, Tokens, WordScore, score_last_words, score_text
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training.initialize import exiting_at_the_start


def main() -> None:
    parser = Parser(__doc__)
    add_model_flags(parser)
    parser.add_argument("--text", type=Path, help="text file, one document")
    parser.add_argument("--data-path", help="tokens: path of a .bin and .idx file without the ending")
    parser.add_argument("--split", metavar="TRAIN,VALID,TEST", help="of --data-path one part alone, as training has it")
    parser.add_argument("--part", choices=[part.value for part in Split], help="the part of --split (default valid)")
    parser.add_argument("--last-word", type=Path, help='JSON lines, {"text": ...} each, whose last word is asked for')
    parser.add_argument(
        "--stride", type=int, help="tokens from one window to the next (default: a whole one, so that none overlap)"
    )
    parser.add_argument(
        "--batch-size", type=at_least(1), default=4, help="windows or texts scored together (default 4)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    options = parser.read()
    if options.text is None and options.data_path is None and options.last_word is None:
        raise UserError("nothing to evaluate: give --text FILE, --data-path PREFIX or --last-word FILE")
    if options.split is not None and options.data_path is None:
        raise UserError(f"--split {options.split}: divides the documents of --data-path, which is not given")
    if options.part is not None and options.split is None:
        raise UserError(f"--part {options.part}: is one of --split, which is not given")
    if options.json is not None:
        prepare_output(options.json, flag="--json")
    part = Split(options.part or "valid")
    text = None if options.text is None else read_text_file(options.text)
    ids = None if options.data_path is None else ids_of(options.data_path, options.split, part)
    texts = None if options.last_word is None else texts_of(options.last_word, flag="--last-word")
    with model_in_use(options) as used:
        results: dict[str, dict[str, Any]] = {}
        if text is not None:
            before, tokens = begun(used.opened.tokenizer, text)
            score = score_stream(used, options, str(options.text), tokens, after=before)
            bits = score.nats / log(2) / len(text.encode())
            results["text"] = {"file": str(options.text), **numbers_of(score), "bits_per_byte": bits}
        if ids is not None:
            note_training_text(used, options)
            score = score_stream(used, options, options.data_path, ids, after=used.opened.tokenizer.eod)
            which = {} if options.split is None else {"split": options.split, "part": part.value}
            results["data"] = {"file": options.data_path, **which, **numbers_of(score)}
        if texts is not None:
            words = score_words(used, options, texts)
            numbers = {"words": words.words, "accuracy": words.accuracy}
            results["last_word"] = {"file": str(options.last_word), **numbers_of(words), **numbers}
        if used.speaks:
            report(results)
            checkpoint = used.opened.checkpoint
            if options.json is not None:
                for result in results.values():
                    if result["perplexity"] == inf:  # which JSON has not
                        result["perplexity"] = None
                results_of = {"checkpoint": str(checkpoint.folder), "iteration": checkpoint.iteration, **results}
                write_json(options.json, results_of)


def read_text_file(path: Path) -> str:
    text = decoded(content_of(path, flag="--text"), path, flag="--text")
    if not text:
        raise UserError(f"--text {path}: is empty")
    return text


def ids_of(prefix: str, split: str | None, part: Split) -> Tokens:
    """The tokens of all documents, or of a part of them, one after the other, as a training reads them."""
    dataset = IndexedDataset(prefix)
    dataset.verify()
    if bin_path(prefix).stat().st_size == 0:
        raise UserError(f"--data-path {prefix}: holds no token")
    ids = np.memmap(bin_path(prefix), dtype=dataset.dtype, mode="r")
    if split is None:
        return ids
    documents = part_of_split(part, split, len(dataset))
    first, end = (int(dataset.sequence_lengths[:number].sum()) for number in (documents.start, documents.stop))
    return ids[first:end]


def note_training_text(used: UsedModel, options: argparse.Namespace) -> None:
    """Say so where documents are scored that the model was trained on: a loss of these says little."""
    data = used.opened.config.data
    name = Path(options.data_path).name
    if options.split is None and name in {Path(word).name for word in data.data_path}:
        used.note(
            f"{name} is what the model was trained on: --split {data.split_text.replace(' ', '')} scores only what the "
            "training was validated on"
        )
    elif name in {Path(word).name for word in data.train_data_path}:
        used.note(f"{name} is what the model was trained on")


def begun(tokenizer: Tokenizer, text: str) -> tuple[int, Tokens]:
    """What begins a text, a token that the tokenizer adds or else the end of a document; and the text's own tokens."""
    ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    return (int(ids[0]), ids[1:]) if tokenizer.encode("") else (tokenizer.eod, ids)


def score_stream(used: UsedModel, options: argparse.Namespace, name: str, ids: Tokens, *, after: int) -> Score:
    """The score of all tokens of a file, of which the first is predicted from the one that it comes after."""
    opened, rows = used.opened, used.staged.part.vocab_size
    stride = opened.context_length if options.stride is None else options.stride
    if not 1 <= stride <= opened.context_length:
        raise UserError(
            f"--stride ({stride}) must be at least 1 and at most {opened.context_length}, the length of a window: "
            "beyond, there would be tokens between windows"
        )
    if len(ids) == 0:
        raise UserError(f"{name}: has no token to score")
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= rows:
        raise UserError(
            f"{name}: holds token {least if least < 0 else most:,}, and the model knows 0 to {rows - 1:,}: "
            "it is of another tokenizer"
        )
    with progress_of(used, len(ids), name, unit="token") as scored:
        return score_text(
            used.staged,
            ids,
            after=after,
            context_length=opened.context_length,
            stride=stride,
            batch_size=options.batch_size,
            scored=scored,
        )


def score_words(used: UsedModel, options: argparse.Namespace, texts: Sequence[tuple[str, str]]) -> WordScore:
    most = used.opened.context_length + 1  # the last token is predicted, and not looked at
    words = []
    for text, where in texts:
        word = last_word(used.opened.tokenizer, text, where)
        if len(word.tokens) > most:
            raise UserError(
                f"{where}: has {len(word.tokens):,} tokens, and the model looks back on {most - 1:,}; give the last "
                f"{most:,} or fewer"
            )
        words.append(word)
    with progress_of(used, len(words), str(options.last_word), unit="text") as scored:
        return score_last_words(used.staged, words, batch_size=options.batch_size, scored=scored)


def last_word(tokenizer: Tokenizer, text: str, where: str) -> LastWord:
    """The word begins with the first token that the text has not without it."""
    parts = text.rstrip().rsplit(maxsplit=1)
    if len(parts) < 2:
        raise UserError(f"{where}: has no last word with something before it")
    tokens, before = tokenizer.encode(text.rstrip()), tokenizer.encode(parts[0].rstrip())
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, before)))
    if not 0 < start < len(tokens):
        raise UserError(f"{where}: the tokenizer does not tell the last word, {parts[1]!r}, from what is before it")
    return LastWord(tokens=tokens, start=start)


@contextmanager
def progress_of(used: UsedModel, total: int, what: str, *, unit: str) -> Iterator[Callable[[int], object]]:
    """What is told how much more is done."""
    if not used.speaks:
        yield lambda number: None
        return
    with progress(total, what, unit=unit) as bar:
        yield bar.update


def numbers_of(score: Score) -> dict[str, float]:
    return {"tokens": score.tokens, "loss": score.loss, "perplexity": score.perplexity}


def report(results: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for each file, with a column for each number that any of them has."""
    columns = dict.fromkeys(name for result in results.values() for name in result)
    names = [name.replace("_", " ") for name in columns]
    print_table([names, *([shown(result.get(name, "")) for name in columns] for result in results.values())])


if __name__ == "__main__":
    run_tool(main, exiting_at_the_start)
