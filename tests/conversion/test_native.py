"""A converted model is a checkpoint like any other: of any layout, and to be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.conversion.hugging_face import read_hugging_face, write_hugging_face
from megatron.conversion.native import read_native, write_native
from megatron.conversion.portable import ConversionError
from tests.conversion.models import FAMILIES, llama, made, save
from tests.conversion.ranks import through_ranks
from tests.helpers.distributed import run_distributed
from tests.helpers.launch import launch, pretrain_gpt
from tests.helpers.numerics import assert_bitwise
from tests.helpers.tiny import CORPUS, INDICES


def write_tokenizer_json(folder: Path) -> None:
    words = {"<|endoftext|>": 0, "a": 1, "b": 2}
    Tokenizer(WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_to_two_by_two_ranks_and_back_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    theirs = save(made(family), tmp_path / "theirs")
    write_tokenizer_json(theirs)
    write_native(read_hugging_face(theirs), tmp_path / "native")
    run_distributed(through_ranks, 4, tmp_path / "native", tmp_path / "saved")
    write_hugging_face(read_native(tmp_path / "saved"), tmp_path / "ours")
    expected, found = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "ours"))
    assert sorted(found) == sorted(expected)
    for name in expected:
        assert_bitwise(found[name], expected[name], name)
    write_hugging_face(read_hugging_face(theirs), tmp_path / "direct")
    assert (tmp_path / "ours" / "config.json").read_bytes() == (tmp_path / "direct" / "config.json").read_bytes()


def test_a_training_on_two_by_two_ranks_begins_with_the_converted_weights(tmp_path: Path) -> None:
    """Its first iteration has a rate of 0, so what it saves is what it began with."""
    theirs = save(llama(vocab_size=251, tie_word_embeddings=True), tmp_path / "theirs")
    write_native(read_hugging_face(theirs), tmp_path / "native")
    arguments = [
        *("--load", str(tmp_path / "native"), "--use-checkpoint-args", "--save", str(tmp_path / "saved")),
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--seq-length", "24"),
        *("--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "1", "--eval-iters", "0"),
        *("--lr", "1e-2", "--lr-warmup-iters", "1", "--lr-decay-iters", "10", "--num-workers", "0"),
        *("--data-path", str(CORPUS), "--split", "90,10,0", "--data-cache-path", str(INDICES)),
    ]
    launch(pretrain_gpt, arguments, ranks=4, folder=tmp_path).wait().check()
    write_hugging_face(read_native(tmp_path / "saved"), tmp_path / "ours")
    expected, found = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "ours"))
    assert sorted(found) == sorted(expected)
    for name in expected:
        assert_bitwise(found[name], expected[name], name)


def test_a_model_alone_is_a_checkpoint_of_iteration_0_without_a_training(tmp_path: Path) -> None:
    model = read_hugging_face(save(made("qwen3", torch.bfloat16), tmp_path / "theirs"))
    config = write_native(model, tmp_path / "native")
    (checkpoint,) = [path for path in (tmp_path / "native").iterdir() if path.name.startswith("iter_")]
    assert checkpoint.name == "iter_0000000"
    opened = read_native(tmp_path / "native")
    assert opened.config == config.model == model.config
    assert opened.seq_length == config.data.seq_length == 40
    assert config.optimizer.precision == "bf16"
    assert config.tokenizer.null_tokenizer_eod_id == 2
    assert (tmp_path / "native" / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert not any(key.startswith("optimizer.") for key in opened.tensors)


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    folder = save(made("llama 2"), tmp_path / "theirs")
    write_tokenizer_json(folder)
    tokenizer = (folder / "tokenizer.json").read_bytes()
    config = write_native(read_hugging_face(folder), tmp_path / "native")
    assert config.tokenizer.tokenizer_type == "HuggingFaceTokenizer"
    assert config.tokenizer.tokenizer_model == str(tmp_path / "native" / "tokenizer")
    assert config.tokenizer.padded_vocab_size == 61
    config.validate(purpose="model", check_files=True)
    write_hugging_face(read_native(tmp_path / "native"), tmp_path / "ours")
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == tokenizer
    generation = "generation_config.json"
    assert (tmp_path / "ours" / generation).read_text() == (tmp_path / "native" / "tokenizer" / generation).read_text()


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    model = read_hugging_face(save(made("llama 2"), tmp_path / "theirs"))
    write_native(model, tmp_path / "native")
    with pytest.raises(ConversionError, match="exists and is not empty"):
        write_native(model, tmp_path / "native")
