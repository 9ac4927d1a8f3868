"""The scripts that users start: their commands, with stand-ins for the programs that they call."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.commands import check_batch_script, check_command, check_torchrun, commands_of, recorded_calls
from tests.docs.render import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*ROOT.glob("**/examples/**/*.s*"), *(ROOT / "tools").glob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shell_scripts_are_well_formed(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_example_runs_on_one_node_as_it_is(tmp_path: Path) -> None:
    calls, _ = recorded_calls(EXAMPLES / "pretrain_gpt.sh", [], tmp_path, {}, programs=["torchrun"])
    ((program, *words),) = calls
    assert program == "torchrun"
    assert "pretrain_gpt.py" in " ".join(words)
    check_torchrun(words)


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 16])
def test_the_slurm_example_starts_each_node_of_one_world(tmp_path: Path, num_nodes: int) -> None:
    script = EXAMPLES / "slurm" / "pretrain_gpt.sbatch"
    check_batch_script(script, ["--micro-batch-size", "1"], num_nodes=num_nodes, folder=tmp_path)


def test_directives_of_slurm_come_before_any_command() -> None:
    lines = (EXAMPLES / "slurm" / "pretrain_gpt.sbatch").read_text(encoding="utf-8").splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert directives, "a batch script without directives"
    assert max(directives) < first_command


def test_the_commands_of_the_quickstart_are_understood(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    calls, printed = recorded_calls(
        ROOT / "tools" / "quickstart.sh",
        [],
        tmp_path / "stand-ins",
        {"QUICKSTART_FOLDER": str(folder)},
        programs=["torchrun", "python"],
    )
    assert [call[0] for call in calls].count("torchrun") == 2
    for call in calls:
        check_command(call)
    shown = printed.split("\nDone.")[1].replace("\\\n", " ").splitlines()
    commands = [words for line in shown if line.startswith("  ") for words in commands_of(line)]
    assert [words[0] for words in commands] == ["tensorboard", "torchrun"]
    for words in commands:
        check_command(words)
