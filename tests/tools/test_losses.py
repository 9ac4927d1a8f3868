"""What a trained model's loss is compared with, and its picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import write_corpus
from tests.helpers.tools import Arguments, names, names_of_tool, run

# After 1 comes 2 or 3, one as often as the other; what comes after 2 and 3 is certain. Of 8 pairs 4 begin with 1.
COIN = [1, 2, 1, 3, 1, 2, 1, 3, 1]
COIN_ENTROPY = math.log(2) / 2


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Ten documents; with `--split 50,50` the second half, which is `COIN`, is for validation."""
    second_half = [COIN[:2], COIN[2:3], COIN[3:5], COIN[5:8], COIN[8:]]
    return write_corpus(tmp_path / "corpus", [[[7, 8]]] * 5 + [[document] for document in second_half])


def write_log(folder: Path, *losses: float, name: str = "lm loss validation") -> Path:
    path = folder / "log.jsonl"
    rows = [{"iteration": 10 * number, name: loss} for number, loss in enumerate(losses, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def entropy(corpus: Path, *arguments: str | Path, status: int = 0) -> str:
    return run("bigram_entropy", "--data-path", corpus, "--split", "50,50", *arguments, status=status)


def test_the_entropy_is_that_of_the_pairs_of_the_part(corpus: Path) -> None:
    assert f"of part valid (9 tokens): {COIN_ENTROPY:.4f} nats per token" in entropy(corpus)
    assert "of part train (10 tokens): 0.0000 nats" in entropy(corpus, "--part", "train")


def test_it_does_not_depend_on_where_the_tokens_are_cut() -> None:
    bigram_entropy = names_of_tool("bigram_entropy")["bigram_entropy"]
    tokens = np.array(COIN)
    for cuts in ([], [1], [4, 5], range(1, len(tokens))):
        num_tokens, value = bigram_entropy(np.split(tokens, cuts))
        assert (num_tokens, value) == (len(COIN), pytest.approx(COIN_ENTROPY, rel=1e-12))


def test_a_last_validation_loss_below_the_entropy_is_success(tmp_path: Path, corpus: Path) -> None:
    log = write_log(tmp_path, 0.5, 0.34)
    said = entropy(corpus, "--log-json", log)
    assert f"validation loss 0.3400 is below the bigram entropy {COIN_ENTROPY:.4f}" in said


@pytest.mark.parametrize("loss", [0.35, math.nan, math.inf])
def test_one_that_is_not_below_fails(tmp_path: Path, corpus: Path, loss: float) -> None:
    log = write_log(tmp_path, 0.1, loss)
    said = entropy(corpus, "--log-json", log, status=1)
    assert f"validation loss {loss:.4f} is not below the bigram entropy {COIN_ENTROPY:.4f}" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "{folder}"], "is a folder; give the path of a file"),
        (["--split", "1,x"], "--split 1,x: must be one to three numbers"),
        (["--part", "test"], "--split 50,50 gives nothing of 10 documents to --part test"),
        (["--part", "all"], "--part: invalid choice: 'all'"),
        (["--split", "9,1"], "a part of 1 token holds no pair"),
        (["--log-json", "{folder}/none"], "none: No such file or directory"),
        (["--log-json", "{folder}/train.jsonl"], "holds no validation loss"),
        (["--data-path", "{folder}/none"], "none.idx: no such file"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(
    tmp_path: Path, corpus: Path, arguments: list[str], message: str
) -> None:
    write_log(tmp_path, 1.0, name="lm loss").rename(tmp_path / "train.jsonl")
    words = [word.format(folder=tmp_path) for word in arguments]
    assert message in entropy(corpus, *words, status=2)


def test_the_entropy_is_handed_to_the_picture_in_full(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "made" / "entropy.json"
    entropy(corpus, "--output", file)
    assert json.loads(file.read_text()) == {"bigram entropy": pytest.approx(COIN_ENTROPY, rel=1e-12)}
    lines_of = names_of_tool("plot_loss")["lines_of"]
    assert lines_of(file) == [("bigram entropy", pytest.approx(COIN_ENTROPY, rel=1e-12))]


@pytest.mark.parametrize("line", [("--line", "bigram entropy=3.2"), ("--lines-from", "{folder}/entropy.json")])
def test_a_curve_is_drawn_beside_a_line(tmp_path: Path, line: tuple[str, str]) -> None:
    output = tmp_path / "pictures" / "p.png"
    (tmp_path / "entropy.json").write_text('{"bigram entropy": 3.2}')
    words = [word.format(folder=tmp_path) for word in line]
    run("plot_loss", write_log(tmp_path, 2.0, 1.0), "--output", output, *words)
    assert output.read_bytes().startswith(b"\x89PNG")
    assert names(output.parent) == ["p.png"]


def test_a_picture_says_whose_it_is_and_names_its_lines_beside_the_curves(tmp_path: Path) -> None:
    log = write_log(tmp_path, 2.0, 1.0)
    plot_loss = names_of_tool("plot_loss")
    _, axes = plot_loss["pyplot"].subplots()
    plot_loss["draw"](axes, [log], [("bigram entropy", 3.2)])
    assert axes.get_title() == str(log)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["lm loss validation", "bigram entropy 3.200"]
    assert not axes.texts, "a text in the picture may lie on a curve"


@pytest.mark.parametrize(
    "torn",
    [
        b'{"iteration": 30, "lm lo',  # a killed run was writing it
        b'{"iteration": 30, "lm l{"iteration": 40, "lm loss": 1.0}\n',  # and a resumed one went on in the line
        b"\xff\xfe\n",
        b'{"iteration": "30", "lm loss": 1.0}\n',
        b'{"iteration": null, "lm loss": 1.0}\n',
        b'{"iteration": 1e3, "lm loss": 1.0}\n',
    ],
)
def test_a_torn_line_is_left_out_with_a_word(tmp_path: Path, torn: bytes) -> None:
    log = write_log(tmp_path, 2.0, 1.0)
    log.write_bytes(log.read_bytes() + torn)
    assert f"{log}: 1 line left out" in run("plot_loss", log, "--output", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none.jsonl"], "none.jsonl: No such file or directory"),
        (["{folder}"], "Is a directory"),
        (["{folder}/empty"], "empty: holds no loss"),
        (["{log}", "--output", "{folder}/p.xyz"], "p.xyz: must end in .png"),
        (["{log}", "--output", "{folder}/p"], "p: must end in .png"),
        (["{log}", "--output", "{log}/p.png"], "its folder cannot be made"),
        (["{log}", "--line", "x=y"], "--line: 'x=y' is not a name and a number"),
        (["{log}", "--line", "3.2"], "--line: '3.2' is not a name and a number"),
        (["{log}", "--lines-from", "{folder}/none"], "--lines-from {folder}/none: No such file or directory"),
        (["{log}", "--lines-from", "{folder}/empty"], "--lines-from {folder}/empty: holds no names with numbers"),
        (["{log}", "--outpt", "p.png"], "--outpt: is not a known flag; --output is the nearest"),
        ([], "required: logs"),
    ],
)
def test_a_picture_that_cannot_be_is_refused(tmp_path: Path, arguments: Arguments, message: str) -> None:
    log = write_log(tmp_path, 1.0)
    (tmp_path / "empty").touch()
    words = [str(word).format(folder=tmp_path, log=log) for word in arguments]
    complaint = run("plot_loss", *words, status=2)
    assert complaint.startswith("plot_loss.py: error: ")
    assert message.format(folder=tmp_path, log=log) in complaint
    assert len(complaint.splitlines()) == 1
    assert names(tmp_path) == ["empty", "log.jsonl"]
