"""The weights of a model as a checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from megatron.core.shard import NamedTensor, shard_of

_WEIGHTS = "model."


def weight_key(name: str) -> str:
    """The key of the weight that has this global name in a model."""
    return _WEIGHTS + name


def is_weight(key: str) -> bool:
    """Whether this is the key of a weight, and not of a state that a training keeps beside it."""
    return key.startswith(_WEIGHTS)


def model_tensors(modules: Iterable[nn.Module], *, frozen_only: bool = False) -> Iterator[NamedTensor]:
    """The weights of this rank's modules, each under the key of its global name.

    Args:
        frozen_only: leave out the trainable ones: a training has these itself, in more bits than the model computes
            with, and maybe a slice of them only.
    """
    for module in modules:
        for parameter in module.parameters():
            if not (frozen_only and parameter.requires_grad):
                shard = shard_of(parameter)
                yield NamedTensor(key=weight_key(shard.name), tensor=parameter.data, shard=shard)
