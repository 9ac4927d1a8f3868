"""The commands of the README for a trained model run as they stand there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.data.corpora import write_corpus
from tests.docs.commands import blocks, commands_of
from tests.docs.render import ROOT
from tests.helpers.tools import on_ranks, run
from tests.training.runs import trained

SECTION = "## Use what was trained"
_, _AFTER = (ROOT / "README.md").read_text(encoding="utf-8").split(f"{SECTION}\n")
COMMANDS = [words for block in blocks(_AFTER.partition("\n## ")[0], "bash") for words in commands_of(block)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands name."""
    folder = tmp_path_factory.mktemp("used")
    for name, layers in (("run", "4"), ("small", "2")):
        trained(
            *("--tokenizer-type", "ByteTokenizer", "--vocab-size", "257", "--num-layers", layers),
            *("--train-iters", "1", "--save", str(folder / "checkpoints" / name)),
        )
    (folder / "prompts.txt").write_text("import os\ndef main():\n")
    (folder / "book.txt").write_text("There was a king, and the king had a cat.\n" * 5)
    (folder / "lambada.jsonl").write_text('{"text": "a cat and a mat"}\n')
    (folder / "data").mkdir()
    write_corpus(folder / "data" / "corpus_text_document", [[[*range(20)]]] * 50)
    return folder


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:60])
def test_the_command_does_what_it_says(words: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    program, *rest = words
    if program == "torchrun":
        launch = get_args_parser().parse_args(rest)
        tool, ranks = Path(launch.training_script).stem, int(launch.nproc_per_node)
        printed = on_ranks(tool, *launch.training_script_args, ranks=ranks, folder=folder).check().out[0]
    else:
        printed = run(Path(rest[0]).stem, *rest[1:], status=int("--compare" in rest))
    assert printed.strip()
    if "--json" in words:
        assert json.loads((folder / words[words.index("--json") + 1]).read_text())


def test_each_tool_has_a_command() -> None:
    shown = " ".join(word for words in COMMANDS for word in words)
    assert all(f"tools/{tool}.py" in shown for tool in ("generate_text", "evaluate", "inspect_checkpoint"))
    assert "torchrun" in shown
