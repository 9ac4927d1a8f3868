"""How far a run has come: all the state of the loop itself, a few numbers that a checkpoint keeps as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        iteration: iterations done, skipped ones included.
        consumed_train_samples, consumed_valid_samples: the position in the data.
        train_blocks: the numbers of samples that were requested of the training data: one at the start, and one more
            for each resume that asked for more. The order of the data depends on them.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    train_blocks: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Progress:
        """Raises TypeError or ValueError for what is no such state."""
        progress = cls(**state)
        for count in (*(vars(progress) | {"train_blocks": 0}).values(), *progress.train_blocks):
            if type(count) is not int or count < 0:
                raise ValueError(f"{count!r:.80} is no count")
        return progress
