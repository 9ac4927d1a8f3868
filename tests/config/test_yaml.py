"""The configuration file and --print-config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.config import ConfigError, MegatronConfig, parse_arguments
from tests.config.conftest import command_line

RUN = """\
# a run
model:
  num_layers: 8
  hidden-size: 64
  num_attention_heads: 8
  max_position_embeddings: 32
  swiglu: true
  add_bias_linear: false
  window_size: [15, 0]
seq_length: 32
micro-batch-size: 2
train_iters: 100
optimizer:
  lr: 1e-3
  bf16: true
  fp16: false
tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 100}
data_path: [0.3, a, 0.7, b]
split: 90,5,5
train_samples:
use_distributed_optimizer: false
use_mcore_models: true
"""


Written = Callable[[str], str]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


def read(*words: str) -> MegatronConfig:
    return parse_arguments(words, check_files=False, say=lambda text: None)[0]


def test_keys_are_flag_names_flat_or_in_sections(written: Written) -> None:
    config = read("--config", written(RUN))
    assert config.model.activation == "swiglu"
    assert config.model.add_bias_linear is False
    assert config.model.window_size == (15, 0)
    assert (config.optimizer.lr, config.optimizer.precision) == (1e-3, "bf16")
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.data.split == "90,5,5"
    assert config.training.train_samples is None


def test_flags_override_the_file(written: Written) -> None:
    path = written(RUN)
    config = read("--seed", "7", "--config", path, "--activation", "gelu", "--fp16", "--add-bias-linear")
    assert (config.model.activation, config.optimizer.precision) == ("gelu", "fp16")
    assert config.model.add_bias_linear is True
    assert config.training.seed == 7


@pytest.mark.parametrize(
    "text, words",
    [
        ("seed: 1\nseed: 2", ["run.yaml:2 seed", "run.yaml:1"]),
        ("data:\n  num-workers: 1\nnum_workers: 2", ["run.yaml:3 num_workers", "run.yaml:2"]),
        ("hiden_size: 3", ["run.yaml:1 hiden_size", "--hidden-size is the nearest"]),
        ("hiden_size:", ["run.yaml:1 hiden_size", "--hidden-size is the nearest"]),
        ("use_mcore_model: false", ["run.yaml:1 use_mcore_model", "--use-mcore-models is the nearest"]),
        ("expert_model_parallel_size: 2", ["run.yaml:1 expert_model_parallel_size 2: mixture of experts"]),
        ("modle:\n  num_layers: 3", ["run.yaml:1 modle", "no section", "model"]),
        ("data: {lr: 1}", ["run.yaml:1 lr", "section optimizer, not data"]),
        ("seed: many", ["run.yaml:1 seed many", "a whole number"]),
        ("seed:", ["run.yaml:1 seed", "needs a value"]),
        ("seed: true", ["run.yaml:1 seed", "not yes or no"]),
        ("sequence_parallel: 1", ["run.yaml:1 sequence_parallel", "true or false"]),
        ("bf16: true\nfp16: true", ["run.yaml:2 fp16", "precision"]),
        ("replication_jump: 2", ["run.yaml:1 replication_jump", "not available"]),
        ("seed: [1", ["is not YAML"]),
        ("- 1", ["must hold keys"]),
        pytest.param(f"split: {'[' * 3000}{']' * 3000}", ["run.yaml: is nested too deeply"], id="nested"),
        ("? [seed]\n: 1", ["run.yaml: is not YAML, line 1: a list or a mapping stands where a key must"]),
        ("data:\n  ? {a: b}\n  : 1", ["run.yaml: is not YAML, line 2: a list or a mapping stands where a key must"]),
        ("split: {[a]: 1}", ["run.yaml: is not YAML"]),
        ("seed: 2001-99-99", ["run.yaml:1 seed 2001-99-99", "a whole number"]),
        ("window_size: [1, 2, 3]", ["run.yaml:1 window_size", "2 words"]),
        ("a: 1", ["run.yaml:1 a: is not a known flag", "--help lists all flags"]),
        ("num_layers: 1:30", ["run.yaml:1 num_layers 1:30", "a whole number"]),
        ("num_layers: 0x10", ["run.yaml:1 num_layers 0x10", "a whole number"]),
        ("seed: \0", ["run.yaml: is not text in UTF-8", "saved as UTF-8"]),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused_with_its_line(written: Written, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*command_line(), "--config", written(text))
    assert len(caught.value.problems) == 1, str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text, rule", [(None, "no such file"), ("seed: [1", "is not YAML"), ("- 1", "must hold keys")])
def test_a_file_that_cannot_be_read_is_all_that_is_wrong(tmp_path: Path, text: str | None, rule: str) -> None:
    """What the file might have given is not reported as missing."""
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read("--config", str(file))
    assert [problem.flags for problem in caught.value.problems] == [("--config",)]
    assert f"--config {file}: {rule}" in str(caught.value)


def test_a_file_that_is_not_in_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes("seed: 7 # café".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.yaml: is not text in UTF-8: .*\n +Works: a YAML file saved as UTF-8"):
        read(*command_line(), "--config", str(tmp_path / "run.yaml"))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config \S+: is a folder"):
        read(*command_line(), "--config", str(tmp_path))


def test_a_run_has_one_file(written: Written) -> None:
    """The second of two would hide what the first one says."""
    with pytest.raises(ConfigError, match=r"--config a\.yaml b\.yaml: are several files, and a run has one"):
        read(*command_line(), "--config", "a.yaml", "--config", "b.yaml")


@pytest.mark.parametrize(
    "text, flag, value",
    [
        ("num_layers: 010", "num_layers", 10),
        ("num_layers: 1_0", "num_layers", 10),
        ("num_layers: 1e1", "num_layers", 10),
        ("rotary_base: 10000", "rotary_base", 10000),
        ("norm_epsilon: 1e-6", "norm_epsilon", 1e-6),
        ("norm_epsilon: 0.5", "norm_epsilon", 0.5),
        ("window_size: [010, 0]", "window_size", (10, 0)),
    ],
)
def test_a_number_means_what_it_means_after_the_flag(written: Written, text: str, flag: str, value: object) -> None:
    words = command_line(without="--num-layers") + ([] if flag == "num_layers" else ["--num-layers", "10"])
    config = read(*words, "--config", written(text))
    assert getattr(config.model, flag) == value


def test_a_split_may_be_a_list(written: Written) -> None:
    shares = read(*command_line(), "--config", written("split: [98, 2, 0]")).data.split_weights
    assert shares == (0.98, 0.02, 0.0)


def test_the_printed_configuration_says_where_each_value_is_from_and_reads_back(written: Written) -> None:
    said: list[str] = []
    words = ["--config", written(RUN), "--seed", "7"]
    expected = read(*words)
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([*words, "--print-config"], defaults={"num_workers": 0}, check_files=False, say=said.append)
    assert stopped.value.code == 0
    lines = {line.split(":")[0].strip(): line.split() for line in said[0].splitlines()}
    assert lines["seed"] == ["seed:", "7", "#", "flag"]
    assert lines["num_layers"] == ["num_layers:", "8", "#", "run.yaml:3"]
    assert lines["num_workers"] == ["num_workers:", "0", "#", "program"]
    assert lines["hidden_dropout"] == ["hidden_dropout:", "0.1", "#", "default"]
    again = read("--config", written(said[0]), "--num-workers", "2")
    assert again == expected


def test_the_configuration_is_printed_with_its_problems(written: Written) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match="--seed -1"):
        parse_arguments([*command_line("--seed -1"), "--print-config"], say=said.append)
    assert "seed: -1" in said[0]


def printed(line: str, *, without: str = "", **settings: object) -> str:
    said: list[str] = []
    with pytest.raises(SystemExit):
        parse_arguments([*command_line(line, without), "--print-config"], say=said.append, **settings)
    return said[0]


def test_the_configuration_of_any_layout_is_printed_where_nothing_was_launched() -> None:
    layout = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    assert "world_size: null" in printed(layout, world_size=1, launched=False)
    assert "world_size: 16 " in printed(f"{layout} --world-size 16", world_size=1, launched=False)
    with pytest.raises(ConfigError, match="8 processes, which do not divide the 12 started"):
        printed(f"{layout} --world-size 12", world_size=1, launched=False)
    with pytest.raises(ConfigError, match=r"--global-batch-size 16: must be divisible by .* size 16 = 32"):
        printed("--world-size 16", world_size=1, launched=False)
    with pytest.raises(ConfigError, match="8 processes, which do not divide the 1 started"):
        printed(layout, world_size=1)
