"""The checkpoint that `--load` and `--ckpt-step` name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.checkpointing import (
    Checkpoint,
    CheckpointBelowError,
    CheckpointError,
    NoCheckpointError,
    load_checkpoint,
)
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.megatron_config import PROGRAMS, MegatronConfig, Task
from megatron.core.comm_group import CommGroup
from megatron.tokenizer.kept_files import TOKENIZER_FOLDER, kept_in


def find_checkpoint(wanted: CheckpointConfig, world: CommGroup, *, task: Task) -> Checkpoint | None:
    """Open it; None when none is asked for, or none need be there. A collective over `world`.

    Raises:
        CheckpointError: there is none (and no `--load-if-exists`), it is damaged, or it is of another task.
    """
    if wanted.load is None:
        return None
    try:
        checkpoint = load_checkpoint(wanted.load, step=wanted.ckpt_step, world=world)
    except NoCheckpointError as error:
        if wanted.load_if_exists:
            return None
        # Where a folder below has one, that one is probably meant, and a new run would not be noticed.
        below = isinstance(error, CheckpointBelowError)
        offer = "" if below else "; --load-if-exists starts a new run where there is none"
        raise NoCheckpointError(f"--load: {error}{offer}") from error
    if (saved := checkpoint.config.task) != task:
        raise CheckpointError(
            f"--load: {checkpoint.folder} holds a {saved.upper()}, which {PROGRAMS[saved]} goes on with; this is "
            f"{PROGRAMS[task]}, for a {task.upper()}"
        )
    return checkpoint


def saved_config(wanted: CheckpointConfig, *, task: Task) -> MegatronConfig | None:
    """What it was saved with, its tokenizer from the copies that it keeps of the files.

    Each rank reads it for itself: the layout of the ranks is not known yet.
    """
    checkpoint = find_checkpoint(wanted, CommGroup.single("world"), task=task)
    if checkpoint is None or wanted.load is None:
        return None
    config = checkpoint.config
    return replace(config, tokenizer=kept_in(config.tokenizer, Path(wanted.load) / TOKENIZER_FOLDER))
