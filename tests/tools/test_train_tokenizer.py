"""Each kind of tokenizer that can be trained is the kind that its --tokenizer-type reads."""

import gzip
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.config.problems import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer.build import build_tokenizer
from megatron.training.fill_in_middle import middle_mover, ordinary_marks
from tests.helpers.datasets import write_lines
from tests.helpers.tools import names, names_of_tool, run

SENTENCES = [
    "The cat sat on the mat, and the dog sat on the log.",
    "A cat that sits on a mat is not a dog; a dog that sits on a log is.",
    "Le café était fermé : l'été, on dort. 你好，世界。",
]
BPE = ("GPT2BPETokenizer", ["-merges.txt", "-vocab.json"], "400")
LOWER = ("BertWordPieceLowerCase", ["-vocab.txt"], "200")
CASED = ("BertWordPieceCase", ["-vocab.txt"], "200")
SENTENCEPIECE = ("SentencePieceTokenizer", [".model"], "400")
MARKS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
every_kind = pytest.mark.parametrize("kind, endings, size", [BPE, LOWER, CASED, SENTENCEPIECE])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sentences, and words of two syllables that come in no order."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    draw = random.Random(1)
    texts = [" ".join(draw.choice(syllables) + draw.choice(syllables) for _ in range(30)) for _ in range(200)]
    return write_lines(tmp_path / "c.jsonl", [{"text": text} for text in SENTENCES * 40 + texts])


