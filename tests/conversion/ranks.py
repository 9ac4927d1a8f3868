"""What ranks do, in a module that imports no other program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing import load_checkpoint, model_tensors, save_checkpoint
from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.core.parallel_state import build_parallel_state, grid_of_world
from megatron.core.tensor_parallel.placement import Placement
from megatron.model.bert_model import BertModel
from megatron.model.gpt_model import GPTModel


def through_ranks(rank: int, world_size: int, source: Path, target: Path) -> None:
    """Load a checkpoint into TP 2 x PP 2, and save what is in memory there."""
    state = build_parallel_state(grid_of_world(world_size, tensor=2, pipeline=2), rank=rank)
    checkpoint = load_checkpoint(source, world=state.world)
    config = MegatronConfig.from_dict(checkpoint.metadata["config"])
    (rows, _) = checkpoint.tensors["model.embedding.word_embeddings.weight"].shape
    stage = state.pipeline.rank
    part: dict[str, Any] = {
        "stage": StageLayout(
            stage=stage, chunk=0, layers=range(stage, stage + 1), has_embedding=stage == 0, has_output=stage == 1
        ),
        "vocab_size": rows,
        "padded_vocab_size": rows + rows % 2,
        "placement": Placement(
            group=state.tensor, sequence_parallel=False, dtype=torch.float32, device=torch.device("cpu")
        ),
    }
    model = GPTModel(config.model, **part) if config.bert is None else BertModel(config.model, config.bert, **part)
    checkpoint.load_into(model_tensors([model]), world=state.world)
    save_checkpoint(target, 7, model_tensors([model]), checkpoint.metadata, world=state.world)
