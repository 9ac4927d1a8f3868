"""Derived sizes: the padded vocabulary, data parallelism, micro-batches, lengths of schedules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config import ConfigError, TrainingConfig, padded_vocab_size
from tests.config.conftest import Parse

TABLES = Path(__file__).parents[1] / "fixtures" / "tables"


def test_the_vocabulary_is_padded_as_megatron_lm_pads_it() -> None:
    table = json.loads((TABLES / "padded_vocab.json").read_text())
    assert len(table["rows"]) == 200
    for vocab_size, divisible_by, tensor, padded in table["rows"]:
        assert padded_vocab_size(vocab_size, divisible_by, tensor) == padded


def test_rows_that_are_given_belong_to_the_model_and_are_padded_for_tensor_parallelism_only(
    parse: Parse,
) -> None:
    config = parse("--padded-vocab-size 130 --tensor-model-parallel-size 4", world_size=4)
    assert config.model_vocab_size(100) == 130
    assert config.padded_vocab_size(100) == 132
    config = parse("--tensor-model-parallel-size 4", world_size=4)
    assert config.model_vocab_size(100) == 100
    assert config.padded_vocab_size(100) == 512


@pytest.mark.parametrize("table", json.loads((TABLES / "batch_size_rampup.json").read_text()))
def test_the_ramps_that_megatron_lm_runs_are_accepted_and_the_one_on_which_it_fails_is_refused(
    parse: Parse, table: dict[str, object]
) -> None:
    ramp = f"{table['start_global_batch_size']} {table['batch_size_increment']} {table['rampup_samples']}"
    line = (
        f"--train-samples 99999 --global-batch-size {table['global_batch_size']} "
        f"--micro-batch-size {table['micro_batch_size']} --rampup-batch-size {ramp}"
    )
    if table["decrease_batch_size_if_needed"]:
        line += " --decrease-batch-size-if-needed"
    world_size = table["data_parallel_size"]
    if "error" in table or table["decrease_batch_size_if_needed"]:
        with pytest.raises(ConfigError):
            parse(line, without="--train-iters", world_size=world_size)
    else:
        config = parse(line, without="--train-iters", world_size=world_size)
        rows = table["rows"]
        assert isinstance(rows, list)
        assert config.global_batch_size == max(row[2] for row in rows)


@pytest.mark.parametrize(
    "line, world_size, replicas",
    [
        ("", 1, 1),
        ("", 4, 4),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 8, 2),
    ],
)
def test_replicas_follow_from_the_number_of_processes(parse: Parse, line: str, world_size: int, replicas: int) -> None:
    config = parse(line, world_size=world_size)
    assert config.data_parallel_size == replicas


def test_the_global_batch_is_one_micro_batch_a_replica_when_not_given(parse: Parse) -> None:
    config = parse("", without="--global-batch-size", world_size=4)
    assert config.global_batch_size == 8
    assert config.train_samples == 800


def test_sizes_that_depend_on_an_unknown_number_of_processes_say_so(parse: Parse) -> None:
    config = parse("", without="--global-batch-size")
    with pytest.raises(ValueError, match="--world-size"):
        _ = config.global_batch_size
    with pytest.raises(ConfigError, match="8 processes, which do not divide the 6 started"):
        _ = parse("--tensor-model-parallel-size 8").on(6).data_parallel_size


def test_schedules_count_samples(parse: Parse) -> None:
    config = parse("--lr-warmup-iters 5 --lr-decay-iters 50 --lr-decay-style WSD --lr-wsd-decay-iters 10", world_size=1)
    lengths = config.schedule_lengths
    assert (lengths.warmup, lengths.decay, lengths.wsd_decay, lengths.weight_decay_ramp) == (
        80,
        800,
        160,
        1600,
    )
    config = parse("--train-samples 1000 --lr-warmup-fraction 0.1", without="--train-iters", world_size=1)
    lengths = config.schedule_lengths
    assert (lengths.warmup, lengths.decay, lengths.wsd_decay, lengths.weight_decay_ramp) == (
        100,
        1000,
        None,
        1000,
    )


def test_the_number_of_processes_is_one_fact(parse: Parse) -> None:
    config = parse("")
    assert config.on(4).parallel.world_size == 4
    assert config.on(4).on(4) == config.on(4)
    with pytest.raises(ConfigError, match=r"--world-size 4: is not the number of processes .* has started, 8"):
        config.on(4).on(8)


@pytest.mark.parametrize(
    "line, ranks, expected",
    [
        ("", 8, None),
        ("--overlap-grad-reduce", 8, 40_000_000),
        ("--overlap-grad-reduce", 64, 64_000_000),
        ("--overlap-grad-reduce --ddp-bucket-size 5000", 8, 5000),
        ("--overlap-grad-reduce --ddp-num-buckets 7", 8, None),
    ],
)
def test_buckets_are_as_large_as_those_of_megatron_lm(
    line: str, ranks: int, expected: int | None, parse: Parse
) -> None:
    assert parse(line).data_parallel.bucket_size(ranks=ranks) == expected


def test_evaluations_of_a_run_are_those_between_iterations_and_the_one_at_its_end() -> None:
    training = TrainingConfig(micro_batch_size=1, eval_interval=10)
    assert [training.evaluations(iterations) for iterations in (9, 10, 25)] == [1, 2, 3]
    assert replace(training, eval_interval=None).evaluations(25) == 1


@pytest.mark.parametrize(
    "line, expected",
    [
        ("", 16),
        ("--bf16", 18),
        ("--bf16 --grad-reduce-in-bf16", 16),
        ("--fp64", 32),
        ("--optimizer sgd", 12),
        ("--optimizer sgd --sgd-momentum 0", 8),
        ("--optimizer muon", 12),
        ("--bf16 --optimizer muon", 14),
        ("--bf16 --use-precision-aware-optimizer", 16),
        ("--fp16 --use-precision-aware-optimizer", 18),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16", 14),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 12),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
            "--main-grads-dtype bf16",
            10,
        ),
    ],
)
def test_bytes_of_a_parameter_with_gradient_and_optimizer(line: str, expected: int, parse: Parse) -> None:
    assert parse(line).optimizer.bytes_per_parameter == expected
