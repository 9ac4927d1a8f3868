"""Each kind of tokenizer that can be trained is the kind that its --tokenizer-type reads."""

import gzip
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer.build import build_tokenizer
from tests.helpers.datasets import write_lines
from tests.helpers.tools import names, run

SENTENCES = [
    "The cat sat on the mat, and the dog sat on the log.",
    "A cat that sits on a mat is not a dog; a dog that sits on a log is.",
    "Le café était fermé : l'été, on dort. 你好，世界。",
]
BPE = ("GPT2BPETokenizer", ["-merges.txt", "-vocab.json"], "400")
LOWER = ("BertWordPieceLowerCase", ["-vocab.txt"], "200")
CASED = ("BertWordPieceCase", ["-vocab.txt"], "200")
SENTENCEPIECE = ("SentencePieceTokenizer", [".model"], "400")
every_kind = pytest.mark.parametrize("kind, endings, size", [BPE, LOWER, CASED, SENTENCEPIECE])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sentences, and words of two syllables that come in no order."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    draw = random.Random(1)
    texts = [" ".join(draw.choice(syllables) + draw.choice(syllables) for _ in range(30)) for _ in range(200)]
    return write_lines(tmp_path / "c.jsonl", [{"text": text} for text in SENTENCES * 40 + texts])


def train(prefix: Path, corpus: Path, kind: str, size: str, *, status: int = 0) -> str:
    return run(
        "train_tokenizer",
        *("--input", corpus, "--output-prefix", prefix, "--tokenizer-type", kind, "--vocab-size", size),
        status=status,
    )


def made(text: str) -> TokenizerConfig:
    """The tokenizer whose flags the tool has said."""
    flags = re.findall(r"--(tokenizer-type|vocab-file|merge-file|tokenizer-model) ([^ :]+)", text)
    fields: dict[str, Any] = {flag.replace("-", "_"): value for flag, value in flags}
    return TokenizerConfig(**fields)


def files(prefix: Path, endings: Sequence[str]) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in endings]


@every_kind
def test_a_trained_tokenizer_is_read_by_the_flags_that_are_said(
    tmp_path: Path, corpus: Path, kind: str, endings: list[str], size: str
) -> None:
    config = made(train(tmp_path / "t", corpus, kind, size))
    tokenizer = build_tokenizer(config)
    assert (tokenizer.name, tokenizer.vocab_size) == (kind, int(size))
    assert len(tokenizer.encode(SENTENCES[0])) < len(SENTENCES[0]) / 2
    records = [name for name in names(tmp_path) if name.endswith(".done.json")]
    assert names(tmp_path) == sorted(["c.jsonl", *(f"t{ending}" for ending in endings), *records])


@every_kind
def test_the_same_texts_give_the_same_files_however_they_are_packed(
    tmp_path: Path, corpus: Path, kind: str, endings: list[str], size: str
) -> None:
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    train(tmp_path / "plain", corpus, kind, size)
    train(tmp_path / "packed", packed, kind, size)
    assert files(tmp_path / "plain", endings) == files(tmp_path / "packed", endings)


def test_a_byte_level_bpe_keeps_every_text_and_ends_documents_with_its_last_id(tmp_path: Path, corpus: Path) -> None:
    tokenizer = build_tokenizer(made(train(tmp_path / "t", corpus, "GPT2BPETokenizer", "400")))
    assert tokenizer.eod == 399
    for text in (*SENTENCES, "".join(map(chr, range(0x300))), "😀\r\n\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    vocabulary = json.loads((tmp_path / "t-vocab.json").read_text())
    assert list(vocabulary.values()) == list(range(400))


def test_a_wordpiece_vocabulary_begins_with_the_special_tokens_of_bert(tmp_path: Path, corpus: Path) -> None:
    lower = build_tokenizer(made(train(tmp_path / "t", corpus, "BertWordPieceLowerCase", "200")))
    assert (tmp_path / "t-vocab.txt").read_text().split("\n")[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert lower.encode("THE CAT sits") == lower.encode("the cat sits")
    assert lower.decode(lower.encode("The cat, the dog.")[1:-1]) == "the cat, the dog."
    assert lower.continues_word is not None and lower.continues_word.any()


def test_a_text_file_and_a_folder_are_inputs_too(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, sentence in enumerate(SENTENCES):
        (folder / f"{number}.txt").write_text(sentence * 40)
    said = run("train_tokenizer", "--input", folder, "--output-prefix", tmp_path / "t", "--vocab-size", "345")
    assert build_tokenizer(made(said)).vocab_size == 345


@pytest.mark.parametrize(
    "kind, size, message",
    [
        ("GPT2BPETokenizer", "257", "--vocab-size 257: must be above 257"),
        ("GPT2BPETokenizer", "5000", r"--vocab-size 5000: the text gives [\d,]+ tokens, each of which occurs in it"),
        ("BertWordPieceCase", "5", "--vocab-size 5: must be above 5"),
        ("BertWordPieceCase", "20", r"--vocab-size 20: must be above the \d+ that special tokens and \d+ characters"),
        ("BertWordPieceCase", "5000", r"--vocab-size 5000: the text gives [\d,]+ tokens"),
    ],
)
def test_a_vocabulary_that_the_text_cannot_give_is_refused(
    tmp_path: Path, corpus: Path, kind: str, size: str, message: str
) -> None:
    assert re.search(message, train(tmp_path / "t", corpus, kind, size, status=2))
    assert names(tmp_path) == ["c.jsonl"]


def test_a_sample_is_spread_over_the_input(tmp_path: Path) -> None:
    """Every third of the corpus has words of its own, and all of them are learnt from a tenth of it."""
    words = ["alphabet", "betatest", "gammaray"]
    lines = [{"text": " ".join([word] * 50)} for word in words for _ in range(300)]
    source = write_lines(tmp_path / "c.jsonl", lines)
    said = run(
        "train_tokenizer",
        *("--input", source, "--output-prefix", tmp_path / "t", "--tokenizer-type", "BertWordPieceLowerCase"),
        *("--vocab-size", "49", "--sample-megabytes", "0.04"),
    )
    tokenizer = build_tokenizer(made(said))
    assert [len(tokenizer.encode(word)) for word in words] == [3, 3, 3]
