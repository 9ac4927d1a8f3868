"""What a run keeps in a checkpoint, and how it takes it back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from megatron.checkpointing import Checkpoint, CheckpointError, model_tensors
from megatron.config.megatron_config import Difference, MegatronConfig, difference
from megatron.config.problems import UserError
from megatron.core.shard import NamedTensor
from megatron.optimizer.param_scheduler import SCHEDULE_FLAGS
from megatron.tokenizer.kept_files import TOKENIZER_FOLDER
from megatron.training.initialize import MegatronContext
from megatron.training.progress import Progress
from megatron.training.run import Run
from megatron.training.wanted_checkpoint import find_checkpoint

Value = TypeVar("Value")

_NOT_SAID = "content not recorded"  # by version 0.1


def kept_of(run: Run) -> tuple[list[NamedTensor], dict[str, Any]]:
    """What a checkpoint of the present iteration keeps: this rank's tensors, and what is no tensor."""
    config = run.config
    tensors = _weights(run)
    metadata: dict[str, Any] = {
        "config": config.to_dict(),
        "progress": run.progress.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "tokenizer_fingerprint": run.tokenizer_fingerprint,
        "training_data": [
            {"prefix": source.prefix, "fingerprint": source.fingerprint, "content": source.content}
            for source in run.loaders.sources
        ],
    }
    if config.checkpoint.save_optim:
        tensors += run.optimizer.named_state()
        metadata["optimizer"] = run.optimizer.state_dict()
    return tensors, metadata


def _weights(run: Run) -> list[NamedTensor]:
    frozen = model_tensors((chunk.module for chunk in run.chunks), frozen_only=True)
    return [*frozen, *run.optimizer.named_main_parameters()]


def open_checkpoint(context: MegatronContext) -> Checkpoint | None:
    """The checkpoint that `--load` and `--ckpt-step` name, None when none is asked for; a collective.

    What differs from the configuration that it was saved with is printed, but flags of schedules where the
    checkpoint's are used.

    Raises:
        CheckpointError: there is none (and no `--load-if-exists`), it is damaged, or the model, or on a resume the
            data, differs from the one that it was saved with.
    """
    config, wanted = context.config, context.config.checkpoint
    checkpoint = find_checkpoint(wanted, context.state.world, task=config.task)
    if checkpoint is None:
        return None
    changes = difference(checkpoint.config, config)
    if wanted.use_checkpoint_opt_param_scheduler and goes_on(checkpoint, config):
        changes = [change for change in changes if change.flag not in SCHEDULE_FLAGS]
    refused = {"tensors": "model", "model": "model"}
    if goes_on(checkpoint, config):
        refused["input"] = "data"
    if _goes_on_in_data(checkpoint, config):
        refused["data"] = "data"
    if wanted.load_partial:  # the tensors themselves are compared when they are loaded
        del refused["tensors"]
    if changes:
        context.say("\n".join([f"configuration that differs from {checkpoint.folder}:", *_by_effect(changes)]))
    wrong = [f"  {change} changes the {refused[change.affects]}" for change in changes if change.affects in refused]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} can not be resumed with another model or other data:\n"
            + "\n".join(wrong)
            + "\nGive the saved values; --finetune takes only the weights and allows other data, "
            "--load-partial GLOB allows other tensors"
        )
    return checkpoint


def _by_effect(changes: Sequence[Difference]) -> list[str]:
    """Lines about differences: first those that should not be overlooked among the many that do not matter."""
    effects = {" which changes what is learned:": False, " which changes nothing that is learned:": True}
    lines: list[str] = []
    for heading, free in effects.items():
        chosen = [f"  {change}" for change in changes if (change.affects == "free") == free]
        lines += [heading, *chosen] if chosen else []
    return lines


def goes_on(checkpoint: Checkpoint, config: MegatronConfig) -> bool:
    """Whether a run goes on with the training of a checkpoint.

    Otherwise it takes the weights alone: `--finetune` asks for that, and a converted model may have nothing else.
    """
    return not config.checkpoint.finetune and "progress" in checkpoint.metadata


def _goes_on_in_data(checkpoint: Checkpoint, config: MegatronConfig) -> bool:
    """Whether the position of a training in its data is gone on from. A trained model is evaluated on any that it reads
    as it read that of its training."""
    return goes_on(checkpoint, config) and not config.training.skip_train


def progress_of(checkpoint: Checkpoint | None, config: MegatronConfig) -> Progress:
    """Where the run stands: that of the checkpoint, or the start of a new run."""
    if checkpoint is None or not goes_on(checkpoint, config):
        return Progress()
    return _take(checkpoint, "progress", Progress.from_state_dict)


