"""The weights of a model as a checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from megatron.core.shard import NamedTensor, shard_of


def model_tensors(modules: Iterable[nn.Module], *, frozen_only: bool = False) -> Iterator[NamedTensor]:
    """The weights of this rank's modules, each under `model.` and its global name.

    Args:
        frozen_only: leave out the trainable ones: a training has these itself, in more bits than the model computes
            with, and maybe a slice of them only.
    """
    for module in modules:
        for parameter in module.parameters():
            if not (frozen_only and parameter.requires_grad):
                shard = shard_of(parameter)
                yield NamedTensor(key=f"model.{shard.name}", tensor=parameter.data, shard=shard)
