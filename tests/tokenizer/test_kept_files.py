"""A tokenizer of any kind is the same from the copies that a checkpoint keeps, when its files are gone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.config.tokenizer import TokenizerConfig, TokenizerType
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.kept_files import files_of, keep_files, kept_in
from tests.helpers.tokenizer_files import BERT_VOCABULARY, BOTCHAN_MODEL, gpt2_merge_file, gpt2_vocab_file
from tests.tokenizer.test_tiktoken_tokenizer import TOKENS, entries, write_json, write_lines
from tests.tokenizer.test_tokenizers_tokenizer import write_words

KINDS: list[tuple[TokenizerType, set[str]]] = [
    ("GPT2BPETokenizer", {"vocab.json", "merges.txt"}),
    ("SentencePieceTokenizer", {"tokenizer.model"}),
    ("GPTSentencePieceTokenizer", {"tokenizer.model"}),
    ("Llama2Tokenizer", {"tokenizer.model"}),
    ("HuggingFaceTokenizer", {"tokenizer.json", "tokenizer_config.json"}),
    ("BertWordPieceLowerCase", {"vocab.txt"}),
    ("BertWordPieceCase", {"vocab.txt"}),
    ("TikTokenizer", {"tiktoken.model"}),
    ("ByteTokenizer", set()),
    ("NullTokenizer", set()),
]


def files_for(kind: TokenizerType, folder: Path) -> dict[str, Any]:
    """The fields of a tokenizer of a kind whose files are in a folder."""
    folder.mkdir()
    sources = {
        "GPT2BPETokenizer": {"vocab_file": gpt2_vocab_file(), "merge_file": gpt2_merge_file()},
        "BertWordPieceLowerCase": {"vocab_file": BERT_VOCABULARY},
        "BertWordPieceCase": {"vocab_file": BERT_VOCABULARY},
        "SentencePieceTokenizer": {"tokenizer_model": BOTCHAN_MODEL},
        "GPTSentencePieceTokenizer": {"tokenizer_model": BOTCHAN_MODEL},
        "Llama2Tokenizer": {"tokenizer_model": BOTCHAN_MODEL},
    }.get(kind, {})
    fields = {field: shutil.copy(path, folder / f"mine-{path.name}") for field, path in sources.items()}
    if kind == "HuggingFaceTokenizer":
        fields["tokenizer_model"] = write_words(
            folder, "<unk>", "the", "<end>", tokenizer_config={"eos_token": "<end>"}
        )
    if kind == "TikTokenizer":
        fields["tokenizer_model"] = write_json(folder, entries(TOKENS))
    return {field: str(path) for field, path in fields.items()} | ({"vocab_size": 9} if kind == "NullTokenizer" else {})


@pytest.mark.parametrize("kind, names", KINDS)
def test_a_tokenizer_is_the_same_from_the_copies_of_its_files(
    tmp_path: Path, kind: TokenizerType, names: set[str]
) -> None:
    config = TokenizerConfig(tokenizer_type=kind, **files_for(kind, tmp_path / "there"))
    before = build_tokenizer(config)
    keep_files(config, tmp_path / "kept")
    shutil.rmtree(tmp_path / "there")
    assert {path.name for path in tmp_path.glob("kept/*")} == names
    kept = kept_in(config, tmp_path / "kept")
    after = build_tokenizer(kept)
    text = "7 1" if kind == "NullTokenizer" else "the cat"
    assert (after.fingerprint(), after.eod) == (before.fingerprint(), before.eod)
    assert after.encode(text) == before.encode(text)
    assert set(files_of(kept)) == names
    keep_files(kept, tmp_path / "kept")  # itself once more
    assert {path.name for path in tmp_path.glob("kept/*")} == names


def test_the_lines_of_tiktoken_are_kept_too(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(write_lines(tmp_path)))
    keep_files(config, tmp_path / "kept")
    kept = kept_in(config, tmp_path / "kept")
    assert build_tokenizer(kept).fingerprint() == build_tokenizer(config).fingerprint()


def test_nothing_is_left_of_what_lay_beside_another_tokenizer(tmp_path: Path) -> None:
    beside: dict[str, Any]
    for name, beside in (("one", {"tokenizer_config": {"eos_token": "<end>"}}), ("other", {})):
        (tmp_path / name).mkdir()
        model = write_words(tmp_path / name, "<unk>", "the", "<end>", **beside)
        config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model))
        keep_files(config, tmp_path / "kept")
    assert {path.name for path in tmp_path.glob("kept/*")} == {"tokenizer.json"}


def test_a_folder_without_all_files_changes_nothing(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="v", merge_file="m")
    (tmp_path / "vocab.json").write_text("{}")
    assert kept_in(config, tmp_path) == config


def test_a_file_that_has_changed_is_kept_anew(tmp_path: Path) -> None:
    model = tmp_path / "a.model"
    config = TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(model))
    for content in ("old", "new"):
        model.write_text(content)
        keep_files(config, tmp_path / "kept")
    assert (tmp_path / "kept" / "tokenizer.model").read_text() == "new"
