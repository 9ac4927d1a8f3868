"""The checkpoint that `--load` and `--ckpt-step` name."""

from __future__ import annotations

from megatron.checkpointing import Checkpoint, CheckpointBelowError, NoCheckpointError, load_checkpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.megatron_config import MegatronConfig
from megatron.core.comm_group import CommGroup


def find_checkpoint(wanted: CheckpointConfig, world: CommGroup) -> Checkpoint | None:
    """Open it; None when none is asked for, or none need be there. A collective over `world`.

    Raises:
        CheckpointError: there is none (and no `--load-if-exists`), or it is damaged.
    """
    if wanted.load is None:
        return None
    try:
        return load_checkpoint(wanted.load, step=wanted.ckpt_step, world=world)
    except NoCheckpointError as error:
        if wanted.load_if_exists:
            return None
        # Where a folder below has one, that one is probably meant, and a new run would not be noticed.
        below = isinstance(error, CheckpointBelowError)
        offer = "" if below else "; --load-if-exists starts a new run where there is none"
        raise NoCheckpointError(f"--load: {error}{offer}") from error


def saved_config(wanted: CheckpointConfig) -> MegatronConfig | None:
    """What it was saved with. Each rank reads it for itself: the layout of the ranks is not known yet."""
    checkpoint = find_checkpoint(wanted, CommGroup.single("world"))
    return None if checkpoint is None else checkpoint.config
