"""Plans say what the papers' figures show, compute everything once, and can run to the end."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args, get_type_hints

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import channel_messages
from megatron.core.pipeline_parallel.schedule_plan import (
    SCHEDULES,
    Action,
    Kind,
    PipelineDeadlock,
    Plan,
    StagePlan,
    backward,
    build_plan,
    check_plan,
    consumer,
    forward,
    microbatch_groups,
    producer,
)
from megatron.core.rank_grid import stage_channels


def words(plan: StagePlan) -> str:
    return " ".join(map(str, plan))


def test_1f1b_is_figure_4_of_the_paper() -> None:
    """Narayanan et al. 2021, figure 4 (top), the first micro-batches of each of 4 stages."""
    plans = build_plan("1f1b", num_stages=4, num_microbatches=8)
    assert words(plans[0]).startswith("F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2")
    assert words(plans[1]).startswith("F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2")
    assert words(plans[2]).startswith("F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2")
    assert words(plans[3]).startswith("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2")
    assert words(plans[0]).endswith("F0.7 B0.4 B0.5 B0.6 B0.7")


def test_interleaved_is_figure_4_of_the_paper() -> None:
    """The same, bottom: device 1 runs 1-4 through both chunks, then 5-7 before its first backward."""
    plans = build_plan("1f1b", num_stages=4, num_microbatches=8, num_chunks=2)
    assert words(plans[0]).startswith(
        "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 F0.4 F0.5 F0.6 B1.0 F0.7 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B0.0"
    )
    assert words(plans[3]).startswith("F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F0.4 B0.0")


def test_gpipe_runs_all_forwards_first() -> None:
    plans = build_plan("gpipe", num_stages=2, num_microbatches=3)
    assert {words(plan) for plan in plans} == {"F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"}


def test_one_stage_accumulates_gradients_one_micro_batch_at_a_time() -> None:
    assert words(build_plan("1f1b", num_stages=1, num_microbatches=3)[0]) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


def test_forward_only_has_no_backward() -> None:
    plans = build_plan("forward_only", num_stages=2, num_microbatches=3, num_chunks=2)
    assert {words(plan) for plan in plans} == {"F0.0 F0.1 F0.2 F1.0 F1.1 F1.2"}


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_stages", range(1, 7))
def test_every_plan_computes_everything_once_without_deadlock(num_stages: int, num_chunks: int) -> None:
    for num in range(1, 20):
        for group_size in (num_stages, num_stages + 1, 2 * num_stages + 1):
            for schedule in ("1f1b", "forward_only", *(["gpipe"] if num_chunks == 1 else [])):
                plans = build_plan(
                    schedule,
                    num_stages=num_stages,
                    num_microbatches=num,
                    num_chunks=num_chunks,
                    group_size=group_size,
                )
                check_plan(
                    plans,
                    num_microbatches=num,
                    num_chunks=num_chunks,
                    forward_only=schedule == "forward_only",
                )


# ---------------------------------------------------------------------------------------------------
# The check finds what is wrong
# ---------------------------------------------------------------------------------------------------


def edited(stage: int, plan: StagePlan) -> Plan:
    plans = list(build_plan("1f1b", num_stages=2, num_microbatches=2))
    plans[stage] = plan
    return tuple(plans)


@pytest.mark.parametrize(
    "plan, complaint",
    [
        ((forward(0, 0), backward(0, 0), forward(0, 1)), "plan of stage 1: missing: B0.1"),
        (
            (forward(0, 0), forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)),
            "plan of stage 1: more than once: F0.0",
        ),
        (
            (forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1), forward(1, 0)),
            "plan of stage 1: not of this model or batch: F1.0",
        ),
    ],
)
def test_an_action_too_few_or_too_many_is_named(plan: StagePlan, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_plan(edited(1, plan), num_microbatches=2)


def test_a_backward_before_its_forward_is_a_deadlock() -> None:
    plan = (backward(0, 0), forward(0, 0), forward(0, 1), backward(0, 1))
    with pytest.raises(PipelineDeadlock, match=r"stage 1, action B0\.0 waits for F0\.0 of stage 1"):
        check_plan(edited(1, plan), num_microbatches=2)


def test_stages_that_wait_for_each_other_are_named() -> None:
    """Stage 0 wants a gradient before it sends the second micro-batch, stage 1 the other way round."""
    first = (forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1))
    second = (forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1))
    with pytest.raises(PipelineDeadlock) as deadlock:
        check_plan((first, second), num_microbatches=2)
    assert str(deadlock.value) == (
        "deadlock: stage 0, action B0.0 waits for B0.0 of stage 1; stage 1, action F0.1 waits for F0.1 of stage 0"
    )


def test_the_textbook_groups_with_a_remainder_would_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why micro-batch groups are of equal length: 4 stages, 3 chunks, 5 micro-batches as 4 + 1."""
    monkeypatch.setattr(
        "megatron.core.pipeline_parallel.schedule_plan.microbatch_groups",
        lambda p, m, size: [range(i, min(i + size, m)) for i in range(0, m, size)],
    )
    plans = build_plan.__wrapped__("1f1b", num_stages=4, num_microbatches=5, num_chunks=3)
    with pytest.raises(PipelineDeadlock):
        check_plan(plans, num_microbatches=5, num_chunks=3)


