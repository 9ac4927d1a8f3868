"""Micro-batches of a step: the same with any number of workers and in any layout."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from megatron.data.batches import GPTBatch, GPTCollator
from megatron.data.loader import MicrobatchLoader
from megatron.data.samplers import CyclicOrder, SampleOrder, SequentialOrder
from tests.helpers.numerics import assert_bitwise

SEQ_LENGTH = 6


class Numbered:
    """Sample n holds n, and is slow to read now and then."""

    def __init__(self, size: int, slow: bool = False) -> None:
        self._size, self._slow = size, slow
        self.reads = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> np.ndarray:
        self.reads += 1
        if self._slow and index % 3 == 0:
            time.sleep(0.002)
        return np.arange(index, index + SEQ_LENGTH + 1, dtype=np.int64) % 11


def loader(
    dataset: Numbered,
    *,
    workers: int,
    rank: int = 0,
    size: int = 1,
    micro: int = 2,
    order: SampleOrder | None = None,
) -> MicrobatchLoader[GPTBatch]:
    return MicrobatchLoader(
        dataset,
        order=order or SequentialOrder(len(dataset)),
        collate=GPTCollator(seq_length=SEQ_LENGTH, eod=0, reset_attention_mask=True, reset_position_ids=True),
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=size,
        num_workers=workers,
    )


def assert_same_batches(actual: Sequence[GPTBatch], expected: Sequence[GPTBatch]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        for name in ("tokens", "labels", "loss_mask", "position_ids", "document_ids", "sample_ids"):
            assert_bitwise(getattr(one, name), getattr(other, name), name)


STEPS = [(0, 2), (4, 2), (8, 3), (14, 4), (22, 1), (6, 2), (100, 3)]  # grows, goes back, jumps


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("cyclic", [False, True])
def test_batches_do_not_depend_on_the_number_of_workers(workers: int, cyclic: bool) -> None:
    order = CyclicOrder(7, seed=3) if cyclic else None
    with loader(Numbered(200, slow=True), workers=workers, order=order) as ahead:
        plain = loader(Numbered(200), workers=0, order=order)
        for consumed, count in STEPS:
            assert_same_batches(ahead.microbatches(consumed, count), plain.microbatches(consumed, count))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("micro, size", [(1, 1), (1, 4), (2, 2), (4, 1), (3, 4)])
def test_a_step_has_the_same_samples_in_every_layout(workers: int, micro: int, size: int) -> None:
    consumed, global_batch = 24, 12
    ranks = [loader(Numbered(100), workers=workers, rank=rank, size=size, micro=micro) for rank in range(size)]
    batches = [one.microbatches(consumed, global_batch // (micro * size)) for one in ranks]
    for one in ranks:
        one.close()
    in_order = [batch for microbatch in zip(*batches) for batch in microbatch]
    samples = torch.cat([batch.sample_ids for batch in in_order])
    assert samples.tolist() == list(range(consumed, consumed + global_batch))
    assert torch.equal(torch.cat([batch.tokens for batch in in_order])[:, 0], samples % 11)


def test_sample_ids_are_positions_of_the_run_and_not_of_the_dataset() -> None:
    order = CyclicOrder(5, seed=1)
    (batch,) = loader(Numbered(5), workers=0, order=order).microbatches(8, 1)
    assert batch.sample_ids.tolist() == [8, 9]
    assert batch.tokens[:, 0].tolist() == [order(8), order(9)]


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_not_touched(workers: int) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with loader(Numbered(50), workers=workers, order=CyclicOrder(50, seed=1)) as batches:
        batches.microbatches(0, 4)
        batches.microbatches(8, 4)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_of_the_data_is_an_error_only_when_it_is_asked_for(workers: int) -> None:
    with loader(Numbered(8), workers=workers) as batches:
        assert len(batches.microbatches(0, 4)) == 4
        with pytest.raises(IndexError, match="sample 8 is read, but 8 were requested"):
            batches.microbatches(8, 1)


def test_the_next_step_is_read_ahead() -> None:
    dataset = Numbered(1000)
    with loader(dataset, workers=2) as batches:
        batches.microbatches(0, 8)
        deadline = time.monotonic() + 10
        while dataset.reads < 32 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert dataset.reads == 32
        batches.microbatches(16, 8)


def test_closing_ends_the_threads() -> None:
    batches = loader(Numbered(100, slow=True), workers=3)
    batches.microbatches(0, 4)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("microbatch")]
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("microbatch")]
    batches.close()


LEFT_OPEN = """
from tests.data.test_loader import Numbered, loader
batches = loader(Numbered(1000, slow=True), workers=3)
batches.microbatches(0, 20)
raise SystemExit(7)
"""


def test_a_loader_that_is_left_open_does_not_hold_up_the_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], timeout=60, check=False)
    assert ended.returncode == 7
