"""Learning rate and weight decay, value for value with Megatron-LM's, and what a resume does to them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron.config.megatron_config import ScheduleLengths
from megatron.config.optimizer import OptimizerConfig
from megatron.config.options import section_options
from megatron.config.problems import UserError
from megatron.optimizer.param_scheduler import (
    SCHEDULE_FLAGS,
    LearningRateSchedule,
    ParamScheduler,
    WeightDecaySchedule,
    build_param_scheduler,
)
from tests.optimizer.toy import data_parallel, loss_sum, optimizer_of, toy_batch, toy_model

OPTIMIZER_FLAGS = {option.name for option in section_options("optimizer", OptimizerConfig)}
CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "tables" / "scheduler.json").read_text())


def scheduler_of(values: dict[str, Any], **options: Any) -> ParamScheduler:
    parts = []
    for schedule in (LearningRateSchedule, WeightDecaySchedule):
        names = {field.name for field in fields(schedule)}
        parts.append(schedule(**{name: value for name, value in values.items() if name in names}))
    return ParamScheduler(*parts, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['arguments']['lr_decay_style']}")
def test_values_of_every_style(case: dict[str, Any]) -> None:
    group = dict(case["param_group"])
    weight_decay_multiplier = group.pop("wd_mult", 1.0)
    scheduler = scheduler_of({**case["arguments"], **group})
    for num_steps, lr, weight_decay in case["rows"]:
        scheduler.step(num_steps - scheduler.num_steps)
        assert scheduler.lr == pytest.approx(lr, rel=1e-12, abs=0)
        assert scheduler.weight_decay * weight_decay_multiplier == pytest.approx(weight_decay, rel=1e-12, abs=0)


def test_the_fixture_covers_every_style() -> None:
    assert {case["arguments"]["lr_decay_style"] for case in CASES} == {
        "constant", "linear", "cosine", "inverse-square-root", "WSD",
    }  # fmt: skip
    assert {case["arguments"].get("lr_wsd_decay_style") for case in CASES} == {
        None, "exponential", "linear", "cosine", "minus_sqrt",
    }  # fmt: skip
    assert {case["arguments"]["wd_incr_style"] for case in CASES} == {"constant", "linear", "cosine"}


@pytest.mark.parametrize("style", ["cosine", "linear"])
def test_the_decay_ends_exactly_at_the_smallest_rate_and_starts_at_the_end_of_the_warm_up(style: str) -> None:
    schedule = LearningRateSchedule(
        max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=10, lr_decay_steps=100, lr_decay_style=style
    )
    for step, lr in ((5, 5e-4), (10, 1e-3), (55, 5.5e-4), (100, 1e-4), (101, 1e-4)):
        assert schedule.at(step) == pytest.approx(lr, rel=1e-12)


def test_the_first_update_of_a_warm_up_changes_nothing_unless_it_starts_above_zero() -> None:
    for init_lr in (0.0, 0.01):
        values = {"max_lr": 0.1, "init_lr": init_lr, "lr_warmup_steps": 10, "lr_decay_steps": 100}
        scheduler = scheduler_of({**values, "start_wd": 0.1, "end_wd": 0.1})
        model = toy_model()
        before = model.linear_fc1.weight.detach().clone()
        chunk = data_parallel(model)
        optimizer = optimizer_of([chunk])
        loss_sum(chunk, *toy_batch(0)).backward()
        optimizer.set_schedule(scheduler.lr, scheduler.weight_decay)
        optimizer.step()
        assert bool((model.linear_fc1.weight == before).all()) is (init_lr == 0.0)


VALUES = {
    "max_lr": 3e-4, "min_lr": 3e-5, "lr_warmup_steps": 40, "lr_decay_steps": 400, "lr_decay_style": "cosine",
    "start_wd": 0.01, "end_wd": 0.1, "wd_incr_steps": 500, "wd_incr_style": "linear",
}  # fmt: skip


def test_a_resumed_run_takes_the_rates_of_an_uninterrupted_one() -> None:
    straight = scheduler_of(VALUES)
    rates = []
    for _ in range(20):
        rates.append((straight.lr, straight.weight_decay))
        straight.step(16)
    first = scheduler_of(VALUES)
    for _ in range(10):
        first.step(16)
    resumed = scheduler_of(VALUES)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.num_steps == 10 * 16
    again = []
    for _ in range(10):
        again.append((resumed.lr, resumed.weight_decay))
        resumed.step(16)
    assert again == rates[10:]


DIFFERENCES = [
    ("max_lr", 2e-4, "--lr"),
    ("min_lr", 1e-5, "--min-lr"),
    ("lr_warmup_steps", 20, "--lr-warmup-iters"),
    ("lr_decay_steps", 300, "--lr-decay-iters"),
    ("lr_decay_style", "linear", "--lr-decay-style"),
    ("start_wd", 0.02, "--start-weight-decay"),
    ("end_wd", 0.2, "--end-weight-decay"),
    ("wd_incr_style", "cosine", "--weight-decay-incr-style"),
    ("wd_incr_steps", 600, "--train-iters"),
]


@pytest.mark.parametrize("key, value, flag", DIFFERENCES)
def test_a_changed_schedule_is_refused_overridden_or_taken_from_the_checkpoint(key: str, value: Any, flag: str) -> None:
    saved = scheduler_of({**VALUES, key: value})
    saved.step(100)
    state = json.loads(json.dumps(saved.state_dict()))

    with pytest.raises(ValueError, match=flag) as error:
        scheduler_of(VALUES).load_state_dict(state)
    assert repr(value) in str(error.value)
    assert repr(VALUES[key]) in str(error.value)

    overriding = scheduler_of(VALUES, on_load="override")
    overriding.load_state_dict(state)
    assert overriding.num_steps == 100
    assert overriding.lr == LearningRateSchedule.at(scheduler_of(VALUES).learning_rate_schedule, 100)

    taking = scheduler_of(VALUES, on_load="use_checkpoint")
    taking.load_state_dict(state)
    assert taking.state_dict() == saved.state_dict()
    assert (taking.lr, taking.weight_decay) == (saved.lr, saved.weight_decay)


def test_all_differences_are_named_at_once() -> None:
    state = scheduler_of({**VALUES, "max_lr": 2e-4, "min_lr": 1e-5}).state_dict()
    with pytest.raises(ValueError, match=r"(?s)max_lr.*min_lr.*--override-opt_param-scheduler"):
        scheduler_of(VALUES).load_state_dict(state)


def test_lengths_are_named_in_iterations_too_where_they_were_given_so() -> None:
    state = scheduler_of({**VALUES, "lr_warmup_steps": 20, "lr_decay_steps": 500}).state_dict()
    for options, saved, mine in (
        ({}, "500 samples in", "400 samples in"),
        ({"samples_per_iteration": 8}, "500 samples (62.5 iterations) in", "400 samples (50 iterations) in"),
    ):
        with pytest.raises(UserError, match="lr_warmup_steps") as error:
            scheduler_of(VALUES, **options).load_state_dict(state)
        assert f"{saved} the checkpoint, {mine} this run" in str(error.value)


def test_the_flags_of_the_schedules_are_options_of_the_optimizer() -> None:
    schedule = {name for name in OPTIMIZER_FLAGS if name.startswith(("--lr", "--min-lr")) or "weight-decay" in name}
    assert schedule == SCHEDULE_FLAGS


def test_a_longer_run_is_no_difference_where_the_length_has_no_effect() -> None:
    constant = {**VALUES, "lr_decay_style": "constant", "start_wd": 0.1, "wd_incr_style": "constant"}
    state = scheduler_of(constant).state_dict()
    scheduler_of({**constant, "lr_decay_steps": 800, "wd_incr_steps": 900}).load_state_dict(state)


def test_a_state_of_megatron_lm_is_understood() -> None:
    """It lacks what Megatron-LM does not save."""
    names = (
        "max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "start_wd",
        "end_wd", "wd_incr_style", "wd_incr_steps",
    )  # fmt: skip
    saved = scheduler_of(VALUES)
    saved.step(77)
    state = {name: saved.state_dict()[name] for name in names}
    scheduler = scheduler_of(VALUES)
    scheduler.load_state_dict(state)
    assert scheduler.num_steps == 77


CONFIG = {"lr": 1e-3, "min_lr": 1e-4}


def test_the_schedules_take_the_lengths_of_the_run() -> None:
    config = OptimizerConfig(
        **CONFIG, lr_decay_style="WSD", start_weight_decay=0.1, end_weight_decay=0.2, weight_decay_incr_style="linear"
    )
    lengths = ScheduleLengths(warmup=160, decay=2560, wsd_decay=320, weight_decay_ramp=3200)
    scheduler = build_param_scheduler(config, lengths)
    schedule = scheduler.learning_rate_schedule
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wsd_decay_steps) == (160, 2560, 320)
    assert scheduler.weight_decay_schedule.wd_incr_steps == 3200
    assert scheduler.weight_decay == 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"min_lr": 1.0},
        {"init_lr": 1.0},
        {"lr_warmup_steps": 400},
        {"lr_decay_steps": 0},
        {"lr_decay_style": "WSD"},
        {"start_wd": 0.5},
        {"wd_incr_style": "constant"},
    ],
)
def test_schedules_that_no_configuration_allows_are_a_bug(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        scheduler_of({**VALUES, **change})
