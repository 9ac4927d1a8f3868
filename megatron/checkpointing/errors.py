"""What can go wrong with a checkpoint."""

from __future__ import annotations

from megatron.config.problems import UserError


class CheckpointError(UserError):
    """A checkpoint could not be written, found, read, or does not fit; the text says which, where and why."""


class NoCheckpointError(CheckpointError):
    """The folder holds no checkpoint at all: the one case in which a run may start from nothing."""


class CheckpointBelowError(NoCheckpointError):
    """The folder holds none, but a folder in it does, which the text names: that one may be meant."""
