"""Scores of files as a user asks for them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from megatron.inference import perplexity
from megatron.inference.load import open_model
from megatron.inference.perplexity import Score, Tokens, score_text
from megatron.inference.stages import ModelRanks, StagedModel
from megatron.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron.tokenizer.tokenizers_tokenizer import huggingface_tokenizer
from tests.data.corpora import write_corpus
from tests.helpers.tokenizer_files import BOTCHAN_MODEL
from tests.helpers.tools import ROOT, names_of_tool, on_ranks, run
from tests.tools.test_generate_text import train_in

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")[:1500]
WORDS = ["The cat sat on the mat.", "and so on and so on\n", "one two"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model in float64, beside a text, its tokens, and sentences."""
    folder = train_in(tmp_path_factory.mktemp("evaluated"), "--fp64")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    tokens = SentencePieceTokenizer(BOTCHAN_MODEL).encode(TEXT)
    write_corpus(folder / "corpus", [[tokens[:300]], [tokens[300:310], tokens[310:]]])
    (folder / "words.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in WORDS))
    return folder


def evaluate(folder: Path, *arguments: str | Path) -> tuple[dict[str, Any], str]:
    """The results, as JSON and as printed."""
    printed = run("evaluate", "--load", folder / "checkpoints", "--json", folder / "scores.json", *arguments)
    return json.loads((folder / "scores.json").read_text()), printed


def refused(folder: Path, *arguments: str | Path) -> str:
    said = run("evaluate", "--load", folder / "checkpoints", *arguments, status=2)
    return said.splitlines()[-1].removeprefix("evaluate.py: error: ")


@pytest.mark.parametrize("stride", [24, 10])
def test_a_text_is_scored_with_all_of_its_tokens(folder: Path, stride: int) -> None:
    model = open_model(folder / "checkpoints")
    tokens = np.array(model.tokenizer.encode(TEXT))
    expected = score_text(
        model.load_gpt(ModelRanks.single(), torch.device("cpu")),
        tokens,
        after=model.tokenizer.eod,
        context_length=24,
        stride=stride,
        batch_size=100,
    )
    results, printed = evaluate(folder, "--text", folder / "text.txt", "--stride", str(stride))
    found = results["text"]
    assert found["tokens"] == len(tokens)
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-10)
    assert found["perplexity"] == pytest.approx(math.exp(expected.loss), rel=1e-10)
    assert found["bits_per_byte"] == pytest.approx(expected.nats / math.log(2) / len(TEXT.encode()), rel=1e-10)
    assert results["iteration"] == 1
    names, numbers = (line.split() for line in printed.splitlines())
    assert names == ["file", "tokens", "loss", "perplexity", "bits", "per", "byte"]
    assert numbers[:3] == [str(folder / "text.txt"), f"{len(tokens):,}", f"{expected.loss:.6g}"]


def test_tokens_of_a_corpus_are_scored_as_one_stream(folder: Path) -> None:
    results, _ = evaluate(folder, "--text", folder / "text.txt", "--data-path", folder / "corpus")
    assert results["data"]["loss"] == results["text"]["loss"]
    assert results["data"]["tokens"] == results["text"]["tokens"]


def test_with_a_split_the_documents_of_one_part_are_scored(folder: Path, tmp_path: Path) -> None:
    """Those that a training of the same split validates on; `--part` names another one."""
    for name, lengths in (("all", [100, 10, 40, 50]), ("held-out", [40, 50])):
        documents = [[[*range(length)]] for length in lengths]
        write_corpus(tmp_path / name, documents)
    expected, _ = evaluate(folder, "--data-path", tmp_path / "held-out")
    found, _ = evaluate(folder, "--data-path", tmp_path / "all", "--split", "2,2,0")
    assert (found["data"]["split"], found["data"]["part"]) == ("2,2,0", "valid")
    assert found["data"]["tokens"] == 90
    assert found["data"]["loss"] == expected["data"]["loss"]
    found, _ = evaluate(folder, "--data-path", tmp_path / "all", "--split", "2,1,1", "--part", "test")
    assert found["data"]["tokens"] == 50


@pytest.mark.parametrize(
    ("data_path", "split", "told"), [("moved/alpha", None, 1), ("moved/alpha", "90,10,0", 0), ("moved/beta", None, 0)]
)
def test_who_scores_the_text_of_the_training_is_told(
    folder: Path, data_path: str, split: str | None, told: int
) -> None:
    """The model of `folder` was trained on a corpus called alpha, with --split 90,10,0."""
    notes: list[str] = []
    used = SimpleNamespace(opened=open_model(folder / "checkpoints"), note=notes.append)
    names_of_tool("evaluate")["note_training_text"](used, SimpleNamespace(data_path=data_path, split=split))
    note = "alpha is what the model was trained on: --split 90,10,0 scores only what the training was validated on"
    assert notes == [note] * told


@pytest.mark.parametrize("split", [None, "90,10,0"])
def test_who_scores_a_corpus_that_was_for_training_only_is_told(folder: Path, split: str | None) -> None:
    """All of it, whatever share of it is scored."""
    opened = open_model(folder / "checkpoints")
    data = replace(opened.config.data, data_path=(), train_data_path=("0.5", "there/alpha", "0.5", "there/beta"))
    notes: list[str] = []
    used = SimpleNamespace(opened=SimpleNamespace(config=replace(opened.config, data=data)), note=notes.append)
    for name in ("alpha", "beta", "gamma"):
        names_of_tool("evaluate")["note_training_text"](used, SimpleNamespace(data_path=f"moved/{name}", split=split))
    assert notes == ["alpha is what the model was trained on", "beta is what the model was trained on"]


