"""Datasets from the data flags: what is refused and how, blends, blocks, mock data, windows of documents."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.config.problems import UserError
from megatron.data.blended_dataset import BlendedDataset, BlockedDataset, block_seed, extend_blocks
from megatron.data.build import build_gpt_datasets, token_sources
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetError
from megatron.data.sample_dataset import SampleDataset
from tests.data.corpora import numbered_corpus, write_corpus


def build(
    cache: Path,
    num_samples: tuple[Any, Any, Any] = (4, 0, 0),
    seed: int = 1,
    vocab_size: int = 65536,
    eod: int = 0,
    **options: Any,
) -> list[SampleDataset | None]:
    data = DataConfig(**{"seq_length": 4, "data_cache_path": str(cache), **options})
    train, valid, test = build_gpt_datasets(data, num_samples=num_samples, seed=seed, vocab_size=vocab_size, eod=eod)
    return [train, valid.get("validation"), test]


def read_all(dataset: SampleDataset | None) -> list[list[int]]:
    assert dataset is not None
    return [dataset[number].tolist() for number in range(len(dataset))]


def test_a_large_index_is_announced_before_it_is_built(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mock data holds 204 million tokens, so with --seq-length 1 as many samples."""
    corpus = numbered_corpus(tmp_path / "corpus", [9] * 10)
    monkeypatch.setattr("megatron.data.gpt_dataset._SAMPLES_OF_SECONDS", 20)
    with caplog.at_level(logging.INFO):
        build(tmp_path, data_path=(str(corpus),), split="1,0,0")
    announced = [record.getMessage().split()[0] for record in caplog.records]
    assert "building an index of 22 samples for train" in caplog.text
    assert announced.index("building") == 0


def test_a_configuration_with_problems_is_not_built_from(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="there is nothing to train on"):
        build(tmp_path)


def test_a_corpus_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(IndexedDatasetError, match=r"nowhere/to/be/found\.idx: no such file"):
        build(tmp_path, data_path=["nowhere/to/be/found"])


@pytest.mark.parametrize(
    "num_samples, message",
    [
        (
            (4, 3, 0),
            r"--split '969, 30, 1' leaves valid 0 of the 10 documents of .*corpus.*--valid-data-path",
        ),
        ((4, 0, 3), r"--split '969, 30, 1' leaves test 0 of the 10 documents of .*--eval-iters 0"),
    ],
)
def test_an_empty_split_of_which_samples_are_wanted_is_refused_at_the_start(
    num_samples: tuple[int, int, int], message: str, tmp_path: Path
) -> None:
    corpus = numbered_corpus(tmp_path / "corpus", [8] * 10)
    with pytest.raises(ValueError, match=message):
        build(tmp_path / "cache", data_path=[str(corpus)], num_samples=num_samples)


def test_an_empty_split_of_which_nothing_is_wanted_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = numbered_corpus(tmp_path / "corpus", [8] * 10)
    with caplog.at_level(logging.INFO):
        train, valid, test = build(tmp_path / "cache", data_path=[str(corpus)], num_samples=(4, 0, None))
    assert train is not None
    assert valid is not None
    assert test is not None
    assert (len(valid), len(test)) == (0, 0)
    assert "valid: 0 samples from 0 documents" in caplog.text
    with pytest.raises(IndexError, match="sample 0 of the test split"):
        test[0]


def test_documents_without_a_token_can_not_give_samples(tmp_path: Path) -> None:
    corpus = numbered_corpus(tmp_path / "corpus", [])
    with pytest.raises(ValueError, match="leaves train 0 of the 0 documents"):
        build(tmp_path / "cache", data_path=[str(corpus)], split="1")


def test_a_share_of_0_and_a_path_that_is_not_given_are_none(tmp_path: Path) -> None:
    corpus = str(numbered_corpus(tmp_path / "corpus", [8] * 10))
    assert build(tmp_path / "cache", data_path=[corpus], split="1", num_samples=(4, 5, 5))[1:] == [None, None]
    train, valid, test = build(tmp_path / "cache", train_data_path=[corpus], num_samples=(4, 5, 5))
    assert train is not None
    assert (valid, test) == (None, None)


