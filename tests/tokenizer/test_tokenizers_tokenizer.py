"""GPT-2's files and tokenizer.json: special ids are looked up, nothing is cut, nothing is lost."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel, WordPiece
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.processors import TemplateProcessing

from megatron.tokenizer.tokenizers_tokenizer import (
    TokenizersTokenizer,
    gpt2_bpe_tokenizer,
    huggingface_tokenizer,
)
from tests.helpers.tokenizer_files import gpt2_merge_file, gpt2_vocab_file

BYTE_SYMBOLS = sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def gpt2() -> TokenizersTokenizer:
    return gpt2_bpe_tokenizer(gpt2_vocab_file(), gpt2_merge_file())


def write_bpe(folder: Path, symbols: list[str]) -> tuple[Path, Path]:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps({symbol: index for index, symbol in enumerate(symbols)}))
    merges.write_text("#version: 0.2\n")
    return vocab, merges


def write_words(folder: Path, *words: str, **beside: Any) -> Path:
    """A folder with a word-level tokenizer.json, and other files as JSON."""
    backend = Backend(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens([word for word in words if not word.isalpha()])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_gpt2_gives_the_published_ids(gpt2: TokenizersTokenizer) -> None:
    assert gpt2.vocab_size == 50257
    ids = [15496, 995, 11, 220, 19526, 254, 25001, 121, 30325, 222]
    assert gpt2.encode("Hello world, 你好 😀") == ids
    assert gpt2.decode(ids) == "Hello world, 你好 😀"


def test_gpt2_has_one_token_for_bos_and_eod(gpt2: TokenizersTokenizer) -> None:
    assert (gpt2.eod, gpt2.pad) == (50256, None)


def test_a_literal_special_token_becomes_its_id(gpt2: TokenizersTokenizer) -> None:
    assert gpt2.encode("a<|endoftext|>b") == [64, 50256, 65]
    assert gpt2.decode([64, 50256, 65]) == "a<|endoftext|>b"


@given(st.text())
def test_gpt2_gives_back_every_text(gpt2: TokenizersTokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text


def test_a_lone_surrogate_is_refused_in_words(gpt2: TokenizersTokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate U\+DC00"):
        gpt2.encode("\udc00")


def test_the_end_of_document_is_looked_up_wherever_it_stands(tmp_path: Path) -> None:
    tokenizer = gpt2_bpe_tokenizer(*write_bpe(tmp_path, ["<|endoftext|>", *BYTE_SYMBOLS]))
    assert (tokenizer.eod, tokenizer.vocab_size) == (0, 257)


def test_a_vocabulary_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--vocab-file .*vocab\.json has no <\|endoftext\|>"):
        gpt2_bpe_tokenizer(*write_bpe(tmp_path, BYTE_SYMBOLS))


def test_a_vocabulary_that_would_drop_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks 2 of the 256 byte symbols"):
        gpt2_bpe_tokenizer(*write_bpe(tmp_path, ["<|endoftext|>", *BYTE_SYMBOLS[2:]]))


def test_ids_with_holes_count_to_the_largest(tmp_path: Path) -> None:
    vocab, merges = write_bpe(tmp_path, BYTE_SYMBOLS)
    vocab.write_text(json.dumps({**json.loads(vocab.read_text()), "<|endoftext|>": 999}))
    assert gpt2_bpe_tokenizer(vocab, merges).vocab_size == 1000


@pytest.mark.parametrize("broken", ["vocab.json", "merges.txt"])
def test_a_broken_file_is_refused_with_its_flag(tmp_path: Path, broken: str) -> None:
    vocab, merges = write_bpe(tmp_path, ["<|endoftext|>", *BYTE_SYMBOLS])
    (tmp_path / broken).write_text("one two three\n" * 2)
    with pytest.raises(ValueError, match=f"--vocab-file .*{broken}"):
        gpt2_bpe_tokenizer(vocab, merges)


@pytest.mark.parametrize("line", [1, 2, 20_000, 49_999, 50_000])
def test_a_merge_that_is_missing_is_noticed(tmp_path: Path, line: int) -> None:
    """Of GPT-2's 50,000, whichever it is: the ids of texts would be others."""
    lines = gpt2_merge_file().read_text().splitlines(keepends=True)
    lost = lines.pop(line)
    (tmp_path / "merges.txt").write_text("".join(lines))
    token = lost.replace(" ", "").strip()
    with pytest.raises(ValueError, match=rf"no merge for 1 of the 50,257 tokens .* such as '{re.escape(token)}'"):
        gpt2_bpe_tokenizer(gpt2_vocab_file(), tmp_path / "merges.txt")


