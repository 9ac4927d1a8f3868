"""Sample, shuffle and blend indices: compiled and numpy versions agree, also in the corners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.core.kernels import extension
from megatron.data import index_builder
from megatron.data.index_builder import (
    blend_index_reference,
    build_blend_index,
    build_document_index,
    build_exhaustive_blend_index,
    build_sample_index,
    build_shuffle_index,
    exhaustive_blend_index_reference,
    plan_epochs,
    sample_index_reference,
)


def walk(
    lengths: list[int], order: list[int], sequence_length: int, num_samples: int, extra: int
) -> list[tuple[int, int]]:
    """The specification, a token at a time: sample k + 1 begins `extra` tokens before the end of sample k."""
    tokens = [(position, offset) for position, doc in enumerate(order) for offset in range(lengths[doc])]
    rows = [(0, 0)]
    for sample in range(1, num_samples + 1):
        last = min(sample * sequence_length + extra, len(tokens)) - 1  # last token consumed
        position, offset = tokens[last]
        rows.append((position, offset + 1 - extra))
    return rows


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    epochs=st.integers(1, 3),
    sequence_length=st.integers(1, 8),
    extra=st.sampled_from([0, 1]),
    keep_last=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_compiled_and_numpy_sample_index_are_the_walk_over_the_tokens(
    lengths: list[int], epochs: int, sequence_length: int, extra: int, keep_last: bool, seed: int
) -> None:
    tokens = sum(lengths) * epochs
    usable = max(0, tokens - extra)
    num_samples = -(-usable // sequence_length) if keep_last else usable // sequence_length
    order = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    np.random.RandomState(seed).shuffle(order)
    sizes = np.array(lengths, dtype=np.int32)
    arguments = {
        "sequence_length": sequence_length,
        "num_samples": num_samples,
        "total_tokens": tokens,
        "extra_tokens": extra,
    }
    expected = walk(lengths, order.tolist(), sequence_length, num_samples, extra)
    built = build_sample_index(sizes, order, **arguments)
    reference = sample_index_reference(sizes, order, **arguments)
    assert built.dtype == np.int32
    assert [tuple(row) for row in built.tolist()] == expected
    assert [tuple(row) for row in reference.tolist()] == expected


def test_the_compiled_module_is_the_one_that_is_tested() -> None:
    assert extension.load_extension() is not None, "build it: make kernels"


def test_documents_and_boundaries_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_builder, "_INT32_MAX", 3)
    lengths, order = np.array([4, 4, 4], dtype=np.int32), np.array([2, 0, 1, 1], dtype=np.int64)
    rows = build_sample_index(lengths, order, sequence_length=5, num_samples=3, total_tokens=16)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert build_document_index(
        np.array([4], np.int64), plan_epochs(tokens_per_epoch=4, sequence_length=1, requested=None),
        np.random.RandomState(0),
    ).dtype == np.int64  # fmt: skip


def test_three_documents_cut_into_windows() -> None:
    lengths, order = np.array([3, 1, 4], dtype=np.int32), np.arange(3, dtype=np.int32)
    plan = plan_epochs(tokens_per_epoch=8, sequence_length=2, requested=None)
    rows = build_sample_index(lengths, order, sequence_length=2, num_samples=plan.num_samples, total_tokens=8)
    assert rows.tolist() == [[0, 0], [0, 2], [2, 0], [2, 2]]
    shuffle = build_shuffle_index(plan, np.random.RandomState(1234))
    assert sorted(shuffle.tolist()) == [0, 1, 2]


def test_a_long_document_is_cut_and_not_truncated() -> None:
    plan = plan_epochs(tokens_per_epoch=128, sequence_length=32, requested=None)
    rows = build_sample_index(
        np.array([128], dtype=np.int32), np.zeros(1, np.int32), sequence_length=32,
        num_samples=plan.num_samples, total_tokens=128,
    )  # fmt: skip
    assert rows.tolist() == [[0, 0], [0, 32], [0, 64], [0, 96]]


def test_samples_are_counted_in_64_bits() -> None:
    plan = plan_epochs(tokens_per_epoch=3_000_000_000, sequence_length=1000, requested=5_999_999)
    assert (plan.num_epochs, plan.num_samples) == (2, 5_999_999)
    # 32-bit floats count 2**24 + 1 as 2**24.
    plan = plan_epochs(tokens_per_epoch=2**24 + 2, sequence_length=1, requested=None, extra_tokens=1, keep_last=True)
    assert plan.num_samples == 2**24 + 1


def test_token_offsets_beyond_32_bits_are_walked() -> None:
    lengths, order = np.full(3, 1_000_000_000, dtype=np.int32), np.tile(np.arange(3, dtype=np.int32), 2)
    arguments = {"sequence_length": 1_000_000, "num_samples": 5_999, "total_tokens": 6_000_000_000}
    built = build_sample_index(lengths, order, **arguments)
    assert built[-1].tolist() == [5, 999_000_000]
    assert np.array_equal(built, sample_index_reference(lengths, order, extra_tokens=1, **arguments))


def test_the_last_epoch_may_give_one_sample_more_than_an_epoch_alone() -> None:
    plan = plan_epochs(tokens_per_epoch=6, sequence_length=4, requested=3)
    assert (plan.num_epochs, plan.num_samples) == (3, 4)
    lengths, documents = np.array([6], dtype=np.int32), np.zeros(1, np.int32)
    random = np.random.RandomState(1234)
    order = build_document_index(documents, plan, random)
    rows = build_sample_index(lengths, order, sequence_length=4, num_samples=plan.num_samples, total_tokens=18)
    assert len(rows) - 1 >= 3
    assert rows[:, 0].max() < len(order)
    assert sorted(build_shuffle_index(plan, random).tolist()) == [0, 1, 2, 3]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.integers(1, 200),
    sequence_length=st.integers(1, 50),
    requested=st.integers(0, 300),
    extra=st.sampled_from([0, 1]),
)
def test_epochs_are_as_few_as_hold_the_request(tokens: int, sequence_length: int, requested: int, extra: int) -> None:
    plan = plan_epochs(
        tokens_per_epoch=tokens, sequence_length=sequence_length, requested=requested, extra_tokens=extra
    )
    assert plan.num_samples >= requested
    assert plan.num_samples == max(0, plan.num_epochs * tokens - extra) // sequence_length
    if plan.num_epochs > 1:
        assert ((plan.num_epochs - 1) * tokens - extra) // sequence_length < requested
    shuffle = build_shuffle_index(plan, np.random.RandomState(7))
    assert shuffle.dtype == np.uint32
    assert sorted(shuffle.tolist()) == list(range(plan.num_samples))
    before = plan.samples_before_final_epoch
    assert sorted(shuffle[:before].tolist()) == list(range(before)), "a separate last epoch comes last"


@pytest.mark.parametrize("from_final, separate", [(1, True), (79, True), (80, False), (100, False)])
def test_the_last_epoch_is_apart_when_less_than_four_fifths_of_it_are_needed(from_final: int, separate: bool) -> None:
    plan = plan_epochs(tokens_per_epoch=101, sequence_length=1, requested=100 + from_final)
    assert (plan.num_epochs, plan.separate_final_epoch) == (2, separate)
    assert plan.samples_before_final_epoch == (100 if separate else plan.num_samples)


def test_samples_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples are requested from documents that hold no token"):
        plan_epochs(tokens_per_epoch=0, sequence_length=4, requested=5)
    assert plan_epochs(tokens_per_epoch=0, sequence_length=4, requested=0).num_samples == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_more_samples_than_tokens_are_an_error_and_not_a_read_past_the_end(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(index_builder, "compiled_function", lambda name, reference_cost: None)
    lengths, order = np.array([3, 0], dtype=np.int32), np.array([0, 1], dtype=np.int32)
    with pytest.raises(ValueError, match="hold 3 tokens, which end before sample 2"):
        build_sample_index(lengths, order, sequence_length=2, num_samples=2, total_tokens=9)
    with pytest.raises(IndexError):
        build_sample_index(lengths, order + 1, sequence_length=2, num_samples=1, total_tokens=9)


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.one_of(st.floats(1e-6, 1e3), st.sampled_from([1.0, 2.0])), min_size=1, max_size=9),
    size=st.integers(0, 600),
    chunk=st.integers(1, 12),
    threads=st.integers(1, 3),
)
def test_a_blend_drawn_in_chunks_is_that_of_a_single_walk(
    weights: list[float], size: int, chunk: int, threads: int
) -> None:
    """Chunks so short that guesses before them do not reach the true numbers drawn, and are walked again."""
    module = extension.load_extension()
    assert module is not None
    shares = np.array(weights) / np.sum(weights)
    expected = blend_index_reference(shares, size)
    for instruction_set in module.instruction_sets():
        index = np.empty(size, np.int16), np.empty(size, np.int64)
        module.build_blend_index(shares, *index, threads=threads, chunk=chunk, instruction_set=instruction_set)
        assert np.array_equal(index[0], expected[0])
        assert np.array_equal(index[1], expected[1])


def test_a_walk_over_many_documents_on_several_threads_is_that_of_numpy() -> None:
    """More documents than a thread walks at a time, empty ones in places, and a border that all samples meet."""
    random = np.random.RandomState(3)
    lengths = np.where(random.rand(500) < 0.2, 0, random.randint(0, 40, 500)).astype(np.int32)
    order = random.randint(0, 500, 300_000).astype(np.int32)
    tokens = int(lengths[order].sum(dtype=np.int64))
    for sequence_length, extra in ((1, 1), (64, 1), (100, 0), (tokens, 0), (tokens - 1, 1)):
        num_samples = -(-(tokens - extra) // sequence_length)
        arguments = {
            "sequence_length": sequence_length,
            "num_samples": num_samples,
            "total_tokens": tokens,
            "extra_tokens": extra,
        }
        built = build_sample_index(lengths, order, **arguments)
        assert np.array_equal(built, sample_index_reference(lengths, order, **arguments))


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9),
    size=st.integers(0, 400),
)
def test_compiled_and_numpy_blend_are_equal_and_never_far_from_the_weights(weights: list[float], size: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    chosen, samples = build_blend_index(shares.tolist(), size)
    reference_chosen, reference_samples = blend_index_reference(shares, size)
    assert chosen.dtype == np.int16
    assert samples.dtype == np.int64
    assert np.array_equal(chosen, reference_chosen)
    assert np.array_equal(samples, reference_samples)
    for dataset, share in enumerate(shares):
        drawn = np.cumsum(chosen == dataset)
        assert samples[chosen == dataset].tolist() == list(range(int(drawn[-1]) if size else 0))
        behind = share * np.arange(1, size + 1) - drawn
        assert (behind <= 1 + len(weights)).all(), "no dataset falls behind its share"


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_the_exhaustive_blend_draws_every_sample_once(sizes: list[int]) -> None:
    chosen, samples = build_exhaustive_blend_index(sizes)
    reference_chosen, reference_samples = exhaustive_blend_index_reference(np.array(sizes))
    assert np.array_equal(chosen, reference_chosen)
    assert np.array_equal(samples, reference_samples)
    drawn = sorted(zip(chosen.tolist(), samples.tolist()))
    assert drawn == [(dataset, sample) for dataset, size in enumerate(sizes) for sample in range(size)]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("value", [0.0, -0.1, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused_wherever_it_stands(zero: int, value: float) -> None:
    weights = [0.4, 0.6]
    weights.insert(zero, value)
    with pytest.raises(ValueError, match="must be a positive number"):
        build_blend_index(weights, 10)


def test_an_empty_dataset_is_no_part_of_an_exhaustive_blend() -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        build_exhaustive_blend_index([3, 0])


def test_more_datasets_than_the_index_type_can_count_are_refused() -> None:
    build_blend_index([1 / 32766] * 32766, 1)
    with pytest.raises(ValueError, match="32767 datasets; 1 to 32766"):
        build_blend_index([1 / 32767] * 32767, 1)
    with pytest.raises(ValueError, match="0 datasets"):
        build_blend_index([], 1)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), block=st.integers(1, 50))
def test_derived_seeds_fit_the_generator_and_differ(seed: int, block: int) -> None:
    derived = index_builder.derived_seed(seed, "block", block)
    np.random.RandomState(derived)
    assert derived == index_builder.derived_seed(seed, "block", block)
    assume(block > 1)
    assert derived != index_builder.derived_seed(seed, "block", block - 1)
