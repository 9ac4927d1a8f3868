"""What `--save` is checked for before a training starts, and not after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpointing import CheckpointError, list_checkpoints
from tests.training.runs import trained


def test_a_save_folder_that_can_not_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="preparing --save"):
        trained("--save", str(tmp_path / "file"))


def test_checkpoints_of_another_run_are_not_replaced(tmp_path: Path) -> None:
    trained("--save", str(tmp_path), "--save-interval", "2", "--train-iters", "4")
    with pytest.raises(CheckpointError, match=f"up to iteration 4, .* --load {tmp_path} goes on from them"):
        trained("--save", str(tmp_path), "--train-iters", "2")
    assert list_checkpoints(tmp_path) == (2, 4)
    trained("--save", str(tmp_path), "--load", str(tmp_path), "--train-iters", "5", "--override-opt_param-scheduler")
    assert list_checkpoints(tmp_path) == (2, 4, 5)
