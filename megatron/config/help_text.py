"""What --help prints: every option in its group, with its limits and its default."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.megatron_config import Task, all_options, section_classes
from megatron.config.options import Option

_LONGEST_METAVAR = 70
CONFIG, PRINT_CONFIG = "--config", "--print-config"
_DESCRIPTION = """\
Trains a {model} model from its first weights or a checkpoint, on {data}, over any number of processes
that torchrun or Slurm start. A run of one process, on any machine{files}:

  python %(prog)s --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
      --max-position-embeddings 64 --micro-batch-size 8 --lr 1e-3 --train-iters 50 --eval-iters 5 \\
      {source} --log-interval 10

Dashes and underscores are the same. Keys of a --config file are names of flags.
A switch --NAME is undone by --no-NAME, and a flag that is the same as --NAME VALUE by --NAME and another value."""
_OF_TASK: Mapping[Task, Mapping[str, str]] = {
    "gpt": {
        "model": "GPT",
        "data": "token files or made-up data",
        "files": ", without a file",
        "source": "--tokenizer-type ByteTokenizer --mock-data",
    },
    "bert": {
        "model": "BERT",
        "data": "token files of sentences",
        "files": "",
        "source": "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --data-path corpus_text_sentence",
    },
}
_ONE_OF_EACH = (
    "and one of --train-iters N and --train-samples N, and one of --data-path, --train-data-path and --mock-data"
)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One line width for every terminal; the description keeps its lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=118)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names of flags stay whole


def help_text(extra: argparse.ArgumentParser, task: Task) -> str:
    """All flags in groups, the required ones first, each with its default."""
    parser = argparse.ArgumentParser(
        parents=[extra],
        add_help=False,
        allow_abbrev=False,
        usage="%(prog)s [--config FILE] [--flag [value ...]] ...",
        description=_DESCRIPTION.format(**_OF_TASK[task]),
        formatter_class=_HelpFormatter,
    )
    needed = parser.add_argument_group("required", _ONE_OF_EACH)
    files = parser.add_argument_group("configuration")
    files.add_argument(CONFIG, metavar="FILE", help="YAML file of flags; flags here override it.")
    files.add_argument(
        PRINT_CONFIG,
        action="store_true",
        help="Print the whole configuration and exit; the rules of --world-size N hold, when it is given.",
    )
    files.add_argument("--help", "-h", action="store_true", help="Print this and exit.")
    groups = {name: parser.add_argument_group(name) for name in section_classes(task)}
    for option in all_options(task):
        group, text = needed if option.required else groups[option.section], flag_help(option)
        if option.kind == "switch":
            group.add_argument(option.shown, action="store_true", help=text)
        else:
            word = metavar(option)
            if len(word) > _LONGEST_METAVAR:
                word, text = "NAME", f"{text} One of {', '.join(option.choices)}."
            group.add_argument(option.name, metavar=word, help=text)
        for name, value in option.flag.constants.items():
            group.add_argument(name, action="store_true", help=f"The same as {option.name} {value}.")
        for name in option.flag.file_flags:
            of_file = [other for other in all_options(task) if name in other.flag.file_flags]
            if option is of_file[-1]:
                group.add_argument(name, metavar="FILE", help=_file_help(name, of_file))
    return parser.format_help()


def _file_help(name: str, options: Sequence[Option]) -> str:
    """Of a flag that takes a file with the words of others."""
    if len(options) == 1:
        return f"The words of {options[0].name}, from a file of text."
    words = (f"{option.flag.file_flags[name]} for {option.name}" for option in options)
    return f"Words by keys of a JSON file: {', '.join(words)}."


def flag_help(option: Option) -> str:
    """What the flag does, its other names, its limits, and its default where the text does not say it."""
    parts = [option.shown_help]
    if option.flag.aliases:
        parts.append(f"Also {', '.join(option.flag.aliases)}.")
    notes = [option.limits] if option.limits else []
    if option.kind != "switch" and not option.required and "when not given" not in option.shown_help:
        notes.append(f"default: {_shown_default(option.default)}")
    if notes:
        parts.append(f"({'; '.join(notes)})")
    return " ".join(parts).replace("%", "%%")


def _shown_default(default: Any) -> str:
    if default in (None, ()):
        return "none"
    if isinstance(default, float) and default >= 2**16 and math.log2(default).is_integer():
        return f"2^{math.log2(default):.0f}"
    return str(default)


def usage(option: Option) -> str:
    """The flag and what follows it, as one writes it."""
    if option.kind == "switch":
        return f"{option.name} or {option.off_name}"
    return f"{option.name} {metavar(option)}"


def metavar(option: Option) -> str:
    """What stands for the value."""
    if option.flag.metavar:
        return option.flag.metavar
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    return {"number": "N", "fraction": "X", "text": "TEXT"}.get(option.kind, "")