def test_an_id_outside_the_vocabulary_names_the_dataset(tmp_path: Path) -> None:
    """Before the training where it is found in parts of the file all over it, else when it is read."""
    data: dict[str, Any] = {"split": "1", "vocab_size": 10}
    corpus = numbered_corpus(tmp_path / "corpus", [20])
    with pytest.raises(UserError, match=r"corpus: holds the id \d+, but the vocabulary has 10 entries"):
        build(tmp_path / "cache", data_path=[str(corpus)], **data)
    rare = write_corpus(tmp_path / "rare", [[[1] * 3000 + [12] + [1] * 100_000]])
    train = build(tmp_path / "cache", data_path=[str(rare)], **data)[0]
    with pytest.raises(UserError, match=r"rare: holds the id 12, but the vocabulary has 10 entries"):
        read_all(train)


def test_a_damaged_file_is_refused_when_the_run_starts(tmp_path: Path) -> None:
    corpus = numbered_corpus(tmp_path / "corpus", [8] * 10)
    Path(f"{corpus}.bin").write_bytes(b"\0" * 50)
    with pytest.raises(IndexedDatasetError, match=r"corpus\.bin: 50 bytes"):
        build(tmp_path / "cache", data_path=[str(corpus)])


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=10).filter(lambda lengths: sum(lengths) > 0),
    requested=st.one_of(st.none(), st.integers(0, 40)),
    seq_length=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    mmap=st.booleans(),
)
def test_samples_are_windows_of_the_documents_in_reading_order(
    lengths: list[int],
    requested: int | None,
    seq_length: int,
    seed: int,
    mmap: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    train = build(
        folder / "cache",
        data_path=[str(numbered_corpus(folder / "corpus", lengths))],
        split="1",
        num_samples=(requested, 0, 0),
        seq_length=seq_length,
        seed=seed,
        mmap_bin_files=mmap,
    )[0]
    assert isinstance(train, GPTDataset)
    stream = np.concatenate([train.source.get(int(document)) for document in train.index.document])
    windows = [
        stream[begin : begin + seq_length + 1].tolist() for begin in range(0, stream.size - seq_length, seq_length)
    ]
    assert read_all(train) == [windows[number] for number in train.index.shuffle]
    assert len(train) >= (requested or 0)


def test_every_sample_of_two_datasets_is_used_once_when_weights_are_their_sizes(tmp_path: Path) -> None:
    a = str(numbered_corpus(tmp_path / "a", [4] * 10 + [1], first=1))
    b = str(numbered_corpus(tmp_path / "b", [4] * 20 + [1], first=1001))
    blend = build(
        tmp_path / "cache",
        data_path=["10", a, "20", b],
        split="1",
        num_samples=(30, 0, 0),
        mid_level_dataset_surplus=0.0,
    )[0]
    assert isinstance(blend, BlendedDataset)
    samples = read_all(blend)
    assert len({tuple(sample) for sample in samples}) == 30
    assert sum(sample[0] <= 1000 for sample in samples) == 10
    even = build(tmp_path / "cache", data_path=["1", a, "1", b], split="1", num_samples=(30, 0, 0))[0]
    assert sum(sample[0] <= 1000 for sample in read_all(even)) == 15


def test_a_blend_has_the_requested_size_and_its_parts_a_surplus(tmp_path: Path) -> None:
    prefixes = [str(numbered_corpus(tmp_path / name, [1001])) for name in "abc"]
    words = [word for weight, prefix in zip(("0.3", "0.3", "0.4"), prefixes) for word in (weight, prefix)]
    blend = build(tmp_path / "cache", data_path=words, split="1", num_samples=(1000, 0, 0), seq_length=1)[0]
    assert isinstance(blend, BlendedDataset)
    assert len(blend) == 1000
    assert np.bincount(blend.dataset_index).tolist() == [300, 300, 400]
    assert all(len(part) >= size for part, size in zip(blend.datasets, (302, 302, 402)))


def test_a_blend_that_draws_more_than_a_part_holds_names_the_surplus() -> None:
    with pytest.raises(ValueError, match=r"draws 3 samples from a, .* 2; a larger --mid-level-dataset-surplus"):
        BlendedDataset(
            [[1, 2]],  # type: ignore[list-item]
            ["a"],
            np.zeros(3, dtype=np.int16),
            np.arange(3, dtype=np.int64),
            np.array([3]),
        )


@pytest.mark.parametrize("weights", [("0.3", "0.7"), ("", "")])
def test_a_blend_is_counted_once_and_not_read_at_each_start(
    weights: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = [str(numbered_corpus(tmp_path / name, [size])) for name, size in (("a", 301), ("b", 701))]
    words = [word for pair in zip(weights, prefixes) for word in pair if word]
    options: dict[str, Any] = {"data_path": words, "split": "1", "num_samples": (250, 0, 0)}
    first = build(tmp_path / "cache", **options)[0]
    (counts,) = (np.load(path) for path in (tmp_path / "cache").glob("*-BlendedDataset-drawn.npy"))
    assert isinstance(first, BlendedDataset)
    assert counts.tolist() == np.bincount(first.dataset_index).tolist() == [75, 175]
    monkeypatch.delattr(np, "bincount")
    again = build(tmp_path / "cache", **options)[0]
    assert isinstance(again, BlendedDataset)
    assert len(again) == len(first)


def test_weights_need_a_number_of_samples(tmp_path: Path) -> None:
    corpus = str(numbered_corpus(tmp_path / "corpus", [8] * 10))
    with pytest.raises(ValueError, match=r"the weights \[1.0, 2.0\] of train need a number of samples"):
        build(
            tmp_path / "cache",
            data_path=["1", corpus, "2", corpus],
            split="1",
            num_samples=(None, 0, 0),
        )


def test_a_dataset_too_small_for_a_split_takes_no_part_in_a_blend_by_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small, large = numbered_corpus(tmp_path / "small", [9]), numbered_corpus(tmp_path / "large", [9] * 20)
    train, valid, _ = build(
        tmp_path / "cache", data_path=[str(small), str(large)], split="80,20,0", num_samples=(None, 3, 0)
    )
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, BlendedDataset)
    assert sorted(set(train.dataset_index.tolist())) == [0, 1]
    assert len(train) == sum(len(part) for part in train.datasets)
    assert valid.dataset_index.tolist() == [1, 1, 1]
    assert "small has no sample here and takes no part in the blend" in caplog.text
    with pytest.raises(ValueError, match=r"leaves valid no sample in any of .*small.*but 3 are requested"):
        build(tmp_path / "cache", data_path=[str(small)] * 3, split="80,20,0", num_samples=(2, 3, 0))


def test_the_blocks_of_a_prolonged_run_are_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = str(numbered_corpus(tmp_path / "corpus", [8] * 10))
    with caplog.at_level(logging.INFO):
        build(tmp_path / "cache", data_path=[corpus], split="1", num_samples=([3, 2], 0, 0))
    lines = [line for line in caplog.messages if line.startswith(("block", "train"))]
    assert [line.partition(" from ")[0].partition(" samples:")[0] for line in lines][::2] == [
        "block 1 of 2, for 3",
        "block 2 of 2, for 2",
    ]
    assert all(line.startswith("train: ") for line in lines[1::2])


def test_a_prolonged_run_keeps_its_order_and_appends_a_block(tmp_path: Path) -> None:
    corpus = str(numbered_corpus(tmp_path / "corpus", [7] * 30))

    def train(blocks: list[int]) -> list[list[int]]:
        dataset = build(tmp_path / "cache", data_path=[corpus], split="1", num_samples=(blocks, 0, 0))[0]
        assert len(dataset or ()) == sum(blocks)
        return read_all(dataset)

    blocks = extend_blocks([], 40)
    longer = extend_blocks(blocks, 65)
    assert (blocks, longer) == ([40], [40, 25])
    before, after = train(blocks), train(longer)
    assert after[:40] == before
    whole = build(tmp_path / "cache", data_path=[corpus], split="1", num_samples=(40, 0, 0))[0]
    assert read_all(whole)[:40] == before, "the first block is Megatron-LM's order"
    assert after[40:] != before[:25], "the second block has an order of its own"
    assert train(extend_blocks(longer, 80))[:65] == after
    assert extend_blocks(longer, 50) == longer, "fewer samples leave the order as it is"
    assert extend_blocks(longer, 65) == longer


def test_each_block_has_a_seed_of_its_own() -> None:
    seeds = [block_seed(1234, number) for number in range(20)]
    assert seeds[0] == 1234
    assert len(set(seeds)) == 20
    assert block_seed(1235, 1) != block_seed(1234, 1)


def test_a_blend_that_reads_each_sample_once_can_not_give_more(tmp_path: Path) -> None:
    corpora = [str(numbered_corpus(tmp_path / name, [9])) for name in "ab"]
    with pytest.raises(ValueError, match=r"5 training samples are requested, the data gives 4: .*weights"):
        build(tmp_path / "cache", train_data_path=corpora, num_samples=([5], 0, 0))


def test_blocks_of_no_samples_are_passed_over(tmp_path: Path) -> None:
    blocked = BlockedDataset([[1], [], [2, 3]], [1, 0, 2])  # type: ignore[list-item]
    assert [blocked[number] for number in range(3)] == [1, 2, 3]
    for number in (-1, 3):
        with pytest.raises(IndexError):
            blocked[number]


def test_mock_data_needs_no_file_and_fills_all_splits(tmp_path: Path) -> None:
    datasets = build(
        tmp_path / "cache",
        mock_data=True,
        num_samples=(10, 5, 5),
        seq_length=2048,
        vocab_size=50257,
        eod=50256,
    )
    again = build(
        tmp_path / "other",
        mock_data=True,
        num_samples=(10, 5, 5),
        seq_length=2048,
        vocab_size=50257,
        eod=50256,
    )
    for dataset, same in zip(datasets, again):
        assert isinstance(dataset, GPTDataset)
        assert same is not None
        assert len(dataset) >= 5
        assert dataset[3].tolist() == same[3].tolist()
        lengths = dataset.source.sequence_lengths
        assert len(lengths) == 100_000
        assert (lengths.min(), lengths.max()) == (1, 4095)
        assert dataset.source.get(0).tolist() == [*range(1, lengths[0]), 50256]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({}, r"No space left on device: an array of [0-9,]{6,} GiB"),
        ({"data_cache_path": None}, r"takes [0-9,]{6,} GiB.*--train-iters"),
    ],
)
def test_an_index_that_no_machine_could_hold_is_refused_before_it_is_built(
    options: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=refusal):
        build(tmp_path, mock_data=True, num_samples=(10**17, 5, 5), vocab_size=50257, eod=50256, **options)


