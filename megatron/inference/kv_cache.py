"""Keys and values of the tokens so far, so that a new token costs one token and not the whole text again."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.model.attention import local_heads
from megatron.model.gpt_model import GPTModel


class KeyValueCache:
    """What a model, or this rank's part of one, remembers of a batch of sequences; a `KeyValueStore`.

    All sequences have a key and a value in each slot. Those of different lengths stand so that they end together, with
    padding before the shorter ones, which nothing may look at: it is a document of its own.

    Args:
        slots: tokens of a sequence, padding counted, that there is room for. All memory is taken at once.
    """

    def __init__(self, model: GPTModel, *, batch_size: int, slots: int) -> None:
        config, placement = model.config, model.placement
        groups = local_heads(config, placement.group).groups
        shape = (batch_size, groups, slots, config.head_dim)

        def room() -> dict[int, Tensor]:
            """[b, g/t, slots, d] for each layer, as attention reads them."""
            return {
                layer: torch.empty(shape, dtype=placement.dtype, device=placement.device)
                for layer in model.stage.layers
            }

        self.slots = slots
        self._length = 0
        self._keys, self._values = room(), room()

    @property
    def length(self) -> int:
        return self._length

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        end = self._length + key.shape[0]
        assert end <= self.slots, f"{end} tokens in {self.slots} slots"
        return self._written(self._keys[layer], key, end), self._written(self._values[layer], value, end)

    def _written(self, room: Tensor, new: Tensor, end: int) -> Tensor:
        """Everything up to `end`, [s, b, g/t, d], once `new` [q, b, g/t, d] stands there."""
        room[:, :, self._length : end] = new.permute(1, 2, 0, 3)
        return room[:, :, :end].permute(2, 0, 1, 3)

    def advance(self, tokens: int) -> None:
        """All layers have appended so many."""
        self._length += tokens

    def clear(self) -> None:
        """Forget all tokens; the memory stays."""
        self._length = 0
