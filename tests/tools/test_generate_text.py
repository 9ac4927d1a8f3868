"""Text from a checkpoint, also when the files of its tokenizer have moved."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import torch

from megatron.core.shard import shard_of
from tests.helpers.numerics import assert_bitwise
from tests.helpers.tokenizer_files import BOTCHAN_MODEL, mistral_model
from tests.helpers.tools import ROOT, run
from tests.training.runs import trained
from tests.training.test_train_step import state_of

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


def sample(folder: Path, *arguments: str, status: int = 0) -> str:
    """What the tool prints for one prompt and seed; what it complains of, where the status is 2."""
    words = ["--load", folder / "checkpoints", "--prompt", "a cat", "--num-tokens", "8", *arguments]
    return run("generate_text", *words, status=status)


def test_a_checkpoint_is_sampled_where_its_tokenizer_has_moved(trained_folder: Path) -> None:
    before = sample(trained_folder)
    assert before.startswith("a cat")
    assert len(before) > len("a cat\n")
    moved = (trained_folder / "tokenizer.model").rename(trained_folder / "moved.model")
    assert sample(trained_folder, "--tokenizer-model", str(moved)) == before


def test_a_training_in_16_bits_is_sampled_with_all_bits_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    load_model = runpy.run_path(str(ROOT / "tools" / "generate_text.py"))["load_model"]
    training, _ = trained("--bf16", "--save", str(tmp_path))
    model, _, _ = load_model(str(tmp_path), None, {}, torch.device("cpu"))
    weights = state_of(training)
    for name, parameter in model.named_parameters():
        rows = shard_of(parameter).global_shape[0]  # those of the vocabulary's padding have no values
        assert_bitwise(parameter.data[:rows], weights[f"main.{name}"][:rows], name)


def test_a_tokenizer_that_is_gone_is_missed_by_the_flag_that_gives_its_place(trained_folder: Path) -> None:
    (trained_folder / "tokenizer.model").unlink()
    said = sample(trained_folder, status=2)
    assert f"--tokenizer-model {trained_folder}/tokenizer.model: no such file; this is its path in the training" in said
    assert "Works: --tokenizer-model with the path that it has here" in said


def test_a_given_file_that_is_not_there_is_not_taken_for_that_of_the_training(trained_folder: Path) -> None:
    said = sample(trained_folder, "--tokenizer-model", str(trained_folder / "absent.model"), status=2)
    assert f"--tokenizer-model {trained_folder}/absent.model: no such file" in said
    assert "in the training" not in said


def test_a_file_that_the_tokenizer_has_not_is_refused(trained_folder: Path) -> None:
    said = sample(trained_folder, "--vocab-file", str(BOTCHAN_MODEL), status=2)
    assert "SentencePieceTokenizer does not use it" in said


def test_a_tokenizer_of_another_size_is_named_with_both_sizes(trained_folder: Path) -> None:
    other = mistral_model()
    said = sample(trained_folder, "--tokenizer-model", str(other), status=2)
    assert f"--tokenizer-model {other}: the tokenizer has 32,000 tokens, and the model was trained with 1,000" in said
    assert len(said.splitlines()) == 2, said  # with the line of what is read


def test_the_smallest_temperature_takes_the_most_likely_token(trained_folder: Path) -> None:
    assert sample(trained_folder, "--temperature", "1e-320") == sample(trained_folder, "--temperature", "0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-tokens", "0"], "--num-tokens (0) must be at least 1"),
        (["--num-tokens", "-3"], "--num-tokens (-3) must be at least 1"),
        (["--temperature", "-1"], "--temperature (-1.0) must be 0 or more"),
        (["--temperature", "nan"], "--temperature (nan) must be 0 or more"),
        (["--seed", "99999999999999999999"], "--seed (99999999999999999999) must be at least 0 and less than 2^64"),
        (["--seed", "-1"], "--seed (-1) must be at least 0"),
        (["--tokens", "3"], "--tokens: is not a known flag; --num-tokens is the nearest"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in sample(tmp_path, *arguments, status=2)
