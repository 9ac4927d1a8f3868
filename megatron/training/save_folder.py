"""The `--save` folder of a run: checked before the training and not after it, and held against other runs."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megatron.checkpointing import CheckpointError, list_checkpoints
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.agreement import agree
from megatron.core.file_lock import FileLock, NoLocksError, holder_of, try_lock
from megatron.core.whole_file import make_folder
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.kept_files import TOKENIZER_FOLDER, keep_files, kept_in
from megatron.training.initialize import MegatronContext

LOCK_FILE = ".lock"
# Ranks whose launcher was killed end after their iteration. Of a node that is gone NFS learns when its lease ends.
_PATIENCE_ON_THIS_HOST, _PATIENCE_FOR_ANOTHER = 60.0, 100.0
_POLL_SECONDS = 0.2


class SaveFolder:
    """The folder in which this run, and no other one, saves.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = ExitStack()

    def claim(self, wanted: CheckpointConfig, patience: float, say: Callable[[str], None]) -> None:
        """Hold the folder until it is closed or this process ends.

        Args:
            patience: seconds to wait at most for a run that holds it.
            say: is told what it waits for.

        Raises:
            CheckpointError: another run holds the folder or has its checkpoints in it.
            OSError: it cannot be written.
        """
        make_folder(self.path)
        with tempfile.TemporaryFile(dir=self.path) as probe:
            probe.write(b"a checkpoint can be written here")
        with ExitStack() as held:
            try:
                held.enter_context(_lock(self.path / LOCK_FILE, patience, say))
            except NoLocksError as error:
                say(f"warning: --save {self.path} has no file locks ({error}): do not start another run in it")
            self._refuse_to_mix(wanted)
            self._held = held.pop_all()

    def _refuse_to_mix(self, wanted: CheckpointConfig) -> None:
        """No iteration may be saved beside, or in place of, one that this run has not gone through."""
        present = list_checkpoints(self.path)
        if not present:
            return
        if wanted.load is None or Path(wanted.load).resolve() != self.path.resolve():
            raise CheckpointError(
                f"there are checkpoints of another run, up to iteration {present[-1]}, which this one would "
                f"replace; --load {self.path} goes on from them, another --save folder keeps both"
            )
        if wanted.finetune:
            raise CheckpointError(
                f"there are checkpoints up to iteration {present[-1]}, which a --finetune would replace from iteration "
                "0 on; another --save folder keeps both, without --finetune the run goes on from the last"
            )
        later = [iteration for iteration in present if wanted.ckpt_step is not None and iteration > wanted.ckpt_step]
        if later:
            raise CheckpointError(
                f"--ckpt-step {wanted.ckpt_step} leaves checkpoints of later iterations, {later[0]} to {later[-1]}, "
                "which this run would replace one by one; another --save folder keeps both, moving them away makes "
                "room, without --ckpt-step the run goes on from the last"
            )

    def keep_tokenizer(self, config: TokenizerConfig, *, copies: bool) -> None:
        """Refuse another tokenizer than that of the checkpoints of this folder, which are used with the copies there.

        Args:
            copies: to keep them of the tokenizer's files. Otherwise those that are there stay.

        Raises:
            CheckpointError: it is not the tokenizer that the checkpoints of this folder are used with.
            OSError: a file cannot be read or written.
        """
        folder = self.path / TOKENIZER_FOLDER
        kept = kept_in(config, folder)
        stays = kept != config and (not copies or bool(list_checkpoints(self.path)))
        if stays and build_tokenizer(kept).fingerprint() != build_tokenizer(config).fingerprint():
            raise CheckpointError(
                f"the checkpoints here are used with the tokenizer in {folder}, and "
                f"{config.shown} is another one; give that one, or --finetune with "
                "another --save folder"
            )
        if copies:
            keep_files(config, folder)

    def close(self) -> None:
        """Leave the folder to others."""
        self._held.close()


def claim_save_folder(context: MegatronContext) -> SaveFolder | None:
    """The `--save` folder, held until it is closed or that process ends; None where nothing is saved.

    The first rank holds it, which alone gives checkpoints their names and deletes old ones.

    To be claimed before the checkpoint is opened: the run that held the folder may just have saved its last one. A
    collective.

    Raises:
        CheckpointError: on all ranks: another run holds the folder or has its checkpoints in it, or it cannot be
            written.
    """
    config = context.config
    if config.training.skip_train:
        return None
    if config.checkpoint.save is None:
        context.say("warning: without --save nothing of this training is kept")
        return None
    folder = SaveFolder(Path(config.checkpoint.save))
    patience = 30.0 * config.parallel.distributed_timeout_minutes  # the other ranks wait meanwhile

    def claim() -> None:
        if context.state.rank == 0:
            folder.claim(config.checkpoint, patience, partial(print, flush=True))

    agree(context.state.world, f"preparing --save {folder.path}", claim, raises=CheckpointError)
    return folder


def keep_tokenizer(folder: SaveFolder, context: MegatronContext) -> None:
    """Keep what the checkpoints of a run need of its tokenizer, or only compare what is there; a collective.

    Raises:
        CheckpointError: on all ranks: it is another tokenizer than that of the checkpoints there, or it cannot be kept.
    """
    config = context.config

    def keep() -> None:
        if context.state.rank == 0:
            folder.keep_tokenizer(config.tokenizer, copies=config.checkpoint.save_tokenizer_assets)

    agree(context.state.world, f"keeping the tokenizer in --save {folder.path}", keep, raises=CheckpointError)


def _lock(file: Path, patience: float, say: Callable[[str], None]) -> FileLock:
    started = time.monotonic()
    said = ""
    while (lock := try_lock(file)) is None:
        holder = holder_of(file)
        here = f" on {socket.gethostname()} " in holder
        limit = min(patience, _PATIENCE_ON_THIS_HOST if here else _PATIENCE_FOR_ANOTHER)
        if time.monotonic() - started > limit:
            raise CheckpointError(
                f"another run saves in this folder: {holder}; end it, or give another --save folder. If its node is "
                f"down, remove {file}"
            )
        if holder != said:
            say(f"--save {file.parent} is held by {holder}: waiting up to {limit:.0f} s for its end")
            said = holder
        time.sleep(_POLL_SECONDS)
    return lock
