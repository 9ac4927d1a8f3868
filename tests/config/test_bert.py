"""The options of BERT: a section that its own program has, and what has a meaning for GPT alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import ConfigError, MegatronConfig, parse_arguments
from megatron.config.bert import BertConfig
from megatron.config.megatron_config import Task, difference
from megatron.config.problems import UserError
from tests.config.conftest import Refused, command_line

CORPUS = "--data-path corpus_text_sentence"


def parsed(line: str = "", *, task: Task = "bert") -> MegatronConfig:
    words = command_line(f"{CORPUS} {line}", without="--mock-data")
    return parse_arguments(words, task=task, check_files=False, say=lambda text: None)[0]


def refused_for_bert(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(line)
    (problem,) = caught.value.problems
    return str(problem)


def test_bert_has_a_section_of_its_own_with_the_defaults_of_megatron_lm() -> None:
    config = parsed()
    assert config.task == "bert"
    assert config.bert == BertConfig(binary_head=True, mask_prob=0.15, short_seq_prob=0.1, masking_max_ngram=3)
    assert config.model.layernorm_placement == "pre"
    without_pairs = parsed("--bert-no-binary-head --mask-prob 0.2 --no-whole-word-masking").bert
    assert without_pairs == BertConfig(binary_head=False, mask_prob=0.2, whole_word_masking=False)
    assert without_pairs.num_token_types == 0


def test_gpt_has_no_such_section() -> None:
    config = parsed(task="gpt")
    assert config.bert is None and config.task == "gpt"
    assert "bert" not in config.to_dict()


@pytest.mark.parametrize(
    "flag", ["--bert-no-binary-head", "--bert-binary-head", "--mask-prob 0.1", "--masking-max-ngram=2"]
)
def test_a_flag_of_bert_is_refused_for_gpt_by_the_name_of_its_program(flag: str, refused: Refused) -> None:
    text = refused(flag)
    assert flag.replace("=", " ") in text and "belongs to pretrain_bert.py" in text


def test_a_section_of_bert_in_a_file_is_refused_for_gpt_likewise(tmp_path: Path, refused: Refused) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("bert:\n  mask_prob: 0.2\n")
    assert "belongs to pretrain_bert.py" in refused(f"--config {file}")
    assert parsed(f"--config {file}").bert == BertConfig(mask_prob=0.2)


@pytest.mark.parametrize(
    "flag",
    ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss", "--window-size 4 0"],
)
def test_what_has_a_meaning_for_gpt_alone_is_refused_for_bert(flag: str) -> None:
    text = refused_for_bert(flag)
    assert text.startswith(f"{flag.split()[0]}: belongs to pretrain_gpt.py")


@pytest.mark.parametrize(
    "line, named",
    [
        ("--position-embedding-type alibi", "--position-embedding-type"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear", "--cross-entropy-fusion-impl"),
        ("--seq-length 4", "--seq-length"),
        ("--use-flash-attn --bf16 --attention-dropout 0", "no mask of padding"),
        ("--seq-length 4 --bert-no-binary-head", "--seq-length"),
        ("--mask-prob 0", "--mask-prob"),
        ("--seq-length 9", "--mask-prob 0.1667 or more; --seq-length 10 or more"),
        ("--seq-length 9 --bert-no-binary-head", "0.15 of the 6 tokens beside [CLS] and [SEP]s: is less than one"),
        ("--mask-prob 1e-300", "--mask-prob 0.0345 or more"),
        ("--short-seq-prob 1.5", "--short-seq-prob"),
        ("--layernorm-placement post --apply-residual-connection-post-layernorm", "--layernorm-placement"),
        ("--layernorm-placement post --fp32-residual-connection --bf16", "--layernorm-placement"),
        ("--apply-residual-connection-post-layernorm --fp32-residual-connection --bf16", "--fp32-residual-connection"),
        ("--layernorm-placement post --recompute-granularity selective --recompute-modules layernorm", "layernorm"),
    ],
)
def test_what_can_not_be_together_is_said(line: str, named: str) -> None:
    assert named in refused_for_bert(line)


def test_the_task_is_a_part_of_the_saved_form() -> None:
    config = parsed("--mask-prob 0.2 --layernorm-placement post")
    saved = json.loads(config.to_json())
    assert MegatronConfig.from_dict(saved) == config
    assert saved["bert"]["mask_prob"] == 0.2
    del saved["bert"]
    assert MegatronConfig.from_dict(saved).task == "gpt"
    with pytest.raises(UserError, match="bert"):
        MegatronConfig.from_dict(saved | {"brt": {}})


def test_what_a_change_affects() -> None:
    changes = difference(parsed(), parsed("--bert-no-binary-head --mask-prob 0.2 --layernorm-placement post"))
    affected = {change.flag: change.affects for change in changes}
    assert affected == {"--bert-binary-head": "tensors", "--mask-prob": "data", "--layernorm-placement": "tensors"}


def test_help_shows_the_options_of_the_program_alone() -> None:
    texts: dict[Task, str] = {}
    for task in ("gpt", "bert"):
        said: list[str] = []
        with pytest.raises(SystemExit):
            parse_arguments(["--help"], task=task, say=said.append)
        texts[task] = "\n".join(said)
    assert "Trains a BERT" in texts["bert"] and "--bert-no-binary-head" in texts["bert"]
    assert "Trains a GPT" in texts["gpt"] and "--bert" not in texts["gpt"]