# ---------------------------------------------------------------------------------------------------
# What cannot be is refused
# ---------------------------------------------------------------------------------------------------


def test_the_configuration_offers_schedules_that_exist() -> None:
    offered = get_args(get_type_hints(ParallelConfig)["pipeline_schedule"])
    assert {*offered, "forward_only"} == SCHEDULES.keys()


@pytest.mark.parametrize(
    "schedule, sizes",
    [
        ("gpipe", {"num_stages": 2, "num_microbatches": 2, "num_chunks": 2}),
        ("1f1b", {"num_stages": 4, "num_microbatches": 8, "num_chunks": 2, "group_size": 3}),
        ("1f1b", {"num_stages": 4, "num_microbatches": 0}),
    ],
)
def test_what_the_configuration_refuses_is_not_built(schedule: str, sizes: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        build_plan(schedule, **sizes)


# ---------------------------------------------------------------------------------------------------
# Groups and messages
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", range(1, 6))
def test_groups_are_nearly_equal_never_shorter_than_the_pipeline_and_as_short_as_asked(
    num_stages: int,
) -> None:
    for group_size in range(num_stages, 3 * num_stages + 1):
        for num in range(1, 40):
            groups = microbatch_groups(num_stages, num, group_size)
            lengths = [len(group) for group in groups]
            assert [i for group in groups for i in group] == list(range(num))
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] - lengths[-1] <= 1
            assert lengths[-1] >= min(num_stages, num)
            if num % group_size == 0:
                assert set(lengths) == {group_size}
            if lengths[0] > group_size:  # one group more would be too short
                assert num // (len(groups) + 1) < num_stages


def test_consumer_and_producer_are_inverse_and_follow_the_model() -> None:
    for kind, start in (
        (Kind.FORWARD, (0, Action(Kind.FORWARD, 0, 7))),
        (Kind.BACKWARD, (2, Action(Kind.BACKWARD, 1, 7))),
    ):
        stage, action = start
        visited = [start]
        while (following := consumer(stage, action, 3, 2)) is not None:
            assert producer(*following, 3, 2) == (stage, action)
            stage, action = following
            visited.append(following)
        order = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
        assert [(stage, action.chunk) for stage, action in visited] == order[:: 1 if kind is Kind.FORWARD else -1]
        assert producer(*start, 3, 2) is None


@pytest.mark.parametrize("num_stages, num_chunks", [(2, 1), (4, 1), (2, 2), (2, 3), (3, 2), (4, 3)])
def test_channels_carry_every_message_once_and_in_order(num_stages: int, num_chunks: int) -> None:
    num = 7
    plans = build_plan("1f1b", num_stages=num_stages, num_chunks=num_chunks, num_microbatches=num)
    pairs = stage_channels(num_stages, circular=num_chunks > 1)
    assert len(pairs) == len(set(pairs))
    total = 0
    for source, destination in pairs:
        messages = channel_messages(plans, source, destination, num_chunks)
        total += len(messages)
        for message in messages:
            computed = producer(destination, message.action, num_stages, num_chunks)
            assert computed == (source, plans[source][message.sent_at])
            assert plans[destination][message.needed_at] == message.action
            assert message.post_at <= message.needed_at
        for one, other in pairwise(messages):
            assert one.sent_at < other.sent_at
            assert one.post_at <= other.post_at
    # Each micro-batch crosses every border between chunks twice: once as activation, once as gradient.
    assert total == 2 * num * (num_stages * num_chunks - 1)
