"""The weights of a model as a checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from megatron.core.shard import NamedTensor, shard_of


def model_tensors(
    modules: Iterable[nn.Module], main_parameters: Mapping[nn.Parameter, Tensor] | None = None
) -> Iterator[NamedTensor]:
    """The weights of this rank's modules, each under `model.` and its global name.

    Args:
        main_parameters: a training's, in more bits than the model computes with: they are the weights, and the
            parameters their rounding. Parameters that are not among them, the frozen ones, are weights themselves.
    """
    main = {} if main_parameters is None else main_parameters
    for module in modules:
        for parameter in module.parameters():
            shard = shard_of(parameter)
            yield NamedTensor(key=f"model.{shard.name}", tensor=main.get(parameter, parameter.data), shard=shard)
