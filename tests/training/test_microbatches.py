"""The global batch size as a function of consumed samples, value for value with Megatron-LM's ramp-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.microbatches import BatchSizeSchedule

CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "tables" / "batch_size_rampup.json").read_text())


def schedule_of(case: dict[str, Any]) -> BatchSizeSchedule:
    return BatchSizeSchedule(
        global_batch_size=case["global_batch_size"],
        micro_batch_size=case["micro_batch_size"],
        data_parallel_size=case["data_parallel_size"],
        rampup=(case["start_global_batch_size"], case["batch_size_increment"], case["rampup_samples"]),
    )


RAMPS = [case for case in CASES if "error" not in case and not case["decrease_batch_size_if_needed"]]


@pytest.mark.parametrize("case", RAMPS, ids=lambda case: f"to{case['global_batch_size']}")
def test_each_iteration_of_a_ramp(case: dict[str, Any]) -> None:
    schedule = schedule_of(case)
    expected_samples = 0
    for iteration, consumed, size, _running, num_microbatches in case["rows"]:
        batch = schedule.at(consumed)
        assert consumed == expected_samples
        assert (batch.global_batch_size, batch.num_microbatches) == (size, num_microbatches)
        assert schedule.samples_after(iteration) == consumed
        assert schedule.iterations_for(consumed) == iteration
        assert iteration == 0 or schedule.iterations_for(consumed - 1) == iteration - 1
        expected_samples += size


@pytest.mark.parametrize(
    "consumed, size", [(0, 16), (2380, 16), (2381, 24), (10000, 48), (300000, 1024), (300001, 1024)]
)
def test_the_ramp_of_gpt_3_era_scripts(consumed: int, size: int) -> None:
    schedule = BatchSizeSchedule(
        global_batch_size=1024, micro_batch_size=2, data_parallel_size=4, rampup=(16, 8, 300000)
    )
    assert schedule.at(consumed).global_batch_size == size
    assert schedule.at(consumed).num_microbatches == size // 8


def test_a_constant_size() -> None:
    schedule = BatchSizeSchedule(global_batch_size=24, micro_batch_size=2, data_parallel_size=3)
    assert schedule.at(0) == schedule.at(10**9)
    assert schedule.at(0).num_microbatches == 4
    assert schedule.samples_after(7) == 168
    assert schedule.iterations_for(191) == 7


def test_a_ramp_over_very_many_samples_is_summed_by_its_stretches() -> None:
    """One batch at a time this would take hours."""
    schedule = BatchSizeSchedule(
        global_batch_size=4, micro_batch_size=1, data_parallel_size=1, rampup=(1, 1, 3 * 10**10)
    )
    third = 10**10
    assert schedule.samples_after(third) == third
    assert schedule.samples_after(third + 1) == third + 2
    total = third + third // 2 + -(-third // 3)
    assert schedule.iterations_for(schedule.samples_after(total) + 4 * 7 + 3) == total + 7


@pytest.mark.parametrize(
    "values",
    [{"global_batch_size": 25}, {"rampup": (6, 7, 100)}, {"rampup": (8, 4, 100)}, {"rampup": (24, 6, 100)}],
)
def test_sizes_that_no_configuration_allows_are_a_bug(values: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        BatchSizeSchedule(**{"global_batch_size": 24, "micro_batch_size": 2, "data_parallel_size": 3, **values})
