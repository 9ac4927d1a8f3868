"""Commands as they stand in documents and scripts: taken out, and read by the programs that they name."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.run import get_args_parser

from megatron.config import parse_arguments
from megatron.config.megatron_config import PROGRAMS, Task
from tests.docs.render import ROOT

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TASKS = {program: task for task, program in PROGRAMS.items()}


class Parsed(BaseException):
    """A program has read its arguments; nothing must run after that."""


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [body for name, body in FENCE.findall(text) if name == language]


def without_blocks(text: str) -> str:
    return FENCE.sub("", text)


def commands_of(script: str) -> Iterator[list[str]]:
    """The words of each command line, without comments and without variables set before the program."""
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            yield words


@cache
def make_targets() -> frozenset[str]:
    """What `make help` lists."""
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return frozenset(line.split()[0] for line in listed.splitlines())


def check_command(words: Sequence[str]) -> None:
    """Have the program that a command names read its words, in the present folder; nothing is started.

    Raises:
        ConfigError, SystemExit, AssertionError: the words are wrong.
    """
    program, *rest = words
    if program == "make":
        assert set(rest) <= make_targets(), words
    elif program == "source":
        assert rest == [".venv/bin/activate"], words
    elif program == "torchrun":
        check_torchrun(rest)
    elif program in ("srun", "sbatch"):
        check_slurm(program, rest)
    elif program == "tensorboard":
        assert rest[0] == "--logdir", words
    elif program == "python" and rest[0] in _TASKS:
        check_training(rest[1:], _TASKS[rest[0]], world_size=1, launched=False)
    elif program == "python" and rest[0].startswith("tools/"):
        check_tool(ROOT / rest[0], rest[1:])
    else:
        raise AssertionError(f"no test knows the program of {shlex.join(words)}")


def check_torchrun(words: Sequence[str]) -> None:
    launch = get_args_parser().parse_args(list(words))
    if launch.training_script.startswith("tools/"):
        check_tool(ROOT / launch.training_script, launch.training_script_args)
        return
    task = _TASKS[Path(launch.training_script).name]
    num_nodes = int(launch.nnodes.split(":")[-1])  # torchrun's default is "1:1", the least and the most
    check_training(launch.training_script_args, task, world_size=num_nodes * int(launch.nproc_per_node))


def check_slurm(program: str, words: Sequence[str]) -> None:
    """`srun OPTIONS python pretrain_gpt.py …` or `sbatch OPTIONS SCRIPT …`; options `--name value` or `--name=x`."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest[0].startswith("--"):
        name, equals, value = rest.pop(0).partition("=")
        options[name] = value if equals else rest.pop(0)
    if program == "sbatch":
        check_batch_script(ROOT / rest[0], rest[1:], num_nodes=int(options["--nodes"]))
        return
    assert rest[0] == "python", words
    check_training(rest[2:], _TASKS[rest[1]], world_size=int(options["--nodes"]) * int(options["--ntasks-per-node"]))


def check_training(words: Sequence[str], task: Task, *, world_size: int, launched: bool = True) -> None:
    """As a rank of that world would read them; whether files are there is not looked at.

    A checkpoint is one that the README's `small.yaml` has saved.
    """
    read = partial(parse_arguments, check_files=False, say=lambda text: None)
    prints_and_ends = pytest.raises(SystemExit, match="0") if "--print-config" in words else nullcontext()
    with prints_and_ends:
        read(
            words,
            task=task,
            world_size=world_size,
            launched=launched,
            saved_config=lambda wanted: read(["--config", "small.yaml"], world_size=1)[0],
        )


def check_tool(tool: Path, words: Sequence[str]) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *arguments: Any) -> argparse.Namespace:
        parse(parser, list(words))
        raise Parsed

    _run_until_parsed(tool, parse_only)


@cache
def tool_flags(tool: Path) -> frozenset[str]:
    """The flags of a tool."""
    flags: set[str] = set()

    def keep_flags(parser: argparse.ArgumentParser, *arguments: Any) -> argparse.Namespace:
        flags.update(flag for action in parser._actions for flag in action.option_strings)
        raise Parsed

    _run_until_parsed(tool, keep_flags)
    return frozenset(flags)


def _run_until_parsed(tool: Path, parse_args: Any) -> None:
    with patch.object(argparse.ArgumentParser, "parse_args", parse_args), patch.object(sys, "argv", [str(tool)]):
        with _importable(tool.parent):
            try:
                runpy.run_path(str(tool), run_name="__main__")
            except Parsed:
                return
    raise AssertionError(f"{tool.name} read no arguments")


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


# A program that writes its words, each closed by a zero byte and all of them by another, to the file in its name.
_RECORDER = """#!/usr/bin/env bash
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\0'; } >> "$RECORD"
"""
# srun, on each node: carry out what comes after the options.
_SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@"; done
"""


def recorded_calls(
    script: Path,
    words: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    *,
    programs: Sequence[str],
    fails: str = "",
    status: int = 0,
) -> tuple[list[list[str]], str]:
    """Run a script with stand-ins for `programs`: their calls, and what the script printed.

    Args:
        fails: a pattern of bash; a stand-in whose words match it ends with status 1.
        status: what the script must end with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**dict.fromkeys(programs, f"{_RECORDER}[[ $* != {fails} ]]\n"), "srun": _SRUN}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    record = folder / "record"
    record.touch()
    done = subprocess.run(
        ["bash", str(script), *words],
        cwd=ROOT,
        env={"PATH": f"{folder}:/usr/bin:/bin", "RECORD": str(record), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    calls = [call.split("\0") for call in record.read_text().split("\0\0")[:-1]]
    return calls, done.stdout


def check_batch_script(script: Path, words: Sequence[str], *, num_nodes: int, folder: Path | None = None) -> None:
    """Every node of the job starts its part of one world, whose ranks understand their flags."""
    folder = Path.cwd() / "stand-ins" if folder is None else folder
    variables = {"SLURM_NNODES": str(num_nodes), "SLURM_JOB_ID": "17", "SLURM_GPUS_ON_NODE": "8"}
    calls, _ = recorded_calls(script, words, folder, variables, programs=["torchrun"])
    assert len(calls) == num_nodes
    launches = [get_args_parser().parse_args(call[1:]) for call in calls]
    assert [launch.node_rank for launch in launches] == list(range(num_nodes))
    assert {launch.nnodes for launch in launches} == {str(num_nodes)}
    assert len({(launch.master_addr, launch.master_port) for launch in launches}) == 1
    for call in calls:
        assert call[len(call) - len(words) :] == list(words), "flags after the script's name reach the program last"
        check_torchrun(call[1:])
