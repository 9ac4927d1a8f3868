"""Pipeline schedules as data: what each stage computes, in which order.

A plan is one tuple of actions for each stage. Nothing here runs anything or knows a tensor, so a schedule can
be printed, drawn, checked for deadlock, simulated and replaced without touching the executor that walks it.

The schedules are those of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (arXiv 2104.04473, section 2.2), and Huang et al. 2019, "GPipe" (arXiv
1811.06965).
Letters: p stages, s the index of one of them, m micro-batches, v model chunks on each stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain, pairwise, product


class Kind(Enum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """Forward or backward of one chunk for one micro-batch. Prints as kind, chunk, micro-batch: ``F1.0``."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


StagePlan = tuple[Action, ...]
Plan = tuple[StagePlan, ...]


class PipelineDeadlock(ValueError):
    """A plan in which every unfinished stage waits for another one."""


def forward(chunk: int, microbatch: int) -> Action:
    """The forward of `chunk` for `microbatch`."""
    return Action(Kind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """The backward of `chunk` for `microbatch`."""
    return Action(Kind.BACKWARD, chunk, microbatch)


# --------------------------------------------------------------------------------------------------
# Schedules: the plan of one stage
# --------------------------------------------------------------------------------------------------


def gpipe(m: int) -> StagePlan:
    """All forwards, then all backwards: all `m` micro-batches are alive at once, on every stage."""
    return tuple(forward(0, i) for i in range(m)) + tuple(backward(0, i) for i in range(m))


def one_forward_one_backward(p: int, s: int, m: int) -> StagePlan:
    """1F1B (PipeDream-Flush): at most `p - s` micro-batches are alive on stage `s`, whatever `m` is.

    On one stage that is plain gradient accumulation: each micro-batch forward, then backward.
    """
    warmup = min(p - s - 1, m)
    forwards = [forward(0, i) for i in range(m)]
    backwards = [backward(0, i) for i in range(m)]
    return _warmup_steady_cooldown(forwards, backwards, warmup)


def interleaved(p: int, s: int, m: int, v: int, group_size: int) -> StagePlan:
    """Interleaved 1F1B: `v` chunks on each stage, which divides the pipeline's bubble by `v`.

    Micro-batches go in groups (of p in the paper): a group passes the first chunk of all stages, then the
    second chunk of all stages, and so on; backwards take chunks in reverse. See Note [Micro-batch groups].
    """
    groups = microbatch_groups(p, m, group_size)
    forwards = [forward(c, i) for group in groups for c, i in product(range(v), group)]
    backwards = [backward(c, i) for group in groups for c, i in product(reversed(range(v)), group)]
    # The first backward follows the last chunk's first forward, which comes after v - 1 chunks of the whole
    # first group. A stage before the last one runs two more slots ahead for each hop: one for the activation
    # on its way to the end, one for the gradient on its way back.
    warmup = min((v - 1) * len(groups[0]) + 2 * (p - s - 1), m * v)
    return _warmup_steady_cooldown(forwards, backwards, warmup)


def microbatch_groups(p: int, m: int, group_size: int) -> list[range]:
    """Splits `m` micro-batches into runs of nearly equal length, the longer ones first: at least `p` each
    (or `m`, if that is less), and at most `group_size` each unless that is impossible.

    Note [Micro-batch groups]
    -------------------------
    A group shorter than p cannot keep p stages busy: when its last micro-batch enters chunk 0, its first one
    has not left the last stage yet, so chunk 1 has nothing to do. With the textbook split (groups of p, then
    the remainder) that is a bubble at best. At worst it is a deadlock, because the backwards that a stage
    puts before a late forward wait for the very same micro-batches: 4 stages, 3 chunks, 5 micro-batches lock
    up. So the remainder is spread over all groups. The longest group comes first because its length sets the
    warm-up, into which every later group then fits. For every m >= p the makespan is the ideal one, and for
    every m and group size there is no deadlock; tests/pipeline/test_simulate.py holds both.
    """
    count = max(1, min(-(-m // group_size), m // p))
    length, longer = divmod(m, count)
    ends = [length * (k + 1) + min(k + 1, longer) for k in range(count)]
    return [range(start, end) for start, end in pairwise([0, *ends])]


def forward_only(p: int, s: int, m: int, v: int, group_size: int) -> StagePlan:
    """The forwards of `interleaved` (with one chunk: micro-batch after micro-batch), for validation."""
    return tuple(action for action in interleaved(p, s, m, v, group_size) if action.kind is Kind.FORWARD)


def _warmup_steady_cooldown(forwards: list[Action], backwards: list[Action], warmup: int) -> StagePlan:
    """`warmup` forwards, then forward and backward in turn, then the remaining backwards."""
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *chain.from_iterable(pairs), *backwards[steady:])


# --------------------------------------------------------------------------------------------------
# Whole plans
# --------------------------------------------------------------------------------------------------

# The plan of stage s as a function of (p, s, m, v, group_size). A further schedule is one more entry, and its name one
# more value of `--pipeline-schedule`.
SCHEDULES: Mapping[str, Callable[[int, int, int, int, int], StagePlan]] = {
    "1f1b": lambda p, s, m, v, g: interleaved(p, s, m, v, g) if v > 1 else one_forward_one_backward(p, s, m),
    "gpipe": lambda p, s, m, v, g: gpipe(m),
    "forward_only": forward_only,
}


@lru_cache(maxsize=64)
def build_plan(
    schedule: str,
    *,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> Plan:
    """The plan of every stage.

    Args:
        schedule: one of `SCHEDULES`: "1f1b" (interleaved with several chunks), "gpipe", or "forward_only" for
            validation.
        num_chunks: model chunks on each stage (virtual stages); more than one asks for a schedule that interleaves.
        group_size: micro-batches that pass one chunk before the next chunk's turn, at least as many as stages; None:
            as many as stages.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    group_size = p if group_size is None else group_size
    assert min(p, m, v) >= 1, (p, m, v)
    assert v == 1 or schedule != "gpipe", "GPipe does not interleave"
    assert group_size >= p, (group_size, p)
    return tuple(SCHEDULES[schedule](p, s, m, v, group_size) for s in range(p))


def producer(stage: int, action: Action, num_stages: int, num_chunks: int) -> tuple[int, Action] | None:
    """Where the input of `action` on `stage` is computed: by the chunk before it in the model for a forward,
    after it for a backward. None for the first chunk's forward and the last chunk's backward."""
    return _chunk_away(stage, action, num_stages, num_chunks, -1 if action.kind is Kind.FORWARD else 1)


def consumer(stage: int, action: Action, num_stages: int, num_chunks: int) -> tuple[int, Action] | None:
    """Where the output of `action` on `stage` goes: the inverse of `producer`."""
    return _chunk_away(stage, action, num_stages, num_chunks, 1 if action.kind is Kind.FORWARD else -1)


def _chunk_away(
    stage: int, action: Action, num_stages: int, num_chunks: int, distance: int
) -> tuple[int, Action] | None:
    """The same micro-batch, `distance` chunks on. In the order of the model, chunk c of stage s is c p + s."""
    position = action.chunk * num_stages + stage + distance
    if not 0 <= position < num_stages * num_chunks:
        return None
    return position % num_stages, Action(action.kind, position // num_stages, action.microbatch)


def dependencies(stage: int, action: Action, num_stages: int, num_chunks: int) -> list[tuple[int, Action]]:
    """What must be done before `action` can start on `stage`, besides what its own plan puts before it."""
    source = producer(stage, action, num_stages, num_chunks)
    required = [] if source is None else [source]
    if action.kind is Kind.BACKWARD:
        required.append((stage, forward(action.chunk, action.microbatch)))
    return required


def execution_order(plans: Plan, num_chunks: int) -> Iterator[tuple[int, Action]]:
    """All actions of all stages in an order in which they can run: each after all that it depends on.

    Raises:
        PipelineDeadlock: no stage that has something left can go on.
    """
    done: set[tuple[int, Action]] = set()
    position = [0] * len(plans)
    moved = True
    while moved:
        moved = False
        for stage, plan in enumerate(plans):
            while position[stage] < len(plan):
                action = plan[position[stage]]
                if not done.issuperset(dependencies(stage, action, len(plans), num_chunks)):
                    break
                done.add((stage, action))
                position[stage] += 1
                moved = True
                yield stage, action
    stuck = [(s, plan[position[s]]) for s, plan in enumerate(plans) if position[s] < len(plan)]
    if stuck:
        raise PipelineDeadlock("deadlock: " + "; ".join(_waits(s, a, plans, num_chunks, done) for s, a in stuck))


def _waits(stage: int, action: Action, plans: Plan, num_chunks: int, done: set[tuple[int, Action]]) -> str:
    missing = [d for d in dependencies(stage, action, len(plans), num_chunks) if d not in done]
    return f"stage {stage}, action {action} waits for " + " and ".join(f"{a} of stage {s}" for s, a in missing)


def check_plan(plans: Plan, *, num_microbatches: int, num_chunks: int = 1, forward_only: bool = False) -> None:
    """Checks that `plans` compute each chunk of each micro-batch exactly once, and can run to the end.

    A backward before its own forward is reported as a deadlock, which it is.

    Raises:
        ValueError: an action is missing, superfluous or repeated.
        PipelineDeadlock: stages wait for each other.
    """
    kinds = [Kind.FORWARD] if forward_only else [Kind.FORWARD, Kind.BACKWARD]
    wanted = {Action(*parts) for parts in product(kinds, range(num_chunks), range(num_microbatches))}
    for stage, plan in enumerate(plans):
        given = Counter(plan)
        faults = {
            "missing": wanted - given.keys(),
            "not of this model or batch": given.keys() - wanted,
            "more than once": {action for action, count in given.items() if count > 1},
        }
        for fault, actions in faults.items():
            if actions:
                raise ValueError(f"plan of stage {stage}: {fault}: {', '.join(sorted(map(str, actions)))}")
    for _ in execution_order(plans, num_chunks):
        pass
