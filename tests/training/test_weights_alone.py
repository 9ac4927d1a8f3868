"""A checkpoint that holds a model without a training, as conversion from another form writes it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import CheckpointError, list_checkpoints, model_tensors, save_checkpoint
from megatron.core.comm_group import CommGroup
from megatron.training.run import Run
from tests.helpers.launch import pretrain_tiny, rows_of
from tests.helpers.numerics import assert_bitwise
from tests.training.runs import build, counting_corpus, trained
from tests.training.test_resume import checksums, timeless
from tests.training.test_train_step import state_of

ALONE = CommGroup.single("world")


def save_model(run: Run, folder: Path) -> None:
    modules = [chunk.module for chunk in run.chunks]
    save_checkpoint(folder, 0, model_tensors(modules), {"config": run.config.to_dict()}, world=ALONE)


def test_it_is_loaded_as_by_finetune_and_a_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, _ = trained("--save", str(tmp_path / "trained"))
    save_model(saved, tmp_path / "model")
    data = counting_corpus(tmp_path / "data")
    capsys.readouterr()
    _, recorder = trained(*data, "--load", str(tmp_path / "model"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "starts at iteration 0" in line]
    assert line.startswith(f"  {tmp_path}/model/iter_0000000 holds a model without a training")
    assert [step.iteration for step in recorder.steps] == [1, 2, 3]
    _, finetuned = trained(*data, "--load", str(tmp_path / "trained"), "--finetune")
    assert timeless(recorder) == timeless(finetuned)

    begun, _ = build(*data, "--load", str(tmp_path / "model"))
    for name, tensor in state_of(begun).items():
        if name.startswith("optimizer."):
            assert not tensor.any(), name
        else:
            assert_bitwise(tensor, state_of(saved)[name], name)
    assert begun.progress.iteration == begun.scheduler.num_steps == begun.optimizer.state_dict()["num_updates"] == 0


def test_a_run_in_the_folder_of_the_model_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    save_model(build()[0], tmp_path / "run")
    model = checksums(tmp_path / "run" / "iter_0000000")
    arguments = ["--load", "run", "--save", "run", "--save-interval", "2", "--train-iters", "4", "--log-json", "log"]
    pretrain_tiny(tmp_path, *arguments, "--exit-interval", "2", ranks=2).check()
    pretrain_tiny(tmp_path, *arguments, ranks=2).check()
    assert [row["iteration"] for row in rows_of(tmp_path / "log") if "lm loss" in row] == [1, 2, 3, 4]
    assert checksums(tmp_path / "run" / "iter_0000000") == model, "iteration 0 is saved once"
    assert list_checkpoints(tmp_path / "run") == (0, 2, 4)


def test_another_model_is_refused_all_the_same(tmp_path: Path) -> None:
    save_model(build()[0], tmp_path)
    with pytest.raises(CheckpointError, match="--rotary-base: 10000 -> 500 changes the model"):
        build("--load", str(tmp_path), "--position-embedding-type", "rope", "--rotary-base", "500")


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata of a checkpoint, as its author could."""
    metadata = json.loads((folder / "metadata.json").read_text())
    change(metadata)
    text = json.dumps(metadata).encode()
    (folder / "metadata.json").write_bytes(text)
    marker = json.loads((folder / "COMPLETE").read_text())
    marker["files"]["metadata.json"] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    (folder / "COMPLETE").write_text(json.dumps(marker))


def test_a_training_that_does_not_say_what_its_data_was_goes_on_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained("--save", str(tmp_path), "--train-iters", "4", "--exit-interval", "2")
    rewrite(tmp_path / "iter_0000002", lambda metadata: metadata.pop("training_data"))
    again, _ = build("--load", str(tmp_path), "--train-iters", "4")
    assert "does not say what its data was: that this is the same is not checked" in capsys.readouterr().out
    assert again.progress == run.progress


@pytest.mark.parametrize(
    "key, value",
    [
        ("progress", 5),
        ("progress", {"iteration": 3, "epoch": 1}),
        ("progress", {"iteration": "3"}),
        ("progress", {"iteration": True}),
        ("progress", {"consumed_train_samples": -8}),
        ("progress", {"train_blocks": [1e3]}),
        ("progress", {"train_blocks": None}),
        ("scheduler", []),
        ("scheduler", {}),
        ("optimizer", None),
        ("optimizer", {"rule": "adam"}),
        ("training_data", {"prefix": "x"}),
        ("training_data", [["x", "y"]]),
        ("training_data", 7),
    ],
)
def test_metadata_that_no_run_writes_is_an_error_that_names_what_is_wrong(
    key: str, value: object, tmp_path: Path
) -> None:
    trained("--save", str(tmp_path), "--train-iters", "4", "--exit-interval", "3")
    rewrite(tmp_path / "iter_0000003", lambda metadata: metadata.update({key: value}))
    with pytest.raises(CheckpointError, match=rf"metadata\.json has no {key} as a run saves it"):
        build("--load", str(tmp_path), "--train-iters", "4")
