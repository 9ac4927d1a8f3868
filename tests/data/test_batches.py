"""Masks and positions of a micro-batch: what each option means at the end of a document and in padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.batches import GPTBatch, GPTCollator


def collate(ids: list[int], *, seq_length: int, **options: object) -> GPTBatch:
    return GPTCollator(seq_length=seq_length, **options)([np.array(ids, dtype=np.uint16)], [0])


def test_all_three_options_at_the_end_of_documents() -> None:
    batch = collate(
        [5, 6, 0, 7, 8, 9, 0, 4, 3],
        seq_length=8,
        eod=0,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    assert batch.tokens.tolist() == [[5, 6, 0, 7, 8, 9, 0, 4]]
    assert batch.labels.tolist() == [[6, 0, 7, 8, 9, 0, 4, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2]], "the end belongs to what it closes"
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 1, 1, 0, 1]]


def test_without_options_every_label_counts() -> None:
    batch = collate([5, 6, 0, 7], seq_length=3, eod=0)
    assert batch.loss_mask.tolist() == [[1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2]]
    assert batch.document_ids is None
    assert batch.loss_counts() == {"lm loss": torch.tensor(3.0, dtype=torch.float64)}


@pytest.mark.parametrize("pad", [0, 1, None, -1])
@pytest.mark.parametrize("eod_mask_loss, expected", [(False, [1, 1, 1, 1]), (True, [1, 0, 1, 1])])
def test_a_genuine_end_keeps_its_loss_when_padding_has_its_id(
    pad: int | None, eod_mask_loss: bool, expected: list[int]
) -> None:
    batch = collate([5, 0, 7, 8, 9], seq_length=4, eod=0, pad=pad, eod_mask_loss=eod_mask_loss)
    assert batch.tokens.tolist() == [[5, 0, 7, 8]]
    assert batch.labels.tolist() == [[0, 7, 8, 9]]
    assert batch.loss_mask.tolist() == [expected]


@pytest.mark.parametrize("pad, filled", [(1, 1), (9, 9), (None, 0), (-1, 0)])
def test_only_padding_after_the_end_is_masked_and_keeps_an_id_of_the_vocabulary(pad: int | None, filled: int) -> None:
    batch = collate([1, 5, 1], seq_length=5, eod=9, pad=pad, reset_position_ids=True, reset_attention_mask=True)
    assert batch.tokens.tolist() == [[1, 5, 1, filled, filled]]
    assert batch.labels.tolist() == [[5, 1, filled, filled, filled]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]], "padding ends no document, also not with its id"
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0]]


@pytest.mark.parametrize("ids", [[], [3]])
def test_a_sample_without_a_label_counts_nothing(ids: list[int]) -> None:
    batch = collate(ids, seq_length=2, eod=0)
    assert batch.loss_mask.tolist() == [[0, 0]]
    assert batch.loss_counts()["lm loss"].item() == 0


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=3))
def test_the_options_agree_with_a_walk_along_the_ids(rows: list[list[int]]) -> None:
    seq_length, eod = 8, 0
    collator = GPTCollator(
        seq_length=seq_length,
        eod=eod,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    batch = collator([np.array(row, dtype=np.int32) for row in rows], range(len(rows)))
    assert batch.document_ids is not None
    for number, row in enumerate(rows):
        document, position = 0, 0
        for place in range(seq_length):
            real = place < len(row)
            assert batch.document_ids[number, place] == document
            assert batch.position_ids[number, place] == position
            has_label = place + 1 < len(row)
            assert batch.loss_mask[number, place] == (has_label and row[place] != eod)
            document, position = (document + 1, 0) if real and row[place] == eod else (document, position + 1)


def test_a_batch_moves_as_a_whole() -> None:
    batch = collate([5, 6, 0, 7], seq_length=3, eod=0, reset_attention_mask=True).to(torch.device("meta"))
    assert batch.document_ids is not None
    tensors = (
        batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.document_ids, batch.sample_ids,
    )  # fmt: skip
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_counts_of_large_batches_are_exact() -> None:
    batch = collate([1, 2], seq_length=1, eod=0)
    count = batch.loss_counts()["lm loss"]
    assert (count * (2**24 + 1)).item() == 2**24 + 1


def test_the_lengths_of_documents_say_what_their_ids_do() -> None:
    """Padding belongs to the last one; an end at the very end of a sample begins nothing."""
    collate = GPTCollator(seq_length=6, eod=0, reset_attention_mask=True)
    samples = [np.array(ids) for ids in ([1, 0, 2, 3, 0, 4, 5], [1, 2, 3, 4, 5, 0, 7], [0, 0, 1], [1, 2])]
    batch = collate(samples, range(4))
    assert batch.document_lengths == ((2, 3, 1), (6,), (1, 1, 4), (6,))
    assert batch.document_ids is not None
    for ids, lengths in zip(batch.document_ids, batch.document_lengths):
        assert ids.unique_consecutive(return_counts=True)[1].tolist() == list(lengths)
    assert GPTCollator(seq_length=6, eod=0)(samples, range(4)).document_lengths is None
