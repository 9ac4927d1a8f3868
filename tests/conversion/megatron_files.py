"""Checkpoints that Megatron-LM itself has written, and changes to them."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.conversion.megatron_lm.pickles import StandIn, read_torch_file
from megatron.conversion.portable import LazyTensor, PortableModel

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "megatron_checkpoints"
OUTPUTS = Path(__file__).parents[1] / "fixtures" / "models"
FILE = "model_optim_rng.pt"


def arrays(path: Path) -> dict[str, Tensor]:
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def read_all(model: PortableModel) -> dict[str, Tensor]:
    """Every tensor of a model, of the shape and type that were said of it."""
    tensors = {}
    for key, lazy in model.tensors.items():
        tensor = lazy.read()
        assert (tuple(tensor.shape), tensor.dtype) == (lazy.shape, lazy.dtype), key
        assert tensor.is_contiguous(), key
        tensors[key] = tensor
    return tensors


def weights(model: PortableModel) -> dict[str, Tensor]:
    return {key.removeprefix("model."): tensor for key, tensor in read_all(model).items() if key.startswith("model.")}


def rank_file(name: str, rank: str = "mp_rank_00") -> Path:
    """The file of a rank in the one checkpoint of a folder."""
    (path,) = (CHECKPOINTS / name).glob(f"iter_*/{rank}/{FILE}")
    return path


def contents(path: Path) -> Any:
    """What is in a file, as its writer could save it again: tensors, and a namespace of the plain arguments."""
    return _plain(read_torch_file(path))


def _plain(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.read()
    if isinstance(value, StandIn):
        return argparse.Namespace(**{name: _plain(item) for name, item in value.fields.items()})
    if isinstance(value, Mapping):
        return OrderedDict((_plain(key), _plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value


def changed(name: str, target: Path, change: Callable[[str, Any], None]) -> Path:
    """A copy of a checkpoint in the `torch` layout, with every rank's file changed; its folder.

    Args:
        change: is given the name of the rank's folder and what its file holds.
    """
    (source,) = (CHECKPOINTS / name).glob("iter_*")
    for path in source.glob("*/*.pt"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        state = contents(path)
        if path.name == FILE:
            change(path.parent.name, state)
        torch.save(state, copy)
    return target
