"""Samples of BERT from random corpora: each sentence where the rules put it, and what is refused and how."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.bert import BertConfig
from megatron.config.data import DataConfig
from megatron.config.problems import UserError
from megatron.core.kernels import extension
from megatron.data.bert_batches import BertCollator
from megatron.data.bert_dataset import BertDataset, BertSample, build_bert_datasets, cut_pair
from megatron.data.bert_mapping import SentenceWalk, bert_mapping_reference, build_bert_mapping
from megatron.data.blended_dataset import BlendedDataset, BlockedDataset
from megatron.data.build import token_sources
from megatron.data.masked_lm import BertVocabulary
from tests.data.corpora import write_corpus

CLS, SEP, MASK, PAD = 65533, 65534, 65532, 0
VOCABULARY = BertVocabulary(size=65536, cls=CLS, sep=SEP, mask=MASK, pad=PAD, continues_word=None)
Documents = list[list[int]]  # the lengths of the sentences of each document


def corpus(prefix: Path, documents: Sequence[Sequence[int]], first: int = 1) -> str:
    """Ids count up from `first` over the whole corpus, so that each token is known by its value."""
    numbers = itertools.count(first)
    write_corpus(prefix, [[list(itertools.islice(numbers, length)) for length in document] for document in documents])
    return str(prefix)


def build(
    cache: Path,
    num_samples: tuple[Any, Any, Any] = (4, 0, 0),
    seed: int = 1,
    bert: BertConfig | None = None,
    **data: Any,
) -> list[Any]:
    bert = bert or BertConfig(whole_word_masking=False, short_seq_prob=0.0)
    config = DataConfig(**{"seq_length": 16, "data_cache_path": str(cache / "cache"), **data})
    train, valid, test = build_bert_datasets(config, bert, num_samples=num_samples, seed=seed, vocabulary=VOCABULARY)
    return [train, valid.get("validation"), test]


def segments(sample: BertSample) -> tuple[list[int], list[int]]:
    """The two parts of the text in the order of the text, as they were before tokens were hidden."""
    ids = sample.labels.tolist()
    assert ids[0] == CLS and ids[-1] == SEP
    middle = ids.index(SEP)
    parts = [ids[1:middle], ids[middle + 1 : -1]]
    assert sample.token_types.tolist() == [0] * (middle + 1) + [1] * (len(ids) - middle - 1)
    return (parts[1], parts[0]) if sample.exchanged else (parts[0], parts[1])


SENTENCES = st.one_of(st.integers(1, 12), st.sampled_from([1, 511, 512, 513, 600]))
DOCUMENTS = st.lists(st.lists(SENTENCES, max_size=9), min_size=1, max_size=9)


def mapping_on_threads(
    lengths: np.ndarray, borders: np.ndarray, walk: SentenceWalk, *, spacing: int, threads: int, row_type: str
) -> np.ndarray:
    """The compiled walk on more threads than the machine may have cores."""
    module = extension.load_extension()
    assert module is not None
    arguments = {
        "lengths": lengths,
        "documents": borders,
        "sequence_length": walk.sequence_length,
        "short_every": walk.short_every,
        "least_sentences": walk.least_sentences,
        "requested": walk.at_least,
        "seed": walk.seed,
    }
    marks = module.mark_bert_samples(**arguments, spacing=spacing)
    samples = [samples for _, _, samples in marks]
    assert all(after - before >= spacing for before, after in itertools.pairwise(samples[:-1])), "but for the last"
    rows = np.empty((samples[-1], 3), row_type)
    getattr(module, f"build_bert_mapping_{row_type}")(**arguments, marks=marks, threads=threads, rows=rows)
    return rows


def usable(document: Sequence[int], pairs: bool) -> bool:
    """Whether a document gives samples."""
    if len(document) < (2 if pairs else 1):
        return False
    return len(document) == 1 or max(document) <= 512


@settings(max_examples=100, deadline=None)
@given(
    documents=DOCUMENTS,
    sequence_length=st.integers(2, 40),
    short=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    pairs=st.booleans(),
    requested=st.sampled_from([None, 1, 30]),
    seed=st.integers(0, 2**32 - 1),
    spacing=st.sampled_from([1, 3, 1 << 16]),
    threads=st.sampled_from([1, 2, 7]),
)
def test_over_an_epoch_every_sentence_of_a_document_that_counts_is_in_one_sample(
    documents: Documents,
    sequence_length: int,
    short: float,
    pairs: bool,
    requested: int | None,
    seed: int,
    spacing: int,
    threads: int,
) -> None:
    lengths = np.array([length for document in documents for length in document], dtype=np.int32)
    borders = np.cumsum([0, *map(len, documents)])
    least = 2 if pairs else 1
    walk = SentenceWalk(
        sequence_length=sequence_length, short_probability=short, least_sentences=least, requested=requested, seed=seed
    )
    rows = build_bert_mapping(lengths, borders, walk)
    assert np.array_equal(rows, bert_mapping_reference(lengths, borders, walk))
    for row_type in ("uint32", "uint64"):
        by_threads = mapping_on_threads(lengths, borders, walk, spacing=spacing, threads=threads, row_type=row_type)
        assert np.array_equal(rows, by_threads), "a function of the seed"
    seen = Counter(sentence for first, end, _ in rows.tolist() for sentence in range(first, end))
    epochs = max(seen.values(), default=0)
    wanted = {
        sentence: epochs
        for document, first in zip(documents, borders.tolist())
        if usable(document, pairs)
        for sentence in range(first, first + len(document))
    }
    assert seen == wanted
    document_of = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    ends = set(borders.tolist())
    for first, end, target in rows.tolist():
        assert document_of[first] == document_of[end - 1], "a sample is of one document"
        assert end - first >= least
        assert target == sequence_length or (short > 0 and 2 <= target <= sequence_length)
        if end not in ends:
            assert lengths[first:end].sum() >= target, "only the last of a document may fall short of its target"
            assert end + 1 not in ends, "no sentence is left alone"
            if end - first > least:
                assert lengths[first : end - 1].sum() < target, "no sentence beyond the target"
    if wanted and requested:
        assert requested <= len(rows)
        if short == 0.0:  # as many samples in each epoch
            assert (epochs - 1) * len(rows) < epochs * requested, "no epoch more than it takes"


@settings(max_examples=30, deadline=None)
@given(
    documents=DOCUMENTS.filter(lambda documents: any(usable(document, pairs=True) for document in documents)),
    seq_length=st.integers(5, 40),
    short=st.sampled_from([0.0, 0.5]),
    pairs=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sample_is_a_pair_of_neighbours_cut_at_its_ends(
    documents: Documents,
    seq_length: int,
    short: float,
    pairs: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    prefix = corpus(folder / "corpus", documents)
    bert = BertConfig(binary_head=pairs, short_seq_prob=short, whole_word_masking=False)
    train, _, _ = build(
        folder, (None, 0, 0), seed=seed, bert=bert, data_path=[prefix], split="1,0,0", seq_length=seq_length
    )
    starts = np.concatenate(([1], 1 + np.cumsum([length for document in documents for length in document]))).tolist()
    samples = [train[number] for number in range(len(train))]
    for sample, (first, end, target) in zip(samples, train.mapping.tolist()):
        one, other = segments(sample)
        assert len(one) + len(other) == min(target, starts[end] - starts[first])
        assert sample.truncated == (starts[end] - starts[first] > target)
        assert target <= seq_length - 3 and len(sample.tokens) <= seq_length
        for part in (one, other):
            assert part == list(range(part[0], part[0] + len(part))) if part else True, "a part is cut at its ends only"
        if not pairs:
            assert other == [] and not sample.exchanged and (sample.token_types == 0).all()
            continue
        assert one and other and one[-1] < other[0]
        borders = [start for start in starts[first + 1 : end] if one[-1] < start <= other[0]]
        assert borders, "the parts are whole sentences, before they are cut"
    batch = BertCollator(seq_length=seq_length, pad=PAD, pairs=pairs)(samples, range(len(samples)))
    counts = {name: count.item() for name, count in batch.loss_counts().items()}
    hidden = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert counts == {"lm loss": hidden, "sop loss": len(samples)} if pairs else {"lm loss": hidden}
    assert batch.is_real.sum().item() == sum(sample.tokens.size for sample in samples)
    assert (batch.tokens[~batch.is_real] == PAD).all() and not batch.loss_mask[~batch.is_real].any()


def test_half_of_the_pairs_are_exchanged(tmp_path: Path) -> None:
    train, _, _ = build(tmp_path, (2000, 0, 0), data_path=[corpus(tmp_path / "a", [[3, 4, 3, 4]] * 50)], split="1,0,0")
    exchanged = sum(train[number].exchanged for number in range(2000))
    assert abs(exchanged - 1000) < 5 * np.sqrt(500), "five standard deviations"


@settings(max_examples=200, deadline=None)
@given(first=st.integers(0, 30), second=st.integers(0, 30), target=st.integers(0, 60), seed=st.integers(0, 2**32 - 1))
def test_segments_are_cut_a_token_at_a_time_from_the_longer_one(
    first: int, second: int, target: int, seed: int
) -> None:
    random = np.random.RandomState(seed)
    parts = [list(range(first)), list(range(second))]
    while sum(map(len, parts)) > target:
        longer = parts[0] if len(parts[0]) > len(parts[1]) else parts[1]
        del longer[0 if random.random_sample() < 0.5 else -1]
    after = np.random.RandomState(seed)
    kept = cut_pair(first, second, target, after)
    assert [list(range(first))[kept[0]], list(range(second))[kept[1]]] == parts
    assert after.random_sample() == random.random_sample(), "as many draws"


def test_a_huge_sentence_is_cut_without_a_draw_for_each_token_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cut_pair(5000, 4000, 100, np.random.RandomState(3))
    monkeypatch.setattr("megatron.data.bert_dataset._CUTS_AT_ONCE", 7)
    assert cut_pair(5000, 4000, 100, np.random.RandomState(3)) == whole


def test_samples_are_the_same_in_any_thread_and_order(tmp_path: Path) -> None:
    train, _, _ = build(tmp_path, (60, 0, 0), data_path=[corpus(tmp_path / "a", [[3, 9, 14, 2, 7]] * 9)], split="1,0,0")
    expected = [train[number].tokens.tolist() for number in range(60)]
    order = np.random.RandomState(0).permutation(60).tolist()
    with ThreadPoolExecutor(4) as threads:
        read = dict(zip(order, threads.map(lambda number: train[number].tokens.tolist(), order)))
    assert [read[number] for number in range(60)] == expected


def test_another_seed_or_number_is_another_sample(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", [[9, 9, 9]])
    one, other = (build(tmp_path, (9, 0, 0), seed, data_path=[prefix], split="1,0,0")[0] for seed in (1, 2))
    shown = {tuple(dataset[number].tokens.tolist()) for dataset in (one, other) for number in range(9)}
    assert len(shown) > 9


def test_a_blend_and_blocks_are_made_of_samples_of_bert(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", [[3, 4, 5]] * 20), corpus(tmp_path / "b", [[3, 4]] * 20, first=1000)
    train, valid, test = build(tmp_path, ((30, 10), 8, 0), data_path=["0.75", a, "0.25", b], split="8,2,0")
    assert isinstance(train, BlockedDataset) and isinstance(train.blocks[0], BlendedDataset)
    assert len(train) == 40 and len(valid) == 8 and test is None
    assert sum(train[number].labels[1] >= 1000 for number in range(30)) == 8
    assert [source.prefix for source in token_sources(train, valid)] == [a, b]
    by_size, _, _ = build(tmp_path, (20, 0, 0), data_path=[a, b], split="1,0,0")
    assert len(by_size) == 20


def test_a_split_is_a_share_of_the_documents_and_not_of_the_sentences(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", [[2] * 8, [2] * 4, [2, 2], [2, 2]])
    train, valid, _ = build(tmp_path, (None, None, 0), data_path=[prefix], split="50,50,0")
    assert sorted(train.mapping[:, 1].tolist())[-1] == 12
    assert sorted(valid.mapping[:, :2].tolist()) == [[12, 14], [14, 16]]


def test_mock_sentences_need_no_file(tmp_path: Path) -> None:
    train, valid, test = build(tmp_path, (10, 4, 4), mock_data=True, seq_length=64)
    for dataset in (train, valid, test):
        one, other = segments(dataset[0])
        assert other[0] == one[-1] + 1 or dataset[0].truncated
    assert isinstance(train, BertDataset)


# ---- what is refused, and how ----


def test_a_corpus_without_sentences_is_refused_for_pairs_alone(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "whole", [[40], [], [30], [700]])
    with pytest.raises(
        UserError, match=r"whole: no document has two sentences.*--split-sentences.*--bert-no-binary-head"
    ):
        build(tmp_path, data_path=[prefix], split="1,0,0")
    some = corpus(tmp_path / "some", [[4, 4], [], [3], []])
    assert len(build(tmp_path, data_path=[some], split="1,0,0")[0]) == 4, "fewer sentences than documents, yet a pair"
    alone = BertConfig(binary_head=False, whole_word_masking=False)
    train, _, _ = build(tmp_path, bert=alone, data_path=[prefix], split="1,0,0")
    assert {sample.tokens.size for sample in (train[number] for number in range(len(train)))} <= set(range(4, 16))


@pytest.mark.parametrize("documents", [[[5, 5]] * 501 + [[5]], [[5, 5]] * 501 + [[]], [[5, 5]] * 501 + [[5, 513]]])
def test_a_split_that_gives_no_sample_is_named_and_does_not_hang(tmp_path: Path, documents: Documents) -> None:
    prefix = corpus(tmp_path / "tiny", documents)
    with pytest.raises(UserError) as refused:
        build(tmp_path, (100, 20, 4), data_path=[prefix], split="449,50,1")
    text = str(refused.value)
    assert "--split '449,50,1' leaves test 1 of the 502 documents" in text
    assert "4 are requested" in text and "--test-data-path" in text and "--eval-iters 0" in text
    counts = ["1 document without a sentence", "1 of one sentence", "1 with a sentence of over 512 tokens"]
    assert sum(count in text for count in counts) == 1, "why"


def test_a_corpus_of_two_lines_trains_and_says_which_split_is_empty(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "lines", [[8, 6], [5, 7, 3]])
    with pytest.raises(UserError, match=r"'969, 30, 1' leaves valid 0 of the 2 documents"):
        build(tmp_path, (100, 8, 8), data_path=[prefix])
    train, valid, _ = build(tmp_path, (100, 0, 0), data_path=[prefix])
    assert len(train) >= 100 and len(valid) == 0


def test_sentences_with_special_tokens_of_their_own_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_corpus(tmp_path / "special", [[[], [CLS, 5, 6, SEP], [CLS, 7, SEP]]] * 4)
    build(tmp_path, data_path=[str(prefix)], split="1,0,0")
    assert "begin with [CLS] and end with [SEP]" in caplog.text


def test_only_the_first_sentences_of_a_corpus_are_searched_for_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where each sentence is one token, none shows how it was made, and there may be billions."""
    monkeypatch.setattr("megatron.data.bert_dataset._SENTENCES_TO_SEE", 2)
    for words, warned in (([], False), ([[CLS, 7, SEP]], True)):
        prefix = write_corpus(tmp_path / f"{warned}", [[[5], *words, [6], [CLS, 5, 6, SEP]]] * 4)
        build(tmp_path, data_path=[str(prefix)], split="1,0,0")
        assert ("begin with [CLS] and end with [SEP]" in caplog.text) == warned


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "other", [[[5, 70000], [6, 7]]], dtype=np.int32)
    with pytest.raises(UserError, match="holds the id 70000, but the vocabulary has 65536 entries"):
        build(tmp_path, data_path=[str(prefix)], split="1,0,0")
    rare = write_corpus(tmp_path / "rare", [[[6] * 40] * 30 + [[70000], [6]], *[[[6]]] * 50_000], dtype=np.int32)
    train, _, _ = build(tmp_path, data_path=[str(rare)], split="1,0,0")
    with pytest.raises(UserError, match="rare: holds the id 70000, but the vocabulary has 65536 entries"):
        [train[number] for number in range(len(train))]
    with pytest.raises(IndexError, match=f"sample {len(train)} of the train split"):
        train[len(train)]


