"""A group of ranks that communicate, as a value that is passed to whatever needs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class CommGroup:
    """The ranks of one group along one axis, seen from one of its members.

    Attributes:
        name: the axis, for messages: "tensor", "pipeline", "data", …
        ranks: the global ranks of the members, in the order of their rank in the group.
        rank: the position of this process in `ranks`.
        process_group: the communicator; None in a group of one, which needs no `torch.distributed`.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < len(self.ranks), f"rank {self.rank} is not in group {self.name} {self.ranks}"
        assert len(self.ranks) == 1 or self.process_group is not None, f"group {self.name} has no communicator"

    @classmethod
    def single(cls, name: str = "single", global_rank: int = 0) -> CommGroup:
        """A group of one rank: all collectives over it are the identity."""
        return cls(name=name, ranks=(global_rank,), rank=0)

    def leave(self) -> None:
        """Let go of the communicator, which nothing else may hold: it can then end while Python still runs."""
        object.__setattr__(self, "process_group", None)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1
