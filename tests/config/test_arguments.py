"""Reading the command line: spellings, values, conflicts, a program's own arguments, help."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import ConfigError, MegatronConfig, parse_arguments
from megatron.config.arguments import _Group, _Reader, add_to_parser
from megatron.config.megatron_config import all_options, section_classes
from megatron.config.optimizer import OptimizerConfig
from megatron.config.options import read_words, section_options
from megatron.config.tokenizer import TokenizerConfig
from tests.config.conftest import Parse, Refused, command_line


def field_of(config: MegatronConfig, name: str) -> object:
    sections = [getattr(config, section) for section in section_classes(config.task)]
    return next(getattr(section, name) for section in sections if name in type(section).__slots__)


@pytest.mark.parametrize(
    "line, fields",
    [
        ("--override-opt_param-scheduler --load x", {"override_opt_param_scheduler": True}),
        ("--override-opt-param-scheduler --load x", {"override_opt_param_scheduler": True}),
        ("--num_layers 4", {"num_layers": 4}),
        ("--num-layers=4", {"num_layers": 4}),
        ("--num-layers 4 --num-layers 6", {"num_layers": 6}),
        ("--train-iters 1_000", {"train_iters": 1000}),
        ("--train-iters 1e3", {"train_iters": 1000}),
        ("--weight-decay .1", {"weight_decay": 0.1}),
        ("--eval-iters -1", {"eval_iters": -1}),
        ("--null-tokenizer-pad-id -1", {"null_tokenizer_pad_id": -1}),
        ("--tokenizer-hf-no-include-special-tokens", {"tokenizer_hf_include_special_tokens": False}),
        ("--disable-save-tokenizer-assets", {"save_tokenizer_assets": False}),
        ("--no-save-tokenizer-assets", {"save_tokenizer_assets": False}),
        ("--window-size -1 0", {"window_size": (-1, 0)}),
        ("--window-size -1,0", {"window_size": (-1, 0)}),
        ("--window-size (15,0)", {"window_size": (15, 0)}),
        ("--disable-bias-linear", {"add_bias_linear": False}),
        ("--disable-bias-linear --add-bias-linear", {"add_bias_linear": True}),
        ("--no-save-optim --no-save-rng", {"save_optim": False}),
        ("--no-mmap-bin-files", {"mmap_bin_files": False}),
        ("--no-calculate-per-token-loss", {"calculate_per_token_loss": False}),
        ("--no-log-loss-scale-to-tensorboard", {"log_loss_scale_to_tensorboard": False}),
        ("--disable-log-loss-scale-to-tensorboard", {"log_loss_scale_to_tensorboard": False}),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --no-sequence-parallel",
            {"sequence_parallel": False},
        ),
        ("--bf16", {"precision": "bf16"}),
        ("--fp64", {"precision": "fp64"}),
        (
            "",
            {
                "precision": "fp32",
                "activation": "gelu_tanh",
                "seed": 1234,
                "hidden_dropout": 0.1,
                "clip_grad": 1.0,
            },
        ),
        ("--swiglu", {"activation": "swiglu"}),
        ("--squared-relu", {"activation": "squared_relu"}),
        ("--openai-gelu", {"activation": "gelu_tanh"}),
        ("--no-bias-gelu-fusion", {"activation": "gelu"}),
        ("--swiglu --no-bias-gelu-fusion", {"activation": "swiglu"}),
        ("--no-bias-gelu-fusion --openai-gelu", {"activation": "gelu_tanh"}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        (
            "--use-rotary-position-embeddings --position-embedding-type rope",
            {"position_embedding_type": "rope"},
        ),
        ("--batch-size 4", {"micro_batch_size": 4}),
        ("--model-parallel-size 2", {"tensor_model_parallel_size": 2}),
        ("--warmup .01", {"lr_warmup_fraction": 0.01}),
        ("--layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--rampup-batch-size 4 4 100 --train-samples 9999", {"rampup_batch_size": (4, 4, 100)}),
    ],
)
def test_flags_are_read_as_megatron_lm_users_write_them(parse: Parse, line: str, fields: Mapping[str, object]) -> None:
    without = {"--batch-size": "--micro-batch-size", "--rampup": "--train-iters"}
    config = parse(line, without=" ".join(name for flag, name in without.items() if line.startswith(flag)))
    assert {name: field_of(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    "line, words",
    [
        ("--bf16 --fp16", ["--fp16", "--bf16", "precision"]),
        ("--swiglu --squared-relu", ["--swiglu", "--squared-relu", "activation"]),
        ("--activation gelu --swiglu", ["--activation", "--swiglu"]),
        ("--use-rotary-position-embeddings --position-embedding-type alibi", ["--position-embedding-type"]),
        ("--model-parallel-size 2 --tensor-model-parallel-size 4", ["--model-parallel-size"]),
        ("--hidden-size 64 65", ["--hidden-size 64 65", "one word"]),
        ("--hidden-size", ["--hidden-size", "none given"]),
        ("--window-size 3", ["--window-size 3", "2 words"]),
        ("--sequence-parallel yes", ["--sequence-parallel", "'yes'"]),
        ("--lr nan", ["--lr nan", "a number"]),
        ("--num-layers 2.5", ["--num-layers 2.5", "a whole number"]),
        ("--normalization rmsnorm", ["--normalization rmsnorm", "nearest: RMSNorm"]),
        ("--position-embedding-type yarn", ["yarn", "not available in this version", "rope"]),
        ("--optimizer lion", ["lion", "not available in this version", "adam | sgd | muon"]),
        ("--hiden-size 3", ["--hiden-size", "not a known flag", "--hidden-size is the nearest"]),
        (
            "--no-bf16",
            ["--no-bf16: is no flag: --bf16 is no switch, but --precision bf16", "--precision fp32; or leave"],
        ),
        (
            "--no_swiglu",
            ["--no_swiglu: is no flag: --swiglu is no switch, but --activation swiglu", "--activation gelu"],
        ),
        ("--Swiglu", ["--Swiglu", "--swiglu is the nearest"]),
        ("--hidden 3", ["--hidden", "not a known flag"]),
        ("-lr 3", ["-lr", "--lr is the nearest"]),
        ("--qwertyuiop", ["--qwertyuiop", "--help lists"]),
        ("--no-position-embedding", ["--no-position-embedding", "rope or none"]),
        (
            "--load x --load-if-exists --exit-on-missing-checkpoint",
            ["--exit-on-missing-checkpoint", "opposite"],
        ),
        (
            "--bf16 --use-flash-attn",
            ["--use-flash-attn", "--attention-dropout 0.1", "--fast-attention-dropout"],
        ),
        ("--attention-backend unfused", ["--attention-backend unfused", "scaled_dot_product_attention"]),
        (
            "--transformer-impl transformer_engine",
            ["--transformer-impl", "Transformer Engine", "leave it out"],
        ),
        ("--expert-model-parallel-size 2", ["--expert-model-parallel-size 2: mixture of experts is not available"]),
        ("--cpu-offloading-num-layers 2", ["--cpu-offloading-num-layers 2: offloading activations"]),
        ("--no-save-rng yes", ["--no-save-rng yes: takes no word after it", "--no-save-rng alone"]),
        ("--DDP-impl torch", ["--DDP-impl torch: there is one implementation of data parallelism"]),
        ("--moe-grouped-gemm --num-experts 8", ["--moe-grouped-gemm, --num-experts 8: mixture of experts"]),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_refused(refused: Refused, line: str, words: list[str]) -> None:
    text = refused(line)
    for word in words:
        assert word in text


def test_words_before_any_flag_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'pile'.*stands alone"):
        parse_arguments(["pile", *command_line()])


def test_accepted_flags_are_said_in_one_line() -> None:
    said: list[str] = []
    line = "--use-mcore-models --transformer-impl local --no-persist-layer-norm --use-flash-attn"
    parse_arguments(command_line(f"{line} --bf16 --attention-dropout 0 --hidden-dropout 0"), say=said.append)
    assert said == [
        "Accepted, and already so in this version: "
        "--use-mcore-models, --transformer-impl local, --no-persist-layer-norm, --use-flash-attn"
    ]


def test_a_just_in_time_compiler_cannot_be_off_and_on() -> None:
    parse_arguments(command_line("--disable-jit-fuser"), say=lambda text: None)
    with pytest.raises(ConfigError, match=r"--disable-jit-fuser.*and --torch-compile ask for opposite things"):
        parse_arguments(command_line("--disable-jit-fuser --torch-compile"), say=lambda text: None)


@pytest.mark.parametrize(
    ("precision", "rule"),
    [
        ("--fp64", "computes in fp32, from fp32"),
        ("--bf16 --grad-reduce-in-bf16", "takes gradients in fp32 only"),
        ("--bf16 --use-precision-aware-optimizer --use-distributed-optimizer", "knows whole parameters"),
    ],
)
def test_the_adam_of_apex_is_refused_for_what_is_not_float32(precision: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"--kernels.*apex.*the Adam of NVIDIA Apex {rule}"):
        parse_arguments(command_line(f"--kernels apex {precision}"), say=lambda text: None)


def test_renamed_flags_are_said_in_one_line() -> None:
    said: list[str] = []
    line = "--batch-size 2 --warmup .01 --model_parallel_size 1 --no-bias-gelu-fusion --attention-dropout 0"
    parse_arguments(command_line(f"{line} --hidden-dropout 0", "--micro-batch-size"), say=said.append)
    assert said == [
        "Accepted, and read under the names of this version: --batch-size as --micro-batch-size, "
        "--warmup as --lr-warmup-fraction, --model_parallel_size as --tensor-model-parallel-size, "
        "--no-bias-gelu-fusion as --activation gelu"
    ]


@pytest.mark.parametrize(
    "line, told",
    [
        ("", ["--hidden-dropout 0.1, --attention-dropout 0.1; --hidden-dropout 0 --attention-dropout 0 turns it off"]),
        ("--attention-dropout 0", ["--hidden-dropout 0.1; --hidden-dropout 0 turns it off"]),
        ("--hidden-dropout 0.1 --attention-dropout 0.1", []),
    ],
)
def test_dropout_that_nobody_asked_for_is_said(line: str, told: list[str]) -> None:
    said: list[str] = []
    parse_arguments(command_line(line), say=said.append)
    assert said == [f"Not given, so at Megatron-LM's default: {text}" for text in told]
    said.clear()
    parse_arguments(command_line(line), say=said.append, purpose="model")
    assert said == []


def test_a_program_adds_its_own_arguments() -> None:
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        group = parser.add_argument_group("mine")
        group.add_argument("--my_path", required=True)
        group.add_argument("--my-weights", type=float, nargs="+", default=[1.0])
        group.add_argument("--num-experts", type=int, default=2)
        return parser

    line = command_line("--my-path here --my_weights -1 .5 --num-experts 4")
    config, extra = parse_arguments(line, provider)
    assert config.model.num_layers == 8
    assert vars(extra) == {"my_path": "here", "my_weights": [-1.0, 0.5], "num_experts": 4}
    with pytest.raises(ConfigError) as caught:
        parse_arguments(command_line("--lr x --my-weights a"), provider)
    assert "--lr x" in str(caught.value)
    assert "--my-weights" in str(caught.value)


def test_a_program_cannot_add_a_flag_that_exists() -> None:
    def provider(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lr")

    with pytest.raises(ValueError, match="--lr, which every program has"):
        parse_arguments(command_line(), provider)


def test_defaults_of_a_program_are_weaker_than_flags() -> None:
    line = command_line("", "--tokenizer-type")
    config, _ = parse_arguments(line, defaults={"tokenizer_type": "NullTokenizer", "seed": 7, "swiglu": True})
    assert (config.tokenizer.tokenizer_type, config.training.seed, config.model.gated) == (
        "NullTokenizer",
        7,
        True,
    )
    config, _ = parse_arguments(
        [*line, "--seed", "8", "--activation", "gelu"],
        defaults={"seed": 7, "swiglu": True, "tokenizer_type": "NullTokenizer"},
    )
    assert (config.training.seed, config.model.activation) == (8, "gelu")


def test_the_started_processes_become_the_world_size(parse: Parse) -> None:
    assert parse("", world_size=4).parallel.world_size == 4
    assert parse("--world-size 4", world_size=4).parallel.world_size == 4
    assert parse("").parallel.world_size is None


def test_printing_the_groups_of_any_world_needs_neither_model_nor_data() -> None:
    line = "--tensor-model-parallel-size 8 --context-parallel-size 2 --world-size 1536 --print-parallel-groups"
    config, _ = parse_arguments(line.split(), world_size=1, launched=False)
    assert config.data_parallel_size == 96
    with pytest.raises(ConfigError, match="16 processes, which do not divide the 1535"):
        parse_arguments(line.replace("1536", "1535").split(), launched=False)


def test_printing_the_groups_of_the_started_world_runs_it_so_all_rules_hold() -> None:
    line = "--world-size 4 --print-parallel-groups"
    parse_arguments(command_line(line), world_size=4)
    with pytest.raises(ConfigError, match="--num-layers: must be given"):
        parse_arguments(line.split(), world_size=4)
    with pytest.raises(ConfigError, match="--num-layers: must be given"):
        parse_arguments(["--world-size", "1", "--print-parallel-groups"])


def test_another_purpose_needs_no_training_flags() -> None:
    line = command_line("", "--mock-data --train-iters")
    config, _ = parse_arguments(line, purpose="model")
    assert config.model.num_layers == 8


def test_help_shows_every_option_in_its_group_with_its_default() -> None:
    said: list[str] = []
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(
            ["--help"], lambda parser: parser.add_argument("--mine", help="My own.") and None, say=said.append
        )
    assert stopped.value.code == 0
    raw = said[0]
    flags = " ".join(raw[raw.index("\nrequired:") :].split())
    for option in all_options("gpt"):
        assert option.shown_help.strip(), option.name
        group = "required" if option.required else option.section
        (place,) = re.finditer(rf"^  {option.shown}\s", raw, re.MULTILINE)
        assert re.findall(r"^(\w+):$", raw[: place.start()], re.MULTILINE)[-1] == group, option.name
        for alias in option.flag.aliases:
            assert alias in flags
    assert "--log-interval N Iterations between log lines. (at least 1; default: 100)" in flags
    assert "--disable-bias-linear No biases in the linear layers. --add-qkv-bias" in flags
    assert "--no-save-optim Leave the optimizer out of checkpoints. --no-load-optim" in flags
    assert (
        "--micro-batch-size N Samples of one forward pass on one model replica. Also --batch-size. (at least 1 and"
        in flags
    )
    assert "--initial-loss-scale X First dynamic loss scale. (more than 0; default: 2^32)" in flags
    assert (
        "--hidden-dropout X Dropout on embeddings and residual branches. (at least 0 and less than 1; default:" in flags
    )
    assert "--data-path [WEIGHT] PREFIX ... Prefixes" in flags
    assert "--split TRAIN,VALID,TEST Shares" in flags
    assert "not given. (default" not in flags
    assert flags.index("--tokenizer-type") < flags.index(" configuration: ") < flags.index("--window-size")
    assert "\nA switch --NAME is undone by --no-NAME, and a flag that is the same as --NAME VALUE by --NAME and" in raw
    assert "--mine MINE My own." in " ".join(raw.split())
    assert max(len(line) for line in raw.splitlines()) <= 120


def test_the_command_that_help_shows_is_a_whole_run() -> None:
    said: list[str] = []
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], say=said.append)
    command = re.search(r"python \S+ (--.*?)\n\n", said[0], re.DOTALL)
    assert command is not None
    config, _ = parse_arguments(shlex.split(command[1].replace("\\\n", "")), world_size=1, say=lambda text: None)
    assert config.data.mock_data


def test_field_names_are_unique_over_sections() -> None:
    names = [option.field for option in all_options("bert")]
    assert len(names) == len(set(names))


def test_every_option_can_be_set_by_its_field_name() -> None:
    samples = {"number": "3", "fraction": "0.5", "text": "word", "switch": ""}
    for option in all_options("bert"):
        word = option.choices[0] if option.choices else samples[option.kind]
        count = option.flag.words if isinstance(option.flag.words, int) else 1
        reader = _Reader(task="bert", extra_options={})
        reader.read_flags([_Group(name=f"--{option.field}", words=[word] * count if word else [])])
        assert reader.problems == []
        expected = read_words(option, [word] * count) if word else True
        assert reader.value(option.field) == expected


def test_a_configuration_cannot_be_changed(parse: Parse) -> None:
    config = parse()
    for option in all_options("gpt"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(getattr(config, option.section), option.field, None)


def test_flags_are_read_without_torch() -> None:
    """The text tools import these, and would wait for it."""
    root = Path(__file__).parents[2]
    modules = "megatron.config, megatron.tokenizer, megatron.data.indexed_dataset, preprocess_data"
    program = f"import sys; sys.path[:0] = sys.argv[1:]; import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, str(root), str(root / "tools")], check=True)


FLAGS = st.sampled_from([option.name for option in all_options("gpt")])
WORDS = st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "2",
        "3",
        "7",
        "64",
        "0.5",
        "1e12",
        "1e30",
        "-1e30",
        "nan",
        "rope",
        "WSD",
        "fp16",
        "a",
        "",
        "0,0",
        "|",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(FLAGS, st.lists(WORDS, max_size=3)), max_size=8), st.sampled_from([None, 1, 2, 6, 8]))
def test_whatever_the_values_the_answer_is_a_configuration_or_all_its_problems(
    changes: list[tuple[str, list[str]]], world_size: int | None
) -> None:
    line = [word for name, words in changes for word in (name, *words)]
    config = None
    with contextlib.suppress(ConfigError):
        config, _ = parse_arguments([*command_line(), *line], world_size=world_size, say=lambda text: None)
    if config is not None:
        assert MegatronConfig.from_dict(json.loads(config.to_json())) == config
        assert config.problems() == []


def test_a_tool_reads_and_explains_the_options_of_a_section_as_a_training_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    options = section_options("optimizer", OptimizerConfig)
    add_to_parser(parser, [option for option in options if option.field in ("adam_eps", "lr_decay_style")])
    assert parser.parse_args(["--adam-eps", "1e-6"]) == argparse.Namespace(adam_eps=1e-6, lr_decay_style="linear")
    for word, complaint in {"nan": "must be a number, 'nan' is not", "x": "must be a number, 'x' is not"}.items():
        with pytest.raises(argparse.ArgumentError, match=complaint):
            parser.parse_args(["--adam-eps", word])
    assert "(more than 0; default: 1e-08)" in " ".join(parser.format_help().split())


def test_a_tool_has_both_flags_of_a_switch_and_explains_the_one_that_changes_it() -> None:
    parser = argparse.ArgumentParser()
    options = section_options("tokenizer", TokenizerConfig)
    add_to_parser(parser, [option for option in options if option.field == "tokenizer_hf_include_special_tokens"])
    assert parser.parse_args([]).tokenizer_hf_include_special_tokens is True
    off = parser.parse_args(["--tokenizer-hf-no-include-special-tokens"])
    assert off.tokenizer_hf_include_special_tokens is False
    assert "--tokenizer-hf-include-special-tokens" not in parser.format_help()
    assert "--tokenizer-hf-no-include-special-tokens" in parser.format_help()


def test_a_tool_reads_several_words_after_a_flag_that_takes_several() -> None:
    parser = argparse.ArgumentParser()
    options = section_options("tokenizer", TokenizerConfig)
    add_to_parser(parser, [option for option in options if option.field == "tiktoken_special_tokens"])
    assert parser.parse_args([]).tiktoken_special_tokens == ()
    assert parser.parse_args(["--tiktoken-special-tokens", "<s>", "</s>"]).tiktoken_special_tokens == ("<s>", "</s>")


def test_two_spellings_of_one_flag_that_differ_are_named_with_their_values(refused: Refused) -> None:
    text = refused("--recompute-activations --recompute-granularity full")
    assert (
        "--recompute-granularity full and --recompute-activations give recompute-granularity different values" in text
    )