def train(prefix: Path, corpus: Path, kind: str, size: str, *more: str, status: int = 0) -> str:
    return run(
        "train_tokenizer",
        *("--input", corpus, "--output-prefix", prefix, "--tokenizer-type", kind, "--vocab-size", size, *more),
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


@pytest.mark.parametrize(
    "kind, size, first, shown",
    [
        ("SentencePieceTokenizer", "400", 3, False),  # behind what is unknown, the end of a document and U+2581
        ("GPT2BPETokenizer", "400", 396, True),
        ("BertWordPieceLowerCase", "200", 5, True),
        ("BertWordPieceCase", "200", 5, True),
    ],
)
def test_special_tokens_have_ids_that_no_text_gives(
    tmp_path: Path, corpus: Path, kind: str, size: str, first: int, shown: bool
) -> None:
    config = made(train(tmp_path / "t", corpus, kind, size, "--special-tokens", *MARKS))
    tokenizer = build_tokenizer(replace(config, tokenizer_hf_include_special_tokens=False))
    ids = [tokenizer.token_id(mark) for mark in MARKS]
    assert ids == [*range(first, first + 4)]
    assert tokenizer.vocab_size == int(size)
    assert tokenizer.decode(tokenizer.encode("the cat") + ids[:1]).replace(" <", "<") == "the cat" + MARKS[0] * shown
    for text in (*MARKS, f"a {' '.join(MARKS)} b", "".join(MARKS)):
        assert not set(ids) & set(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text or kind.startswith("Bert")
    assert ordinary_marks(DataConfig(seq_length=8, fim_data=True), tokenizer) == []


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPT2BPETokenizer"])
def test_special_tokens_leave_plain_text_as_it_was_and_mark_middles(tmp_path: Path, corpus: Path, kind: str) -> None:
    """A vocabulary with four more has the same pieces, so it cuts plain text alike."""
    without = build_tokenizer(made(train(tmp_path / "a", corpus, kind, "400")))
    special = build_tokenizer(made(train(tmp_path / "b", corpus, kind, "404", "--special-tokens", *MARKS)))
    for text in (*SENTENCES, "\t\tif x:  # \u2581\r\n"):
        pieces = [[one.decode([token]) for token in one.encode(text)] for one in (without, special)]
        assert pieces[0] == pieces[1]
        assert special.decode(special.encode(text)) == text
    move = middle_mover(DataConfig(seq_length=8, fim_data=True, fim_rate=1.0, fim_spm_rate=0.0), special)
    ids = np.array(special.encode(SENTENCES[0]) + [special.eod] * 9)
    moved = move(ids, np.random.RandomState(0))
    places = [np.flatnonzero(moved == special.token_id(mark)).tolist() for mark in MARKS]
    (prefix,), (middle,), (suffix,), pads = places
    assert prefix == 0 < suffix < middle and not pads
    end = moved.tolist().index(special.eod)
    parts = [moved[1:suffix], moved[middle + 1 : end], moved[suffix + 1 : middle]]
    assert "".join(special.decode(part.tolist()) for part in parts) == SENTENCES[0]


@pytest.mark.parametrize(
    "kind, tokens, message",
    [
        ("SentencePieceTokenizer", ["<a>", "<b>", "<a>"], "--special-tokens <a>: is given twice"),
        ("SentencePieceTokenizer", ["<a>", ""], "--special-tokens '': must be visible characters without a space"),
        ("GPT2BPETokenizer", ["a\n"], r"--special-tokens 'a\\n': must be visible characters without a space"),
        ("SentencePieceTokenizer", ["<s>"], "--special-tokens <s>: is a token that every SentencePieceTokenizer has"),
        ("SentencePieceTokenizer", ["<0x0A>"], "--special-tokens <0x0A>: is a token that every Sentence"),
        ("GPT2BPETokenizer", ["<|endoftext|>"], r"--special-tokens <\|endoftext\|>: is a token that every GPT2BPE"),
        ("BertWordPieceCase", ["[CLS]"], r"--special-tokens \[CLS\]: is a token that every BertWordPieceCase has"),
        ("GPT2BPETokenizer", ["at"], "--special-tokens at: is one word"),
        ("GPT2BPETokenizer", ["zeppelin"], "--special-tokens zeppelin: is one word"),
        ("GPT2BPETokenizer", ["==>"], "--special-tokens ==>: is one word"),
        ("BertWordPieceLowerCase", ["sat"], "--special-tokens sat: is a token that the text gives"),
        ("GPT2BPETokenizer", ["<\u00e9>"], "--special-tokens <\u00e9>: comes back as '<\ufffd>'"),
        ("SentencePieceTokenizer", [f"<{n}>" for n in range(130)], "must be above 408, .* and 130 --special-tokens"),
        ("BertWordPieceCase", [f"<{n}>" for n in range(290)], r"--vocab-size 300: must be above the \d+ that special"),
    ],
)
def test_what_can_be_no_special_token_is_refused(
    tmp_path: Path, corpus: Path, kind: str, tokens: list[str], message: str
) -> None:
    size = {"BertWordPieceLowerCase": "200"}.get(kind, "300")
    said = train(tmp_path / "t", corpus, kind, size, "--special-tokens", *tokens, status=2)
    assert re.search(message, said)
    assert names(tmp_path) == ["c.jsonl"]


class Symbols:
    """A vocabulary of one token: what encodes to its id, and what that is decoded to."""

    continues_word = None

    def __init__(self, given: str, back: str) -> None:
        self.given, self.back = given, back

    def token_id(self, token: str) -> int:
        return 0

    def encode(self, text: str) -> list[int]:
        return [0 if text == self.given else 1]

    def decode(self, ids: Sequence[int]) -> str:
        return self.back


@pytest.mark.parametrize(
    "given, back, message",
    [
        ("<a>", "<a>", "--special-tokens <a>: is given by a text in which it stands"),
        ("", "", "--special-tokens <a>: comes back as ''"),
    ],
)
def test_a_special_token_that_a_trained_vocabulary_gives_or_hides_is_refused(
    given: str, back: str, message: str
) -> None:
    check = names_of_tool("train_tokenizer")["check"]
    with pytest.raises(UserError, match=f"^{message}"):
        check(Symbols(given, back), [], ["<a>"], lossless=False)


def test_a_plain_word_of_a_wordpiece_vocabulary_is_named_as_ordinary(tmp_path: Path, corpus: Path) -> None:
    config = made(train(tmp_path / "t", corpus, "BertWordPieceCase", "200", "--special-tokens", "middle"))
    data = DataConfig(seq_length=8, fim_data=True, fim_middle_token="middle")
    assert ordinary_marks(data, build_tokenizer(config)) == ["--fim-middle-token middle"]


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


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPT2BPETokenizer", "BertWordPieceCase"])
@pytest.mark.parametrize(
    "text", ["a", "   \n\n  ", "\n", "".join(map(chr, range(32))), "the cat, the cat", "你好，你好。"]
)
def test_a_size_that_a_refusal_gives_works_and_a_text_that_has_none_is_too_small(
    tmp_path: Path, kind: str, text: str
) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", [{"text": text}] * 2)
    said = train(tmp_path / "t", corpus, kind, "5000", status=2)
    if size := re.search(r"the text gives ([\d,]+) tokens.*; give that size, or more text", said):
        assert build_tokenizer(made(train(tmp_path / "t", corpus, kind, size[1]))).vocab_size == int(size[1])
    else:
        assert "the text is too small" in said


def test_a_size_below_that_of_the_characters_is_refused_with_the_least(tmp_path: Path, corpus: Path) -> None:
    said = train(tmp_path / "t", corpus, "SentencePieceTokenizer", "280", status=2)
    least = re.search(r"--vocab-size 280: must be (\d+) or more", said)
    assert least is not None
    assert build_tokenizer(made(train(tmp_path / "t", corpus, "SentencePieceTokenizer", least[1]))).vocab_size > 280


def test_texts_without_spaces_give_a_tokenizer_that_keeps_spaces(tmp_path: Path) -> None:
    """Or with so few that a character as rare would be written in bytes."""
    draw = random.Random(1)
    characters = [chr(0x4E00 + number) for number in range(200)]
    texts = ["".join(draw.choices(characters, k=100)) for _ in range(200)]
    for name, added in (("none", []), ("few", ["a b"])):
        corpus = write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in [*texts, *added]])
        tokenizer = build_tokenizer(made(train(tmp_path / name, corpus, "SentencePieceTokenizer", "600")))
        assert len(tokenizer.encode(" ")) == 1
        assert tokenizer.decode(tokenizer.encode(" 一 a b")) == " 一 a b"


@pytest.mark.parametrize("kind, ending", [("GPT2BPETokenizer", "-merges.txt"), ("BertWordPieceCase", "-vocab.txt")])
def test_a_word_is_learnt_from_in_parts_of_4096_characters(tmp_path: Path, kind: str, ending: str) -> None:
    """Each merge doubles the longest token, up to such a part; the time of a part grows with its length squared."""
    corpus = write_lines(tmp_path / "c.jsonl", [{"text": "ab" * 8192}])
    size = re.search(r"the text gives (\d+) tokens", train(tmp_path / "t", corpus, kind, "5000", status=2))
    assert size is not None
    train(tmp_path / "t", corpus, kind, size[1])
    longest = max((tmp_path / f"t{ending}").read_text().split("\n"), key=len)
    assert 2048 < len(longest.replace("##", "").replace(" ", "")) <= 4096


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
