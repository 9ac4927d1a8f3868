"""The account of a run from its configuration alone."""

from __future__ import annotations

import re

import pytest

from megatron.config.pipeline_layout import StageLayout
from megatron.core.pipeline_parallel.schedule_plan import build_plan
from megatron.model.flops import elements_of_chunk
from megatron.planning.memory import StageMemory, memory_table, peak_of_plan, predict_memory
from tests.helpers.tiny import tiny_config as tiny_run_config
from tests.model.tiny import ARCHITECTURES, VOCAB, build, tiny_config, whole

MB = 10**6


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_elements_of_a_chunk_are_those_of_the_model(architecture: str) -> None:
    config = tiny_config(**ARCHITECTURES[architecture])
    first = StageLayout(stage=0, chunk=0, layers=range(1), has_embedding=True, has_output=False)
    last = StageLayout(stage=1, chunk=0, layers=range(1, 2), has_embedding=False, has_output=True)
    for stage in (whole(config), first, last):
        built = sum(parameter.numel() for parameter in build(config, stage=stage, padded_vocab_size=64).parameters())
        assert elements_of_chunk(config, stage, tensor_parallel_size=1, padded_vocab_size=64) == built
    assert VOCAB < 64


def test_the_peak_of_a_plan_is_that_of_its_live_chunks() -> None:
    def peaks(schedule: str, chunks: int) -> list[int]:
        plans = build_plan(schedule, num_stages=4, num_microbatches=8, num_chunks=chunks)
        return [peak_of_plan(plan, [10] * chunks) for plan in plans]

    assert peaks("1f1b", 1) == [40, 30, 20, 10]  # Narayanan et al. 2021: p - s micro-batches
    assert peaks("gpipe", 1) == [80] * 4
    assert peaks("1f1b", 2) == [110, 90, 70, 50]  # Korthikanti et al. 2022, 4.2.3: 1 + (p - 1)/(p v) of all, at first


def test_bytes_of_a_parameter_follow_from_precision_and_sharding() -> None:
    def first_stage(*arguments: str) -> StageMemory:
        config = tiny_run_config(*arguments, world_size=4)
        return predict_memory(config, padded_vocab_size=config.padded_vocab_size(251))[0]

    plain, sharded = first_stage("--bf16"), first_stage("--bf16", "--use-distributed-optimizer")
    assert plain.gradients == 2 * plain.parameters
    assert plain.optimizer == 6 * plain.parameters
    assert sharded.optimizer == plain.optimizer // 4
    assert (sharded.parameters, sharded.gradients) == (plain.parameters, plain.gradients)


def test_the_table_shows_how_much_more_was_measured() -> None:
    predicted = StageMemory(parameters=MB, gradients=2 * MB, optimizer=0, activations=4 * MB, recomputed=MB)
    measured = StageMemory(parameters=MB, gradients=2 * MB, optimizer=0, activations=5 * MB)
    header, line = memory_table([predicted], [measured]).splitlines()
    assert header.split() == ["stage", "parameters", "gradients", "optimizer", "activations", "recomputed", "total"]
    assert "4.0 -> 5.0 (+25.0%)" in line
    assert line.endswith("7.0 -> 8.0 (+14.3%)")  # what is recomputed is not measured
    _, line = memory_table([predicted], [measured], as_predicted=["activations"]).splitlines()
    assert re.split(" {2,}", line.strip()) == [
        *("0", "1.0 -> 1.0 (+0.0%)", "2.0 -> 2.0 (+0.0%)", "0.0 -> 0.0"),
        *("4.0", "1.0", "7.0 -> 7.0 (+0.0%)"),
    ]
    assert memory_table([predicted]).splitlines()[1].split() == ["0", "1.0", "2.0", "0.0", "4.0", "1.0", "8.0"]
