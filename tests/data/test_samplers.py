"""Who reads which sample: the same order in every layout and after every resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.samplers import CyclicOrder, SampleOrder, SequentialOrder, microbatch_positions


def step_of_all_ranks(consumed: int, global_batch: int, micro_batch_size: int, dp_size: int) -> list[int]:
    """Positions of a step in the order: micro-batch by micro-batch, rank by rank."""
    return [
        position
        for first in range(consumed, consumed + global_batch, micro_batch_size * dp_size)
        for rank in range(dp_size)
        for position in microbatch_positions(first, micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size)
    ]


@given(
    consumed=st.integers(0, 10**12),
    microbatches=st.integers(1, 4),
    micro_batch_size=st.integers(1, 4),
    dp_size=st.integers(1, 8),
)
def test_a_step_reads_the_next_samples_in_order_whatever_the_layout(
    consumed: int, microbatches: int, micro_batch_size: int, dp_size: int
) -> None:
    global_batch = microbatches * micro_batch_size * dp_size
    read = step_of_all_ranks(consumed, global_batch, micro_batch_size, dp_size)
    assert read == list(range(consumed, consumed + global_batch))


def test_one_rank_reads_its_part_of_each_microbatch() -> None:
    def positions(first: int, rank: int) -> list[int]:
        return list(microbatch_positions(first, micro_batch_size=2, dp_rank=rank, dp_size=3))

    assert positions(100, 0) == [100, 101]
    assert positions(100, 2) == [104, 105]
    assert positions(106, 1) == [108, 109]


def test_a_growing_batch_and_another_layout_continue_the_order() -> None:
    consumed, read = 0, []
    for global_batch, micro_batch_size, dp_size in [(4, 1, 4), (4, 2, 2), (8, 2, 4), (12, 3, 2), (16, 1, 1)]:
        read += step_of_all_ranks(consumed, global_batch, micro_batch_size, dp_size)
        consumed += global_batch
    assert read == list(range(consumed))


def test_training_data_that_ends_is_an_error_and_validation_begins_again() -> None:
    training = SequentialOrder(4)
    assert [training(position) for position in range(4)] == [0, 1, 2, 3]
    with pytest.raises(IndexError, match=r"sample 4 is read, but 4 were requested.*--train-iters"):
        training(4)
    validation = SequentialOrder(3, wrap=True, name="validation")
    assert [validation(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("size", [0, -1])
def test_an_order_of_nothing_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="validation: the dataset holds no sample"):
        SequentialOrder(size, wrap=True, name="validation")
    with pytest.raises(ValueError, match="training: the dataset holds no sample"):
        CyclicOrder(size, seed=1)


def epoch(order: SampleOrder, number: int, size: int) -> list[int]:
    return [order(position) for position in range(number * size, (number + 1) * size)]


@given(size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_each_cyclic_epoch_reads_every_sample_once(size: int, seed: int) -> None:
    order = CyclicOrder(size, seed=seed)
    for number in range(3):
        assert sorted(epoch(order, number, size)) == list(range(size))


def test_cyclic_order_depends_on_the_seed_and_the_epoch() -> None:
    size = 50
    order, again, other = CyclicOrder(size, seed=1), CyclicOrder(size, seed=1), CyclicOrder(size, seed=2)
    assert epoch(order, 0, size) == epoch(again, 0, size)
    assert epoch(order, 0, size) != epoch(order, 1, size)
    assert epoch(order, 0, size) != epoch(other, 0, size)


@pytest.mark.parametrize("resumed_at", [0, 6, 9, 10, 13, 20, 27])
def test_a_cyclic_run_resumes_in_the_middle_of_an_epoch(resumed_at: int) -> None:
    straight = CyclicOrder(10, seed=3)
    whole = [straight(position) for position in range(30)]
    resumed = CyclicOrder(10, seed=3)
    assert [resumed(position) for position in range(resumed_at, 30)] == whole[resumed_at:]
    for number in range(3):
        assert sorted(whole[10 * number : 10 * number + 10]) == list(range(10))


def test_cyclic_order_may_be_asked_back_and_forth_across_epochs() -> None:
    order, expected = CyclicOrder(5, seed=3), CyclicOrder(5, seed=3)
    forward = [expected(position) for position in range(20)]
    for position in (12, 4, 19, 0, 5, 4, 14, 9, 10):
        assert order(position) == forward[position]
