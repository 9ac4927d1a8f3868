"""An event simulator of pipeline plans: how long a step takes, who waits, how many micro-batches are alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.pipeline_parallel.schedule_plan import (
    Action,
    Kind,
    Plan,
    StagePlan,
    dependencies,
    execution_order,
)

Duration = Callable[[int, Action], float]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One action with the time at which it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What each stage does at which time."""

    stages: tuple[tuple[Event, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the first action's start to the last one's end."""
        return max(event.end for events in self.stages for event in events)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each stage computes."""
        return tuple(sum(event.end - event.start for event in events) for events in self.stages)

    @property
    def bubble_fraction(self) -> float:
        """Waiting time of the busiest stage over its computing time, as in Narayanan et al. 2021, section
        2.2: (p - 1) / m for 1F1B with equal stages."""
        return self.makespan / max(self.busy) - 1


def uniform(forward_time: float = 1, backward_time: float = 2) -> Duration:
    """Each chunk of each stage takes the same time."""
    times = {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time}
    return lambda stage, action: times[action.kind]


def simulate(
    plans: Plan, *, num_chunks: int = 1, duration: Duration | None = None, transfer_time: float = 0
) -> Timeline:
    """Runs `plans` in time: an action starts when its stage is free and its inputs are there.

    Args:
        duration: time of an action on a stage; None: 1 for a forward, 2 for a backward.
        transfer_time: from the end of an action until another stage has its result; overlaps with computing.

    Raises:
        PipelineDeadlock: stages wait for each other.
    """
    duration = duration or uniform()
    events: list[list[Event]] = [[] for _ in plans]
    end: dict[tuple[int, Action], float] = {}
    for stage, action in execution_order(plans, num_chunks):
        inputs = dependencies(stage, action, len(plans), num_chunks)
        arrivals = [end[source] + (0 if source[0] == stage else transfer_time) for source in inputs]
        start = max([events[stage][-1].end if events[stage] else 0, *arrivals])
        end[stage, action] = start + duration(stage, action)
        events[stage].append(Event(action=action, start=start, end=end[stage, action]))
    return Timeline(stages=tuple(map(tuple, events)))


def peak_live(plan: StagePlan) -> int:
    """The most (chunk, micro-batch) pairs of one stage that are between their forward and their backward."""
    live = peak = 0
    for action in plan:
        live += 1 if action.kind is Kind.FORWARD else -1
        peak = max(peak, live)
    return peak


def draw(plans: Plan, *, num_chunks: int = 1, forward_time: int = 1, backward_time: int = 2) -> str:
    """The plans as text, a line for each stage, as in figures 3 and 4 of Narayanan et al. 2021.

    Time goes from left to right. A cell is as long as its action (times are whole numbers), blanks are the
    bubble. With one chunk the chunk number is left out.
    """
    timeline = simulate(plans, num_chunks=num_chunks, duration=uniform(forward_time, backward_time))

    def label(action: Action) -> str:
        return str(action) if num_chunks > 1 else f"{action.kind.value}{action.microbatch}"

    width = 1 + max(len(label(action)) for plan in plans for action in plan)
    lines = []
    for stage, events in enumerate(timeline.stages):
        line = ""
        for event in events:
            cell = label(event.action).ljust(round(event.end - event.start) * width - 1, "-")
            line = line.ljust(round(event.start) * width) + cell + " "
        line = line.ljust(round(timeline.makespan) * width)
        lines.append(f"stage {stage:<2} |{line}| alive {peak_live(plans[stage])}")
    lines.append(f"makespan {timeline.makespan:g}, bubble {timeline.bubble_fraction:.1%}")
    return "\n".join(lines)