def test_no_token_of_gpt2_but_the_end_of_a_document_can_do_without_its_merge(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=r"no merge for 50,000 of the 50,257 tokens"):
        gpt2_bpe_tokenizer(gpt2_vocab_file(), tmp_path / "merges.txt")


def test_tokens_that_were_put_in_beside_the_merges_are_taken(tmp_path: Path) -> None:
    """Those of RoBERTa and OPT, StarCoder, Falcon and OLMo, wherever they stand."""
    put_in = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "madeupword0000", "<fim_prefix>", "<jupyter_start>", "[MASK]"]
    put_in += ["<|im_start|>", "<extra_id_0>", ">>TITLE<<", "|||EMAIL_ADDRESS|||", "__start__", "<início>", "<｜end｜>"]
    words = json.loads(gpt2_vocab_file().read_text())
    symbols = [*put_in[:4], *sorted(words), *put_in[4:]]
    vocab, _ = write_bpe(tmp_path, symbols)
    tokenizer = gpt2_bpe_tokenizer(vocab, gpt2_merge_file())
    assert tokenizer.encode("Hello world") == [symbols.index("Hello"), symbols.index("Ġworld")]


def test_a_missing_file_is_refused_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--merge-file .*merges does not exist"):
        gpt2_bpe_tokenizer(gpt2_vocab_file(), tmp_path / "merges")


@pytest.mark.parametrize("as_object", [False, True])
def test_the_special_tokens_of_a_folder_are_its_own(tmp_path: Path, as_object: bool) -> None:
    def token(text: str) -> Any:
        return {"content": text, "lstrip": False} if as_object else text

    folder = write_words(
        tmp_path,
        *("<unk>", "<s>", "</s>", "<pad>", "hello"),
        tokenizer_config={"bos_token": token("<s>"), "eos_token": token("</s>"), "pad_token": token("<pad>")},
    )
    tokenizer = huggingface_tokenizer(folder)
    assert (tokenizer.eod, tokenizer.pad) == (2, 3)
    assert tokenizer.encode("hello world") == [4, 0]


def test_an_end_token_may_also_begin_a_sequence(tmp_path: Path) -> None:
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    tokenizer = huggingface_tokenizer(write_words(tmp_path, "<unk>", "<|endoftext|>", special_tokens_map=special))
    assert tokenizer.eod == 1


def test_tokenizer_config_has_the_last_word(tmp_path: Path) -> None:
    folder = write_words(
        tmp_path,
        *("<unk>", "<a>", "<b>"),
        special_tokens_map={"eos_token": "<a>"},
        tokenizer_config={"eos_token": "<b>"},
    )
    assert huggingface_tokenizer(folder).eod == 2


