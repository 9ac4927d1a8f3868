"""What the documents say is so: commands, flags, files, links, and the parts that follow from the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron.config.arguments import _spellings
from megatron.config.megatron_config import PROGRAMS
from megatron.config.megatron_flags import FUSION_FLAG, known_flag
from megatron.training.initialize import initialize_megatron
from tests.docs.commands import FENCE, blocks, check_command, commands_of, make_targets, tool_flags, without_blocks
from tests.docs.render import BLOCK, PARTS, ROOT, documents, rendered

DOCUMENTS = documents()
TEXTS = {document: document.read_text(encoding="utf-8") for document in DOCUMENTS}
COMMANDS = [
    pytest.param(words, id=f"{document.stem}: {' '.join(words)[:60]}")
    for document, text in TEXTS.items()
    for block in blocks(text, "bash")
    for words in commands_of(block)
]
ARCHITECTURE = TEXTS[ROOT / "docs" / "ARCHITECTURE.md"]
SOURCE_SUFFIXES = (".py", ".sh", ".sbatch", ".cpp", ".cu", ".h", ".md", ".toml")
# Flags of a program's own reader, and of programs that are not ours.
OTHER_FLAGS = {"--config", "--print-config", "--help", "--dependency"}

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)


@pytest.fixture
def folder_with_files_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present folder holds each YAML file that a document shows, under the name in its first line."""
    for text in TEXTS.values():
        for block in blocks(text, "yaml"):
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder_with_files_of_the_documents")
@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_is_understood_by_its_program(words: list[str]) -> None:
    check_command(words)


def test_the_readme_has_a_command_for_each_step_of_a_run() -> None:
    shown = "\n".join(blocks(TEXTS[ROOT / "README.md"], "bash"))
    for program in ("make_corpus", "train_tokenizer", "preprocess_data", "torchrun", "sbatch", "srun", "generate_text"):
        assert program in shown, program


@pytest.mark.parametrize("flag", ["--async-save", "--keep-last", "--save-retain-interval", "--use-checkpoint-args"])
@pytest.mark.parametrize("document", ["README.md", "docs/CHECKPOINTS.md"])
def test_how_to_save_and_to_begin_from_a_checkpoint_is_shown_in_a_command(document: str, flag: str) -> None:
    assert flag in " ".join(blocks(TEXTS[ROOT / document], "bash")).split()


def test_how_to_begin_and_to_use_a_bert_is_shown_in_commands_and_what_hugging_face_needs_is_said_beside_them() -> None:
    first = TEXTS[ROOT / "docs" / "BERT.md"].partition("\n## ")[0]
    shown = " ".join(blocks(first, "bash"))
    for said in ("make_corpus.py --output corpus.jsonl --docstrings", "pretrain_bert.py", "fill_mask.py"):
        assert said in shown, said
    assert "--layernorm-placement post --activation gelu" in without_blocks(first)


# Flags after those of the README, so that they count: a small part of the text, and two iterations.
SMALLER = {
    "tools/make_corpus.py": "--max-megabytes 3",
    "tools/train_tokenizer.py": "--vocab-size 512",
    "tools/preprocess_data.py": "--workers 1",
    "pretrain_gpt.py": "--train-iters 2 --lr-warmup-iters 1 --eval-iters 1 --global-batch-size 8",
    "tools/generate_text.py": "--num-tokens 2",
}


