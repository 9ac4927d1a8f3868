"""What each layout of Megatron-LM's checkpoints is read into, and the names that are the same wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.bert import BertConfig
from megatron.config.transformer import TransformerConfig
from megatron.conversion.portable import LazyTensor, TrainingState

# The file that names the newest checkpoint in a folder, and its word for weights without a training.
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
# What a rank of the model has in its folder, in the layout `torch`: all, and apart what its distributed optimizer has.
RANK_FILE = "model_optim_rng.pt"
BUFFERS_FILE = "distrib_optim.pt"
# What an optimizer keeps of a parameter, by Megatron-LM's word in any layout and by our kind.
STATES = {
    "exp_avg": "optimizer.exp_avg",
    "exp_avg_sq": "optimizer.exp_avg_sq",
    "momentum_buffer": "optimizer.momentum",
    "param": "main",
    "fp32_param": "main",
}
# What helps where only the optimizer's state is wrong.
ADVICE = "--weights-only leaves the optimizer out"
# What is said of a file that can be read, but not understood.
NOT_THE_FORM = "what is in it has not the form that Megatron-LM gives it"


@dataclass(frozen=True, kw_only=True)
class MegatronContents:
    """A model as it was saved.

    Attributes:
        bert: of a BERT; None for a GPT.
        arguments: Megatron-LM's, by name.
        tensors: whole ones, as `model.<name>`, `optimizer.<kind>.<name>`, and `main.<name>` for the weights that the
            optimizer updates. The vocabulary has all rows that were saved.
        training: None without an optimizer.
    """

    config: TransformerConfig
    bert: BertConfig | None
    arguments: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    training: TrainingState | None


def iteration_folder(iteration: int) -> str:
    """The folder of a checkpoint."""
    return f"iter_{iteration:07d}"


def rank_folder(tensor: int, stage: int, *, pipeline: int) -> str:
    """The folder in it of a tensor-parallel rank of a stage, of so many."""
    return f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")


def rank_of(folder: str) -> tuple[int, int] | None:
    """The stage and the tensor-parallel rank in it that have a folder of this name; None for another name."""
    match = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3,}))?", folder)
    return (int(match[2] or 0), int(match[1])) if match else None
