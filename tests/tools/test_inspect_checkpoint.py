"""What is said of a checkpoint is in it; what is said of two is how they differ."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import load_checkpoint
from megatron.core.comm_group import CommGroup
from megatron.training.saving import save_run
from tests.helpers.tools import names_of_tool, run
from tests.training.runs import trained

TOOL = names_of_tool("inspect_checkpoint")
WORD_EMBEDDINGS = "model.embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoints of iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("inspected") / "checkpoints"
    trained("--train-iters", "2", "--save-interval", "1", "--save", str(folder))
    return folder


def inspect(*arguments: str | Path, found_in: Path, status: int = 0) -> tuple[dict[str, Any], str]:
    """What the tool finds, as JSON and as printed."""
    printed = run("inspect_checkpoint", *arguments, "--json", found_in / "found.json", status=status)
    return json.loads((found_in / "found.json").read_text()), printed


def tensors_of(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = load_checkpoint(folder, step=step, world=CommGroup.single("world"))
    return {key: checkpoint.read(key) for key in checkpoint.tensors}


def test_each_tensor_has_its_shape_norm_and_bounds(folder: Path, tmp_path: Path) -> None:
    found, printed = inspect(folder, "--ckpt-step", "1", "--all", found_in=tmp_path)
    tensors = tensors_of(folder, 1)
    assert found["tensors"].keys() == tensors.keys()
    for key, tensor in tensors.items():
        said = found["tensors"][key]
        assert (said["shape"], said["dtype"], said["not_finite"]) == (list(tensor.shape), "float32", 0), key
        assert (said["min"], said["max"]) == (float(tensor.min()), float(tensor.max())), key
        assert said["norm"] == pytest.approx(float(tensor.double().norm()), rel=1e-12), key
        assert sum(line.split()[:1] == [key] for line in printed.splitlines()) == 1, key


def test_the_run_is_described(folder: Path, tmp_path: Path) -> None:
    found, printed = inspect(folder, found_in=tmp_path)
    assert (found["iteration"], found["samples"], found["written by"]) == (2, 16, "1 rank, fp32")
    assert found["configuration"]["model"]["num_layers"] == 4
    weights = [tensor for key, tensor in tensors_of(folder, 2).items() if key.startswith("model.")]
    assert found["parameters"] == sum(tensor.numel() for tensor in weights)
    lines = [line.strip() for line in printed.splitlines()]
    assert "--num-layers 4" in lines and "--reset-attention-mask" in lines
    assert not any(line.startswith("--adam-beta1") for line in lines), "that is as by default"


def test_layers_share_a_line_with_the_norm_of_all_of_them(folder: Path, tmp_path: Path) -> None:
    found, printed = inspect(folder, found_in=tmp_path)
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line}
    line = lines["model.decoder.layers.0-3.mlp.linear_fc1.weight"]
    alone = [found["tensors"][f"model.decoder.layers.{layer}.mlp.linear_fc1.weight"] for layer in range(4)]
    assert line[1:6] == ["4", "96", "x", "48", "float32"]
    assert float(line[6]) == pytest.approx(math.hypot(*(each["norm"] for each in alone)), rel=1e-5)
    assert float(line[7]) == pytest.approx(min(each["min"] for each in alone), rel=1e-5)
    assert float(line[8]) == pytest.approx(max(each["max"] for each in alone), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_statistics_of_a_tensor_larger_than_is_looked_at_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOOL["parts_of"].__globals__, "_AT_ONCE", 100)
    tensor = (torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    found = TOOL["statistics_of"](tensor)
    assert found.not_finite == 0
    assert (found.smallest, found.largest) == (float(tensor.min()), float(tensor.max()))
    assert found.norm == pytest.approx(float(tensor.double().norm()), rel=1e-12)


def test_numbers_that_are_not_finite_are_counted_and_left_out() -> None:
    tensor = torch.tensor([[1.0, math.nan], [-math.inf, -2.0]])
    found = TOOL["statistics_of"](tensor)
    assert (found.not_finite, found.smallest, found.largest) == (2, -2.0, 1.0)
    assert found.norm == pytest.approx(5**0.5)
    nothing = TOOL["statistics_of"](torch.tensor([math.nan]))
    assert (nothing.not_finite, nothing.smallest, nothing.largest, nothing.norm) == (1, None, None, 0.0)


def test_a_tensor_of_no_elements_has_no_numbers() -> None:
    empty = torch.zeros(0, 3)
    found = TOOL["statistics_of"](empty)
    assert (found.not_finite, found.smallest, found.largest, found.norm) == (0, None, None, 0.0)
    change = TOOL["change_of"](empty, empty.double())
    assert (change.identical, change.not_finite, change.largest, change.relative) == (False, 0, 0.0, 0.0)


def test_tensors_with_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    training, _ = trained("--train-iters", "1")
    for named in training.optimizer.named_main_parameters():
        if f"{named.key}" == WORD_EMBEDDINGS:
            named.tensor[3, :2] = math.nan
    save_run(training, tmp_path / "checkpoints")
    found, printed = inspect(tmp_path / "checkpoints", found_in=tmp_path)
    assert found["tensors"][WORD_EMBEDDINGS]["not_finite"] == 2
    assert printed.endswith(f"1 tensor with NaN or infinite elements:\n  {WORD_EMBEDDINGS}: 2 elements\n")


def test_a_checkpoint_is_the_same_as_itself(folder: Path, tmp_path: Path) -> None:
    found, printed = inspect(folder, "--compare", folder, found_in=tmp_path)
    assert "configuration: no difference" in printed
    count = len(tensors_of(folder, 2))
    assert printed.splitlines()[-1].startswith(f"{count} of {count} tensors")
    assert (found["missing"], found["surplus"], found["reshaped"], found["first_changed"]) == ([], [], [], None)


def test_an_iteration_changes_tensors_by_what_is_said(folder: Path, tmp_path: Path) -> None:
    words = [folder, "--ckpt-step", "1", "--compare", folder, "--compare-step", "2"]
    found, printed = inspect(*words, found_in=tmp_path, status=1)
    before, after = tensors_of(folder, 1), tensors_of(folder, 2)
    for key, said in found["tensors"].items():
        change = after[key].double() - before[key].double()
        assert said["identical"] == torch.equal(before[key], after[key]), key
        assert said["largest"] == float(change.abs().max()), key
        assert said["relative"] == pytest.approx(float(change.norm() / before[key].double().norm()), rel=1e-12), key
    assert f"the first that differs is {found['first_changed']}\n" in printed
    assert found["first_changed"].startswith("model.")


def test_tensors_that_one_of_two_lacks_and_changed_options_are_listed(folder: Path, tmp_path: Path) -> None:
    trained("--no-save-optim", "--lr", "0.5", "--train-iters", "1", "--save", str(tmp_path / "other"))
    found, printed = inspect(folder, "--compare", tmp_path / "other", found_in=tmp_path, status=1)
    kinds = {key.split(".")[1] for key in found["missing"]}
    assert (kinds, found["surplus"]) == ({"exp_avg", "exp_avg_sq"}, [])
    assert "--lr: 0.01 -> 0.5" in found["configuration"]
    assert "104 tensors that only the first has:" in printed
    reverse, printed = inspect(tmp_path / "other", "--compare", folder, found_in=tmp_path, status=1)
    assert (reverse["surplus"], reverse["missing"]) == (found["missing"], [])
    assert "104 tensors that only the second has:" in printed


def test_tensors_of_other_shapes_are_listed(folder: Path, tmp_path: Path) -> None:
    trained("--ffn-hidden-size", "48", "--train-iters", "1", "--save", str(tmp_path / "other"))
    found, printed = inspect(folder, "--compare", tmp_path / "other", found_in=tmp_path, status=1)
    assert "model.decoder.layers.0.mlp.linear_fc1.weight" in found["reshaped"]
    assert "model.decoder.layers.0-3.mlp.linear_fc1.weight 48 x 48" in printed
    assert not set(found["reshaped"]) & found["tensors"].keys()


def test_zeros_of_two_signs_and_dtypes_are_not_the_same_bytes() -> None:
    change = TOOL["change_of"](torch.zeros(2), -torch.zeros(2))
    assert (change.identical, change.largest, change.relative) == (False, 0.0, 0.0)
    assert not TOOL["change_of"](torch.ones(2), torch.ones(2).double()).identical
    nan = torch.tensor([math.nan, 1.0])
    assert TOOL["change_of"](nan, nan.clone()).identical


def test_a_change_in_numbers_that_are_not_finite_is_counted() -> None:
    """NaN with another sign or payload is the same; and what is alike in both has not changed."""
    before = torch.tensor([1.0, 1.0, math.inf, math.inf, math.nan, math.nan, 4.0])
    after = torch.tensor([1.0, math.nan, math.inf, -math.inf, -math.nan, 2.0, 4.0])
    change = TOOL["change_of"](before, after)
    assert (change.identical, change.not_finite, change.relative) == (False, 3, 0.0)
    assert math.copysign(1.0, change.largest) == 1.0 and change.largest == 0.0
    assert TOOL["change_of"](before, after + torch.tensor([0, 0, 0, 0, 0, 0, 0.5])).largest == 0.5
    assert change.as_json()["not_finite"] == 3


def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    trained("--train-iters", "1", "--save", str(tmp_path / "damaged"))
    (shard,) = (tmp_path / "damaged").rglob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"\xff" * 50)
    complaint = run("inspect_checkpoint", tmp_path / "damaged", status=2).splitlines()[-1]
    assert f"{shard} is damaged: wrong checksum of " in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["absent"], "no checkpoint in absent: there is no such folder"),
        (["--ckpt-step", "9"], "--ckpt-step asks for iteration 9, which is not there"),
        (["--compare", "absent"], "no checkpoint in absent: there is no such folder"),
        (["--json", "/dev/null/found.json"], "--json /dev/null/found.json: its folder cannot be made"),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, arguments: list[str], complaint: str) -> None:
    words = arguments if arguments[0] == "absent" else [str(folder), *arguments]
    assert complaint in run("inspect_checkpoint", *words, status=2)
