"""Masks of a text, filled with a trained BERT."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
import torch

from megatron.inference.load import OpenedModel
from megatron.model.bert_model import BertModel
from tests.helpers.tools import run
from tests.training import runs
from tests.training.test_bert import data, trained
from tests.training.test_weights_alone import rewrite


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel]:
    """A checkpoint, and the model in it; ids 0 to 4 are special, then word0, word1 and so on."""
    folder = tmp_path_factory.mktemp("bert")
    arguments = ("--train-iters", "1", "--num-layers", "1", "--fp64", "--save", str(folder / "saved"))
    finished, _ = trained(*data(folder), *arguments)
    model = finished.chunks[0].module
    assert isinstance(model, BertModel)
    return folder / "saved", model.eval()


def test_masks_are_filled_with_the_likeliest_tokens(bert: tuple[Path, BertModel]) -> None:
    folder, model = bert
    text = "word5 [MASK] word7 [MASK] [SEP] word8"
    tokens, types = torch.tensor([[2, 10, 4, 12, 4, 3, 13, 3]]), torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        output = model(tokens, types, torch.ones_like(tokens, dtype=torch.bool))
    chances, ids = output.tokens[0, [2, 4]].softmax(-1).topk(3)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"word{number}" for number in range(96)]
    pair = output.pairs[0].softmax(-1).tolist()
    filled, *lines = run("fill_mask", "--load", folder, "--text", text, "--top-k", "3").splitlines()
    best = [names[token] for token in ids[:, 0].tolist()]
    assert filled == f"word5 {best[0]} word7 {best[1]} [SEP] word8"
    assert lines == [
        *(
            f"  [MASK] {number}: "
            + ", ".join(f"{names[token]} {chance:.0%}" for token, chance in zip(of_mask, of_chance))
            for number, of_mask, of_chance in zip((1, 2), ids.tolist(), chances.tolist())
        ),
        f"  segments in their order {pair[0]:.0%}, exchanged {pair[1]:.0%}",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("word5", "--text 'word5': needs a [MASK] to fill"),
        ("word5 [Mask]", "needs a [MASK], in capitals, to fill"),
        ("[MASK] [SEP] a [SEP] b", "at most one [SEP]"),
        ("[MASK] " * 50, "[MASK] ': has 52 tokens; the model was trained on up to 48"),
        ("\udcff [MASK]", "--text '\\udcff [MASK]': character 0 of the text is the lone surrogate"),
    ],
)
def test_a_text_that_has_nothing_to_fill_or_too_much_is_refused(
    bert: tuple[Path, BertModel], text: str, message: str
) -> None:
    assert message in run("fill_mask", "--load", bert[0], "--text", text, status=2)


def test_a_gpt_fills_no_mask(tmp_path: Path) -> None:
    runs.trained("--train-iters", "1", "--num-layers", "1", "--save", str(tmp_path))
    said = run("fill_mask", "--load", tmp_path, "--text", "[MASK]", status=2)
    assert "holds a GPT, which fills no [MASK]; tools/generate_text.py continues texts" in said


def test_a_model_whose_tokenizer_has_no_mask_fills_none(
    bert: tuple[Path, BertModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was converted from a folder without a vocabulary. It is said before weights are read."""
    copytree(bert[0], tmp_path / "saved")
    monkeypatch.delattr(OpenedModel, "load_bert")
    numbers = {"tokenizer_type": "NullTokenizer", "vocab_file": None, "vocab_size": 101}
    rewrite(tmp_path / "saved" / "iter_0000001", lambda metadata: metadata["config"]["tokenizer"].update(numbers))
    said = run("fill_mask", "--load", tmp_path / "saved", "--text", "[MASK] 7", status=2)
    assert "NullTokenizer, has no [CLS]; a model that is converted with its vocab.txt beside it has" in said
