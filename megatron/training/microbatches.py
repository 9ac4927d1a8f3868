"""Size of the global batch, constant or ramping up, as a function of the samples consumed.

Nothing is remembered between steps: a resumed run finds its batch size from its consumed samples alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.problems import UserError


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
    """A constant global batch size, or one that grows linearly to it.

    Attributes:
        rampup: (first size, increment, samples over which to grow), as `--rampup-batch-size` gives them.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    rampup: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a size does not divide; with flag, value, rule, and what works.
        """
        for flag, value in (
            ("--global-batch-size", self.global_batch_size),
            ("--micro-batch-size", self.micro_batch_size),
            ("data-parallel size", self.data_parallel_size),
        ):
            if value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if self.rampup is not None:
            self._check_rampup(*self.rampup)
        else:
            self._check_divides("--global-batch-size", self.global_batch_size)

    def _check_rampup(self, start: int, increment: int, samples: int) -> None:
        flag = f"--rampup-batch-size {start} {increment} {samples}"
        if start < 1 or increment < 1 or samples < 0:
            raise UserError(f"{flag}: first size and increment must be at least 1, samples at least 0")
        growth = self.global_batch_size - start
        if growth <= 0:
            raise UserError(
                f"{flag}: the first size must be less than --global-batch-size {self.global_batch_size}; "
                f"leave the flag out for a constant size"
            )
        if growth % increment:
            raise UserError(
                f"{flag}: the increment must divide the growth from {start} to --global-batch-size "
                f"{self.global_batch_size}, {growth}; {_divisors_near(growth, increment)} do"
            )
        self._check_divides(f"{flag}: first size", start)
        if increment % self._unit:
            raise UserError(
                f"{flag}: each size on the way must be divisible by micro-batch size × data-parallel size = "
                f"{self.micro_batch_size} × {self.data_parallel_size} = {self._unit}, and so must the "
                f"increment {increment}"
            )

    def _check_divides(self, flag: str, size: int) -> None:
        below = size // self._unit * self._unit
        if size % self._unit:
            works = f"{below} or {below + self._unit}" if below else f"{self._unit}"
            raise UserError(
                f"{flag} {size}: must be divisible by micro-batch size × data-parallel size = "
                f"{self.micro_batch_size} × {self.data_parallel_size} = {self._unit}; the nearest that "
                f"works: {works}"
            )

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
        if consumed_samples > samples or samples == 0:
            return self.global_batch_size
        samples_per_increment = samples / ((self.global_batch_size - start) // increment)
        return min(start + int(consumed_samples / samples_per_increment) * increment, self.global_batch_size)

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by that many iterations from the start of training."""
        consumed = done = 0
        while done < iterations and self._growing(consumed):
            consumed += self.at(consumed).global_batch_size
            done += 1
        return consumed + (iterations - done) * self.at(consumed).global_batch_size

    def iterations_for(self, samples: int) -> int:
        """Whole iterations from the start of training that fit into that many samples."""
        consumed = done = 0
        while self._growing(consumed):
            step = self.at(consumed).global_batch_size
            if consumed + step > samples:
                return done
            consumed += step
            done += 1
        return done + (samples - consumed) // self.at(consumed).global_batch_size

    def _growing(self, consumed_samples: int) -> bool:
        return self.rampup is not None and consumed_samples <= self.rampup[2]


def _divisors_near(number: int, wanted: int) -> str:
    """The divisors of `number` next below and above `wanted`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = max(d for d in divisors if d <= wanted)
    above = min((d for d in divisors if d >= wanted), default=number)
    return f"{below} and {above}"
