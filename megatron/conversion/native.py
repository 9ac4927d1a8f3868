"""A checkpoint of this program: of a model that comes from elsewhere, and of one that goes there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing import (
    CheckpointError,
    LazySlice,
    is_weight,
    load_checkpoint,
    save_converted,
    weight_key,
)
from megatron.checkpointing.slices import Box
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.data_parallel import DataParallelConfig
from megatron.config.logging import LoggingConfig
from megatron.config.megatron_config import MegatronConfig, all_options
from megatron.config.optimizer import OptimizerConfig, Precision
from megatron.config.parallel import ParallelConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig
from megatron.conversion.portable import (
    LazyTensor,
    PortableModel,
    TrainingState,
    global_shapes,
    refuse_differences,
)
from megatron.conversion.tokenizer_files import GENERATION, generation_of, settings_of, tokenizer_config
from megatron.conversion.whole_folder import copy_file, whole_folder, write_json
from megatron.core.comm_group import CommGroup
from megatron.model.language_model import WORD_EMBEDDINGS
from megatron.tokenizer.kept_files import TOKENIZER_FOLDER, files_of, kept_in

# A training has one, and a model without a training none: it is not used.
_LEARNING_RATE = 1e-4
_PRECISIONS: Mapping[torch.dtype, Precision] = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


# ---- reading ----


def read_native(folder: Path, step: int | None = None) -> PortableModel:
    """The model of a checkpoint, without its training; its weights are read later, one by one.

    Args:
        folder: the `--save` of the training.
        step: the iteration; the newest when None.

    Raises:
        CheckpointError: there is none, it is damaged, or its model is neither a GPT nor a BERT.
        ConfigError: its configuration breaks a rule.
    """
    checkpoint = load_checkpoint(folder, step=step, world=CommGroup.single("world"))
    config = checkpoint.config
    config.validate(purpose="model", check_files=False)  # before anything is sized by it
    embedding = checkpoint.tensors.get(weight_key(WORD_EMBEDDINGS))
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{checkpoint.folder} holds no language model: there is no {WORD_EMBEDDINGS}")
    tensors = {
        key: LazyTensor(shape=stored.shape, dtype=stored.dtype, read=partial(checkpoint.read, key))
        for key, stored in checkpoint.tensors.items()
        if is_weight(key)
    }
    rows = embedding.shape[0]
    tokenizer = kept_in(config.tokenizer, folder / TOKENIZER_FOLDER)
    shapes = {weight_key(name): shape for name, shape in global_shapes(config.model, config.bert, rows).items()}
    refuse_differences(str(checkpoint.folder), shapes, tensors)
    return PortableModel(
        config=config.model,
        bert=config.bert,
        vocab_size=rows,
        seq_length=config.data.seq_length,
        tensors=tensors,
        tokenizer_files=files_of(tokenizer),
        tokenizer_settings=settings_of(tokenizer),
        generation=generation_of(tokenizer, folder / TOKENIZER_FOLDER),
    )


# ---- writing ----


def write_native(model: PortableModel, folder: Path) -> MegatronConfig:
    """Write a model as a checkpoint that `--load` takes, one tensor at a time.

    A model alone is a checkpoint of iteration 0 without a training; one with a training goes on with it.

    Returns: the configuration that it is saved with.

    Raises:
        ConversionError: the folder is not empty.
        CheckpointError: the disk is full, or it cannot be written.
        ConfigError: the configuration of the model breaks a rule.
    """
    config = _config(model, folder.resolve())
    tensors = [
        LazySlice(key=key, box=Box.whole(lazy.shape), dtype=lazy.dtype, read=lazy.read)
        for key, lazy in model.tensors.items()
    ]
    metadata = {"config": config.to_dict(), **({} if model.training is None else _training(model.training))}
    with whole_folder(folder) as inside:
        save_converted(inside, 0 if model.training is None else model.training.iteration, tensors, metadata)
        if model.tokenizer_files or model.generation:
            (inside / TOKENIZER_FOLDER).mkdir()
            for name, path in model.tokenizer_files.items():
                copy_file(path, inside / TOKENIZER_FOLDER / name)
            write_json(inside / TOKENIZER_FOLDER / GENERATION, model.generation)
    return config


def _config(model: PortableModel, folder: Path) -> MegatronConfig:
    """A whole configuration: the model's, and of a training its flags; the rest as by default."""
    embedding = model.tensors[weight_key(WORD_EMBEDDINGS)]
    config = MegatronConfig(
        model=model.config,
        parallel=ParallelConfig(),
        data_parallel=DataParallelConfig(),
        optimizer=OptimizerConfig(lr=_LEARNING_RATE, precision=_PRECISIONS[embedding.dtype]),
        training=TrainingConfig(micro_batch_size=1),
        data=DataConfig(seq_length=model.seq_length),
        tokenizer=_tokenizer(model, folder / TOKENIZER_FOLDER),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
        bert=model.bert,
    )
    if model.training is not None:
        config = _with_flags(config, model.training.flags)
        if config.tokenizer.tokenizer_type != "NullTokenizer" or config.tokenizer.vocab_size != model.vocab_size:
            config = replace(config, tokenizer=replace(config.tokenizer, padded_vocab_size=model.vocab_size))
    config.validate(purpose="model", check_files=False)
    return config


def _tokenizer(model: PortableModel, folder: Path) -> TokenizerConfig:
    """That of the model, from where its files will be; of a model without one, numbers alone."""
    config = tokenizer_config(model.tokenizer_files, folder, model.vocab_size)
    end = model.generation.get("eos_token_id")
    if config.tokenizer_type == "NullTokenizer" and type(end) is int and 0 <= end < model.vocab_size:
        config = replace(config, null_tokenizer_eod_id=end)
    return config


def _with_flags(config: MegatronConfig, flags: Mapping[str, Any]) -> MegatronConfig:
    """A configuration with the flags of the training that the model comes from, by fields."""
    for option in all_options(config.task):
        if option.field in flags and option.section != "model":
            section = replace(getattr(config, option.section), **{option.field: flags[option.field]})
            config = replace(config, **{option.section: section})
    return config


def _training(training: TrainingState) -> dict[str, Any]:
    """What a run keeps of itself, beside the configuration and the tensors."""
    return {
        "progress": {"iteration": training.iteration, "consumed_train_samples": training.consumed_samples},
        "scheduler": dict(training.scheduler),
        "optimizer": dict(training.optimizer),
    }