def test_mock_data_fits_a_small_vocabulary(tmp_path: Path) -> None:
    train = build(tmp_path / "cache", mock_data=True, seq_length=4096, vocab_size=7, eod=6)[0]
    assert train is not None
    assert {int(token) for number in range(3) for token in train[number]} == set(range(1, 7))


def test_the_sources_of_blends_and_blocks_are_named_once(tmp_path: Path) -> None:
    prefixes = [str(numbered_corpus(tmp_path / name, [9] * size)) for name, size in (("a", 20), ("b", 30))]
    blended = ["0.5", prefixes[0], "0.5", prefixes[1]]
    splits = build(tmp_path, data_path=blended, num_samples=([8, 4], 4, 0), split="60,40,0")
    sources = token_sources(*splits)
    assert [source.prefix for source in sources] == prefixes
    assert [source.fingerprint for source in sources] == [IndexedDataset(prefix).fingerprint for prefix in prefixes]
    (alone,) = token_sources(*build(tmp_path, data_path=prefixes[:1], split="100,0,0"))
    assert alone.prefix == prefixes[0]


def test_the_datasets_of_a_blend_are_built_at_the_same_time_and_stay_in_order(tmp_path: Path) -> None:
    prefixes = [str(numbered_corpus(tmp_path / name, [9] * 20, first=1 + 300 * n)) for n, name in enumerate("abc")]
    words = [word for prefix in prefixes for word in ("1", prefix)]
    meeting = threading.Barrier(3)

    class Waits(IndexedDataset):
        def __init__(self, prefix: str, **reading: bool) -> None:
            meeting.wait(timeout=60)
            super().__init__(prefix, **reading)

    one = build(tmp_path / "one", data_path=words, split="1", num_samples=(30, 0, 0))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.data.build.IndexedDataset", Waits)
        several = build(
            tmp_path / "several", data_path=words, split="1", num_samples=(30, 0, 0), num_dataset_builder_threads=3
        )[0]
    assert read_all(several) == read_all(one)
