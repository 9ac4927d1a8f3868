"""A training keeps its tokenizer with its checkpoints, and goes on with no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.checkpointing import CheckpointError
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.inference.load import open_model
from megatron.training.save_folder import SaveFolder
from megatron.training.wanted_checkpoint import saved_config
from tests.helpers.launch import pretrain_tiny
from tests.helpers.tools import run
from tests.training.runs import trained

WORDS = [f"w{number}" for number in range(250)]


def tokenizer_flags(folder: Path, words: list[str] = WORDS) -> list[str]:
    """Of a tokenizer of 251 words in a folder, the last of which ends documents."""
    folder.mkdir(exist_ok=True)
    vocabulary = {word: number for number, word in enumerate([*words, "<eod>"])}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eod>"}))
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def test_a_checkpoint_is_used_with_its_own_copy_of_the_tokenizer(tmp_path: Path) -> None:
    flags = tokenizer_flags(tmp_path / "there")
    trained(*flags, "--save", str(tmp_path / "saved"), "--train-iters", "1")
    (tmp_path / "there").rename(tmp_path / "gone")
    (tmp_path / "saved").rename(tmp_path / "moved")
    opened = open_model(tmp_path / "moved")
    assert (opened.tokenizer.eod, opened.tokenizer.encode("w7")) == (250, [7])
    taken = saved_config(CheckpointConfig(load=str(tmp_path / "moved")), task="gpt")
    assert taken is not None
    assert taken.tokenizer.tokenizer_model == str(tmp_path / "moved" / "tokenizer" / "tokenizer.json")


def test_a_training_goes_on_with_the_tokenizer_of_its_checkpoints_only(tmp_path: Path) -> None:
    first = ("--save", str(tmp_path / "saved"), "--train-iters", "1")
    more = ("--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--train-iters", "2")
    trained(*tokenizer_flags(tmp_path / "a"), *first)
    other = tokenizer_flags(tmp_path / "b", WORDS[::-1])
    for copies in ("--save-tokenizer-assets", "--no-save-tokenizer-assets"):
        with pytest.raises(
            CheckpointError, match=r"used with the tokenizer in .*saved/tokenizer, and --tokenizer-model .*/b is"
        ):
            trained(*other, *more, "--override-opt_param-scheduler", copies)
    trained(*tokenizer_flags(tmp_path / "c"), *more, "--override-opt_param-scheduler")


def test_it_goes_on_with_no_other_in_another_folder_or_without_copies(tmp_path: Path) -> None:
    trained(*tokenizer_flags(tmp_path / "a"), "--save", str(tmp_path / "saved"), "--train-iters", "1")
    other = tokenizer_flags(tmp_path / "b", WORDS[::-1])
    more = ("--load", str(tmp_path / "saved"), "--train-iters", "2", "--override-opt_param-scheduler")
    to_another = (*more, "--save", str(tmp_path / "another"))
    with pytest.raises(CheckpointError, match=r"--tokenizer-model .*/b is; .*saved/tokenizer has a copy"):
        trained(*other, *to_another)
    trained(*other, *to_another, "--finetune")
    shutil.rmtree(tmp_path / "saved" / "tokenizer")
    with pytest.raises(CheckpointError, match=r"--tokenizer-model .*/b is; give that one; --finetune"):
        trained(*other, *more)
    trained(*tokenizer_flags(tmp_path / "c"), *more)


def test_copies_of_another_tokenizer_are_refused_where_none_are_kept_too(tmp_path: Path) -> None:
    """Whoever uses the checkpoints would take the old copies."""

    def tokenizer(name: str, words: list[str]) -> TokenizerConfig:
        return TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tokenizer_flags(tmp_path / name, words)[-1]
        )

    folder = SaveFolder(tmp_path / "saved")
    folder.keep_tokenizer(tokenizer("a", WORDS), copies=True)
    with pytest.raises(
        CheckpointError, match=r"used with the tokenizer in .*saved/tokenizer, and --tokenizer-model .*/b is"
    ):
        folder.keep_tokenizer(tokenizer("b", WORDS[::-1]), copies=False)
    folder.keep_tokenizer(tokenizer("c", WORDS), copies=False)


def test_copies_of_the_tokenizer_can_be_left_out(tmp_path: Path) -> None:
    flags = tokenizer_flags(tmp_path / "there")
    trained(*flags, "--save", str(tmp_path / "saved"), "--train-iters", "1", "--no-save-tokenizer-assets")
    assert not (tmp_path / "saved" / "tokenizer").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_that_another_tokenizer_has_made_is_told(ranks: int, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "w1 w2 w3 " * 99}) + "\n")
    flags = tokenizer_flags(tmp_path / "a")
    run("preprocess_data", "--input", text, "--output-prefix", tmp_path / "x", *flags)
    data = ("--data-path", str(tmp_path / "x_text_document"), "--split", "1,0,0", "--train-iters", "1")
    told = f"warning: {tmp_path}/x_text_document was made with another HuggingFaceTokenizer, and this run has"
    for tokenizer, times in ((flags, 0), (tokenizer_flags(tmp_path / "b", WORDS[::-1]), 1)):
        said = pretrain_tiny(tmp_path, *tokenizer, *data, ranks=ranks).check().out
        assert "".join(said).count(told) == times
