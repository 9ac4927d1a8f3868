"""BERT's WordPiece: the published ids, and a vocab.txt that is what it must be."""

from pathlib import Path

import numpy as np
import pytest

from megatron.tokenizer.tokenizers_tokenizer import TokenizersTokenizer
from megatron.tokenizer.wordpiece_tokenizer import wordpiece_tokenizer
from tests.helpers.tokenizer_files import BERT_VOCABULARY

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def build(path: Path, *, lower_case: bool = True, include_special_tokens: bool = True) -> TokenizersTokenizer:
    name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    return wordpiece_tokenizer(path, name=name, lower_case=lower_case, include_special_tokens=include_special_tokens)


def write(folder: Path, *words: str, end: str = "\n") -> Path:
    path = folder / "vocab.txt"
    path.write_text("".join(word + end for word in words), newline="")
    return path


@pytest.fixture(scope="module")
def bert() -> TokenizersTokenizer:
    return build(BERT_VOCABULARY)


def test_berts_vocabulary_gives_the_published_ids(bert: TokenizersTokenizer) -> None:
    assert bert.encode("Hello world, unaffable!") == [101, 7592, 2088, 1010, 14477, 20961, 3468, 999, 102]
    assert (bert.vocab_size, bert.pad, bert.cls, bert.sep, bert.mask) == (30522, 0, 101, 102, 103)


def test_a_document_ends_with_sep(bert: TokenizersTokenizer) -> None:
    assert bert.eod == bert.sep


def test_what_stands_round_a_text_can_be_left_out(bert: TokenizersTokenizer) -> None:
    bare = build(BERT_VOCABULARY, include_special_tokens=False)
    assert bare.encode("Hello world, unaffable!") == bert.encode("Hello world, unaffable!")[1:-1]
    assert (bare.encode(""), bert.encode("")) == ([], [101, 102])
    assert bare.fingerprint() == bert.fingerprint(), "the ids mean the same"


def test_the_lower_case_kind_folds_case_and_accents_and_the_other_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, *SPECIAL, "cafe", "Café", "##s")
    assert build(path).encode("Café cafes") == [2, 5, 5, 7, 3]
    assert build(path, lower_case=False).encode("Café cafes CAFE") == [2, 6, 5, 7, 1, 3]
    assert build(path).fingerprint() != build(path, lower_case=False).fingerprint()


def test_the_pieces_that_continue_a_word_are_known(tmp_path: Path, bert: TokenizersTokenizer) -> None:
    small = build(write(tmp_path, *SPECIAL, "#", "##s", "a##"))
    assert small.continues_word is not None and small.continues_word.tolist() == [False] * 6 + [True, False]
    assert bert.continues_word is not None
    assert bert.continues_word.shape == (30522,) and int(np.sum(bert.continues_word)) == 5828
    assert bert.continues_word[[14477, 20961, 3468]].tolist() == [False, True, True]


def test_a_literal_special_token_becomes_its_id(bert: TokenizersTokenizer) -> None:
    assert bert.encode("a [MASK] b")[2] == bert.mask


@pytest.mark.parametrize("token", SPECIAL)
def test_a_vocabulary_without_a_special_token_is_refused(tmp_path: Path, token: str) -> None:
    path = write(tmp_path, *(word for word in SPECIAL if word != token), "a")
    with pytest.raises(ValueError, match=rf"--vocab-file {path} has no \{token[:-1]}\]: .*BertWordPieceLowerCase"):
        build(path)


def test_a_token_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, *SPECIAL, "a", "b", "a")
    with pytest.raises(ValueError, match=r"vocab\.txt: 'a' stands in line 6 and again in line 8"):
        build(path)


@pytest.mark.parametrize("words", [(*SPECIAL, "", "a"), (*SPECIAL, "a", ""), ()])
def test_an_empty_line_would_shift_ids_and_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"line \d is empty"):
        build(write(tmp_path, *words))


def test_line_ends_of_windows_are_no_part_of_the_tokens(tmp_path: Path) -> None:
    assert build(write(tmp_path, *SPECIAL, "a", end="\r\n")).encode("a") == [2, 5, 3]


def test_a_vocabulary_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes("\n".join([*SPECIAL, "é"]).encode("latin-1"))
    with pytest.raises(ValueError, match=r"not a vocab\.txt: byte 32 is not valid UTF-8"):
        build(path)
