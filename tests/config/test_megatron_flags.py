"""Every flag that Megatron-LM has or had is an option, already so, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from megatron.config import ConfigError, MegatronConfig, parse_arguments
from megatron.config.arguments import _spellings
from megatron.config.megatron_config import Task
from megatron.config.megatron_flags import FUSION_FLAG, _table, known_flag
from tests.config.conftest import command_line

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES: dict[str, list[str]] = json.loads((FIXTURES / "megatron_lm_flags.json").read_text())
LINES = [json.loads(line) for line in (FIXTURES / "launch_args.jsonl").read_text().splitlines()]
REFUSED_OF_OLD_LINES = {
    "--tokenizer-model-type", "--train-data", "--valid-data", "--test-data", "--presplit-sentences",
    "--loose-json", "--text-key", "--lazy-loader", "--use-tfrecords", "--resume-dataloader", "--cache-dir",
    "--max-preds-per-seq", "--fp32-layernorm", "--fp32-embedding", "--checkpoint-activations",
    "--activations-checkpoint-method",
    "--log-memory-to-tensorboard", "--use-legacy-models", "--deterministic-mode",
}  # fmt: skip


@pytest.mark.parametrize("source", sorted(NAMES))
def test_no_flag_of_megatron_lm_is_unknown(source: str) -> None:
    unknown = []
    for name in NAMES[source]:
        name = name.replace("_", "-")
        if name not in _spellings("bert") and name != FUSION_FLAG and known_flag(name) is None:
            unknown.append(name)
    assert unknown == []


def test_the_census_is_whole() -> None:
    assert len(NAMES["current"]) == 865
    assert len(set(NAMES["current"]) | set(NAMES["seen_in_launch_scripts"])) > 1000


def test_no_option_is_also_in_the_table_of_other_flags() -> None:
    assert [name for name in _table() if name in _spellings("bert")] == []


def test_every_refusal_has_a_reason_and_an_alternative_that_exists() -> None:
    for name, known in _table().items():
        assert known.already or (known.reason and known.instead), name
        for word in known.instead.replace(",", " ").replace(";", " ").split():
            if word.startswith("--"):
                assert word in _spellings("bert") or word == "--config", (name, word)


def test_a_flag_of_which_some_values_are_so_has_a_reason_for_the_others() -> None:
    for name, known in _table().items():
        if known.already and known.values is not None and not known.is_switch:
            assert known.reason and known.instead, name


TOKENIZERS: dict[Task, str] = {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"}


def outcome(line: dict[str, object]) -> MegatronConfig | ConfigError:
    words, task = line["args"], cast(Task, line["kind"])
    assert isinstance(words, list)
    try:
        config, _ = parse_arguments(
            words,
            task=task,
            defaults={"tokenizer_type": TOKENIZERS[task]},
            check_files=False,
            say=lambda text: None,
        )
        return config
    except ConfigError as error:
        return error


@pytest.mark.parametrize("line", LINES, ids=[line["id"] for line in LINES])
def test_a_published_launch_line_gives_a_configuration_or_names_every_refused_flag(
    line: dict[str, object],
) -> None:
    result = outcome(line)
    words = line["args"]
    assert isinstance(words, list)
    refused = {word for word in words if word in REFUSED_OF_OLD_LINES}
    if isinstance(result, MegatronConfig):
        assert not refused
        return
    text = str(result)
    assert "is not a known flag" not in text
    named = {flag for problem in result.problems for flag in problem.flags}
    assert refused <= named
    assert all(flag in text for flag in refused)


def test_the_launch_lines_that_ask_for_nothing_refused_are_accepted() -> None:
    accepted = {str(line["id"]) for line in LINES if isinstance(outcome(line), MegatronConfig)}
    gpt = {"LA034", "LA035", "LA036", "LA042", "LA049", "LA050", "LA051"}
    bert = {"LA010", "LA011", "LA014", "LA025", "LA031", "LA032", "LA039", "LA045", "LA047"}
    assert accepted == gpt | bert


def test_the_175b_line_is_read_as_it_was_meant() -> None:
    config = outcome(next(line for line in LINES if line["id"] == "LA049"))
    assert isinstance(config, MegatronConfig)
    config = config.on(1024)
    assert config.data_parallel_size == 8
    assert config.global_batch_size == 1536
    assert config.training.rampup_batch_size == (16, 16, 5859375)
    assert config.data.data_path[::2] == ("0.2", "0.3", "0.5")
    assert config.optimizer.precision == "fp16"
    lengths = config.schedule_lengths
    assert (lengths.warmup, lengths.decay) == (183105, 126953125)


@pytest.mark.parametrize(
    "flag",
    [
        "--overlap-param-gather-with-optimizer-step", "--no-align-grad-reduce",
        "--num-distributed-optimizer-instances 2",
        "--cpu-offloading-num-layers 2", "--fp8-format hybrid", "--num-experts 8",
        "--moe-router-topk 2", "--non-persistent-save-interval 5", "--cross-entropy-fusion-impl te",
        "--use-megatron-fsdp", "--step-batch-size-schedule 0:768", "--ckpt-format torch_dist", "--profile",
        "--ddp-reduce-scatter-with-fp32-accumulation", "--bert-no-binary-head", "--mask-prob 0.15",
        "--expert-model-parallel-size 2", "--wandb-project x", "--fake-process-group",
    ],
)  # fmt: skip
def test_a_feature_of_later_versions_is_refused_not_dropped(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(command_line(flag), say=lambda text: None)
    (problem,) = caught.value.problems
    assert flag.split()[0] in str(problem)
    assert "Works:" in str(problem)


@pytest.mark.parametrize(
    "flag",
    [
        "--expert-model-parallel-size 1", "--num-distributed-optimizer-instances 1",
        "--cpu-offloading-num-layers 0",
        "--data-impl mmap", "--data-impl infer", "--DDP-impl local", "--accumulate-allreduce-grads-in-fp32",
        "--attention-softmax-in-fp32", "--no-masked-softmax-fusion", "--no-scaled-masked-softmax-fusion",
        "--no-rope-fusion",
        "--no-gradient-accumulation-fusion", "--use-cpu-initialization", "--attention-backend auto",
        "--local-rank 3", "--no-create-attention-mask-in-dataloader", "--log-batch-size-to-tensorboard",
        "--context-parallel-size 1",
        "--position-embedding-type rope --no-position-embedding", "--rerun-mode disabled",
    ],
)  # fmt: skip
def test_a_flag_that_asks_for_what_is_so_is_accepted(flag: str) -> None:
    parse_arguments(command_line(flag), say=lambda text: None)


def test_a_step_schedule_that_the_shell_has_split_is_one_refusal() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(command_line("--step-batch-size-schedule 0:768 250B:1536 500B:3072"), say=lambda text: None)
    assert len(caught.value.problems) == 1
    assert "--rampup-batch-size START INCREMENT SAMPLES with --global-batch-size" in str(caught.value)
