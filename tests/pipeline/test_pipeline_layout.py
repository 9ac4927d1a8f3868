"""Which layers a stage gets: every layer once, in order, as evenly as costs allow, or as the user says."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import PipelineLayout, StageLayout, end_costs, pipeline_layout, spread_layers
from megatron.config.transformer import TransformerConfig

VOCABULARY = 1000


def model_of(num_layers: int, **settings: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": num_layers, "hidden_size": 128, "num_attention_heads": 8, **settings})


def layout_of(num_layers: int, stages: int, vocabulary: int = VOCABULARY, **parallel: Any) -> PipelineLayout:
    return pipeline_layout(
        model_of(num_layers), ParallelConfig(pipeline_model_parallel_size=stages, **parallel), vocabulary
    )


def sizes(layout: PipelineLayout) -> list[int]:
    return [sum(len(chunk.layers) for chunk in layout.stage(stage)) for stage in range(layout.num_stages)]


def in_model_order(layout: PipelineLayout) -> list[StageLayout]:
    """All chunks, from the embedding to the output."""
    return [stage[chunk] for chunk in range(layout.num_chunks) for stage in layout.chunks]


def assert_sound(layout: PipelineLayout, num_layers: int) -> None:
    """Each layer on one chunk, in the order of the model; embedding first, output last."""
    order = in_model_order(layout)
    assert [number for chunk in order for number in chunk.layers] == list(range(num_layers))
    assert [chunk.has_embedding for chunk in order] == [True] + [False] * (len(order) - 1)
    assert [chunk.has_output for chunk in order] == [False] * (len(order) - 1) + [True]
    for stage, chunks in enumerate(layout.chunks):
        assert [(chunk.stage, chunk.chunk) for chunk in chunks] == [(stage, c) for c in range(layout.num_chunks)]


# ---------------------------------------------------------------------------------------------------
# Even and given sizes
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages, chunks, per_chunk", [(1, 1, 5), (2, 1, 3), (4, 1, 2), (2, 2, 2), (4, 3, 1)])
def test_layers_that_divide_are_split_evenly(stages: int, chunks: int, per_chunk: int) -> None:
    num_layers = stages * chunks * per_chunk
    virtual = {"num_virtual_stages_per_pipeline_rank": chunks} if chunks > 1 else {}
    # An output layer that costs as much as many layers changes nothing: even is what was asked for.
    layout = layout_of(num_layers, stages, vocabulary=100_000, **virtual)
    assert_sound(layout, num_layers)
    for stage, chunk in product(range(stages), range(chunks)):
        # The offset of Megatron-LM: v L/V + p L/(P V) + local.
        start = chunk * (num_layers // chunks) + stage * (num_layers // (stages * chunks))
        assert layout.chunks[stage][chunk].layers == range(start, start + per_chunk)


def test_layers_per_virtual_stage_say_how_many_chunks_there_are() -> None:
    by_layers = layout_of(12, 2, num_layers_per_virtual_pipeline_stage=2)
    assert by_layers == layout_of(12, 2, num_virtual_stages_per_pipeline_rank=3)
    assert by_layers.num_chunks == 3


@pytest.mark.parametrize(
    "num_layers, stages, first, last, expected",
    [
        (10, 3, None, 2, [4, 4, 2]),
        (10, 4, 2, 2, [2, 3, 3, 2]),
        (10, 3, 2, None, [2, 4, 4]),
        (10, 2, 7, None, [7, 3]),
        (10, 2, 7, 3, [7, 3]),
        (11, 3, None, 2, [4, 5, 2]),
        (11, 4, 1, 2, [1, 4, 4, 2]),
        (12, 4, 1, 2, [1, 4, 5, 2]),
    ],
)
def test_given_first_and_last_stages_are_kept_and_the_rest_is_shared(
    num_layers: int, stages: int, first: int | None, last: int | None, expected: list[int]
) -> None:
    layout = layout_of(
        num_layers,
        stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    assert sizes(layout) == expected
    assert_sound(layout, num_layers)
    starts = [layout.chunks[stage][0].layers.start for stage in range(stages)]
    assert starts == [sum(expected[:stage]) for stage in range(stages)]


def test_given_sizes_are_shared_among_the_chunks_of_a_stage() -> None:
    layout = layout_of(20, 3, num_virtual_stages_per_pipeline_rank=2, decoder_first_pipeline_num_layers=4)
    assert_sound(layout, 20)
    assert [[len(chunk.layers) for chunk in stage] for stage in layout.chunks] == [[2, 2], [4, 4], [4, 4]]


# ---------------------------------------------------------------------------------------------------
# Balanced sizes
# ---------------------------------------------------------------------------------------------------


def test_a_costly_output_layer_takes_layers_off_the_last_stage() -> None:
    # Output costs 50,304 / (12 x 4,096) = 1.02 layers.
    model = model_of(30, hidden_size=4096, num_attention_heads=32)
    layout = pipeline_layout(model, ParallelConfig(pipeline_model_parallel_size=4), 50304)
    assert layout.output_cost == pytest.approx(1.0234, abs=1e-4)
    assert sizes(layout) == [8, 8, 8, 6]
    assert max(map(layout.stage_cost, range(4))) == 8 + layout.embedding_cost


def test_costs_count_the_weights_of_the_model() -> None:
    embedding, output = end_costs(model_of(1, hidden_size=64, num_attention_heads=4), 12 * 64)
    assert output == 1
    assert embedding == 1 / (12 * 64)
    grouped = model_of(
        1,
        hidden_size=64,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=1,
        activation="swiglu",
        ffn_hidden_size=96,
    )
    # q 64 x 64, k and v 64 x 16 each, projection 64 x 64; gate, up and down 64 x 96 each
    weights = 64 * 64 + 2 * 64 * 16 + 64 * 64 + 3 * 64 * 96
    assert end_costs(grouped, 1000) == (64 / weights, 64 * 1000 / weights)


def best_largest_cost(num_layers: int, extra: list[float], minimum: int) -> float:
    """By trying everything."""
    return min(
        max(count + cost for count, cost in zip(counts, extra))
        for counts in product(range(minimum, num_layers + 1), repeat=len(extra))
        if sum(counts) == num_layers
    )


@settings(deadline=None, max_examples=60)
@given(
    extra=st.lists(st.floats(0, 6), min_size=1, max_size=4),
    minimum=st.integers(0, 2),
    more=st.integers(0, 6),
)
def test_no_other_spread_has_a_smaller_largest_cost(extra: list[float], minimum: int, more: int) -> None:
    num_layers = minimum * len(extra) + more
    counts = spread_layers(num_layers, extra, minimum)
    assert sum(counts) == num_layers
    assert min(counts) >= minimum
    largest = max(count + cost for count, cost in zip(counts, extra))
    assert largest == best_largest_cost(num_layers, extra, minimum)


def test_among_equals_the_later_place_gets_the_layer() -> None:
    assert spread_layers(10, [0, 0, 0, 0], 1) == [2, 2, 3, 3]


@settings(deadline=None, max_examples=200)
@given(
    stages=st.integers(1, 8),
    chunks=st.integers(1, 4),
    more=st.integers(0, 40),
    vocabulary=st.integers(1, 200_000),
)
def test_every_layout_is_sound_and_leaves_no_chunk_without_a_layer(
    stages: int, chunks: int, more: int, vocabulary: int
) -> None:
    chunks = chunks if stages > 1 else 1
    num_layers = stages * chunks + more
    virtual = {"num_virtual_stages_per_pipeline_rank": chunks} if chunks > 1 else {}
    layout = layout_of(num_layers, stages, vocabulary, **virtual)
    assert_sound(layout, num_layers)
    assert all(len(chunk.layers) >= 1 for chunk in in_model_order(layout))
    text = "|".join("E" * c.has_embedding + "t" * len(c.layers) + "L" * c.has_output for c in in_model_order(layout))
    assert layout_of(num_layers, stages, vocabulary, pipeline_model_parallel_layout=text) == layout


# ---------------------------------------------------------------------------------------------------
# Layout strings
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, stages, num_layers, expected",
    [
        ("Ett|tL", 2, 3, [[2], [1]]),
        ("E|t|tt|L", 4, 3, [[0], [1], [2], [0]]),
        ("E|t|tt|L", 2, 3, [[0, 2], [1, 0]]),
        ("Et*3|(tt|)*3,L", 5, 9, [[3], [2], [2], [2], [0]]),
        ("Et*3|(tt|)*29,t|L", 16, 62, None),
        ("E(tt|t|)*2L", 5, 6, [[2], [1], [2], [1], [0]]),
        ("E,t * 2 | ((t)*2|)*2 tL", 4, 7, [[2], [2], [2], [1]]),
        ("Et||t|tL", 2, 3, [[1, 1], [0, 1]]),
        ("EttL", 1, 2, [[2]]),
    ],
)
def test_a_layout_string_says_where_every_layer_is(
    text: str, stages: int, num_layers: int, expected: list[list[int]] | None
) -> None:
    layout = layout_of(num_layers, stages, pipeline_model_parallel_layout=text)
    assert_sound(layout, num_layers)
    if expected is not None:
        assert [[len(chunk.layers) for chunk in stage] for stage in layout.chunks] == expected


@pytest.mark.parametrize(
    "text, stages, complaint",
    [
        ("Ett|tt,m|L", 3, "multi-token prediction is not offered"),
        ("tt|ttL", 2, "must have one E"),
        ("tE|tttL", 2, "must have one E"),
        ("EEtt|ttL", 2, "must have one E"),
        ("Ett|tt", 2, "must have one L"),
        ("Ett|Ltt", 2, "must have one L"),
        ("Ett|tL", 2, r"has 3 layers \(t\), --num-layers is 4"),
        (
            "Ett|t|tL",
            2,
            "3 chunks, which --pipeline-model-parallel-size 2 does not divide\n.*size 3; .* 2 or 4 chunks",
        ),
        ("Exx|ttL", 2, "has 'x' where it has no meaning"),
        ("E(tt|ttL", 2, r"has '\(' where it has no meaning"),
        ("Ett|t**2tL", 2, r"has '\*' where it has no meaning"),
        ("Ett|((t)*99999)*99999L", 2, "repeats t{99999} too often: 99999 times"),
        ("Et||tttL", 3, "leaves stage 1 with nothing to compute"),
        ("Ett|ttL", 1, "2 chunks for one stage"),
    ],
)
def test_a_wrong_layout_string_is_refused_with_the_reason(text: str, stages: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        layout_of(4, stages, pipeline_model_parallel_layout=text)


def test_a_layout_string_with_chunks_needs_a_schedule_that_interleaves() -> None:
    with pytest.raises(ValueError, match="--pipeline-schedule gpipe does not interleave"):
        layout_of(4, 2, pipeline_model_parallel_layout="Et|t|t|tL", pipeline_schedule="gpipe")


# ---------------------------------------------------------------------------------------------------
# What cannot be, and what works
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_layers, stages, parallel, complaint",
    [
        (3, 4, {}, "each of 4 stages\n.*--num-layers 4 or more; --pipeline-model-parallel-size 3 or less"),
        (
            6,
            4,
            {"num_virtual_stages_per_pipeline_rank": 2},
            "each of 4 stages x 2 chunks\n.*--num-layers 8.*size 3 or less; .*per-pipeline-rank 1;",
        ),
        (
            10,
            2,
            {"num_layers_per_virtual_pipeline_stage": 3},
            r"3: x --pipeline-model-parallel-size 2 must divide --num-layers 10\n.*stage 1 or 5",
        ),
        (
            10,
            2,
            {"num_layers_per_virtual_pipeline_stage": 1, "decoder_last_pipeline_num_layers": 4},
            "makes all chunks equal.*--decoder-last-pipeline-num-layers 4 makes stages unequal",
        ),
        (
            10,
            2,
            {"decoder_first_pipeline_num_layers": 4, "decoder_last_pipeline_num_layers": 4},
            "4 and --decoder-last-pipeline-num-layers 4 .* do not add up to --num-layers 10",
        ),
        (
            10,
            3,
            {"decoder_first_pipeline_num_layers": 10},
            "2 stages beside --decoder-first-pipeline-num-layers 10\n.*--num-layers 12 or more",
        ),
        (
            10,
            3,
            {"decoder_first_pipeline_num_layers": 1, "num_virtual_stages_per_pipeline_rank": 2},
            "first.* 1: must be at least 1 for each of the 2 chunks",
        ),
    ],
)
def test_an_impossible_layout_is_refused_with_what_works(
    num_layers: int, stages: int, parallel: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        layout_of(num_layers, stages, **parallel)


def test_a_layout_can_be_looked_at() -> None:
    layout = layout_of(7, 2, vocabulary=12 * 128, num_virtual_stages_per_pipeline_rank=2)
    assert layout.describe().splitlines() == [
        "stage  chunk  layers  besides    cost",
        "0      0      0-1     embedding  2.00",
        "       1      4-5                2.00",
        "       all                       4.00",
        "1      0      2-3                2.00",
        "       1      6-6     output     2.00",
        "       all                       4.00",
        "cost in transformer layers; the largest stage has 4.00, the mean is 4.00: stages wait 0.0% of the time for it",
    ]
