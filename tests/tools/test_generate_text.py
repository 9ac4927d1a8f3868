"""Text from a checkpoint, also when the files of its tokenizer have moved."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.tokenizer_files import BOTCHAN_MODEL
from tests.training.runs import trained

TOOL = Path(__file__).parents[2] / "tools" / "generate_text.py"
VOCABULARY = "1000"


@pytest.fixture
def trained_folder(tmp_path: Path) -> Path:
    """Holds `checkpoints`, and `tokenizer.model` where the training read it."""
    shutil.copy(BOTCHAN_MODEL, tmp_path / "tokenizer.model")
    trained(
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tmp_path / "tokenizer.model")),
        *("--vocab-size", VOCABULARY, "--train-iters", "1", "--save", str(tmp_path / "checkpoints")),
    )
    return tmp_path


def sample(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the tool prints for one prompt and seed."""
    words = [str(TOOL), "--load", str(folder / "checkpoints"), "--prompt", "a cat", "--num-tokens", "8", *arguments]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        runpy.run_path(str(TOOL), run_name="__main__")
    return capsys.readouterr().out


def complaint(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        sample(folder, capsys, *arguments)
    assert isinstance(end.value.code, str)
    return end.value.code


def test_a_checkpoint_is_sampled_where_its_tokenizer_has_moved(
    trained_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sample(trained_folder, capsys)
    assert before.startswith("a cat")
    assert len(before) > len("a cat\n")
    moved = (trained_folder / "tokenizer.model").rename(trained_folder / "moved.model")
    assert sample(trained_folder, capsys, "--tokenizer-model", str(moved)) == before


def test_a_tokenizer_that_is_gone_is_missed_by_the_flag_that_gives_its_place(
    trained_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained_folder / "tokenizer.model").unlink()
    said = complaint(trained_folder, capsys)
    assert f"--tokenizer-model {trained_folder}/tokenizer.model: no such file; this is its path in the training" in said
    assert "Works: --tokenizer-model with the path that it has here" in said


def test_a_given_file_that_is_not_there_is_not_taken_for_that_of_the_training(
    trained_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(trained_folder, capsys, "--tokenizer-model", str(trained_folder / "absent.model"))
    assert f"--tokenizer-model {trained_folder}/absent.model: no such file" in said
    assert "in the training" not in said


def test_a_file_that_the_tokenizer_has_not_is_refused(trained_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(trained_folder, capsys, "--vocab-file", str(BOTCHAN_MODEL))
    assert "SentencePieceTokenizer does not use it" in said