def _take(checkpoint: Checkpoint, key: str, take: Callable[[Any], Value]) -> Value:
    """Hand over what the metadata say under a key; whoever wrote them, what cannot be read is the file's fault."""
    try:
        return take(checkpoint.metadata[key])
    except UserError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{checkpoint.folder}: metadata.json has no {key} as a run saves it ({text})") from error


def _source_of(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """What a checkpoint says of a source of samples: its prefix, fingerprint and content."""
    return str(entry["prefix"]), str(entry["fingerprint"]), str(entry.get("content", _NOT_SAID))


def _check_data(run: Run, checkpoint: Checkpoint) -> None:
    """Refuse training data that has been replaced: the position in it would mean other samples. A folder that moved is
    no other data, so fingerprints and contents are compared, and prefixes not."""
    present = [(source.prefix, source.fingerprint, source.content) for source in run.loaders.sources]
    # Older versions list what is only evaluated on, too, behind what was trained on.
    key, most = ("training_data", None) if "training_data" in checkpoint.metadata else ("data", len(present))
    if key not in checkpoint.metadata:
        run.say(f"  {checkpoint.folder} does not say what its data was: that this is the same is not checked")
        return
    saved = _take(checkpoint, key, lambda data: [_source_of(each) for each in data])[:most]
    nothing = ("nothing", "nothing", "nothing")
    lines = [
        f"  {now[0] if now is not nothing else was[0]}: {was[1]}, {was[2]} in the checkpoint, {now[1]}, {now[2]} here"
        for was, now in zip_longest(saved, present, fillvalue=nothing)
        if was[1] != now[1] or was[2] not in (now[2], _NOT_SAID)
    ]
    if lines:
        raise CheckpointError(
            f"{checkpoint.folder} can not be resumed with data that is not what it was trained with:\n"
            + "\n".join(lines)
            + "\nPut the data of the training back; --finetune takes only the weights and starts with this data anew"
        )


def _check_tokenizer(run: Run, checkpoint: Checkpoint) -> None:
    """Refuse another tokenizer, whose ids mean other tokens. Versions to 0.1 and converted trainings name none."""
    saved = checkpoint.metadata.get("tokenizer_fingerprint", run.tokenizer_fingerprint)
    if saved != run.tokenizer_fingerprint:
        kept = checkpoint.folder.parent / TOKENIZER_FOLDER
        works = f"give that one, of which {kept} has a copy" if kept.is_dir() else "give that one"
        raise CheckpointError(
            f"{checkpoint.folder} can not be resumed with another tokenizer than that of its training, which "
            f"{run.config.tokenizer.shown} is; {works}; --finetune takes only the weights and allows another one"
        )


def load_run(run: Run, checkpoint: Checkpoint) -> None:
    """Fill the run's weights, and unless told otherwise its optimizer and schedule, from a checkpoint; a collective."""
    start = time.perf_counter()
    wanted = run.config.checkpoint
    resumes = goes_on(checkpoint, run.config)
    with_optimizer = wanted.load_optim and resumes
    if resumes:
        _check_tokenizer(run, checkpoint)
    if _goes_on_in_data(checkpoint, run.config):
        _check_data(run, checkpoint)
    elif not resumes and not wanted.finetune:
        run.say(
            f"  {checkpoint.folder} holds a model without a training: this one starts at iteration 0, as --finetune"
        )
    if with_optimizer and "optimizer" not in checkpoint.metadata:
        raise CheckpointError(
            f"{checkpoint.folder} was saved without the optimizer (--no-save-optim): --no-load-optim starts it anew, "
            f"--finetune the whole run"
        )
    if with_optimizer:
        _take(checkpoint, "optimizer", run.optimizer.load_state_dict)
    if resumes:  # also with --no-load-optim: the position in the data goes on, so must the rates
        _take(checkpoint, "scheduler", run.scheduler.load_state_dict)
    tensors = _weights(run)
    if with_optimizer:
        tensors += run.optimizer.named_state()
    summary = checkpoint.load_into(
        tensors,
        world=run.state.world,
        ignore=() if with_optimizer else ("optimizer.",),
        partial=wanted.load_partial,
    )
    run.optimizer.after_load()
    if summary.left:
        lines = [f"  {line}" for line in summary.left]
        run.say("\n".join(["left out, as --load-partial allows; what the model has of it keeps first values:", *lines]))
    for cast in summary.casts:
        run.say(f"  {cast}")
    run.say(
        f"  successfully loaded checkpoint from {checkpoint.folder} at iteration {checkpoint.iteration} in "
        f"{time.perf_counter() - start:.1f} s"
    )
