"""The simulator gives the closed forms of the papers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatron.core.pipeline_parallel.schedule_plan import (
    Action,
    Kind,
    PipelineDeadlock,
    backward,
    build_plan,
    forward,
)
from megatron.core.pipeline_parallel.simulate import draw, peak_live, simulate, uniform

# (forward, backward) times, whole numbers so that sums are exact
TIMES = [(1, 2), (1, 1), (3, 5), (2, 1)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_makespan_is_that_of_the_paper(num_stages: int, schedule: str) -> None:
    """(m + p - 1)(tf + tb), for 1F1B and GPipe alike, also with fewer micro-batches than stages."""
    for num in range(1, 20):
        plans = build_plan(schedule, num_stages=num_stages, num_microbatches=num)
        for forward_time, backward_time in TIMES:
            timeline = simulate(plans, duration=uniform(forward_time, backward_time))
            assert timeline.makespan == (num + num_stages - 1) * (forward_time + backward_time)
            assert timeline.busy == (num * (forward_time + backward_time),) * num_stages
            assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / num)


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("num_stages", range(2, 6))
def test_interleaving_divides_the_bubble_by_the_chunks(num_stages: int, num_chunks: int) -> None:
    """(m v + p - 1)(tf + tb) with the times of one chunk, which are 1 / v of a stage's: for every number of
    micro-batches from p on, also those that p does not divide, and every group size."""
    for num in range(num_stages, 3 * num_stages + 2):
        for group_size in range(num_stages, 2 * num_stages + 2):
            plans = build_plan(
                "1f1b",
                num_stages=num_stages,
                num_microbatches=num,
                num_chunks=num_chunks,
                group_size=group_size,
            )
            for forward_time, backward_time in TIMES[:2]:
                timeline = simulate(plans, num_chunks=num_chunks, duration=uniform(forward_time, backward_time))
                slots = num * num_chunks + num_stages - 1
                assert timeline.makespan == slots * (forward_time + backward_time), (num, group_size)
                assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / (num * num_chunks))


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_1f1b_keeps_as_many_micro_batches_alive_as_stages_follow(num_stages: int) -> None:
    for num in range(1, 20):
        for stage, plan in enumerate(build_plan("1f1b", num_stages=num_stages, num_microbatches=num)):
            assert peak_live(plan) == min(num_stages - stage, num)
        assert all(peak_live(plan) == num for plan in build_plan("gpipe", num_stages=num_stages, num_microbatches=num))


@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize("num_stages", range(2, 6))
def test_interleaving_pays_with_chunks_alive(num_stages: int, num_chunks: int) -> None:
    """The warm-up and one more: (v - 1) p + 2 (p - s - 1) + 1 chunks, if the batch is large enough."""
    num = 4 * num_stages
    plans = build_plan("1f1b", num_stages=num_stages, num_microbatches=num, num_chunks=num_chunks)
    for stage, plan in enumerate(plans):
        assert peak_live(plan) == (num_chunks - 1) * num_stages + 2 * (num_stages - stage - 1) + 1


def test_a_slow_stage_sets_the_pace() -> None:
    """Stage 2 of 4 takes twice as long: the others wait for it, and its own time is the floor."""

    def duration(stage: int, action: Action) -> float:
        return (2 if stage == 2 else 1) * (1 if action.kind is Kind.FORWARD else 2)

    timeline = simulate(build_plan("1f1b", num_stages=4, num_microbatches=32), duration=duration)
    assert timeline.busy == (96, 96, 192, 96)
    assert 192 < timeline.makespan <= 192 + 3 * 3 + 3


def test_messages_that_take_time_show_in_the_makespan_and_start_no_action_early() -> None:
    plans = build_plan("1f1b", num_stages=3, num_microbatches=1)
    # One micro-batch crosses two borders there and two back.
    assert simulate(plans, transfer_time=0.5).makespan == simulate(plans).makespan + 4 * 0.5


def test_every_action_starts_after_its_inputs_and_a_stage_does_one_thing_at_a_time() -> None:
    plans = build_plan("1f1b", num_stages=3, num_microbatches=5, num_chunks=2)
    timeline = simulate(plans, num_chunks=2)
    end = {(stage, event.action): event.end for stage, events in enumerate(timeline.stages) for event in events}
    for stage, events in enumerate(timeline.stages):
        for before, after in pairwise(events):
            assert before.end <= after.start
        for event in events:
            if event.action.kind is Kind.FORWARD and stage > 0:
                assert end[stage - 1, event.action] <= event.start
            if event.action.kind is Kind.BACKWARD and stage < 2:
                assert end[stage + 1, event.action] <= event.start


def test_a_deadlock_is_reported_not_simulated() -> None:
    stuck = ((forward(0, 0), backward(0, 0)), (backward(0, 0), forward(0, 0)))
    with pytest.raises(PipelineDeadlock, match=r"stage 0, action B0\.0 waits for B0\.0 of stage 1"):
        simulate(stuck)


def test_a_plan_can_be_looked_at() -> None:
    picture = draw(build_plan("1f1b", num_stages=2, num_microbatches=3))
    assert picture.splitlines() == [
        "stage 0  |F0 F1       B0--- F2 B1---    B2--- | alive 2",
        "stage 1  |   F0 B0--- F1 B1--- F2 B2---       | alive 1",
        "makespan 12, bubble 33.3%",
    ]


def test_a_plan_with_chunks_can_be_looked_at() -> None:
    picture = draw(build_plan("1f1b", num_stages=2, num_microbatches=2, num_chunks=2), num_chunks=2, backward_time=1)
    assert picture.splitlines() == [
        "stage 0  |F0.0 F0.1 F1.0 F1.1      B1.0      B1.1 B0.0 B0.1 | alive 4",
        "stage 1  |     F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1      | alive 3",
        "makespan 10, bubble 25.0%",
    ]
