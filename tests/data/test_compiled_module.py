"""The compiled module is optional: without it the references run and one line says so."""

from __future__ import annotations

import importlib.machinery
import logging
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from megatron.core.kernels import extension
from megatron.data.bert_mapping import SentenceWalk, build_bert_mapping
from megatron.data.index_builder import build_blend_index, build_exhaustive_blend_index, build_sample_index


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    extension.load_extension.cache_clear()
    extension._report_reference.cache_clear()
    yield
    extension.load_extension.cache_clear()
    extension._report_reference.cache_clear()


def build_all() -> list[list[int]]:
    rows = build_sample_index(
        np.array([3, 1, 4], np.int32),
        np.arange(3, dtype=np.int32),
        sequence_length=2,
        num_samples=3,
        total_tokens=8,
    )
    blend, exhaustive = build_blend_index([0.3, 0.7], 9), build_exhaustive_blend_index([2, 5])
    walk = SentenceWalk(sequence_length=9, short_probability=0.5, least_sentences=2, requested=9, seed=1)
    mapping = build_bert_mapping(np.array([5, 3, 4, 8], np.int32), np.array([0, 2, 4]), walk)
    return [array.ravel().tolist() for array in (rows, blend[0], exhaustive[0], mapping)]


def test_without_the_module_results_are_the_same_and_one_line_an_operator_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = build_all()
    assert not caplog.records
    extension.load_extension.cache_clear()
    monkeypatch.setattr(extension, "MODULE_NAME", "megatron._not_built")
    for _ in range(3):
        assert build_all() == expected
    assert len(caplog.records) == 4
    assert all("the reference runs (about" in record.message for record in caplog.records)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_module_of_other_sources_is_not_taken_for_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("old")
    old.__file__ = "old.so"
    monkeypatch.setattr(extension.importlib, "import_module", lambda name: old)
    spec = importlib.machinery.ModuleSpec("old", None)
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(RuntimeError, match=r"old\.so has no operator 'build_blend_index'.*make kernels"):
        build_blend_index([0.5, 0.5], 4)


def test_the_compiled_operators_take_no_silent_copy() -> None:
    module = extension.load_extension()
    assert module is not None
    with pytest.raises(TypeError):
        module.build_blend_index(np.array([1, 1]), np.empty(2, np.int16), np.empty(2, np.int64), threads=1)
    with pytest.raises(TypeError):
        module.build_blend_index(np.array([0.5, 0.5]), np.empty(2, np.int32), np.empty(2, np.int64), threads=1)
