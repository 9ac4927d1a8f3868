"""The benchmarks run; what they measure is no matter of tests."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

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
    results = json.loads(file.read_text())["results"]
    for other, result in zip(("plain-sdpa", "plain-eager", "framework-dp2"), results, strict=True):
        assert result["seconds"].keys() == {"framework", "framework +", other, f"{other} +", "matmul +"}
        assert all(table.count(f"| {name} |") == 1 for name in result["seconds"] if name != "matmul +")
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


def test_a_count_of_turns_says_how_many_are_done_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    turns = runpy.run_path(str(BENCHMARKS / "turns.py"))
    turns["take_turns"]({"a": lambda: None}, turns=2, warm_up=1, what="small ones")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"small ones: turn {done} of 3" for done in (1, 2, 3)]
    assert all(line.endswith(" s left") for line in lines)
    turns["take_turns"]({"a": lambda: None}, turns=2, silent=True)
    assert capsys.readouterr().err == ""


def test_what_is_waited_for_before_a_side_is_not_timed() -> None:
    turns = runpy.run_path(str(BENCHMARKS / "turns.py"))
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = turns["take_turns"](sides, turns=1, before_side=lambda: time.sleep(0.2) or calls.append("wait"))
    assert calls == ["wait", "a", "wait", "b"]
    assert all(seconds < [0.1] for seconds in times.seconds.values())


def test_the_rate_of_products_is_of_the_products_that_a_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each weight forward and backward, in its own shape, as many as the model's operations count."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    speed, gpt = (runpy.run_path(str(BENCHMARKS / name)) for name in ("training_speed.py", "plain_gpt.py"))
    size = replace(gpt["SIZES"]["smoke"], hidden=32, ffn=80, layers=3)
    with FlopCounterMode(display=False) as counter:
        speed["matmul_step"](size)()
    assert counter.get_total_flops() == speed["products_of"](size)
    model = gpt["PlainGPT"](size)
    matrices = [parameter for name, parameter in model.named_parameters() if parameter.dim() == 2 and "pos" not in name]
    assert sorted(map(tuple, speed["weight_shapes"](size))) == sorted(tuple(matrix.shape) for matrix in matrices)


def test_the_overhead_of_a_step_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--size", "smoke", "--turns", "2", "--threads", "1", "--json", str(file)]
    command = [sys.executable, str(BENCHMARKS / "step_overhead.py"), *words]
    table = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    (result,) = json.loads(file.read_text())["results"]
    assert "| smoke | 1 |" in table
    assert len(result["around"]) == len(result["seconds"]["model"]) == len(result["cpu"]["hollow"]) == 2
    assert 0 < result["around_share"] < 1
    assert result["hollow_share"] > 0


def test_the_update_is_measured_and_says_how_far_it_is(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--elements", "100000", "--turns", "2", "--threads", "1", "--json", str(file)]
    command = [sys.executable, str(BENCHMARKS / "optimizer_step.py"), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    one, many = json.loads(file.read_text())["results"]
    assert (one["parameters"], many["parameters"]) == (1, 10)
    assert "1 x 100,000: turn 3 of 3, 0 s left" in done.stderr
    assert "10 x 10,000: turn 3 of 3, 0 s left" in done.stderr


@pytest.mark.full
def test_preprocessing_is_measured_beside_a_loop_that_writes_the_same_files(tmp_path: Path) -> None:
    words = ["--megabytes", "3", "--vocab-size", "2000", "--turns", "1", "--json", str(tmp_path / "result.json")]
    command = [sys.executable, str(BENCHMARKS / "data.py"), *words]
    table = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    result = json.loads((tmp_path / "result.json").read_text())["results"]["preprocessing"]
    assert list(result["seconds"]) == list(result["cpu"]) == ["preprocess_data.py, 2 workers", "tokenizers, 2 threads"]
    assert "| ratio |" in table


@pytest.mark.full
def test_indices_and_reading_are_measured_each_in_a_process_of_its_own(tmp_path: Path) -> None:
    words = ["--parts", "indices", "reading", "--documents", "100000", "--samples", "100000", "--turns", "1"]
    words += ["--corpus-megabytes", "20", "--json", str(tmp_path / "result.json")]
    command = [sys.executable, str(BENCHMARKS / "data.py"), *words]
    table = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    results = json.loads((tmp_path / "result.json").read_text())["results"]
    assert list(results) == ["indices", "reading"]
    assert all(len(turns) == 1 and turns[0]["s"] > 0 for part in results.values() for turns in part.values())
    assert "| million tokens/s |" in table
