"""The script for a machine with a GPU, tried where there is none."""

from __future__ import annotations

import json
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.commands import recorded_calls
from tests.helpers.tools import ROOT

SCRIPT = ROOT / "tools" / "dev" / "gpu_check.sh"
CPU = torch.device("cpu")


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "benchmark"))
    return runpy.run_path(str(ROOT / "tools" / "benchmark" / "gpu_check.py"))


def test_without_a_gpu_the_script_says_so_and_does_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = subprocess.run(
        ["bash", str(SCRIPT), "--output", str(output)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "torch sees no GPU: nothing can be checked here" in done.stderr
    assert list(output.iterdir()) == []


@pytest.mark.parametrize(("fails", "status"), [("", 0), ("*doctor*", 1)])
def test_every_step_runs_and_one_that_fails_is_named(tmp_path: Path, fails: str, status: int) -> None:
    python = tmp_path / "stand-ins" / "python"
    calls, said = recorded_calls(
        SCRIPT,
        ["--device", "cpu", "--quick", "--output", str(tmp_path / "out")],
        tmp_path / "stand-ins",
        {"PYTHON": str(python), "PYTHONPATH": "elsewhere"},
        programs=["python", "cmake", "cp"],
        fails=fails,
        status=status,
    )
    programs = [" ".join(call[:3]) for call in calls]
    assert [line for line in programs if "cmake" not in line and "cp" not in line] == [
        "python -m pybind11",
        "python tools/doctor.py --device",
        "python -m pytest",
        "python tools/benchmark/gpu_check.py --device",
    ]
    assert [call[:2] for call in calls if call[0] == "cmake"] == [["cmake", "-S"], ["cmake", "--build"]]
    for step in ("build", "doctor", "tests", "speed"):
        failed = bool(fails) and step == "doctor"
        (line,) = (line for line in said.splitlines() if line.startswith(f"{step} "))
        assert ("FAILED (exit status 1)" in line) == failed
        assert ("passed" in line) != failed


def test_the_limits_of_the_steps_are_eight_minutes() -> None:
    words = [line.split() for line in SCRIPT.read_text(encoding="utf-8").splitlines() if line.startswith("step ")]
    assert [name for _, name, *_ in words] == ["build", "doctor", "tests", "speed"]
    assert sum(int(limit) for _, _, limit, *_ in words) < 8 * 60


def test_each_implementation_of_the_update_computes_the_same(measurements: dict[str, Any]) -> None:
    updates: Callable[..., dict[str, Callable[[], object]]] = measurements["updates"]
    results = []
    for name in updates(CPU, 64):
        runs = updates(CPU, 64)
        runs[name]()
        kept = [cell.cell_contents for cell in runs["torch's fused AdamW, and a copy"].__closure__ or ()]
        (copy,) = (value for value in kept if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16)
        results.append(copy)
    assert len(results) == 2
    assert results[0].any()
    assert torch.equal(results[0], results[1])


def test_the_table_has_every_row_and_says_what_failed(measurements: dict[str, Any]) -> None:
    row = measurements["Row"]
    table = measurements["table"](
        [
            row(what="copy", value=4300.0, unit="GB/s"),
            row(
                what="GPT, eager",
                value=51234.0,
                unit="tokens/s",
                share=0.4567,
                peak_memory=7_310_000_000,
                reckoned_memory=7_290_000_000,
            ),
            row(what="GPT, compiled", value=None, unit="tokens/s", note="FAILED: out of memory"),
        ]
    )
    assert table.splitlines()[2:] == [
        "| copy | 4,300.0 GB/s |  |  |  |",
        "| GPT, eager | 51,234.0 tokens/s | 0.457 | 7.31 | 7.29 |",
        "| GPT, compiled | FAILED: out of memory |  |  |  |",
    ]


def test_a_model_that_does_not_fit_is_a_row_and_not_the_end(
    measurements: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("out of memory\nlong story")

    training_row = measurements["training_row"]
    monkeypatch.setitem(training_row.__globals__, "initialize_megatron", lambda flags: None)
    monkeypatch.setitem(training_row.__globals__, "build_run", full)
    row = training_row("GPT", [], CPU, 1, 1.0)
    assert (row.value, row.note) == (None, "FAILED: out of memory")


def test_the_results_are_written_as_json(
    measurements: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, row = measurements["main"], measurements["Row"]
    monkeypatch.setitem(main.__globals__, "measure", lambda device, sizes: [row(what="copy", value=1.0, unit="GB/s")])
    path = tmp_path / "folder" / "speed.json"
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--device", "cpu", "--quick", "--output", str(path)])
    main()
    document = json.loads(path.read_text())
    assert document["quick"] is True
    assert document["rows"] == [
        {
            "what": "copy",
            "value": 1.0,
            "unit": "GB/s",
            "share": None,
            "peak_memory": None,
            "reckoned_memory": None,
            "note": "",
        }
    ]
