"""The loss scale, value for value with Megatron-LM's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "tables" / "loss_scaler.json").read_text())


def scaler_of(arguments: dict[str, Any]) -> DynamicGradScaler:
    assert (arguments["growth_factor"], arguments["backoff_factor"]) == (2.0, 0.5)
    names = ("initial_scale", "min_scale", "growth_interval", "hysteresis")
    return DynamicGradScaler(**{name: arguments[name] for name in names})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"hysteresis{case['arguments']['hysteresis']}")
def test_scale_and_trackers_over_a_script_of_overflows(case: dict[str, Any]) -> None:
    scaler = scaler_of(case["arguments"])
    assert case["columns"] == [
        "found_inf",
        "scale_used",
        "scale_after",
        "growth_tracker",
        "hysteresis_tracker",
    ]
    for found_inf, used, after, growth, hysteresis in case["rows"]:
        assert scaler.scale == used
        scaler.update(bool(found_inf))
        assert (scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker) == (after, growth, hysteresis)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"hysteresis{case['arguments']['hysteresis']}")
def test_a_resume_at_any_step_continues_the_script(case: dict[str, Any]) -> None:
    scaler = scaler_of(case["arguments"])
    for found_inf, used, *_ in case["rows"]:
        resumed = scaler_of(case["arguments"])
        resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
        assert resumed.scale == used
        assert resumed.state_dict() == scaler.state_dict()
        scaler = resumed
        scaler.update(bool(found_inf))


def test_a_resume_with_a_shorter_window_grows_at_once_and_then_as_the_window_says() -> None:
    scaler = DynamicGradScaler(initial_scale=1024.0, min_scale=1.0, growth_interval=4, hysteresis=2)
    scaler.load_state_dict({"scale": 1024.0, "growth_tracker": 9, "hysteresis_tracker": 2})
    scales = []
    for _ in range(5):
        scaler.update(found_inf=False)
        scales.append(scaler.scale)
    assert scales == [2048.0] * 4 + [4096.0]


def test_a_resume_with_a_higher_minimum_starts_there() -> None:
    scaler = DynamicGradScaler(initial_scale=2.0**18, min_scale=2.0**16, growth_interval=4, hysteresis=1)
    scaler.load_state_dict({"scale": 1024.0, "growth_tracker": 0, "hysteresis_tracker": 1})
    assert scaler.scale == 2.0**16


def test_a_fixed_scale_stays() -> None:
    scaler = ConstantGradScaler(4096.0)
    scaler.update(found_inf=True)
    assert scaler.scale == 4096.0


@pytest.mark.parametrize("change", [{"min_scale": 0.0}, {"min_scale": 1e30}, {"growth_interval": 0}, {"hysteresis": 0}])
def test_settings_that_no_configuration_allows_are_a_bug(change: dict[str, Any]) -> None:
    settings = {"initial_scale": 2.0**16, "min_scale": 1.0, "growth_interval": 5, "hysteresis": 2}
    with pytest.raises(AssertionError):
        DynamicGradScaler(**{**settings, **change})
    with pytest.raises(AssertionError):
        ConstantGradScaler(0.0)
