"""The scripts that users start: their commands, with stand-ins for the programs that they call."""

from __future__ import annotations

import os
import re
import select
import shlex
import subprocess
from math import prod
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.docs.commands import check_batch_script, check_command, check_torchrun, commands_of, recorded_calls
from tests.docs.render import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*ROOT.glob("**/examples/**/*.s*"), *(ROOT / "tools").glob("**/*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shell_scripts_are_well_formed(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("example", ["pretrain_gpt", "pretrain_bert", "pretrain_bert_distributed"])
def test_an_example_runs_on_one_node_as_it_is(tmp_path: Path, example: str) -> None:
    calls, _ = recorded_calls(EXAMPLES / f"{example}.sh", [], tmp_path, {}, programs=["torchrun"])
    ((program, *words),) = calls
    assert program == "torchrun"
    assert f"{example.removesuffix('_distributed')}.py" in " ".join(words)
    check_torchrun(words)


# The commands in the comments of the examples: variables, the script, flags.
COMMENTED = [
    shlex.split(re.sub(r"<[^>]*>", "0", command))
    for example in sorted(EXAMPLES.glob("*.sh"))
    for command in re.findall(
        r"^# *(?:[^#\n]*: )?((?:[A-Z_]+=(?:<.*?>|\S+) )*bash examples/.*)$",
        example.read_text(encoding="utf-8").replace("\\\n#", ""),
        re.MULTILINE,
    )
]


def test_the_examples_say_how_they_are_started() -> None:
    said = [" ".join(words) for words in COMMENTED]
    assert len([words for words in said if "--micro-batch-size" in words]) == 3
    assert len([words for words in said if "--precision fp32" in words]) == 2, "a try without a GPU"
    assert len([words for words in said if "--layernorm-placement post --activation gelu" in words]) == 2


@pytest.mark.parametrize("command", COMMENTED, ids=" ".join)
def test_a_command_in_a_comment_of_an_example_is_understood(tmp_path: Path, command: list[str]) -> None:
    program = command.index("bash")
    variables = dict(word.split("=", 1) for word in command[:program])
    script, *words = command[program + 1 :]
    (call,), _ = recorded_calls(ROOT / script, words, tmp_path, variables, programs=["torchrun"])
    assert call[len(call) - len(words) :] == words
    check_torchrun(call[1:])


@pytest.mark.parametrize(
    ("example", "variables", "world_size"),
    [
        ("pretrain_bert", {"GPUS_PER_NODE": "8"}, 8),
        ("pretrain_bert_distributed", {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "node0"}, 32),
    ],
)
def test_the_examples_of_bert_run_on_as_many_gpus_as_they_say(
    tmp_path: Path, example: str, variables: dict[str, str], world_size: int
) -> None:
    words = ["--micro-batch-size", "4"]
    (call,), _ = recorded_calls(EXAMPLES / f"{example}.sh", words, tmp_path, variables, programs=["torchrun"])
    launch = get_args_parser().parse_args(call[1:])
    assert int(launch.nnodes.split(":")[-1]) * int(launch.nproc_per_node) == world_size
    assert call[-2:] == words
    check_torchrun(call[1:])


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


# What the first steps of each quickstart leave.
_DATA = {
    "quickstart": ("tokenizer.model", "corpus_text_document.bin", "corpus_text_document.idx"),
    "quickstart_bert": ("wordpiece-vocab.txt", "docstrings_text_sentence.bin", "docstrings_text_sentence.idx"),
}


def quickstart(
    tmp_path: Path, script: str, variables: dict[str, str], *, fails: str = "", status: int = 0
) -> tuple[list[list[str]], str]:
    """The calls of a quickstart over files that stand for its data, and what it printed."""
    folder = tmp_path / "quickstart"
    folder.mkdir(exist_ok=True)
    for name in _DATA[script]:
        (folder / name).touch()
    (tmp_path / "stand-ins" / "record").unlink(missing_ok=True)
    return recorded_calls(
        ROOT / "tools" / f"{script}.sh",
        [],
        tmp_path / "stand-ins",
        {"QUICKSTART_FOLDER": str(folder), **variables},
        programs=["torchrun", "python"],
        fails=fails,
        status=status,
    )


def quickstart_gpt(tmp_path: Path, half: int, *, fails: str = "", status: int = 0) -> tuple[list[list[str]], str]:
    return quickstart(tmp_path, "quickstart", {"QUICKSTART_HALF": str(half)}, fails=fails, status=status)


def quickstart_bert(tmp_path: Path) -> tuple[list[list[str]], str]:
    return quickstart(tmp_path, "quickstart_bert", {})


def trained(calls: list[list[str]]) -> Path:
    """Have what the trainings and the sampling of these calls would write."""
    (run,) = {Path(call[call.index("--save") + 1]).parent for call in calls if call[0] == "torchrun"}
    iterations = next(call[call.index("--train-iters") + 1] for call in calls if call[0] == "torchrun")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(iterations)
    (run / "sample.txt").write_text("class Sample\n")
    return run


def programs_of(calls: list[list[str]]) -> list[str]:
    return [Path(call[1]).stem if call[0] == "python" else call[0] for call in calls]


@pytest.mark.parametrize("half", [1, 7, 300])
def test_the_commands_of_the_quickstart_are_understood(tmp_path: Path, half: int) -> None:
    calls, printed = quickstart_gpt(tmp_path, half)
    assert programs_of(calls).count("torchrun") == 2
    for call in calls:
        check_command(call)
    compare, plot = calls[-2:]
    assert programs_of([compare, plot]) == ["bigram_entropy", "plot_loss"]
    assert compare[compare.index("--output") + 1] == plot[plot.index("--lines-from") + 1]
    training = next(call for call in calls if call[0] == "torchrun")
    sizes = (training[training.index(f"--{name}") + 1] for name in ("eval-iters", "global-batch-size", "seq-length"))
    assert f"the mean over {prod(map(int, sizes))} tokens" in printed, "how much the loss says"
    shown = printed.split("\nDone.")[1].replace("\\\n", " ").splitlines()
    commands = [words for line in shown if line.startswith("  ") for words in commands_of(line)]
    assert [words[0] for words in commands] == ["tensorboard", *["python"] * 4, "torchrun"]
    tools = ["generate_text", "evaluate", "inspect_checkpoint", "convert_checkpoint"]
    assert programs_of(commands)[1:-1] == tools, "what is done next with the model"
    (run,) = (tmp_path / "quickstart").glob("run-*")
    assert all(f"{run}/checkpoints" in words for words in commands[1:-1])
    for words in commands:
        check_command(words)


@pytest.mark.parametrize(
    ("script", "variable", "lengths"),
    [("quickstart", "QUICKSTART_HALF", (200, 2000)), ("quickstart_bert", "QUICKSTART_ITERATIONS", (1500, 15000))],
)
def test_a_quickstart_says_at_its_start_how_long_it_takes_on_the_cores_of_this_machine(
    tmp_path: Path, script: str, variable: str, lengths: tuple[int, int]
) -> None:
    minutes = []
    for length in lengths:
        printed = quickstart(tmp_path, script, {variable: str(length), "OMP_NUM_THREADS": "1"})[1]
        said = re.match(
            r"some (\d+) minutes on two free cores; .* of the (\d+) here are busy: expect (\d+) minutes\n", printed
        )
        assert said is not None, printed
        free, cores, here = map(int, said.groups())
        assert free <= here
        assert cores == len(os.sched_getaffinity(0))
        minutes.append(free)
    assert minutes == [5, 41], "in proportion to the training"


def test_every_process_of_the_quickstart_has_a_thread_of_its_own() -> None:
    text = (ROOT / "tools" / "quickstart.sh").read_text(encoding="utf-8")
    assert text.index("export OMP_NUM_THREADS=1\n") < text.index("\nstep ")


def test_the_sample_is_shown_whole_after_what_its_program_says() -> None:
    """Through a pipe it would come later than the line about its speed, or in the middle of it."""
    text = (ROOT / "tools" / "quickstart.sh").read_text(encoding="utf-8")
    program, shown = text.index("tools/generate_text.py"), text.index('\ncat "$run/sample.txt"\n')
    assert program < shown and " | " not in text[program:shown]


def test_the_steps_of_the_quickstart_are_numbered_as_the_readme_numbers_them() -> None:
    """One heading a step, and the verdict in the last of them, before the word that all is done."""
    text = (ROOT / "tools" / "quickstart.sh").read_text(encoding="utf-8")
    steps = re.findall(r'^step "(\d+)/(\d+) ', text, re.MULTILINE)
    _, shown = (ROOT / "README.md").read_text(encoding="utf-8").split("## What the quickstart shows")
    listed = re.findall(r"^(\d+)\. ", shown.partition("\n## ")[0], re.MULTILINE)
    assert steps == [(number, str(len(listed))) for number in listed]
    last = text.index(f"{len(listed)}/{len(listed)} ")
    assert last < text.index("tools/bigram_entropy.py") < text.index("\nDone.")


def test_the_quickstart_skips_what_is_complete(tmp_path: Path) -> None:
    trained(quickstart_gpt(tmp_path, 300)[0])
    calls, printed = quickstart_gpt(tmp_path, 300)
    assert programs_of(calls) == ["make_corpus", "train_tokenizer", "preprocess_data", "bigram_entropy", "plot_loss"]
    assert printed.count(": skipped") == 2
    assert printed.count("\nclass Sample\n") == 1
    assert printed.count(" s)") == 7, "each step says how long it took"


def test_the_quickstart_fails_with_a_picture_when_only_pairs_are_learned(tmp_path: Path) -> None:
    calls, printed = quickstart_gpt(tmp_path, 300, fails="*bigram_entropy*", status=1)
    assert programs_of(calls)[-2:] == ["bigram_entropy", "plot_loss"]
    assert "Done." in printed


@pytest.mark.parametrize("change", ["half", "tokenizer.model", "corpus_text_document.bin"])
def test_the_quickstart_trains_anew_when_anything_differs(tmp_path: Path, change: str) -> None:
    before = trained(quickstart_gpt(tmp_path, 300)[0])
    if change != "half":
        (tmp_path / "quickstart" / change).write_text("other")
    calls, _ = quickstart_gpt(tmp_path, 200 if change == "half" else 300)
    assert programs_of(calls).count("torchrun") == 2
    assert trained(calls) != before


# A Python whose venv has a pip that says what pip says, and fails where it is told to.
_PYTHON = """#!/usr/bin/env bash
if [[ $1 == -m && $2 == venv ]]; then
  mkdir -p "$3/bin"
  cp "$0" "$3/bin/python"
elif [[ $* == *--editable* ]]; then
  [[ $* == *"--progress-bar raw"* ]] || exit 9
  echo "Obtaining file:///here"
  echo "Collecting torch==2.13.0 (from here)"
  echo "  Downloading https://there/torch-2.13.0-cp311.whl (250.0 MB)"
  for part in 0 60 120 180 250; do echo "Progress ${part}000000 of 250000000"; done
  echo "  Downloading numpy-2.4-cp311.whl (60 MB)"
  for part in 0 60; do echo "Progress ${part}000000 of 60000000"; done
  echo "  Building editable for megatron-pretraining (pyproject.toml): started"
  echo "  Building editable for megatron-pretraining (pyproject.toml): finished with status 'done'"
  echo "Installing collected packages: numpy, torch, megatron-pretraining"
  echo "error: no space left" >&2
  exit $PIP_STATUS
fi
"""


@pytest.mark.parametrize("status", [0, 1])
def test_setting_up_shows_in_a_few_lines_what_is_going_on_and_all_of_the_end_of_a_failure(
    tmp_path: Path, status: int
) -> None:
    python, environment = tmp_path / "python", tmp_path / "environment"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--silent", f"VENV={environment}", f"PYTHON={python}", "setup"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PIP_STATUS": str(status)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    _, *lines = done.stdout.splitlines()
    assert lines[:6] == [
        "  downloaded 100 MB, now torch-2.13.0-cp311.whl",
        "  downloaded 200 MB, now torch-2.13.0-cp311.whl",
        "  downloaded 300 MB, now numpy-2.4-cp311.whl",
        "  compiling csrc",
        "  installing 3 packages",
        "installed" if status == 0 else "Obtaining file:///here",
    ]
    assert ("error: no space left" in lines) == (status != 0)
    assert (done.returncode != 0) == (status != 0)
    assert (environment / ".installed").exists() == (status == 0)


def test_a_step_that_takes_long_is_shown_when_it_begins() -> None:
    """Nothing comes after it for minutes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["bash", str(ROOT / "tools" / "dev" / "pip_progress.sh")], **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"  Building editable for megatron-pretraining (pyproject.toml): started\n")
        process.stdin.flush()
        shown, _, _ = select.select([process.stdout], [], [], 30)
        assert shown and process.stdout.readline() == b"  compiling csrc\n"


# What `make setup` of the script in .ci leaves: a Python whose doctor says what the test wants.
_MAKE = """#!/usr/bin/env bash
[[ $1 == setup ]] || exit 0
mkdir -p .venv/bin
cat > .venv/bin/python <<'END'
#!/usr/bin/env bash
[[ $1 == tools/doctor.py ]] || exit 0
echo "$DOCTOR"
exit "$DOCTOR_STATUS"
END
chmod +x .venv/bin/python
"""


@pytest.mark.parametrize(
    ("nvcc", "doctor", "doctor_status", "status"),
    [
        (None, "not for GPUs", 0, 0),
        ("sm_80 sm_90", "for GPUs sm_80, sm_90", 0, 0),
        ("sm_80 sm_90 sm_100", "for GPUs sm_80, sm_90, sm_100", 0, 0),
        ("sm_80 sm_90 sm_100", "for GPUs sm_80, sm_90", 0, 1),
        ("sm_80 sm_90 sm_100", "not for GPUs", 0, 1),
        (None, "adam is far from its reference", 1, 1),
    ],
)
def test_what_must_pass_before_a_change_asks_the_doctor_and_shows_its_answer(
    tmp_path: Path, nvcc: str | None, doctor: str, doctor_status: int, status: int
) -> None:
    stand_ins, script = tmp_path / "stand-ins", tmp_path / "checkout" / ".ci" / "run"
    programs = {"make": _MAKE, "git": "#!/usr/bin/env bash\necho 0123\n"}
    if nvcc is not None:
        programs["nvcc"] = f"#!/usr/bin/env bash\necho {nvcc}\n"
    stand_ins.mkdir()
    for name, text in programs.items():
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    done = subprocess.run(
        ["bash", str(script)],
        env={"PATH": f"{stand_ins}:/usr/bin:/bin", "DOCTOR": doctor, "DOCTOR_STATUS": str(doctor_status)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert doctor in done.stdout


def test_the_commands_of_the_quickstart_of_bert_are_understood(tmp_path: Path) -> None:
    calls, printed = quickstart_bert(tmp_path)
    programs = ["make_corpus", "train_tokenizer", "preprocess_data", "torchrun", "plot_loss", "fill_mask"]
    assert programs_of(calls) == programs
    for call in calls:
        check_command(call)
    assert re.findall(r"== (\d+)/6 ", printed) == list("123456")
    shown = printed.split("\nDone.")[1].splitlines()
    commands = [words for line in shown if line.startswith("  ") for words in commands_of(line)]
    assert programs_of(commands)[1:] == ["fill_mask", "inspect_checkpoint"]
    for words in commands:
        check_command(words)


def test_the_quickstart_of_bert_skips_a_training_that_is_complete_and_goes_on_with_another(tmp_path: Path) -> None:
    training = next(call for call in quickstart_bert(tmp_path)[0] if call[0] == "torchrun")
    checkpoints = Path(training[training.index("--save") + 1])
    checkpoints.mkdir()
    for done, skipped in ((int(training[training.index("--train-iters") + 1]), True), (20, False)):
        (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(done))
        assert ("torchrun" not in programs_of(quickstart_bert(tmp_path)[0])) == skipped
