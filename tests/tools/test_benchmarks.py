"""The benchmarks run; what they measure is no matter of tests."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "tools" / "benchmark"


@pytest.mark.full
def test_training_speed_measures_each_program_with_and_without_the_allocator_setting(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = [
        "--quick",
        "--threads",
        "1",
        "--programs",
        "plain-sdpa",
        "plain-eager",
        "framework-dp2",
        "--json",
        str(file),
    ]
    command = [sys.executable, str(BENCHMARKS / "training_speed.py"), *words]
    table = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    (result,) = json.loads(file.read_text())["results"]
    programs = {"framework", "plain-sdpa", "plain-eager", "framework-dp2"}
    assert result["seconds"].keys() == {*programs, *(f"{program} +" for program in programs), "matmul +"}
    assert all(f"| {name} |" in table for name in result["seconds"] if name != "matmul +")
    assert all(second > 0 for seconds in result["cpu"].values() for second in seconds)


def test_sides_take_turns_in_both_orders() -> None:
    turns = runpy.run_path(str(BENCHMARKS / "turns.py"))
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = turns["take_turns"](sides, turns=2, warm_up=1, before=lambda: calls.append("before"))
    assert calls == ["before", "b", "a", "before", "a", "b", "before", "b", "a"]
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == {"a": 2, "b": 2}
    assert turns["ratios"]([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert turns["cell"]([1.0, 3.0, 2.0], ".1f") == "2.0 (1.0-3.0)"
