"""Every schedule gives the losses and gradients of one process, and holds no more than planned."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megatron.config.pipeline_layout import PipelineLayout, StageLayout
from megatron.core.parallel_state import ParallelState, build_parallel_state
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.schedule_plan import (
    Action,
    Kind,
    PipelineDeadlock,
    Plan,
    backward,
    build_plan,
    check_plan,
    dependencies,
    forward,
    microbatch_groups,
)
from megatron.core.pipeline_parallel.simulate import peak_live
from megatron.core.rank_grid import RankGrid
from tests.helpers.distributed import RankFailure, run_distributed
from tests.pipeline import toy

SCALE = 8.0
# Both sides add the same float64 numbers in another order: some tens of terms of size one to hundred.
BOUND = 1e-12


def make_executor(state: ParallelState, layout: PipelineLayout) -> tuple[PipelineExecutor, list[toy.Chunk]]:
    layouts = layout.stage(state.pipeline.rank)
    chunks = [toy.Chunk(stage) for stage in layouts]
    executor = PipelineExecutor(
        group=state.pipeline,
        channels=state.channels,
        chunks=chunks,
        layouts=layouts,
        hidden_shape=toy.HIDDEN_SHAPE,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    return executor, chunks


def one_pipeline(rank: int, world_size: int) -> ParallelState:
    return build_parallel_state(RankGrid(pp=world_size), rank=rank)


def assert_same(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names: Sequence[str], what: str
) -> None:
    assert sorted(actual) == sorted(names), what
    for name in names:
        assert actual[name].dtype == torch.float64
        error = float((actual[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1))
        assert error <= BOUND, f"{what}: {name} differs by {error:.1e}"


def train_and_compare(
    executor: PipelineExecutor,
    chunks: list[toy.Chunk],
    plans: Plan,
    layout: PipelineLayout,
    num: int,
    what: str,
) -> None:
    """One step of `plans` against the model in one piece; activations against the simulator."""
    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
    instruments = toy.Instruments()
    stage = chunks[0].layout.stage
    losses = executor.run(
        plans,
        toy.microbatches(num),
        toy.instrumented(instruments),
        divisors=toy.divisors(num),
        loss_scale=torch.tensor(SCALE),
        forward_only=False,
    )
    num_layers = max(chunk.layers.stop for stage_chunks in layout.chunks for chunk in stage_chunks)
    expected_losses, expected_gradients = toy.reference(num_layers, num, SCALE)
    if chunks[-1].layout.has_output:
        assert len(losses) == num
        for i, (actual, expected) in enumerate(zip(losses, expected_losses)):
            assert not any(term.requires_grad for term in actual.values())
            assert_same(actual, expected, list(expected), f"{what}: loss of micro-batch {i}")
    else:
        assert losses == []
    names = [name for chunk in chunks for name, _ in chunk.named_parameters()]
    assert_same(toy.gradients(chunks), expected_gradients, names, what)
    assert instruments.peak_live == peak_live(plans[stage]), what
    assert instruments.live == 0, what
    if layout.num_stages > 1:
        assert instruments.unfreed_outputs == 0, f"{what}: outputs were not freed before their backward"


def every_plan(num_stages: int, num_chunks: int) -> Iterator[tuple[str, Plan, int]]:
    for num in range(1, 10):
        for schedule in ("1f1b", "gpipe") if num_chunks == 1 else ("1f1b",):
            plans = build_plan(schedule, num_stages=num_stages, num_chunks=num_chunks, num_microbatches=num)
            yield f"{schedule}, {num_stages} stages, {num_chunks} chunks, {num} micro-batches", plans, num


def watch_last_backwards(rank: int, world_size: int, num_chunks: int) -> None:
    layout = toy.layout_for(world_size, num_chunks, world_size * num_chunks)
    executor, chunks = make_executor(one_pipeline(rank, world_size), layout)
    done = [0] * num_chunks

    def count(chunk: int) -> None:
        done[chunk] += 1

    for i, chunk in enumerate(chunks):
        next(chunk.parameters()).register_post_accumulate_grad_hook(lambda parameter, i=i: count(i))
    for what, plans, num in every_plan(world_size, num_chunks):
        done[:] = [0] * num_chunks
        seen: list[int] = []

        @contextmanager
        def last_backward(chunk: int, num: int = num, what: str = what, seen: list[int] = seen) -> Iterator[None]:
            assert done[chunk] == num - 1, what
            yield
            assert done[chunk] == num, what
            seen.append(chunk)

        executor.run(
            plans,
            toy.microbatches(num),
            toy.instrumented(toy.Instruments()),
            divisors=toy.divisors(num),
            last_backward=last_backward,
        )
        assert sorted(seen) == list(range(num_chunks)), what


@pytest.mark.parametrize("num_stages, num_chunks", [(2, 1), (2, 2), (3, 2)])
def test_the_last_backward_of_each_chunk_is_announced(num_stages: int, num_chunks: int) -> None:
    run_distributed(watch_last_backwards, num_stages, num_chunks)


def train_every_plan(rank: int, world_size: int, num_chunks: int) -> None:
    # One layer more than fits evenly, so that stages differ.
    layout = toy.layout_for(world_size, num_chunks, world_size * num_chunks + 1)
    executor, chunks = make_executor(one_pipeline(rank, world_size), layout)
    for what, plans, num in every_plan(world_size, num_chunks):
        train_and_compare(executor, chunks, plans, layout, num, what)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_schedule_gives_losses_and_gradients_of_one_process(num_stages: int, num_chunks: int) -> None:
    run_distributed(train_every_plan, num_stages, num_chunks)


def test_one_stage_needs_no_torch_distributed() -> None:
    assert not dist.is_initialized()
    layout = toy.layout_for(1, 1, 3)
    executor, chunks = make_executor(ParallelState.single(), layout)
    for what, plans, num in every_plan(1, 1):
        train_and_compare(executor, chunks, plans, layout, num, what)


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_chunks_on_one_stage_hand_over_in_memory(num_chunks: int) -> None:
    pieces = tuple(
        StageLayout(
            stage=0,
            chunk=c,
            layers=range(2 * c, 2 * c + 2),
            has_embedding=c == 0,
            has_output=c == num_chunks - 1,
        )
        for c in range(num_chunks)
    )
    layout = PipelineLayout(num_stages=1, num_chunks=num_chunks, chunks=(pieces,))
    executor, chunks = make_executor(ParallelState.single(), layout)
    for what, plans, num in every_plan(1, num_chunks):
        train_and_compare(executor, chunks, plans, layout, num, what)


# ---------------------------------------------------------------------------------------------------
# Nothing depends on the schedule
# ---------------------------------------------------------------------------------------------------


def random_plan(num_stages: int, num_chunks: int, num_microbatches: int, seed: int) -> Plan:
    """A plan that nobody would write: at each moment, one of the actions that could run does."""
    generator = random.Random(seed)
    left = {
        (stage, Action(kind, chunk, microbatch))
        for stage in range(num_stages)
        for kind in Kind
        for chunk in range(num_chunks)
        for microbatch in range(num_microbatches)
    }
    plans: list[list[Action]] = [[] for _ in range(num_stages)]
    while left:
        ready = [
            (stage, action)
            for stage, action in left
            if not left.intersection(dependencies(stage, action, num_stages, num_chunks))
        ]
        stage, action = generator.choice(sorted(ready, key=lambda item: (item[0], str(item[1]))))
        left.remove((stage, action))
        plans[stage].append(action)
    return tuple(map(tuple, plans))


def train_random_plans(rank: int, world_size: int, num_chunks: int) -> None:
    layout = toy.layout_for(world_size, num_chunks, world_size * num_chunks)
    executor, chunks = make_executor(one_pipeline(rank, world_size), layout)
    for seed in range(20):
        num = 1 + seed % 6
        plans = random_plan(world_size, num_chunks, num, seed)
        check_plan(plans, num_chunks=num_chunks, num_microbatches=num)
        train_and_compare(executor, chunks, plans, layout, num, f"random plan {seed}")


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_any_plan_without_deadlock_runs_and_gives_the_same(num_stages: int, num_chunks: int) -> None:
    run_distributed(train_random_plans, num_stages, num_chunks)


def train_with_group_sizes(rank: int, world_size: int) -> None:
    layout = toy.layout_for(world_size, 2, 2 * world_size)
    executor, chunks = make_executor(one_pipeline(rank, world_size), layout)
    for group_size in (world_size, world_size + 1, 2 * world_size):
        for num in (world_size - 1, 2 * world_size + 1, 3 * world_size):
            plans = build_plan("1f1b", num_stages=world_size, num_chunks=2, num_microbatches=num, group_size=group_size)
            what = f"groups {microbatch_groups(world_size, num, group_size)}"
            train_and_compare(executor, chunks, plans, layout, num, what)


def test_group_size_changes_nothing_but_the_order() -> None:
    run_distributed(train_with_group_sizes, 3)


def train_in_two_pipelines(rank: int, world_size: int) -> None:
    """Ranks 0, 2, 4 are one pipeline, 1, 3, 5 another with other batches, as with data parallelism."""
    state = build_parallel_state(RankGrid(dp=2, pp=world_size // 2), rank=rank)
    group, mine = state.pipeline, state.data.rank
    assert group.ranks == tuple(range(mine, world_size, 2))
    layout = toy.layout_for(group.size, 2, 2 * group.size)
    executor, chunks = make_executor(state, layout)
    for num in (2 + mine, 5 - mine):
        plans = build_plan("1f1b", num_stages=group.size, num_chunks=2, num_microbatches=num)
        train_and_compare(executor, chunks, plans, layout, num, f"pipeline {mine}")


def test_pipelines_side_by_side_do_not_meet() -> None:
    run_distributed(train_in_two_pipelines, 6)


def train_with_empty_chunks(rank: int, world_size: int) -> None:
    # E | t | (nothing) | t t L: the embedding alone, and a chunk that passes on what it gets.
    counts = [range(0), range(1), range(1, 1), range(1, 3)]
    pieces = [
        StageLayout(stage=i % 2, chunk=i // 2, layers=layers, has_embedding=i == 0, has_output=i == 3)
        for i, layers in enumerate(counts)
    ]
    layout = PipelineLayout(num_stages=2, num_chunks=2, chunks=(tuple(pieces[0::2]), tuple(pieces[1::2])))
    executor, chunks = make_executor(one_pipeline(rank, world_size), layout)
    passing = toy.forward_step if rank else pass_through
    for num in (1, 3):
        plans = build_plan("1f1b", num_stages=2, num_chunks=2, num_microbatches=num)
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
        executor.run(plans, toy.microbatches(num), passing, divisors=toy.divisors(num), loss_scale=SCALE)
        _, expected = toy.reference(3, num, SCALE)
        names = [name for chunk in chunks for name, _ in chunk.named_parameters()]
        assert_same(toy.gradients(chunks), expected, names, f"{num} micro-batches")


def pass_through(batch: torch.Tensor, chunk: toy.Chunk, hidden: torch.Tensor | None) -> object:
    """The very tensor it got, from a chunk without layers."""
    return toy.forward_step(batch, chunk, hidden) if hidden is None else hidden


def test_a_chunk_may_have_no_layers_and_return_its_input() -> None:
    run_distributed(train_with_empty_chunks, 2)


# ---------------------------------------------------------------------------------------------------
# Gradients add up, and validation leaves no trace
# ---------------------------------------------------------------------------------------------------


def accumulate(rank: int, world_size: int) -> None:
    """Four micro-batches in one step, against four steps of one each with the gradients kept."""
    layout = toy.layout_for(world_size, 1, 4)
    batches, counts = toy.microbatches(4), toy.divisors(4)
    state = one_pipeline(rank, world_size)
    executor, chunks = make_executor(state, layout)
    together = build_plan("1f1b", num_stages=world_size, num_microbatches=4)
    executor.run(together, batches, toy.forward_step, divisors=counts, loss_scale=SCALE)
    executor_alone, chunks_alone = make_executor(state, layout)
    alone = build_plan("1f1b", num_stages=world_size, num_microbatches=1)
    for batch, count in zip(batches, counts):
        executor_alone.run(alone, [batch], toy.forward_step, divisors=[count], loss_scale=SCALE)
    expected = toy.gradients(chunks_alone)
    assert_same(toy.gradients(chunks), expected, list(expected), "sum of single micro-batches")


def test_gradients_are_the_sum_over_micro_batches_and_over_runs() -> None:
    run_distributed(accumulate, 2)


def validate(rank: int, world_size: int, num_chunks: int) -> None:
    layout = toy.layout_for(world_size, num_chunks, world_size * num_chunks)
    executor, chunks = make_executor(one_pipeline(rank, world_size), layout)
    for num in (1, 5, 8):
        plans = build_plan("forward_only", num_stages=world_size, num_chunks=num_chunks, num_microbatches=num)
        instruments = toy.Instruments()
        losses = executor.run(
            plans, toy.microbatches(num), toy.instrumented(instruments), divisors=None, forward_only=True
        )
        expected, _ = toy.reference(world_size * num_chunks, num, SCALE)
        for actual, wanted in zip(losses, expected, strict=chunks[-1].layout.has_output):
            assert_same(actual, wanted, list(wanted), "validation loss")
        assert toy.gradients(chunks) == {}
        assert [grad_enabled for _, grad_enabled in instruments.calls] == [False] * num * num_chunks
        assert instruments.peak_live <= 1
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_forward_only_gives_losses_and_keeps_nothing(num_chunks: int) -> None:
    run_distributed(validate, 3, num_chunks)


# ---------------------------------------------------------------------------------------------------
# Failures say where
# ---------------------------------------------------------------------------------------------------


def fail_on_stage_one(rank: int, world_size: int) -> None:
    layout = toy.layout_for(world_size, 1, world_size)
    executor, _ = make_executor(one_pipeline(rank, world_size), layout)
    plans = build_plan("1f1b", num_stages=world_size, num_microbatches=4)

    def step(batch: int, chunk: toy.Chunk, hidden: torch.Tensor | None) -> object:
        if rank == 1 and batch == 2:
            raise FloatingPointError("not a number")
        return toy.forward_step(toy.microbatches(4)[batch], chunk, hidden)

    executor.run(plans, range(4), step, divisors=toy.divisors(4))


def test_a_failure_names_stage_and_action_and_stops_all_ranks() -> None:
    with pytest.raises(RankFailure) as failure:
        run_distributed(fail_on_stage_one, 3, timeout=20.0)
    assert "FloatingPointError: not a number\nin the pipeline: stage 1, action F0.2" in str(failure.value)
    assert "no answer" not in str(failure.value)


def test_a_plan_that_would_hang_is_refused_before_anything_runs() -> None:
    executor, _ = make_executor(ParallelState.single(), toy.layout_for(1, 1, 1))
    plans = ((backward(0, 0), forward(0, 0)),)
    with pytest.raises(PipelineDeadlock, match=r"stage 0, action B0\.0 waits for F0\.0 of stage 0"):
        executor.run(plans, [0], lambda *_: pytest.fail("it ran"), divisors=toy.divisors(1))


@pytest.mark.parametrize(
    "result, error",
    [
        (torch.zeros(2, 3), "a dict of loss sums"),
        ({}, "a dict of loss sums"),
        ({"square": torch.zeros((), requires_grad=True)}, r"loss terms \['square'\].*divisors"),
    ],
)
def test_a_forward_step_that_returns_something_else_is_told_so(result: object, error: str) -> None:
    executor, _ = make_executor(ParallelState.single(), toy.layout_for(1, 1, 1))
    plans = build_plan("1f1b", num_stages=1, num_microbatches=1)
    with pytest.raises((TypeError, ValueError), match=error):
        executor.run(plans, [0], lambda batch, chunk, hidden: result, divisors=toy.divisors(1))


def test_hidden_states_of_another_shape_are_refused_before_they_are_sent() -> None:
    pieces = tuple(
        StageLayout(stage=0, chunk=c, layers=range(c, c + 1), has_embedding=c == 0, has_output=c == 1) for c in range(2)
    )
    layout = PipelineLayout(num_stages=1, num_chunks=2, chunks=(pieces,))
    executor, _ = make_executor(ParallelState.single(), layout)
    plans = build_plan("1f1b", num_stages=1, num_chunks=2, num_microbatches=1)
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*expects \(2, 3, 4\)"):
        executor.run(plans, [0], lambda *_: torch.zeros(2, 3), divisors=toy.divisors(1))
