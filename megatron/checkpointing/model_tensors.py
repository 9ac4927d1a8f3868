"""The weights of a model as a checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from megatron.core.shard import NamedTensor, shard_of


def model_tensors(modules: Iterable[nn.Module]) -> Iterator[NamedTensor]:
    """The parameters of this rank's modules, each under `model.` and its global name."""
    for module in modules:
        for parameter in module.parameters():
            shard = shard_of(parameter)
            yield NamedTensor(key=f"model.{shard.name}", tensor=parameter.data, shard=shard)
