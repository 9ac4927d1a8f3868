"""What the tools share that use a trained model: its flags, the ranks that hold it, lines of JSON that it is given."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import Parser
from text_tools import parse_record, text_under

from megatron.config.arguments import add_to_parser
from megatron.config.options import section_options
from megatron.config.parallel import ParallelConfig
from megatron.config.problems import UserError
from megatron.config.tokenizer import TOKENIZER_FILES, TokenizerConfig
from megatron.core.parallel_state import destroy_model_parallel
from megatron.inference.load import OpenedModel, open_model
from megatron.inference.stages import ModelRanks, StagedModel
from megatron.training.initialize import join_ranks

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


@dataclass(frozen=True, kw_only=True)
class UsedModel:
    """A model with its weights.

    Attributes:
        speaks: whether this process prints; of several ranks the first.
    """

    opened: OpenedModel
    staged: StagedModel
    speaks: bool

    def note(self, line: str) -> None:
        """Print to stderr, once."""
        if self.speaks:
            print(line, file=sys.stderr, flush=True)


def add_model_flags(parser: Parser) -> None:
    parser.add_argument("--load", required=True, help="checkpoint folder: the --save of the training")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the newest)")
    ranks = parser.add_argument_group(
        "ranks", "a model that one process has no room for is spread by torchrun over as many as these two multiply to"
    )
    add_to_parser(ranks, (option for option in section_options("parallel", ParallelConfig) if option.field in _SIZES))
    files = parser.add_argument_group("files of the tokenizer", "by default the copies in the checkpoint")
    tokenizer_options = section_options("tokenizer", TokenizerConfig)
    add_to_parser(files, (option for option in tokenizer_options if option.field in TOKENIZER_FILES))


@contextmanager
def model_in_use(options: argparse.Namespace) -> Iterator[UsedModel]:
    """The model that the flags name, over the ranks that were started."""
    opened = open_model(
        options.load,
        step=options.ckpt_step,
        tokenizer_files={field: path for field in TOKENIZER_FILES if (path := getattr(options, field)) is not None},
        tensor_parallel_size=options.tensor_model_parallel_size,
        pipeline_parallel_size=options.pipeline_model_parallel_size,
    )
    context = join_ranks(opened.config)
    state, speaks = context.state, context.state.rank == 0
    if context.device.type == "cpu" and state.world.size == 1:  # torchrun gives each of several ranks one thread
        torch.set_num_threads(free_threads())
    ranks = ModelRanks(tensor=state.tensor, pipeline=state.pipeline, channels=state.channels, world=state.world)
    with context.exiting() if state.world.size > 1 else nullcontext():
        if speaks:
            print(f"reading {opened.checkpoint.folder}", file=sys.stderr, flush=True)
        yield UsedModel(opened=opened, staged=opened.load_gpt(ranks, context.device), speaks=speaks)
    if dist.is_initialized():
        destroy_model_parallel()
        dist.destroy_process_group()


def free_threads() -> int:
    """Threads that have a core each: those of torch, less as many as other programs have kept busy in the last minute.

    Threads wait for each other hundreds of times in a forward, and each wait lasts until the scheduler comes back to
    one that had to let another program run: with two threads on two busy cores, ten times as long as one takes for all.
    """
    free = len(os.sched_getaffinity(0)) - round(os.getloadavg()[0])
    return max(1, min(torch.get_num_threads(), free))


def texts_of(path: Path, *, flag: str) -> list[tuple[str, str]]:
    """The texts of a file of JSON lines, each with its place for messages; lines that are blank are none.

    Raises:
        UserError: a line is no JSON object with a text under "text", or there is none.
    """
    found = []
    for number, line in enumerate(content_of(path, flag=flag).splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                found.append((text_under(parse_record(line), "text"), where))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
    if not found:
        raise UserError(f'{flag} {path}: holds no text; a line is such as {{"text": "..."}}')
    return found


def content_of(path: Path, *, flag: str) -> bytes:
    """Raises UserError: there is no such file."""
    if not path.is_file():
        raise UserError(f"{flag} {path}: {'is a folder' if path.is_dir() else 'no such file'}")
    return path.read_bytes()


def decoded(data: bytes, path: Path, *, flag: str) -> str:
    """The text of a file, or of a line of it.

    Raises:
        UserError: it is not in UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path}: {error}; convert the file to UTF-8") from None