def test_documents_beyond_the_sentences_are_an_error_and_not_a_read_past_the_end() -> None:
    walk = SentenceWalk(sequence_length=9, short_probability=0.1, least_sentences=1, requested=None, seed=1)
    lengths = np.ones(3, dtype=np.int32)
    for mapping in (build_bert_mapping, bert_mapping_reference):
        with pytest.raises(IndexError, match="sentences 2 to 4 of a file with 3"):
            mapping(lengths, np.array([0, 2, 4]), walk)


def test_rows_are_of_64_bits_where_there_are_more_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, documents = np.full(40, 7, dtype=np.int32), np.arange(0, 41, 4)
    walk = SentenceWalk(sequence_length=9, short_probability=0.1, least_sentences=2, requested=99, seed=2**32 - 1)
    narrow = build_bert_mapping(lengths, documents, walk)
    monkeypatch.setattr("megatron.data.bert_mapping._UINT32_MAX", 39)
    wide = build_bert_mapping(lengths, documents, walk)
    assert (narrow.dtype, wide.dtype) == (np.uint32, np.uint64)
    assert narrow.tolist() == wide.tolist()


# ---- the cache ----


def test_a_mapping_is_built_once_for_all_that_does_not_change_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = corpus(tmp_path / "a", [[3, 9, 4, 4]] * 10)

    def built(**changes: Any) -> int:
        caplog.clear()
        bert = BertConfig(**{"whole_word_masking": False, **changes.pop("bert", {})})
        build(tmp_path, bert=bert, **{"data_path": [prefix], "split": "1,0,0", **changes})
        return sum("built index" in record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.INFO):
        assert built() == 1
        assert built() == 0
        assert built(bert={"mask_prob": 0.3, "masking_max_ngram": 1}) == 0, "masks are no part of it"
        assert built(bert={"short_seq_prob": 0.5}) == 1
        assert built(bert={"binary_head": False}) == 1
        assert built(seq_length=17) == 1
        assert built(seed=2) == 1
        assert built(split="1,1,0") >= 1
        corpus(tmp_path / "a", [[3, 9], [4, 4]] * 10)
        assert built() == 1, "the same sentences in other documents"


def test_a_long_walk_is_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.bert_dataset._SENTENCES_OF_SECONDS", 40)
    with caplog.at_level(logging.INFO):
        build(tmp_path, data_path=[corpus(tmp_path / "a", [[3, 9, 4, 4], [3]] * 8)], split="1,0,0")
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "walking over 40 sentences for train"
    assert (
        "train: 0 documents without a sentence, 8 of one sentence, 0 with a sentence of over 512 tokens" in messages[1]
    )
