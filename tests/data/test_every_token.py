"""Over random corpora, every token of every epoch is read as often, and in the place, that docs/DATA.md says.

Nothing here knows how an index is built: ids are numbered through, so the samples themselves say what was read.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.build import build_gpt_datasets
from megatron.data.sample_dataset import SampleDataset, TokenArray
from tests.data.corpora import numbered_corpus

# Empty documents, of one token, and now and then a huge one.
LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40), st.just(1500)), min_size=1, max_size=12)


def build(folder: Path, requested: int | None, seed: int, seq_length: int, data_path: list[str]) -> SampleDataset:
    data = DataConfig(data_path=tuple(data_path), split="1", seq_length=seq_length, data_cache_path=str(folder / "c"))
    train, _, _ = build_gpt_datasets(data, num_samples=(requested, 0, 0), seed=seed, vocab_size=2**16, eod=0)
    assert train is not None
    return train


def read(dataset: SampleDataset, begin: int = 0, end: int | None = None) -> list[TokenArray]:
    return [dataset[number] for number in range(begin, len(dataset) if end is None else end)]


def check_samples_follow_documents(samples: list[TokenArray], lengths: list[int], seq_length: int) -> None:
    """A sample goes on within a document, and from its end to the start of one."""
    starts, ends, first = set(), set(), 1
    for length in lengths:
        if length:
            starts.add(first)
            ends.add(first + length - 1)
        first += length
    for sample in samples:
        ids = sample.tolist()
        assert len(ids) == seq_length + 1
        assert all(after == before + 1 or (before in ends and after in starts) for before, after in pairwise(ids))


@settings(max_examples=80, deadline=None)
@given(
    lengths=LENGTHS.filter(lambda lengths: sum(lengths) > 0),
    seq_length=st.integers(1, 30),
    epochs=st.floats(0.1, 4.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_token_is_read_once_an_epoch_but_for_the_tail_of_the_last(
    lengths: list[int], seq_length: int, epochs: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    tokens = sum(lengths)
    requested = max(1, int(epochs * tokens / seq_length))
    dataset = build(folder, requested, seed, seq_length, [str(numbered_corpus(folder / "a", lengths))])
    whole = -(-(requested * seq_length + 1) // tokens)  # epochs that hold the requested samples, and a last label
    samples = read(dataset)
    check_samples_follow_documents(samples, lengths, seq_length)
    for part in (slice(0, -1), slice(1, None)):  # as an input, and as a label
        seen = Counter(token for sample in samples for token in sample[part].tolist())
        assert set(seen) <= set(range(1, tokens + 1))
        assert max(seen.values()) <= whole
        # What is missing is less than a sample, at the end of the order (of labels, also the first token of all).
        assert sum(seen.values()) == len(samples) * seq_length
        assert 1 <= whole * tokens - len(samples) * seq_length <= seq_length
    # Where most of the last epoch is not needed, what it adds comes after all that the earlier ones hold.
    if whole == 1:
        return
    earlier, in_one = ((count * tokens - 1) // seq_length for count in (whole - 1, 1))
    if requested - earlier < int(0.8 * in_one):
        seen = Counter(token for sample in read(dataset, 0, earlier) for token in sample[:-1].tolist())
        assert max(seen.values(), default=0) <= whole - 1
        assert (whole - 1) * tokens - sum(seen.values()) <= seq_length
        # The first of these may begin with what was left over before.
        late = Counter(token for sample in read(dataset, earlier) for token in sample[:-1].tolist())
        assert sum(count - 1 for count in late.values() if count > 1) <= seq_length


@settings(max_examples=40, deadline=None)
@given(
    corpora=st.lists(LENGTHS.filter(lambda lengths: sum(lengths) > 10), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    requested=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_blend_reads_each_corpus_in_its_own_order_at_its_share(
    corpora: list[list[int]],
    weights: list[int],
    requested: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("corpora")
    words = []
    for number, (lengths, weight) in enumerate(zip(corpora, weights)):
        words += [str(weight), str(numbered_corpus(folder / str(number), lengths))]
    blend = build(folder, requested, seed, 8, words)
    assert isinstance(blend, BlendedDataset)
    assert len(blend) >= requested
    drawn = [0] * len(corpora)
    for count, sample in enumerate(read(blend)):
        number = int(blend.dataset_index[count])
        assert sample.tolist() == blend.datasets[number][drawn[number]].tolist()
        drawn[number] += 1
        for weight, of_this in zip(weights, drawn):
            # No corpus is ever a whole sample ahead of its share, nor behind it by one for each other corpus.
            share = weight / sum(weights[: len(corpora)]) * (count + 1)
            assert -len(corpora) < of_this - share < 1 + 1e-9
    for part, lengths in zip(blend.datasets, corpora):
        check_samples_follow_documents(read(part), lengths, 8)


@settings(max_examples=40, deadline=None)
@given(
    corpora=st.lists(LENGTHS, min_size=2, max_size=4).filter(lambda them: max(map(sum, them)) > 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_blend_without_weights_reads_each_sample_once(
    corpora: list[list[int]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, words, first = tmp_path_factory.mktemp("corpora"), [], 1
    for number, lengths in enumerate(corpora):
        words.append(str(numbered_corpus(folder / str(number), lengths, first=first)))
        first += sum(lengths)
    blend = build(folder, None, seed, 8, words)
    seen = Counter(token for sample in read(blend) for token in sample[:-1].tolist())
    assert set(seen.values()) == {1}
    assert len(seen) == sum((max(sum(lengths), 1) - 1) // 8 * 8 for lengths in corpora)
