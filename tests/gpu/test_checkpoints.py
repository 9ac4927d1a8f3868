"""A checkpoint holds numbers, not devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.saving import save_run
from megatron.training.train_step import train_step
from tests.gpu.runs import CPU, CUDA, run_on
from tests.helpers.numerics import assert_bitwise
from tests.training.test_train_step import state_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", [(), ("--bf16",), ("--fp64",)], ids=["fp32", "bf16", "fp64"])
def test_from_a_gpu_over_a_cpu_back_to_a_gpu_no_bit_changes(precision: tuple[str, ...], tmp_path: Path) -> None:
    trained = run_on(CUDA, *precision)
    for _ in range(2):
        assert train_step(trained).applied
    save_run(trained, tmp_path / "from-gpu")
    on_cpu = run_on(CPU, *precision, "--load", str(tmp_path / "from-gpu"))
    save_run(on_cpu, tmp_path / "from-cpu")
    back = run_on(CUDA, *precision, "--load", str(tmp_path / "from-cpu"))
    expected, middle, after = (state_of(run) for run in (trained, on_cpu, back))
    assert middle.keys() == after.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bitwise(middle[name], tensor.cpu(), f"{name} on the CPU")
        assert_bitwise(after[name], tensor, name)
    assert back.progress == trained.progress
    assert back.scheduler.lr == trained.scheduler.lr
    assert train_step(back).losses["lm loss"] == pytest.approx(train_step(trained).losses["lm loss"])