def test_what_says_nothing_of_ids_takes_no_part_in_the_fingerprint(tmp_path: Path) -> None:
    words = ("<unk>", "<a>", "<b>")
    tokenizer = huggingface_tokenizer(write_words(tmp_path, *words, tokenizer_config={"eos_token": "<b>"}))
    config = {"eos_token": "<b>", "chat_template": "{{ messages }}", "model_max_length": 7}
    folder = write_words(tmp_path, *words, tokenizer_config=config)
    content = json.loads((folder / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps({**content, "truncation": cut}, indent=7))
    assert huggingface_tokenizer(folder).fingerprint() == tokenizer.fingerprint()
    for other in ((*words, "<c>"), ("<unk>", "<b>", "<a>")):
        of_other = huggingface_tokenizer(write_words(tmp_path, *other, tokenizer_config={"eos_token": "<b>"}))
        assert of_other.fingerprint() != tokenizer.fingerprint()
    of_other = huggingface_tokenizer(write_words(tmp_path, *words, tokenizer_config={"eos_token": "<a>"}))
    assert of_other.fingerprint() != tokenizer.fingerprint()


def test_a_bare_file_with_one_usual_end_token_needs_no_word(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<unk>", "hello", "</s>")
    tokenizer = huggingface_tokenizer(folder / "tokenizer.json")
    assert tokenizer.eod == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [(["<unk>"], "none of the usual ones"), (["<unk>", "</s>", "<eos>"], "it has </s> and <eos>")],
)
def test_an_end_of_document_is_never_guessed(tmp_path: Path, words: list[str], why: str) -> None:
    tokenizer = huggingface_tokenizer(write_words(tmp_path, *words))
    assert tokenizer.encode("hello") == [0]
    with pytest.raises(ValueError, match=rf"does not say which token ends a document: {why}.*eos_token"):
        _ = tokenizer.eod


def test_a_special_token_that_is_not_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<unk>", "</s>", tokenizer_config={"pad_token": "[PAD]"})
    with pytest.raises(ValueError, match=r"the pad token '\[PAD\]' is not in the vocabulary"):
        huggingface_tokenizer(folder)


def test_truncation_and_padding_of_a_file_do_not_cut_or_fill_documents(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<unk>", "</s>", "word")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = huggingface_tokenizer(folder)
    assert tokenizer.encode("word " * 100) == [2] * 100
    assert tokenizer.encode("word") == [2]


def test_what_a_files_post_processor_adds_is_added(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<unk>", "<s>", "</s>", "word")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    assert huggingface_tokenizer(folder).encode("word") == [1, 3]


def test_gpt2_as_tokenizer_json_gives_gpt2s_ids(tmp_path: Path, gpt2: TokenizersTokenizer) -> None:
    backend = Backend(BPE.from_file(str(gpt2_vocab_file()), str(gpt2_merge_file())))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = huggingface_tokenizer(tmp_path)
    text = "if x:\n\treturn 'ü' <|endoftext|>  "
    assert (tokenizer.eod, tokenizer.encode(text)) == (gpt2.eod, gpt2.encode(text))


def test_a_folder_without_tokenizer_json_says_what_reads_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json.*GPT2BPETokenizer.*SentencePieceTokenizer"):
        huggingface_tokenizer(tmp_path)


def test_a_hub_name_is_not_downloaded() -> None:
    with pytest.raises(ValueError, match=r"--tokenizer-model gpt2 does not exist.*nothing is downloaded"):
        huggingface_tokenizer("gpt2")


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config"])
def test_a_malformed_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_words(tmp_path, "<unk>", "</s>")
    (folder / f"{name}.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{name}\.json is not"):
        huggingface_tokenizer(folder)


def test_the_fingerprint_knows_the_special_tokens(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<unk>", "<a>", "<b>", tokenizer_config={"eos_token": "<a>"})
    before = huggingface_tokenizer(folder).fingerprint()
    assert huggingface_tokenizer(folder).fingerprint() == before
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<b>"}')
    assert huggingface_tokenizer(folder).fingerprint() != before


def test_a_bert_in_a_folder_knows_its_special_tokens_and_ends_documents_with_sep(tmp_path: Path) -> None:
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    folder = write_words(tmp_path, "<unk>", "[PAD]", "[CLS]", "[SEP]", "[MASK]", tokenizer_config=special)
    tokenizer = huggingface_tokenizer(folder)
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.eod) == (1, 2, 3, 4, 3)
    assert tokenizer.continues_word is None
    assert not tokenizer.surrounds_texts, "the file has no post-processor that would put them around a text"


def test_a_usual_end_token_counts_before_sep(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<unk>", "[SEP]", "</s>", tokenizer_config={"sep_token": "[SEP]"})
    assert huggingface_tokenizer(folder).eod == 2


def test_a_wordpiece_in_a_file_knows_which_pieces_continue_a_word(tmp_path: Path) -> None:
    Backend(WordPiece({"[UNK]": 0, "un": 1, "##do": 2, "</s>": 3})).save(str(tmp_path / "tokenizer.json"))
    continues = huggingface_tokenizer(tmp_path).continues_word
    assert continues is not None and continues.tolist() == [False, False, True, False]


def test_what_a_files_post_processor_adds_can_be_left_out(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<unk>", "<s>", "</s>", "word")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    assert huggingface_tokenizer(folder, include_special_tokens=False).encode("word") == [3]
    assert huggingface_tokenizer(folder).surrounds_texts
    assert not huggingface_tokenizer(folder, include_special_tokens=False).surrounds_texts


def test_merges_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    merges = tmp_path / "merges.txt"
    merges.write_text("".join(gpt2_merge_file().read_text().splitlines(keepends=True)[:40_000]))
    with pytest.raises(ValueError, match=r"--merge-file .*merges\.txt has no merge for [\d,]+ of the 50,257 tokens"):
        gpt2_bpe_tokenizer(gpt2_vocab_file(), merges)
