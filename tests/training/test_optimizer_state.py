"""`--use-precision-aware-optimizer` in whole runs: the same training in fewer bytes, and checkpoints of either form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpointing import load_checkpoint
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import Halves
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import LOSS_BF16, assert_bitwise
from tests.training.runs import build, trained
from tests.training.test_resume import timeless
from tests.training.test_train_step import state_of

COPY = ("--bf16", "--lr-warmup-iters", "1", "--log-params-norm")
HALVES = (*COPY, "--use-precision-aware-optimizer")
NARROW = (*HALVES, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16", "--adam-beta2", "0.95")
FORMS = {"copy": COPY, "halves": HALVES, "narrow": NARROW, "gradients": (*NARROW, "--main-grads-dtype", "bf16")}


def test_in_halves_a_run_has_every_bit_of_one_with_a_copy() -> None:
    copy, recorder = trained(*COPY, "--train-iters", "4")
    halves, other = trained(*HALVES, "--train-iters", "4")
    assert all(isinstance(part.main, Halves) and part.low_precision is None for part in halves.optimizer.parts)
    rows = [[{**row, "params_norm": 0} for row in timeless(each)] for each in (recorder, other)]
    assert rows[0] == rows[1]
    norms = [[step.params_norm for step in each.steps] for each in (recorder, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    expected = state_of(copy)
    for name, tensor in state_of(halves).items():
        assert_bitwise(tensor, expected[name], name)


def test_bytes_of_optimizer_state_are_those_of_the_configuration() -> None:
    for form, flags in FORMS.items():
        run, _ = build(*flags)
        config = run.config.optimizer
        elements = kept = 0
        for part in run.optimizer.parts:
            elements += part.main.numel()
            main = [part.main.lower] if isinstance(part.main, Halves) else [part.main]
            model = part.bucket.parameters
            tensors = [model, part.gradient, *main, *part.state.values()]
            kept += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert kept == elements * config.bytes_per_parameter, form


def test_narrow_state_trains_nearly_alike() -> None:
    _, exact = trained(*COPY, "--train-iters", "4")
    for flags in (NARROW, FORMS["gradients"]):
        _, recorder = trained(*flags, "--train-iters", "4")
        assert recorder.losses == pytest.approx(exact.losses, rel=LOSS_BF16)


@pytest.mark.parametrize("form", FORMS)
def test_a_resume_is_exact(form: str, tmp_path: Path) -> None:
    arguments = [*FORMS[form], "--train-iters", "6"]
    straight, recorder = trained(*arguments)
    trained(*arguments, "--save", str(tmp_path), "--exit-interval", "3")
    resumed, rest = trained(*arguments, "--load", str(tmp_path))
    assert timeless(rest) == timeless(recorder)[3:]
    expected = state_of(straight)
    for name, tensor in state_of(resumed).items():
        assert_bitwise(tensor, expected[name], name)


@pytest.mark.parametrize("saved, present", [("copy", "halves"), ("halves", "copy")])
def test_a_checkpoint_of_one_form_goes_on_exactly_in_the_other(saved: str, present: str, tmp_path: Path) -> None:
    straight, _ = trained(*COPY, "--train-iters", "6")
    trained(*FORMS[saved], "--train-iters", "6", "--save", str(tmp_path), "--exit-interval", "3")
    stored = load_checkpoint(tmp_path, world=CommGroup.single("world")).tensors
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    resumed, _ = trained(*FORMS[present], "--train-iters", "6", "--load", str(tmp_path))
    expected = state_of(straight)
    for name, tensor in state_of(resumed).items():
        assert_bitwise(tensor, expected[name], name)


def test_moments_of_another_type_are_converted_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beta2 = ("--adam-beta2", "0.95")
    first, _ = trained(*HALVES, *beta2, "--train-iters", "4", "--save", str(tmp_path), "--exit-interval", "2")
    capsys.readouterr()
    run, _ = build(*NARROW, "--train-iters", "4", "--load", str(tmp_path))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "converted" in line]
    assert line.endswith(" tensors: torch.float32 in the checkpoint, converted to torch.bfloat16")
    before = state_of(first)
    for name, tensor in state_of(run).items():
        assert_bitwise(tensor, before[name].to(tensor.dtype), name)


SHARDED = ("--use-distributed-optimizer", "--ddp-bucket-size", "20000", "--overlap-grad-reduce")


def saved_in_parts(rank: int, world_size: int, folder: str, *arguments: str) -> list[dict[str, object]]:
    """Three iterations and a checkpoint, then three more from it; what all six report."""
    first, second = (
        trained(*arguments, "--train-iters", "6", *flags, rank=rank, world_size=world_size)[1]
        for flags in (("--save", folder, "--exit-interval", "3"), ("--load", folder))
    )
    return timeless(first) + timeless(second)


def straight(rank: int, world_size: int, *arguments: str) -> list[dict[str, object]]:
    return timeless(trained(*arguments, "--train-iters", "6", rank=rank, world_size=world_size)[1])


def without_params_norm(rows: list[list[dict[str, object]]]) -> list[list[dict[str, object]]]:
    """It is summed slice by slice where each rank has one."""
    return [[{key: value for key, value in row.items() if key != "params_norm"} for row in rank] for rank in rows]


def test_sharded_over_two_ranks_halves_are_updated_saved_and_loaded_as_whole_copies_are(tmp_path: Path) -> None:
    copies = run_distributed(straight, 2, *COPY, *SHARDED)
    halves = run_distributed(saved_in_parts, 2, str(tmp_path / "halves"), *HALVES, *SHARDED)
    assert without_params_norm(halves) == without_params_norm(copies)
    run_distributed(saved_in_parts, 2, str(tmp_path / "copies"), *COPY, *SHARDED)
    expected, loaded = (
        state_of(build(*form, "--train-iters", "6", "--load", str(folder), "--ckpt-step", "3")[0])
        for form, folder in ((COPY, tmp_path / "copies"), (HALVES, tmp_path / "halves"))
    )
    assert sorted(loaded) == sorted(expected)
    for name, tensor in loaded.items():
        assert_bitwise(tensor, expected[name], name)


@pytest.mark.parametrize("layout", [(), SHARDED], ids=["", "sharded"])
def test_a_resume_with_muon_is_exact(layout: tuple[str, ...], tmp_path: Path) -> None:
    muon = ("--bf16", "--optimizer", "muon", "--muon-extra-scale-factor", "0.2", *layout)
    assert run_distributed(saved_in_parts, 2, str(tmp_path), *muon) == run_distributed(straight, 2, *muon)
