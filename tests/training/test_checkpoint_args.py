"""`--use-checkpoint-args`: what is not given is as in the checkpoint."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.checkpointing import CheckpointError, load_checkpoint
from megatron.config import ConfigError, MegatronConfig, parse_arguments
from megatron.config.checkpoint import CheckpointConfig
from megatron.core.comm_group import CommGroup
from tests.helpers.launch import launch, pretrain_gpt, rows_of
from tests.helpers.tiny import CORPUS, INDICES, TINY_GPT, tiny_config
from tests.training.runs import trained

ALONE = CommGroup.single("world")
# What TINY_GPT has besides model, tokenizer and sequence length.
TRAINING = [
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "4", "--num-workers", "0"),
    *("--data-path", str(CORPUS), "--split", "90,10,0", "--data-cache-path", str(INDICES)),
    *("--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask", "--eval-iters", "0"),
    *(
        "--lr",
        "1e-2",
        "--lr-decay-style",
        "cosine",
        "--clip-grad",
        "0.5",
        "--weight-decay",
        "0.1",
        "--adam-eps",
        "1e-6",
    ),
]
FROM_CHECKPOINT = ["--use-checkpoint-args", "--load", "saved"]
MODEL = ("--normalization", "RMSNorm", "--swiglu", "--qk-layernorm", "--hidden-dropout", "0.1", "--disable-bias-linear")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_without_the_flags_of_its_model(ranks: int, tmp_path: Path) -> None:
    _, straight = trained(*MODEL, "--train-iters", "4")
    trained(*MODEL, "--train-iters", "4", "--save", str(tmp_path / "saved"), "--exit-interval", "2")
    layout = ["--tensor-model-parallel-size", str(ranks)]
    arguments = [*TRAINING, *FROM_CHECKPOINT, *layout, "--log-json", "log.json"]
    outcome = launch(pretrain_gpt, arguments, ranks=ranks, folder=tmp_path).wait().check()
    losses = [row["lm loss"] for row in rows_of(tmp_path / "log.json") if "lm loss" in row]
    assert losses == pytest.approx(straight.losses[2:], rel=0 if ranks == 1 else 1e-5)
    (line,) = [line for text in outcome.out for line in text.splitlines() if line.startswith("Not given, so as in ")]
    for taken in ("--num-layers 4", "--swiglu", "--qk-layernorm", "--disable-bias-linear", "--seq-length 24"):
        assert taken.replace("--swiglu", "--activation swiglu") in line
    assert "--hidden-dropout" not in line, "0.1 is the default"
    assert "--tensor-model-parallel-size" not in line


def test_print_config_shows_where_each_value_comes_from(tmp_path: Path) -> None:
    trained("--save", str(tmp_path / "saved"), "--kv-channels", "4", "--max-position-embeddings", "32")
    arguments = [*TRAINING, *FROM_CHECKPOINT, "--num-layers", "4", "--print-config"]
    printed = launch(pretrain_gpt, arguments, ranks=1, folder=tmp_path).wait().check().out[0]
    lines = {line.split(":")[0].strip(): line for line in printed.splitlines()}
    assert "max_position_embeddings: 32" in lines["max_position_embeddings"]
    for field in ("max_position_embeddings", "hidden_size", "vocab_size", "seq_length", "attention_dropout"):
        assert lines[field].endswith("# checkpoint"), lines[field]
    for field, origin in (("num_layers", "flag"), ("lr", "flag"), ("recompute_granularity", "default")):
        assert lines[field].endswith(f"# {origin}"), lines[field]
    assert yaml.safe_load(printed)["model"]["hidden_size"] == 48


def test_what_is_given_and_differs_is_refused_with_both_values(tmp_path: Path) -> None:
    trained("--save", str(tmp_path / "saved"))
    (tmp_path / "run.yaml").write_text("hidden_size: 96\n")
    arguments = [*TRAINING, *FROM_CHECKPOINT, "--num-layers", "2", "--config", "run.yaml"]
    outcome = launch(pretrain_gpt, arguments, ranks=1, folder=tmp_path).wait()
    assert outcome.codes == [2]
    assert "--num-layers: 4 -> 2 changes the model" in outcome.err[0]
    assert "--hidden-size: 48 -> 96 changes the model" in outcome.err[0]


def test_without_a_checkpoint_there_is_one_error_or_the_flags_must_be_given(tmp_path: Path) -> None:
    outcome = launch(pretrain_gpt, [*TRAINING, *FROM_CHECKPOINT], ranks=2, folder=tmp_path).wait()
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert said.count("--load: no checkpoint in saved: there is no such folder") == 1
    assert "Traceback" not in said and "--num-layers" not in said
    if_exists = [*TRAINING, *FROM_CHECKPOINT, "--load-if-exists"]
    outcome = launch(pretrain_gpt, if_exists, ranks=1, folder=tmp_path).wait()
    assert outcome.codes == [2]
    assert "--num-layers: must be given" in outcome.err[0]
    whole = [*TINY_GPT, *FROM_CHECKPOINT, "--load-if-exists"]
    launch(pretrain_gpt, whole, ranks=1, folder=tmp_path).wait().check()


# ---- which values are taken ----


def with_saved(saved: MegatronConfig | None, *arguments: str, **settings: Any) -> MegatronConfig:
    """The configuration of arguments beside a checkpoint that was saved with `saved`."""
    config, _ = parse_arguments(
        [*TRAINING, "--use-checkpoint-args", "--load", "x", *arguments],
        saved_config=lambda wanted: saved,
        say=lambda text: None,
        check_files=False,
        **settings,
    )
    return config


def test_the_model_the_tokenizer_and_the_sequence_length_are_taken_and_nothing_else() -> None:
    saved = tiny_config(
        *("--recompute-activations", "--hidden-dropout", "0.25", "--seed", "7"),
        *("--position-embedding-type", "rope", "--rotary-base", "500"),
        *("--make-vocab-size-divisible-by", "64", "--lr", "1", "--bf16", "--init-method-std", "0.5"),
    )
    config = with_saved(saved)
    assert config.tokenizer == saved.tokenizer
    assert config.data.seq_length == 24
    assert (config.model.rotary_base, config.model.hidden_dropout) == (500, 0.25)
    assert config.model.recompute_granularity is None
    assert (config.training.seed, config.optimizer.lr, config.optimizer.precision) == (1234, 1e-2, "fp32")
    assert config.model.init_method_std == 0.02


def test_flags_count_before_the_checkpoint_and_the_checkpoint_before_defaults_of_the_program() -> None:
    saved = tiny_config("--attention-dropout", "0.5", "--hidden-dropout", "0.5")
    config = with_saved(saved, "--attention-dropout", "0.25", defaults={"hidden_dropout": 0.3, "seed": 9})
    assert (config.model.attention_dropout, config.model.hidden_dropout) == (0.25, 0.5)
    assert config.training.seed == 9


BPE = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "there/vocab.json", "--merge-file", "there/merges.txt")


def bpe_config() -> MegatronConfig:
    config, _ = parse_arguments(
        [*(word for word in TINY_GPT if word not in ("--vocab-size", "251")), *BPE],
        check_files=False,
        say=lambda text: None,
    )
    return config


def test_paths_of_the_tokenizer_s_files_may_be_given_or_left_there() -> None:
    saved = bpe_config()
    assert with_saved(saved).tokenizer == saved.tokenizer
    moved = with_saved(saved, "--vocab-file", "here/vocab.json").tokenizer
    assert (moved.vocab_file, moved.merge_file) == ("here/vocab.json", "there/merges.txt")
    off = "--no-use-tokenizer-model-from-checkpoint-args"
    with pytest.raises(ConfigError, match="--vocab-file: not given, and GPT2BPETokenizer is made from"):
        with_saved(saved, off)
    here = with_saved(saved, off, "--vocab-file", "a", "--merge-file", "b").tokenizer
    assert (here.tokenizer_type, here.vocab_file, here.merge_file) == ("GPT2BPETokenizer", "a", "b")


def test_of_another_tokenizer_nothing_is_taken() -> None:
    config = with_saved(bpe_config(), "--tokenizer-type", "ByteTokenizer", "--finetune")
    assert config.tokenizer.vocab_file is config.tokenizer.merge_file is None


def test_a_line_that_does_not_name_a_checkpoint_is_refused_before_one_is_read() -> None:
    def never(wanted: CheckpointConfig) -> MegatronConfig:
        raise AssertionError("a checkpoint was read")

    for line, text in (
        (["--use-checkpoint-args"], "--use-checkpoint-args: says how to load, and --load is not given"),
        (["--use-checkpoint-args", "--load", "x", "--ckpt-step", "-1"], "--ckpt-step -1: must be at least 0"),
        (["--use-checkpoint-args", "--load", "x", "--ckpt-step", "x"], "--ckpt-step x: must be a whole number"),
        (["--use-checkpoint-args", "--load"], "--load: takes one word"),
    ):
        with pytest.raises(ConfigError) as error:
            parse_arguments([*TRAINING, *line], saved_config=never)
        assert text in str(error.value)
        assert "--num-layers" not in str(error.value), "it may stand in the checkpoint"


def test_the_layout_is_not_the_checkpoint_s() -> None:
    with pytest.raises(ConfigError, match="--use-mp-args-from-checkpoint-args: a checkpoint belongs to no layout"):
        with_saved(tiny_config(), "--use-mp-args-from-checkpoint-args")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda config: config["model"].update(num_layers="4"), r"has model\.num_layers '4'"),
        (lambda config: config["model"].update(num_layers=True), r"has model\.num_layers True"),
        (lambda config: config["model"].update(hidden_dropout=[0.1]), r"has model\.hidden_dropout \[0\.1\]"),
        (lambda config: config["model"].update(window_size=[1, "x"]), r"has model\.window_size"),
        (lambda config: config["model"].update(untie_embeddings_and_output_weights=1), r"has model\.untie"),
        (lambda config: config["tokenizer"].update(tokenizer_type={}), r"has tokenizer\.tokenizer_type \{\}"),
        (lambda config: config.update(model=[]), r"has \[\] in the place of every field of model"),
        (lambda config: config.clear(), r"lacks model\.num_layers"),
        (lambda config: config["model"].update(experts=8), "has the field of model 'experts', unknown"),
    ],
)
def test_a_saved_configuration_that_cannot_be_is_an_error_that_names_its_file(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    trained("--save", str(tmp_path))
    folder = tmp_path / "iter_0000003"
    metadata = json.loads((folder / "metadata.json").read_text())
    change(metadata["config"])
    text = json.dumps(metadata).encode()
    (folder / "metadata.json").write_bytes(text)
    marker = json.loads((folder / "COMPLETE").read_text())
    marker["files"]["metadata.json"] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    (folder / "COMPLETE").write_text(json.dumps(marker))
    with pytest.raises(CheckpointError, match=rf"metadata\.json: the saved configuration {message}"):
        _ = load_checkpoint(tmp_path, world=ALONE).config
