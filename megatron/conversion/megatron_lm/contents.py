"""What each layout of Megatron-LM's checkpoints is read into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.transformer import TransformerConfig
from megatron.conversion.portable import LazyTensor, TrainingState

# The file that names the newest checkpoint in a folder, and its word for weights without a training.
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
# What is said of a file that can be read, but not understood.
NOT_THE_FORM = "what is in it has not the form that Megatron-LM gives it"


@dataclass(frozen=True, kw_only=True)
class MegatronContents:
    """A model as it was saved.

    Attributes:
        arguments: Megatron-LM's, by name.
        tensors: whole ones, as `model.<name>`, `optimizer.<kind>.<name>`, and `main.<name>` for the weights that the
            optimizer updates. The vocabulary has all rows that were saved.
        training: None without an optimizer.
    """

    config: TransformerConfig
    arguments: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    training: TrainingState | None
