"""`pretrain`: from arguments to a trained model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from signal import Signals

import torch
import torch.distributed as dist

from megatron.config.arguments import ExtraArgsProvider
from megatron.config.megatron_config import Task
from megatron.core.collectives import barrier
from megatron.core.parallel_state import destroy_model_parallel
from megatron.optimizer.build import build_optimizer
from megatron.optimizer.param_scheduler import OnLoad, build_param_scheduler
from megatron.training.checkpoints import load_run, open_checkpoint, progress_of
from megatron.training.data_loaders import DatasetsProvider, build_loaders
from megatron.training.hooks import Evaluation, Exits, StopOnNaN
from megatron.training.initialize import MegatronContext, initialize_megatron
from megatron.training.memory import MemoryAccount, explaining_out_of_memory, warn_of_too_little_memory
from megatron.training.reports import JsonLog, LogLine, MemoryReport, TensorBoard
from megatron.training.run import ForwardStep, Hook, Run
from megatron.training.save_folder import SaveFolder, claim_save_folder, keep_tokenizer
from megatron.training.saving import Saving
from megatron.training.setup import (
    ModelProvider,
    build_chunks,
    build_executor,
    build_layout,
    build_schedule,
    build_vocabulary,
    check_parameter_count,
    describe,
    flops_per_sample,
    plan_builder,
)
from megatron.training.timers import Timers
from megatron.training.train_step import train_step


def pretrain(
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    *,
    task: Task = "gpt",
    extra_args_provider: ExtraArgsProvider | None = None,
    context: MegatronContext | None = None,
) -> Run:
    """Train a model as the command line says.

    Args:
        datasets_provider: builds the training, validation and test data.
        model_provider: builds one pipeline chunk of the model.
        forward_step: runs one micro-batch through one chunk.
        task: what is trained, which decides the options of the command line.
        extra_args_provider: adds the user's own arguments to the parser.
        context: of an `initialize_megatron` that was called before; by default it is called here.

    Returns:
        The finished run.

    Raises:
        ConfigError, LaunchError: see `initialize_megatron`.
        CheckpointError: what `--load` names cannot be loaded, or `--save` cannot be written.
        UserError: the tokenizer, the data or the layout is not what the configuration says.
        NonFiniteError: a loss or gradient norm was not finite.
        OutOfMemory: an allocation failed on this rank.

        Without a context each of these ends the program with exit code 2 and the reason, printed once.
    """
    if context is None:
        context = initialize_megatron(extra_args_provider=extra_args_provider, task=task)
        save = None if context.config.training.skip_train else context.config.checkpoint.save
        after_loss = "" if save is None else f"--load {save} goes on from the last checkpoint"
        with context.exiting("interrupted; the last checkpoint stays as it is", after_loss=after_loss):
            run = _pretrain(context, datasets_provider, model_provider, forward_step)
        if dist.is_initialized():
            # Threads of communicators that outlive Python would wait for an interpreter that is gone, and abort.
            destroy_model_parallel()
            dist.destroy_process_group()
        return run
    return _pretrain(context, datasets_provider, model_provider, forward_step)


def _pretrain(
    context: MegatronContext,
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
) -> Run:
    with explaining_out_of_memory(context, lambda: "while it was set up"):
        run = build_run(context, datasets_provider, model_provider, forward_step)
    with explaining_out_of_memory(context, lambda: f"in iteration {run.progress.iteration + 1}"):
        train(run)
    barrier(context.state.world)
    return run


def build_run(
    context: MegatronContext,
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
) -> Run:
    """Everything that training needs, at the position of the checkpoint that `--load` names."""
    save_folder = claim_save_folder(context)
    try:
        return _build_run(context, datasets_provider, model_provider, forward_step, save_folder)
    except BaseException:
        if save_folder is not None:
            save_folder.close()
        raise


def _build_run(
    context: MegatronContext,
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    save_folder: SaveFolder | None,
) -> Run:
    config, state, device = context.config, context.state, context.device
    checkpoint = open_checkpoint(context)
    progress = progress_of(checkpoint, config)
    batch_sizes, train_iters = build_schedule(config)
    vocabulary = build_vocabulary(config)
    if save_folder is not None:
        keep_tokenizer(save_folder, context)
    warn_of_too_little_memory(context, vocabulary)
    layout = build_layout(config, vocabulary)
    chunks = build_chunks(context, layout, vocabulary, model_provider)
    parameters = check_parameter_count(context, chunks)
    loaders = build_loaders(
        context, vocabulary, datasets_provider, batch_sizes=batch_sizes, train_iters=train_iters, progress=progress
    )
    run = Run(
        context=context,
        chunks=chunks,
        executor=build_executor(context, layout, chunks),
        forward_step=forward_step,
        optimizer=build_optimizer(
            chunks,
            config.optimizer,
            model_group=state.world if config.data_parallel.use_distributed_optimizer else state.model,
            device=device,
            count_zeros=config.logging.log_num_zeros_in_grad,
        ),
        scheduler=build_param_scheduler(
            config.optimizer,
            config.schedule_lengths,
            on_load=_schedule_on_load(context),
            samples_per_iteration=config.global_batch_size if config.training.train_samples is None else None,
        ),
        batch_sizes=batch_sizes,
        plans=plan_builder(config, layout),
        loaders=loaders,
        tokenizer_fingerprint=vocabulary.tokenizer.fingerprint(),
        train_iters=train_iters,
        flops_per_sample=flops_per_sample(chunks[0].module, config.data.seq_length),
        timers=Timers(
            config.logging.timing_log_level,
            torch.cuda.synchronize if device.type == "cuda" else lambda: None,
        ),
        progress=progress,
    )
    context.say(describe(context, layout, vocabulary, chunks[0].module, parameters))
    if checkpoint is not None:
        load_run(run, checkpoint)
    run.hooks = build_hooks(context, save_folder)
    return run


def _schedule_on_load(context: MegatronContext) -> OnLoad:
    checkpoint = context.config.checkpoint
    if checkpoint.override_opt_param_scheduler:
        return "override"
    return "use_checkpoint" if checkpoint.use_checkpoint_opt_param_scheduler else "check"


def build_hooks(context: MegatronContext, save_folder: SaveFolder | None) -> list[Hook]:
    """The hooks that the configuration asks for, in the order in which they are called.

    Logs come first, so that what led to a stop is written; saving comes last, so that a stop is saved.
    """
    training, logging = context.config.training, context.config.logging
    hooks: list[Hook] = [LogLine(logging), MemoryReport()]
    if logging.log_memory:
        hooks.append(MemoryAccount())
    if logging.log_json is not None:
        hooks.append(JsonLog(Path(logging.log_json)))
    if logging.tensorboard_dir is not None:
        hooks.append(TensorBoard(logging))
    if training.check_for_nan_in_loss_and_grad:
        hooks.append(StopOnNaN())
    if training.eval_iters > 0:
        hooks.append(Evaluation(training.eval_interval, training.eval_iters, full=training.full_validation))
    hooks.append(
        Exits(
            interval=training.exit_interval,
            minutes=training.exit_duration_in_mins,
            signal_number=Signals[training.exit_signal] if training.exit_signal_handler else None,
            started=context.started,
            launcher=context.launcher,
        )
    )
    if save_folder is not None:
        hooks.append(Saving(save_folder, context))
    return hooks


def train(run: Run) -> None:
    """The loop: iterations until the last one or until a hook asks to stop; none with `--skip-train`."""
    try:
        for hook in run.hooks:
            hook.on_start(run)
        end = 0 if run.config.training.skip_train else run.train_iters
        if not run.config.training.skip_train and run.progress.iteration >= end:
            run.say(f"nothing to train: {run.progress.iteration} of {end} iterations are done")
        while run.progress.iteration < end and run.stop_reason is None:
            report = train_step(run)
            for hook in run.hooks:
                hook.after_step(run, report)
        for chunk in run.chunks:
            chunk.wait_for_parameters()
        for hook in run.hooks:
            hook.on_end(run)
    finally:
        with ExitStack() as closing:  # each of them, whatever another one fails of
            for close in reversed([run.loaders.close, *(hook.close for hook in run.hooks)]):
                closing.callback(close)
    if run.stop_reason is not None:
        run.say(f"stopped after iteration {run.progress.iteration}: {run.stop_reason}")
