"""Build the indices of a training ahead of it, so that it starts at once and its ranks wait for nobody.

    python tools/build_index.py pretrain_gpt.py --config small.yaml --data-path corpus_text_document
    python tools/build_index.py pretrain_bert.py --config bert.yaml --train-samples 1_000_000

What follows is the whole command of the training, without `torchrun` or `srun`. It needs no GPU, and with
--global-batch-size no number of processes either. One process builds, on all its cores; a training with the same flags
then finds every index, on each machine that sees the folder. Where the order of a blend shall be kept as well, that
folder must be named with --data-cache-path, as there is no data that it could lie beside.
"""

import argparse
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from command_line import elapsed, run_tool, say, size_of

from megatron.config.arguments import parse_arguments
from megatron.config.megatron_config import PROGRAMS, MegatronConfig, Task
from megatron.config.problems import UserError
from megatron.core.parallel_state import ParallelState
from megatron.training.bert import bert_datasets
from megatron.training.checkpoints import open_checkpoint, progress_of
from megatron.training.data_loaders import DatasetsProvider, sample_counts
from megatron.training.gpt import gpt_datasets
from megatron.training.initialize import MegatronContext
from megatron.training.setup import build_schedule, build_vocabulary
from megatron.training.wanted_checkpoint import saved_config

PROVIDERS: dict[Task, DatasetsProvider] = {"gpt": gpt_datasets, "bert": bert_datasets}


class Built(logging.Handler):
    """Says what is reported of indices, and counts those that are built.

    Attributes:
        sizes: bytes of each index that was built.
        lost: indices that no folder was there for.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say
        self.sizes: list[int] = []
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())
        said = vars(record)
        if "built" in said:
            self.sizes.append(said["built"])
        self.lost += "kept" in said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help=f"the program that trains: {' or '.join(PROGRAMS.values())}")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="its flags")
    arguments = parser.parse_args()
    task = task_of(arguments.program)
    config, _ = parse_arguments(
        arguments.flags, task=task, launched=False, saved_config=partial(saved_config, task=task), say=say
    )
    build_indices(of_any_world(config))


def task_of(program: str) -> Task:
    """What a program trains.

    Raises:
        UserError: it is not one of this project.
    """
    for task, name in PROGRAMS.items():
        if Path(program).name == name:
            return task
    raise UserError(f"{program}: the first word is the program that trains, {' or '.join(PROGRAMS.values())}")


def of_any_world(config: MegatronConfig) -> MegatronConfig:
    """The configuration on one replica, where it names no number of processes: samples are the same on any number.

    Raises:
        ConfigError: it breaks rules on that many.
        UserError: the number of samples depends on that of processes, which is not known.
    """
    if config.parallel.world_size is not None:
        return config
    if config.training.global_batch_size is None:
        raise UserError(
            "--global-batch-size is not given, so how many samples there are depends on the number of processes: "
            "--world-size N says it"
        )
    config = config.on(config.parallel.model_parallel_size)
    config.validate(check_files=False)
    return config


def build_indices(config: MegatronConfig) -> None:
    """Build what is not there, and say what that was."""
    started = time.perf_counter()
    built, megatron = Built(say), logging.getLogger("megatron")
    megatron.setLevel(logging.INFO)
    megatron.addHandler(built)
    megatron.propagate = False
    context = MegatronContext(
        config=config, state=ParallelState.single(), device=torch.device("cpu"), extra=argparse.Namespace()
    )
    progress = progress_of(open_checkpoint(context), config)
    batch_sizes, train_iters = build_schedule(config)
    counts = sample_counts(config.training, batch_sizes=batch_sizes, train_iters=train_iters, progress=progress)
    PROVIDERS[config.task](context, build_vocabulary(config), counts)
    say(f"indices built: {len(built.sizes)}, {size_of(sum(built.sizes))}, in {elapsed(started)}")
    if built.lost:
        raise UserError(
            "not every index could be kept, see above: --data-cache-path names a folder, for the training too"
        )
    say("a training with the same flags finds them all")


if __name__ == "__main__":
    run_tool(main)