def test_a_corpus_is_scored_where_it_is_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be larger than the memory."""

    def score_mapped(model: StagedModel, tokens: Tokens, **arguments: Any) -> Score:
        assert isinstance(tokens, np.memmap)
        return score_text(model, tokens, **arguments)

    monkeypatch.setattr(perplexity, "score_text", score_mapped)
    run("evaluate", "--load", folder / "checkpoints", "--data-path", folder / "corpus")


def test_a_perplexity_that_json_has_no_number_for_is_null(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Score, "perplexity", math.inf)
    results, printed = evaluate(folder, "--text", folder / "text.txt")
    assert results["text"]["perplexity"] is None
    assert "inf" in printed.split()


@pytest.mark.parametrize("tensor, pipeline", [(2, 1), (1, 2), (2, 2)])
def test_ranks_find_the_scores_of_one_process(folder: Path, tmp_path: Path, tensor: int, pipeline: int) -> None:
    files = ["--text", str(folder / "text.txt"), "--last-word", str(folder / "words.jsonl")]
    expected, printed = evaluate(folder, *files)
    words = ["--load", str(folder / "checkpoints"), *files, "--json", str(tmp_path / "scores.json")]
    layout = ["--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline)]
    outcome = on_ranks("evaluate", *words, *layout, ranks=tensor * pipeline, folder=tmp_path).check()
    found = json.loads((tmp_path / "scores.json").read_text())
    for kind in ("text", "last_word"):
        numbers = [{name: value for name, value in each[kind].items() if name != "file"} for each in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-10)
    assert outcome.out == [printed] + [""] * (tensor * pipeline - 1)


def test_a_text_begins_after_the_end_of_another_or_as_its_tokenizer_begins_it(tmp_path: Path) -> None:
    begun = names_of_tool("evaluate")["begun"]
    tokenizer = Backend(WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    before, tokens = begun(huggingface_tokenizer(tmp_path), "a b")
    assert (before, tokens.tolist()) == (3, [0, 1])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    before, tokens = begun(huggingface_tokenizer(tmp_path), "a b")
    assert (before, tokens.tolist()) == (2, [0, 1])


def test_last_words_are_asked_for(folder: Path) -> None:
    results, printed = evaluate(folder, "--last-word", folder / "words.jsonl", "--batch-size", "2")
    assert results["last_word"]["words"] == 3
    assert 0 <= results["last_word"]["accuracy"] <= 1
    assert results["last_word"]["perplexity"] > 1
    assert printed.splitlines()[0].split()[-2:] == ["words", "accuracy"]


@pytest.mark.parametrize("text", WORDS)
def test_the_last_word_is_the_tokens_that_spell_it(text: str) -> None:
    tokenizer = SentencePieceTokenizer(BOTCHAN_MODEL)
    word = names_of_tool("evaluate")["last_word"](tokenizer, text, "here")
    assert tokenizer.decode(word.tokens[word.start :]) == text.split()[-1]
    assert tokenizer.decode(word.tokens) == text.strip()


@pytest.mark.parametrize(
    ("flag", "name", "content", "complaint"),
    [
        ("--text", "absent.txt", None, "no such file"),
        ("--text", "empty.txt", b"", "is empty"),
        ("--text", "latin.txt", b"caf\xe9", "convert the file to UTF-8"),
        ("--data-path", "absent", None, "no such file; a dataset is given by its prefix"),
        ("--last-word", "absent.jsonl", None, "no such file"),
        ("--last-word", "empty.jsonl", b"\n", "holds no text"),
        ("--last-word", "broken.jsonl", b'{"text": "a b"}\n\n{"text"', "line 3: not valid JSON"),
        ("--last-word", "short.jsonl", b'{"text": "a b"}\n{"text": "one"}', "line 2: has no last word with something"),
        ("--last-word", "long.jsonl", b'{"text": "' + b"the king " * 30 + b'"}', "and the model looks back on 24"),
    ],
)
def test_a_file_that_cannot_be_scored_is_refused(
    folder: Path, tmp_path: Path, flag: str, name: str, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    said = refused(folder, flag, tmp_path / name)
    assert name in said and complaint in said


def test_tokens_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    for token, shown in ((1000, "1,000"), (-7, "-7")):
        write_corpus(tmp_path / shown, [[[1, 2, token]]], np.int32)
        said = refused(folder, "--data-path", tmp_path / shown)
        assert (
            said == f"{tmp_path / shown}: holds token {shown}, and the model knows 0 to 999: it is of another tokenizer"
        )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to evaluate: give --text FILE, --data-path PREFIX or --last-word FILE"),
        (["--text", "x", "--batch-size", "0"], "--batch-size: must be at least 1, not 0"),
        (["--text", "README.md", "--stride", "25"], "--stride (25) must be at least 1 and at most 24"),
        (["--text", "x", "--split", "9,1"], "--split 9,1: divides the documents of --data-path, which is not given"),
        (["--data-path", "{corpus}", "--part", "test"], "--part test: is one of --split, which is not given"),
        (["--data-path", "{corpus}", "--split", "9,x"], "--split 9,x: must be one to three numbers"),
        (["--data-path", "{corpus}", "--split", "1"], "--split 1 gives nothing of 3 documents to --part valid"),
        (["--text", "README.md", "--stride", "0"], "--stride (0) must be at least 1"),
    ],
)
def test_a_score_that_cannot_be_is_refused(folder: Path, arguments: list[str], complaint: str) -> None:
    places = {"README.md": str(ROOT / "README.md"), "{corpus}": str(folder / "corpus")}
    assert complaint in refused(folder, *(places.get(word, word) for word in arguments))
