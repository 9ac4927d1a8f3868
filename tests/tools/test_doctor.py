"""What the doctor says of an installation, and when it says that something is missing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.core.kernels import extension
from megatron.core.kernels.choice import OPERATIONS, KernelChoice, set_kernel_choice
from tests.helpers.tools import ROOT, names_of_tool, run


@pytest.fixture
def doctor() -> Iterator[dict[str, Any]]:
    extension._report_reference.cache_clear()
    yield names_of_tool("doctor")
    set_kernel_choice(KernelChoice())


def examined(doctor: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[bool, dict[str, str]]:
    """Whether all is fine on a CPU, and the line of each operation."""
    fine = doctor["examine"](torch.device("cpu"))
    lines = capsys.readouterr().out.splitlines()[1:]
    named = {operation.name: [line for line in lines if line.startswith(operation.name)] for operation in OPERATIONS}
    return fine, {name: line for name, (line,) in named.items()}


def test_it_says_what_there_is_and_runs_every_operation(doctor: dict[str, Any]) -> None:
    said = run("doctor", "--device", "cpu", "--kernels", "native")
    for what in ("Python", "torch", "GPUs", "gloo yes", "instruction sets generic", "NVIDIA Apex", "transformers"):
        assert what in said
    for operation in OPERATIONS:
        assert f"\n{operation.name} " in said
    assert "torch  " not in said.partition("--kernels native:")[2], "a reference runs although the module is there"
    assert str(ROOT) not in said
    assert socket.gethostname() not in said.split()


def test_every_operation_has_a_check(doctor: dict[str, Any]) -> None:
    assert list(doctor["CHECKS"]) == [operation.name for operation in OPERATIONS]


def test_the_choice_is_shown(doctor: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    set_kernel_choice(KernelChoice(kernels="torch"))
    fine, lines = examined(doctor, capsys)
    assert fine
    assert all("torch" in line and "--kernels torch asks for it" in line for line in lines.values())


def test_what_is_asked_for_and_missing_is_an_error() -> None:
    said = run("doctor", "--device", "cpu", "--kernels", "apex", status=1)
    assert "\nMISSING: --kernels apex: the kernels of NVIDIA Apex run on GPUs" in said


def test_a_gpu_that_is_asked_for_and_missing_is_named() -> None:
    assert "--device cuda: torch sees no GPU" in run("doctor", "--device", "cuda", status=2)


def test_without_the_compiled_module_the_references_run(
    doctor: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "load_extension", lambda: None)
    doctor["compiled_module"].__globals__["load_extension"] = lambda: None
    assert doctor["compiled_module"]().startswith("is not built; `make kernels`")
    fine, lines = examined(doctor, capsys)
    assert fine
    assert all("torch" in line and "is not built" in line for line in lines.values())


def test_a_kernel_that_computes_something_else_is_an_error(
    doctor: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, wrong in (("gradient norm", 1.001), ("cross entropy", float("nan"))):
        correct = doctor["CHECKS"][name]
        monkeypatch.setitem(
            doctor["CHECKS"], name, lambda device, correct=correct, wrong=wrong: _scaled(correct(device), wrong)
        )
    fine, lines = examined(doctor, capsys)
    assert not fine
    assert "1.0e-03: WRONG, more than 1e-05" in lines["gradient norm"]
    assert "inf: WRONG" in lines["cross entropy"]
    assert "WRONG" not in lines["adam"]


def _scaled(results: Any, factor: float) -> Any:
    mine, expected = results
    return [tensor * factor for tensor in mine], expected


def test_a_kernel_that_raises_is_an_error_and_the_others_still_run(
    doctor: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ModuleType("old")
    old.__file__ = "old.so"
    monkeypatch.setattr(extension, "load_extension", lambda: old)
    fine, lines = examined(doctor, capsys)
    assert not fine
    assert all("FAILS: the compiled module" in line for line in lines.values())