def test_the_readme_leads_from_text_to_a_sample_on_a_cpu_in_the_order_of_its_commands(tmp_path: Path) -> None:
    """In an empty folder, each YAML file being saved where it is shown, up to the first sample."""
    _, text = TEXTS[ROOT / "README.md"].split("## A run of your own")
    for name in ("tools", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    programs = []
    for language, block in FENCE.findall(text):
        if language == "yaml":
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
        for words in commands_of(block) if language == "bash" else ():
            if words[0] != "python":
                continue  # setting up, which is done here
            programs.append(words[1])
            done = subprocess.run(
                [sys.executable, *words[1:], *SMALLER[words[1]].split()],
                cwd=tmp_path,
                env=variables,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        if "tools/generate_text.py" in programs:
            break
    assert programs == list(SMALLER)


@each_document
def test_python_blocks_run(document: Path) -> None:
    for block in blocks(TEXTS[document], "python"):
        exec(compile(block, document.name, "exec"), {})


@each_document
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(TEXTS[document])):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        assert not heading or heading in headings(file.read_text(encoding="utf-8")), target


def headings(text: str) -> set[str]:
    """The anchors of a document."""
    lines = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


@each_document
def test_every_flag_that_is_named_exists(document: Path) -> None:
    named = {flag for code in inline_code(TEXTS[document]) for flag in re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", code)}
    assert {flag for flag in named if not flag_exists(flag)} == set()


def flag_exists(flag: str) -> bool:
    name = flag.replace("_", "-")
    known = any(name in _spellings(task) for task in PROGRAMS) or name == FUSION_FLAG or known_flag(name) is not None
    return known or flag in OTHER_FLAGS or flag in flags_of_programs()


@cache
def flags_of_programs() -> frozenset[str]:
    """Those of the tools and of torchrun."""
    tools = [tool for tool in sorted((ROOT / "tools").glob("*.py")) if "__main__" in tool.read_text(encoding="utf-8")]
    torchrun = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    return frozenset().union(torchrun, *map(tool_flags, tools))


@each_document
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    named = {target for code in inline_code(TEXTS[document]) for target in re.findall(r"^make ([a-z-]+)", code)}
    assert named <= make_targets()


@cache
def names_of_files() -> frozenset[str]:
    folders = ("megatron", "tools", "tests", "csrc", "docs", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())
    return frozenset(file.name for file in files)


@each_document
def test_every_file_that_is_named_exists(document: Path) -> None:
    named = [code for code in inline_code(TEXTS[document]) if code.endswith(SOURCE_SUFFIXES) and code[0] not in ".<"]
    assert [code for code in named if " " not in code and not file_exists(code)] == []


def file_exists(name: str) -> bool:
    """A bare name may be that of any file; a path begins at the root, in megatron/, or in a room."""
    if "/" not in name:
        return name in names_of_files()
    return any((folder / name).exists() for folder in (ROOT, ROOT / "megatron", *(folder for folder, _ in rooms())))


def rooms() -> Iterator[tuple[Path, str]]:
    """(folder, text) of each section of the architecture that is headed by a folder."""
    for heading, body in re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", ARCHITECTURE, re.MULTILINE | re.DOTALL):
        yield ROOT / heading, body


def named_in_rooms() -> list[Path]:
    """The files that the lists of the rooms begin their lines with."""
    lines = [(folder, line) for folder, body in rooms() for line in re.findall(r"^- (.*)$", body, re.MULTILINE)]
    return [
        folder / name
        for folder, line in lines
        for name in re.findall(r"`([^`]+)`", line)
        if name.endswith(SOURCE_SUFFIXES) and not name.startswith(".")
    ]


def test_every_file_of_the_architecture_exists() -> None:
    assert [str(file) for file in named_in_rooms() if not file.is_file()] == []


def test_every_module_is_in_the_architecture_once() -> None:
    modules = {file for file in (ROOT / "megatron").rglob("*.py") if file.name != "__init__.py"}
    named = [file for file in named_in_rooms() if file.is_relative_to(ROOT / "megatron")]
    assert sorted(modules - set(named)) == []
    assert sorted({file for file in named if named.count(file) > 1}) == []


def test_the_verbs_of_a_step_are_those_of_the_code() -> None:
    """Line by line, and in this order; three dots stand for arguments."""
    code = (ROOT / "megatron" / "training" / "train_step.py").read_text(encoding="utf-8")
    _, *shown = blocks(ARCHITECTURE, "python")[0].splitlines()
    lines = [re.escape(line.partition("  #")[0].strip()).replace(re.escape("..."), ".*?") for line in shown]
    body = code[code.index("def train_step(") : code.index("def _begin(")]
    assert [line for line in lines if not re.search(line, body, re.DOTALL)] == []
    assert re.search(".*?".join(lines), body, re.DOTALL)


def test_every_tool_is_in_the_architecture() -> None:
    tools = {file for file in (ROOT / "tools").iterdir() if file.suffix in (".py", ".sh")}
    assert tools <= set(named_in_rooms())


def test_every_benchmark_is_described() -> None:
    text = TEXTS[ROOT / "docs" / "BENCHMARKS.md"]
    programs = [
        file.name for file in (ROOT / "tools" / "benchmark").glob("*.py") if "__main__" in file.read_text("utf-8")
    ]
    assert [name for name in programs if name != "gpu_check.py" and f"| `{name}` |" not in text] == []


def test_the_slots_of_a_process_are_those_that_are_named() -> None:
    """What `global` assigns is state of the process; the architecture says where there is some, and why."""
    (paragraph,) = (line for line in ARCHITECTURE.split("\n\n") if line.startswith("**A group is an argument.**"))
    named = {f"megatron/core/{name}" for name in re.findall(r"`([\w/]+\.py)`", paragraph)}
    slots = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "megatron").rglob("*.py")
        if any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(file.read_text("utf-8"))))
    }
    assert slots == named


def test_the_layers_are_those_that_are_enforced() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = {
        container: [{f"{container}.{name}" for name in re.findall(r"\w+", layer)} for layer in contract["layers"]]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
        for container in contract["containers"]
    }
    core = layers["megatron"].index({"megatron.core"})
    enforced = [*layers["megatron"][:core], *layers["megatron.core"], *layers["megatron"][core + 1 :]]
    drawn = [layer for line in blocks(ARCHITECTURE, "text")[0].splitlines() if (layer := drawn_layer(line))]
    files_of_core = drawn.index({"megatron.core.kernels"})
    assert drawn[files_of_core] < enforced[files_of_core]
    assert all(name.startswith("megatron.core.") for name in enforced[files_of_core])
    assert [layer for layer in drawn if layer != {"megatron.core.kernels"}] == [
        layer for number, layer in enumerate(enforced) if number != files_of_core
    ]


def drawn_layer(line: str) -> set[str]:
    """The packages in one line of the drawing of the layers."""
    names = [name for name in re.split(r" \| |, ", line.split("   ")[0].strip()) if "*" not in name]
    folder = names[0].rpartition("/")[0]
    paths = [name if "/" in name else f"{folder}/{name}" for name in names]
    return {path.replace("/", ".") for path in paths if path.startswith("megatron/")}


@each_document
def test_what_follows_from_the_code_is_up_to_date(document: Path) -> None:
    assert rendered(TEXTS[document]) == TEXTS[document], "`python -m tests.docs.render` writes it anew"


def test_the_map_of_ranks_is_what_the_command_below_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXTS[ROOT / "docs" / "PARALLELISM.md"]
    commands = (words for block in blocks(text, "bash") for words in commands_of(block))
    (words,) = (words for words in commands if "--print-parallel-groups" in words)
    with pytest.raises(SystemExit, match="0"):
        initialize_megatron(words[2:])
    assert f"```text\n{capsys.readouterr().out}```" in text


def test_every_rendered_part_stands_in_a_document() -> None:
    assert {name for text in TEXTS.values() for _, name, _, _ in BLOCK.findall(text)} == set(PARTS)
