"""Texts to ids and back, over all of Unicode: exactly, or as the tokenizer's own normalisation has them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import BertTokenizer

from megatron.tokenizer.plain_tokenizers import ByteTokenizer
from megatron.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron.tokenizer.tiktoken_tokenizer import TikTokenizer
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.tokenizer.tokenizers_tokenizer import gpt2_bpe_tokenizer, huggingface_tokenizer
from megatron.tokenizer.wordpiece_tokenizer import wordpiece_tokenizer
from tests.helpers.tokenizer_files import BERT_VOCABULARY, gpt2_merge_file, gpt2_vocab_file, mistral_model
from tests.tokenizer.test_sentencepiece_tokenizer import LOSSLESS, train
from tests.tokenizer.test_tiktoken_tokenizer import TOKENS, entries, write_json, write_lines

CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
CHUNKS = ["".join(CHARACTERS[start : start + 8192]) for start in range(0, len(CHARACTERS), 8192)]
# With a space between, which keeps a word short and a character from joining the next.
SPACED = [" ".join(chunk) for chunk in CHUNKS]


def lossless_sentencepiece(folder: Path) -> Tokenizer:
    symbols = {"control_symbols": ["<|u2581|>"], "user_defined_symbols": ["\n", "▁▁"]}
    return SentencePieceTokenizer(train(folder / "lossless.model", vocab_size=300, **symbols, **LOSSLESS))


def huggingface(folder: Path) -> Tokenizer:
    backend = Backend(BPE.from_file(str(gpt2_vocab_file()), str(gpt2_merge_file())))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    backend.save(str(folder / "tokenizer.json"))
    return huggingface_tokenizer(folder)


LOSSLESS_KINDS: dict[str, Callable[[Path], Tokenizer]] = {
    "GPT2BPETokenizer": lambda folder: gpt2_bpe_tokenizer(gpt2_vocab_file(), gpt2_merge_file()),
    "HuggingFaceTokenizer": huggingface,
    "SentencePieceTokenizer": lossless_sentencepiece,
    "TikTokenizer, JSON": lambda folder: TikTokenizer(write_json(folder, entries(TOKENS))),
    "TikTokenizer, lines": lambda folder: TikTokenizer(write_lines(folder)),
    "ByteTokenizer": lambda folder: ByteTokenizer(),
}


@pytest.fixture(scope="module", params=LOSSLESS_KINDS)
def lossless(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return LOSSLESS_KINDS[request.param](tmp_path_factory.mktemp("files"))


def test_every_character_of_unicode_comes_back(lossless: Tokenizer) -> None:
    for text in (*CHUNKS, *SPACED[:2]):
        assert lossless.decode(lossless.encode(text)) == text


@given(st.text())
def test_every_text_comes_back(lossless: Tokenizer, text: str) -> None:
    ids = lossless.encode(text)
    assert lossless.decode(ids) == text
    assert all(0 <= token < lossless.vocab_size for token in ids)


@pytest.mark.parametrize("part", ["a", "the ", "\n", "é", "的", "  x\r\n", "!"])
def test_a_long_text_comes_back(lossless: Tokenizer, part: str) -> None:
    text = part * (200_000 // len(part))
    assert lossless.decode(lossless.encode(text)) == text


def test_a_sentencepiece_model_gives_back_what_its_own_normalisation_makes_of_a_text() -> None:
    tokenizer = SentencePieceTokenizer(mistral_model())
    library = SentencePieceProcessor(model_file=str(mistral_model()))
    for text in SPACED:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == library.normalize(text).replace("▁", " ").removeprefix(" ")


def test_a_wordpiece_gives_the_ids_of_transformers_for_every_character() -> None:
    tokenizer = wordpiece_tokenizer(
        BERT_VOCABULARY, name="BertWordPieceLowerCase", lower_case=True, include_special_tokens=True
    )
    theirs = BertTokenizer.from_pretrained(str(BERT_VOCABULARY.parent), vocab_file=str(BERT_VOCABULARY))
    for text in SPACED:
        assert tokenizer.encode(text) == theirs(text).input_ids
