"""The same samples of BERT in the same order as Megatron-LM, in every configuration of fixtures/bert_dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.bert import BertConfig
from megatron.config.data import DataConfig
from megatron.data import bert_mapping
from megatron.data.bert_batches import BertCollator
from megatron.data.bert_dataset import BertDataset, build_bert_datasets
from megatron.data.bert_mapping import SentenceWalk, build_bert_mapping
from megatron.data.masked_lm import BertVocabulary
from tests.data.corpora import FIXTURES

FOLDER = FIXTURES / "bert_dataset"
CONFIGURATIONS = sorted(path.parent.name for path in FOLDER.glob("*/params.json"))
SPLITS = ("train", "valid", "test")
DIRECT = json.loads((FOLDER / "build_mapping_direct.json").read_text())
WORDS = (FIXTURES / "tokenizers" / "bert_base_uncased_vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]


@pytest.fixture(params=["compiled", "reference"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations of the mapping."""
    if request.param == "reference":
        monkeypatch.setattr(bert_mapping, "compiled_function", lambda name, reference_cost: None)
    return str(request.param)


def build(name: str, tmp_path: Path) -> tuple[dict[str, Any], list[BertDataset]]:
    params = json.loads((FOLDER / name / "params.json").read_text())
    config, special = params["config"], params["special_ids"]
    train, valid, test = build_bert_datasets(
        DataConfig(
            data_path=[str(FIXTURES / "preprocess" / prefix) for prefix in config["blend"][0]],
            split=config["split"],
            seq_length=config["sequence_length"],
            data_cache_path=str(tmp_path / "cache"),
        ),
        BertConfig(
            binary_head=config["classification_head"],
            mask_prob=config["masking_probability"],
            short_seq_prob=config["short_sequence_probability"],
            masking_max_ngram=config["masking_max_ngram"],
            whole_word_masking=config["masking_do_full_word"],
        ),
        num_samples=tuple(params["requested"][split] for split in SPLITS),
        seed=config["random_seed"],
        vocabulary=BertVocabulary(
            size=len(WORDS), continues_word=np.array([word.startswith("##") for word in WORDS]), **special
        ),
    )
    built = [dataset for dataset in (train, *valid.values(), test) if isinstance(dataset, BertDataset)]
    assert len(built) == len(SPLITS)
    return params, built


def test_every_configuration_is_compared() -> None:
    assert len(CONFIGURATIONS) == 3
    assert len(DIRECT) == 4


@pytest.mark.parametrize("case", DIRECT, ids=lambda case: case["key"])
def test_the_mapping_of_a_list_of_sentences_is_megatron_lms(case: dict[str, Any], either: str) -> None:
    arrays = np.load(FOLDER / "build_mapping_direct.npz")
    expected = arrays[case["key"]]
    walk = SentenceWalk(
        sequence_length=case["max_sequence_length"],
        short_probability=case["short_seq_prob"],
        least_sentences=case["min_num_sentences"],
        requested=len(expected),
        seed=case["seed"],
    )
    rows = build_bert_mapping(arrays["sequence_lengths"], arrays["document_indices"], walk)
    assert rows.dtype == expected.dtype
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_mappings_are_megatron_lms(name: str, either: str, tmp_path: Path) -> None:
    params, datasets = build(name, tmp_path)
    for split, dataset in zip(SPLITS, datasets):
        expected = np.load(FOLDER / name / f"{split}_mapping.npy")
        assert len(dataset) == params["splits"][split]["length"]
        assert dataset.mapping.dtype == expected.dtype
        assert np.array_equal(dataset.mapping, expected), split


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_samples_are_megatron_lms(name: str, tmp_path: Path) -> None:
    params, datasets = build(name, tmp_path)
    config = params["config"]
    collator = BertCollator(
        seq_length=config["sequence_length"], pad=params["special_ids"]["pad"], pairs=config["classification_head"]
    )
    for split, dataset in zip(SPLITS, datasets):
        expected = np.load(FOLDER / name / f"{split}_samples.npz")
        samples = [dataset[number] for number in range(len(expected["text"]))]
        batch = collator(samples, range(len(samples)))
        labels = np.where(batch.loss_mask, batch.labels, -1)
        for key, actual in [
            ("text", batch.tokens),
            ("types", batch.token_types),
            ("labels", labels),
            ("loss_mask", batch.loss_mask),
            ("padding_mask", batch.is_real),
            ("truncated", [sample.truncated for sample in samples]),
            ("is_random", [sample.exchanged for sample in samples]),
        ]:
            assert np.array_equal(np.asarray(actual), expected[key]), f"{split} {key}"
        if batch.sentence_labels is None:
            assert not config["classification_head"]
        else:
            assert batch.sentence_labels.tolist() == expected["is_random"].tolist()
