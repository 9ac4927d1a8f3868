"""The model of a checkpoint, whole or this rank's part of it, and the tokenizer that it was trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from megatron.checkpointing import Checkpoint, load_checkpoint, model_tensors, weight_key
from megatron.config.data_parallel import DataParallelConfig
from megatron.config.megatron_config import MegatronConfig, section_problems
from megatron.config.optimizer import OptimizerConfig, Precision
from megatron.config.options import flag_name, section_options
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import pipeline_layout
from megatron.config.problems import ConfigError, UserError, counted
from megatron.config.tokenizer import SIZED_TYPES, TokenizerConfig
from megatron.config.transformer import TransformerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.tensor_parallel.placement import Placement
from megatron.inference.stages import ModelRanks, StagedModel
from megatron.model.bert_model import BertModel
from megatron.model.gpt_model import GPTModel
from megatron.model.language_model import WORD_EMBEDDINGS, LanguageModel
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.kept_files import TOKENIZER_FOLDER, kept_in
from megatron.tokenizer.tokenizer import Tokenizer

Model = TypeVar("Model", bound=LanguageModel)


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """What is known of a model before its weights are read.

    Attributes:
        config: of the training, with the layout and precision that the model is used in.
        tokenizer: of the training.
    """

    checkpoint: Checkpoint
    config: MegatronConfig
    tokenizer: Tokenizer

    @property
    def context_length(self) -> int:
        """Tokens that the model was trained to look back on."""
        return self.config.data.seq_length

    def load_gpt(self, ranks: ModelRanks, device: torch.device) -> StagedModel:
        """This rank's part of a GPT with its weights; a collective over the ranks that hold it.

        Raises:
            CheckpointError: the checkpoint is damaged, holds another model, or is not the same on all ranks.
            UserError: it holds a BERT.
        """
        if self.config.bert is not None:
            raise UserError(
                f"{self.checkpoint.folder} holds a BERT, which does not continue texts; "
                "tools/fill_mask.py fills the masks in one"
            )
        return StagedModel(self._load(GPTModel, ranks, device), ranks)

    def load_bert(self) -> BertModel:
        """A whole BERT with its weights, in this process.

        Raises:
            CheckpointError: the checkpoint is damaged, or holds another model.
            UserError: it holds a GPT.
        """
        if self.config.bert is None:
            raise UserError(
                f"{self.checkpoint.folder} holds a GPT, which fills no [MASK]; tools/generate_text.py continues texts"
            )
        return self._load(partial(BertModel, bert=self.config.bert), ModelRanks.single(), torch.device("cpu"))

    def _load(self, build: Callable[..., Model], ranks: ModelRanks, device: torch.device) -> Model:
        folder = self.checkpoint.folder.parent
        checkpoint = load_checkpoint(folder, step=self.checkpoint.iteration, world=ranks.world)
        rows = self.config.model_vocab_size(self.tokenizer.vocab_size)
        (stage,) = pipeline_layout(self.config.model, self.config.parallel, rows).stage(ranks.pipeline.rank)
        model = build(
            self.config.model,
            stage=stage,
            vocab_size=rows,
            padded_vocab_size=-(-rows // ranks.tensor.size) * ranks.tensor.size,
            placement=Placement(
                group=ranks.tensor,
                sequence_parallel=False,
                dtype=self.config.optimizer.params_dtype,
                device=device,
            ),
        )
        checkpoint.load_into(model_tensors([model]), world=ranks.world, ignore=("optimizer.",))
        return model.eval()


def open_model(
    folder: str | Path,
    *,
    step: int | None = None,
    tokenizer_files: Mapping[str, str] | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> OpenedModel:
    """Read what a checkpoint says of its model, to use it over so many ranks; each rank does so for itself.

    Args:
        folder: the `--save` of the training.
        step: the iteration; None for the newest.
        tokenizer_files: by field of `TokenizerConfig`, paths that take the place of the copies in the checkpoint, or of
            those of the training where it keeps none.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: the model does not fit so many ranks, or a file of its tokenizer is not there.
        UserError: the tokenizer has another number of tokens than the model.
    """
    checkpoint = load_checkpoint(folder, step=step, world=CommGroup.single("world"))
    trained = checkpoint.config
    # The weights of a checkpoint have all their bits, also where the training computed with fewer.
    precision: Precision = "fp64" if trained.optimizer.precision == "fp64" else "fp32"
    config = replace(
        trained,
        model=_without_training(trained.model),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tensor_parallel_size,
            pipeline_model_parallel_size=pipeline_parallel_size,
            world_size=tensor_parallel_size * pipeline_parallel_size,
        ),
        data_parallel=DataParallelConfig(),
        optimizer=OptimizerConfig(lr=trained.optimizer.lr, precision=precision),
        tokenizer=_tokenizer_config(kept_in(trained.tokenizer, Path(folder) / TOKENIZER_FOLDER), tokenizer_files or {}),
    )
    config.validate(purpose="model", check_files=False)
    tokenizer = build_tokenizer(config.tokenizer)
    _check_vocabulary(config, tokenizer, checkpoint)
    return OpenedModel(checkpoint=checkpoint, config=config, tokenizer=tokenizer)


def _without_training(model: TransformerConfig) -> TransformerConfig:
    """The same function of the same weights; what only a training asks for, as recomputation, is as by default."""
    options = section_options("model", TransformerConfig)
    return TransformerConfig(**{option.field: getattr(model, option.field) for option in options if option.of_model})


def _tokenizer_config(trained: TokenizerConfig, files: Mapping[str, str]) -> TokenizerConfig:
    """The tokenizer of the training with its files at other paths.

    Raises:
        ConfigError: a file is not there, or the tokenizer has no such file.
    """
    config = replace(trained, **files)  # type: ignore[arg-type]
    if config.tokenizer_type not in SIZED_TYPES:  # what size its files must have is for the model to say
        config = replace(config, vocab_size=None)
    problems = section_problems(config)
    given = {flag_name(field) for field in files}
    for problem in config.file_problems():
        (flag,) = problem.flags
        if flag not in given:
            works = f"{flag} with the path that it has here"
            problem = replace(problem, rule=f"{problem.rule}; this is its path in the training", works=works)
        problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return config


def _check_vocabulary(config: MegatronConfig, tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """The tokenizer must be that of the model, whose own rows may be more than it has tokens."""
    embedding = checkpoint.tensors.get(weight_key(WORD_EMBEDDINGS))  # another model than a GPT has none
    rows = config.model_vocab_size(tokenizer.vocab_size)
    if embedding is None or (embedding.shape[0] == rows and tokenizer.vocab_size <= rows):
        return
    raise UserError(
        f"{config.tokenizer.shown}: the tokenizer has {counted(tokenizer.vocab_size, 'token')}, and "
        f"the model was trained with {embedding.shape[0]:,}; give the tokenizer of the training"
    )
