"""What every tool says to a wrong command line, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.tools import ROOT, run

TOOLS = [
    "make_corpus",
    "train_tokenizer",
    "preprocess_data",
    "bigram_entropy",
    "plot_loss",
    "generate_text",
    "evaluate",
    "inspect_checkpoint",
    "inspect_dataset",
]


def one_line(tool: str, *arguments: str) -> str:
    """The complaint of a tool, which must be one line."""
    complaint = run(tool, *arguments, status=2)
    assert complaint.startswith(f"{tool}.py: error: ")
    assert len(complaint.splitlines()) == 1, complaint
    return complaint


@pytest.mark.parametrize("tool", TOOLS)
def test_a_missing_flag_is_named(tool: str) -> None:
    assert "the following arguments are required: " in one_line(tool)


@pytest.mark.parametrize(
    ("tool", "typed", "nearest"),
    [
        ("make_corpus", "--outptu", "--output"),
        ("train_tokenizer", "--vocab_size=512", "--vocab-size"),
        ("preprocess_data", "--tokenizer-typ", "--tokenizer-type"),
        ("bigram_entropy", "--data_path", "--data-path"),
        ("plot_loss", "--lines", "--line"),
        ("generate_text", "--Load", "--load"),
        ("evaluate", "--lastword", "--last-word"),
        ("inspect_checkpoint", "--compare_step", "--compare-step"),
        ("inspect_dataset", "--histograms", "--histogram"),
    ],
)
def test_a_misspelt_flag_is_named_with_the_nearest_and_before_the_missing_ones(
    tool: str, typed: str, nearest: str
) -> None:
    flag = typed.partition("=")[0]
    assert f"{flag}: is not a known flag; {nearest} is the nearest" in one_line(tool, typed, "x")


def test_a_flag_like_no_other_is_sent_to_the_help() -> None:
    assert "--qqq: is not a known flag; --help lists all flags" in one_line("make_corpus", "--qqq")


def test_what_looks_like_a_flag_inside_a_value_is_none() -> None:
    words = ["--load", "x", "--prompt", "--no flag", "--prompt=--none", "--num-tokens", "0"]
    assert "--num-tokens: must be at least 1, not 0" in one_line("generate_text", *words)


@pytest.mark.parametrize("value", ["x", "1.5"])
def test_a_number_that_is_none_is_refused(value: str) -> None:
    assert f"--workers: must be a whole number, not '{value}'" in one_line("preprocess_data", "--workers", value)


def test_a_reader_that_has_seen_enough_ends_a_tool_without_a_word() -> None:
    script = "from command_line import run_tool, say\nrun_tool(lambda: [say('x' * 1000) for _ in range(1000)])"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
