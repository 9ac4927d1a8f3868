"""Size of the global batch, constant or ramping up, as a function of the samples consumed.

Nothing is remembered between steps: a resumed run finds its batch size from its consumed samples alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """The batch of one iteration.

    Attributes:
        global_batch_size: samples over all ranks.
        num_microbatches: of each data-parallel rank.
    """

    global_batch_size: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class BatchSizeSchedule:
    """A constant global batch size, or one that grows linearly to it. All sizes are multiples of the samples that the
    replicas take at a time, as the rules of a configuration demand.

    Attributes:
        rampup: (first size, increment, samples over which to grow), as `--rampup-batch-size` gives them.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    rampup: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        assert self.global_batch_size % self._unit == 0, (self.global_batch_size, self._unit)
        if self.rampup is not None:
            start, increment, _ = self.rampup
            assert start % self._unit == increment % self._unit == 0, (self.rampup, self._unit)
            assert 0 < start < self.global_batch_size, (self.rampup, self.global_batch_size)
            assert (self.global_batch_size - start) % increment == 0, (self.rampup, self.global_batch_size)

    @property
    def _unit(self) -> int:
        return self.micro_batch_size * self.data_parallel_size

    def at(self, consumed_samples: int) -> BatchSize:
        """The batch of the iteration that comes after `consumed_samples` samples."""
        size = self._scheduled(consumed_samples)
        return BatchSize(global_batch_size=size, num_microbatches=size // self._unit)

    def _scheduled(self, consumed_samples: int) -> int:
        if self.rampup is None:
            return self.global_batch_size
        start, increment, samples = self.rampup
        if consumed_samples > samples:
            return self.global_batch_size
        samples_per_increment = samples / ((self.global_batch_size - start) // increment)
        return min(start + int(consumed_samples / samples_per_increment) * increment, self.global_batch_size)

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by that many iterations from the start of training."""
        consumed = 0
        for size, steps in self._growing():
            if iterations <= steps:
                return consumed + iterations * size
            consumed += steps * size
            iterations -= steps
        return consumed + iterations * self.global_batch_size

    def iterations_for(self, samples: int) -> int:
        """Whole iterations from the start of training that fit into that many samples."""
        done = 0
        for size, steps in self._growing():
            fitting = min(steps, samples // size)
            done += fitting
            samples -= fitting * size
            if fitting < steps:
                return done
        return done + samples // self.global_batch_size

    def _growing(self) -> Iterator[tuple[int, int]]:
        """Each batch size on the way to the full one, and how many iterations have it."""
        consumed, size = 0, self._scheduled(0)
        while self.rampup is not None and size < self.global_batch_size:

            def has_grown(steps: int, consumed: int = consumed, size: int = size) -> bool:
                return self._scheduled(consumed + steps * size) > size

            most = self.rampup[2] // size + 1
            steps = 1 + bisect.bisect_left(range(1, most + 1), True, key=has_grown)
            yield size, steps
            consumed += steps * size
            size = self._scheduled(consumed)
