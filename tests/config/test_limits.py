"""What a number may be stands at its field: whatever it is, the answer comes at once and names the limit."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron.config import ConfigError, MegatronConfig, TokenizerConfig, parse_arguments, section_problems
from megatron.config.megatron_config import all_options
from megatron.config.options import LARGEST_WHOLE, Option
from tests.config.conftest import Parse, Refused, command_line

NUMBERS = [option for option in all_options("gpt") if option.kind in ("number", "fraction")]
# Flags beside which a value is tried: other rules look at it then.
BESIDE = [
    "",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2",
    "--tensor-model-parallel-size 2 --sequence-parallel --swiglu --ffn-hidden-size 64",
    "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4",
    "--position-embedding-type rope --kv-channels 8",
    "--fp16 --weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2",
    "--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-warmup-iters 5 --world-size 4",
]
EXTREMES = ["0", "-1", "1", "7", "-1e30", "1e12", "1e30", "1e300", "1e-300", "nan", "inf", "-inf"]


def words_of(option: Option, value: str) -> list[str]:
    return [option.name, *[value] * (option.flag.words if isinstance(option.flag.words, int) else 1)]


def lines() -> Iterator[list[str]]:
    """Command lines with each extreme value of each option."""
    for option in all_options("gpt"):
        limits = [str(limit) for limit in (option.flag.at_least, option.flag.at_most) if limit is not None]
        for value in [*EXTREMES, *limits] if option.kind != "switch" else []:
            for beside in BESIDE:
                yield command_line(beside) + words_of(option, value)


def answer(line: list[str]) -> None:
    """A configuration or its problems; anything else is raised."""
    try:
        parse_arguments(line, world_size=8, say=lambda text: None)
    except ConfigError as error:
        str(error)


def test_every_value_is_answered_in_little_memory() -> None:
    """In a process of its own, whose memory is limited: a rule that counts through a size would end it, or never end.

    It says first what it answers, so that the line without an answer is known.
    """
    root = Path(__file__).parents[2]
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        "from tests.config.test_limits import answer, lines\n"
        "for line in lines(): print(*line, flush=True); answer(line)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert run.returncode == 0, [*run.stdout.splitlines()[-1:], run.stderr]
    assert len(run.stdout.splitlines()) == len(list(lines()))


def test_every_number_has_limits_and_its_default_keeps_them() -> None:
    for option in NUMBERS:
        assert (option.flag.at_least is None) != (option.flag.above is None), option.name
        if not option.required:
            assert option.rule(option.default) == "", option.name


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.name)
def test_a_value_beyond_its_limits_is_one_problem_and_the_advice_works(option: Option) -> None:
    """The nearest value stands in for it in the other rules, and none of them speaks of that value. What is advised,
    they take."""
    for beside in BESIDE:
        for value in ("-1e300", "1e300"):
            line = [*command_line(beside), *words_of(option, value)]
            if option.rule(tuple([float(value)] * 3) if option.many else float(value)) == "":
                continue
            with pytest.raises(ConfigError) as caught:
                parse_arguments(line, world_size=None, say=lambda text: None)
            (problem,) = caught.value.problems
            assert problem.flags[0] == option.name
            assert problem.rule.startswith("must ")
            advised, _, advised_then = problem.works.partition("; and then ")
            words = [] if advised == f"leave out {option.name}" else advised.split()
            assert words[:1] in ([], [option.name])
            with pytest.raises(ConfigError) if advised_then else nullcontext():
                parse_arguments([*command_line(beside), *words], world_size=None, say=lambda text: None)


def test_not_a_number_is_refused_also_where_a_program_has_set_it(parse: Parse) -> None:
    config = parse()
    for option in NUMBERS:
        if option.kind != "fraction":
            continue
        for value in (math.nan, math.inf, -math.inf):
            section = dataclasses.replace(getattr(config, option.section), **{option.field: value})
            wrong = dataclasses.replace(config, **{option.section: section})
            assert option.name in [problem.flags[0] for problem in wrong.problems()], option.name


def test_a_section_that_stands_alone_keeps_its_limits() -> None:
    (problem,) = section_problems(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=0))
    assert str(problem).startswith("--vocab-size 0: must be at least 1")
    (problem,) = section_problems(TokenizerConfig(tokenizer_type="NullTokenizer"))
    assert str(problem).startswith("--vocab-size: not given")


def test_a_value_beyond_its_limits_hides_no_other_problem(refused: Refused) -> None:
    text = refused(
        "--num-layers 0 --hidden-size 60 --tensor-model-parallel-size 3 --lr 0 --split 1,2,3,4 --world-size 7",
        problems=6,
    )
    assert "--num-layers 0: must be at least 1 and at most 10_000\n      Works: --num-layers 1" in text
    assert "--hidden-size 60: must be divisible by --num-attention-heads 8" in text
    assert "--num-attention-heads 8: must be divisible by --tensor-model-parallel-size 3" in text
    assert "3 processes, which do not divide the 7 started" in text
    assert re.search(r"--lr 0\.0: must be more than 0\n +Works: --lr 0\.0001", text)


def test_a_whole_number_without_a_limit_of_its_own_is_one_that_json_keeps(refused: Refused, parse: Parse) -> None:
    assert parse(f"--log-interval {LARGEST_WHOLE}").logging.log_interval == LARGEST_WHOLE
    text = refused(f"--log-interval {LARGEST_WHOLE + 1}")
    assert "--log-interval 9_007_199_254_740_993: must be at most 9_007_199_254_740_992" in text


def test_a_number_beyond_all_is_told_in_a_few_words(refused: Refused) -> None:
    assert "--ddp-bucket-size 99_999_999_999_999_999_999_999: " in refused(f"--ddp-bucket-size {'9' * 23}")
    assert "--ddp-bucket-size 1e+400: " in refused(f"--ddp-bucket-size {'9' * 400}")


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("--optimizer muon --muon-num-ns-steps 0", "--muon-num-ns-steps 5"),
        ("--ddp-bucket-size 0", "leave out --ddp-bucket-size"),
        ("--ddp-bucket-size 0 --overlap-grad-reduce", "--ddp-bucket-size 1"),
        ("--hidden-size 0", "--hidden-size 8"),
        ("--global-batch-size 0 --world-size 4", "--global-batch-size 8"),
        ("--train-iters 0 --lr-warmup-iters 5", "--train-iters 1; and then --lr-warmup-iters 0; --lr-decay-iters 6"),
    ],
)
def test_where_other_rules_refuse_the_nearest_value_another_is_advised(
    refused: Refused, line: str, advice: str
) -> None:
    assert f"Works: {advice}" in refused(line).splitlines()[-1]


@pytest.mark.parametrize("unreadable", ["--muon-extra-scale-factor nan", "--kernels foo", "--no-such-flag"])
def test_a_value_that_cannot_be_read_hides_no_limit_of_another(refused: Refused, unreadable: str) -> None:
    text = refused(f"--optimizer muon --muon-momentum 1.5 --recompute-num-layers 0 --lr 0 {unreadable}", problems=4)
    for said in ("--muon-momentum 1.5: ", "--recompute-num-layers 0: ", "--lr 0.0: "):
        assert said in text


def test_the_largest_layouts_are_found_at_once(parse: Parse) -> None:
    config: MegatronConfig = parse("--num-layers 10000 --pipeline-model-parallel-size 7777")
    assert config.model.num_layers == 10000
