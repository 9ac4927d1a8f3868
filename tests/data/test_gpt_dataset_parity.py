"""The same samples in the same order as Megatron-LM, in every configuration of fixtures/gpt_dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.data import DataConfig
from megatron.data import index_builder
from megatron.data.batches import GPTCollator
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.build import SampleShape, build_gpt_datasets
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.sample_dataset import SampleDataset
from tests.data.corpora import FIXTURES

FOLDER = FIXTURES / "gpt_dataset"
CONFIGURATIONS = sorted(path.parent.name for path in FOLDER.glob("c*/params.json"))
SPLITS = ("train", "valid", "test")


def words(blend: list[Any] | None) -> list[str]:
    if blend is None:
        return []
    prefixes, weights = blend
    if weights is None:
        return list(prefixes)
    return [word for weight, prefix in zip(weights, prefixes) for word in (repr(weight), prefix)]


def build(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[dict[str, Any], list[SampleDataset | None]]:
    monkeypatch.chdir(FOLDER)
    params = json.loads((FOLDER / name / "params.json").read_text())
    config = params["config"]
    if "blend" in config:
        origin = {"data_path": words(config["blend"]), "split": config["split"]}
    else:
        origin = {f"{split}_data_path": words(blend) for split, blend in zip(SPLITS, config["blend_per_split"])}
    data = DataConfig(
        seq_length=config["sequence_length"],
        data_cache_path=str(tmp_path / "cache"),
        mid_level_dataset_surplus=config["mid_level_dataset_surplus"],
        **origin,
    )
    train, valid, test = build_gpt_datasets(
        data,
        num_samples=tuple(params["requested_num_samples"][split] for split in SPLITS),
        seed=config["random_seed"],
        vocab_size=70000,
        eod=250,
        shape=SampleShape(
            extra_tokens=int(config.get("add_extra_token_to_sequence", True)),
            keep_last_of_valid=not config.get("drop_last_partial_validation_sequence", True),
        ),
    )
    return params, [train, valid.get("validation"), test]


def stored(name: str, array: str) -> np.ndarray:
    return np.load(FOLDER / name / f"{array}.npy")


def assert_same(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert actual.dtype == expected.dtype, what
    assert np.array_equal(actual, expected), what


def test_every_configuration_is_compared() -> None:
    assert len(CONFIGURATIONS) == 11


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "reference"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_indices_are_megatron_lms(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not compiled:
        monkeypatch.setattr(index_builder, "compiled_function", lambda name, reference_cost: None)
    params, datasets = build(name, monkeypatch, tmp_path)
    for split, dataset in zip(SPLITS, datasets):
        expected = params["splits"][split]
        if expected is None:
            assert dataset is None
            continue
        assert dataset is not None
        assert len(dataset) == expected["length"]
        parts = [dataset]
        if expected["type"] == "BlendedDataset":
            assert isinstance(dataset, BlendedDataset)
            parts = list(dataset.datasets)
            assert_same(dataset.dataset_index, stored(name, f"{split}_dataset_index"), split)
            assert_same(dataset.dataset_sample_index, stored(name, f"{split}_dataset_sample_index"), split)
        assert len(parts) == len(expected["datasets"])
        for number, part in enumerate(parts):
            assert isinstance(part, GPTDataset)
            for kind in ("document", "sample", "shuffle"):
                what = f"{split}_{number}_{kind}_index"
                assert_same(getattr(part.index, kind), stored(name, what), what)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_samples_masks_and_positions_are_megatron_lms(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    params, datasets = build(name, monkeypatch, tmp_path)
    config = params["config"]
    eod = int(config["tokenizer"].split("eod=")[1].split(",")[0])
    for split, dataset in zip(SPLITS, datasets):
        path = FOLDER / name / f"{split}_samples.npz"
        if not path.exists():
            assert not dataset
            continue
        assert dataset is not None
        expected = np.load(path)
        count = len(expected["tokens"])
        collator = GPTCollator(
            seq_length=config["sequence_length"],
            eod=eod,
            pad=-1,
            reset_position_ids=config["reset_position_ids"],
            reset_attention_mask=config["reset_attention_mask"],
            eod_mask_loss=config["eod_mask_loss"],
        )
        batch = collator([dataset[number] for number in range(count)], range(count))
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            actual = getattr(batch, key).numpy()
            assert np.array_equal(actual, expected[key]), f"{split} {key}"
        assert batch.sample_ids.tolist() == list(range(count))
        assert (batch.document_ids is not None) == config["reset_attention_mask"]
        assert batch.loss_counts()["lm loss"].item() == expected["loss_mask"].sum()

        shape = tuple(expected["attention_mask_shape"])
        masked = np.unpackbits(expected["attention_mask_packbits_first10"], count=int(np.prod(shape)))
        allowed = torch.tril(torch.ones(shape[1:], dtype=torch.bool)).expand(shape)
        if batch.document_ids is not None:
            documents = batch.document_ids[: shape[0]]
            allowed = allowed & (documents[:, :, None] == documents[:, None, :])
        assert np.array_equal(allowed.numpy(), masked.reshape(shape) == 0), f"{split} attention mask"
        if "dataset_id" in expected:
            assert isinstance(dataset, BlendedDataset)
            assert dataset.dataset_index[:count].tolist() == expected["dataset_id"].tolist()
