"""Which tokens of a sample of BERT are hidden, and by what."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.masked_lm import BertVocabulary, TokenMasker

CLS, SEP, MASK = 1, 2, 3
SIZE = 1000
CONTINUES = np.arange(SIZE) % 3 == 2  # of the words, every third continues the one before it; so does [SEP] by its id
VOCABULARY = BertVocabulary(size=SIZE, cls=CLS, sep=SEP, mask=MASK, pad=0, continues_word=CONTINUES)


def sample(words: list[int]) -> np.ndarray:
    half = len(words) // 2
    return np.array([CLS, *words[:half], SEP, *words[half:], SEP], dtype=np.int64)


def budget(length: int, target: int, share: float) -> int:
    return int(min(share * target, max(1, round(length * share))))


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.integers(4, SIZE - 1), min_size=0, max_size=120),
    share=st.floats(0.01, 1.0),
    longest=st.integers(1, 5),
    whole_words=st.booleans(),
    shorter=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_hidden_fits_the_budget_and_the_rest_stays(
    words: list[int], share: float, longest: int, whole_words: bool, shorter: int, seed: int
) -> None:
    tokens = sample(words)
    target = max(2, len(words) - shorter)
    masker = TokenMasker(VOCABULARY, mask_prob=share, max_ngram=longest, whole_words=whole_words)
    before = tokens.copy()
    shown, hidden = masker.hide(tokens, target_length=target, random=np.random.RandomState(seed))
    assert np.array_equal(tokens, before), "the labels are the ids of before"
    assert hidden.sum() <= budget(len(tokens), target, share)
    assert not hidden[np.isin(tokens, [CLS, SEP])].any(), "neither [CLS] nor [SEP] is hidden"
    assert np.array_equal(shown[~hidden], tokens[~hidden])
    assert ((shown >= 0) & (shown < SIZE)).all()
    again = masker.hide(tokens, target_length=target, random=np.random.RandomState(seed))
    assert np.array_equal(shown, again[0]) and np.array_equal(hidden, again[1])
    if whole_words:
        positions = np.flatnonzero(~np.isin(tokens, [CLS, SEP]))
        pieces = CONTINUES[tokens[positions]]
        pieces[:1] = False
        same_word = hidden[positions][1:] == hidden[positions][:-1]
        assert same_word[pieces[1:]].all(), "a word is hidden whole or not at all"


def test_of_a_hundred_tokens_fifteen_are_hidden_and_by_what() -> None:
    """1,000 samples of 100 tokens without pieces of words, in runs of up to three."""
    plain = BertVocabulary(size=10_000, cls=CLS, sep=SEP, mask=MASK, pad=0, continues_word=np.zeros(10_000, np.bool_))
    masker = TokenMasker(plain, mask_prob=0.15, max_ngram=3, whole_words=True)
    masked = kept = replaced = 0
    for seed in range(1000):
        random = np.random.RandomState(seed)
        tokens = sample(random.randint(4, 10_000, size=97).tolist())
        shown, hidden = masker.hide(tokens, target_length=100, random=random)
        assert hidden.sum() == 15, "single words fill what a run has no room for"
        masked += int((shown[hidden] == MASK).sum())
        kept += int((shown[hidden] == tokens[hidden]).sum())
        replaced += int(((shown != tokens) & (shown != MASK) & hidden).sum())
    count = masked + kept + replaced
    assert count == 15_000
    for found, share in [(masked, 0.8), (kept, 0.1), (replaced, 0.1)]:
        assert abs(found - share * count) < 5 * sqrt(count * share * (1 - share)), "five standard deviations"


def test_runs_of_n_words_are_drawn_one_in_n_as_often() -> None:
    plain = BertVocabulary(size=SIZE, cls=CLS, sep=SEP, mask=MASK, pad=0, continues_word=None)
    masker = TokenMasker(plain, mask_prob=0.002, max_ngram=3, whole_words=False)
    runs = np.zeros(4, dtype=np.int64)
    for seed in range(3000):
        # A budget of three in 1,500 tokens: the first run is whole.
        random = np.random.RandomState(seed)
        tokens = np.full(1500, 7, dtype=np.int64)
        _, hidden = masker.hide(tokens, target_length=1500, random=random)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], hidden.astype(np.int8), [0]))))
        runs[np.max(edges[1::2] - edges[::2])] += 1
    # 6/11 begin with one word, 3/11 with two, 2/11 with three. After one word two may follow, and the other way round.
    assert runs[3] > 0.9 * 3000 * 2 / 11 and runs.sum() == 3000


def test_a_run_over_the_end_of_the_sample_ends_there() -> None:
    masker = TokenMasker(VOCABULARY, mask_prob=1.0, max_ngram=5, whole_words=False)
    for seed in range(200):
        _, hidden = masker.hide(sample([4, 6, 7]), target_length=100, random=np.random.RandomState(seed))
        # A run that meets a hidden word is not hidden at all, so words before the last one may stay.
        assert hidden[4], "a run from the last word is the last word"


def test_a_target_that_leaves_no_token_to_hide_hides_none() -> None:
    masker = TokenMasker(VOCABULARY, mask_prob=0.15, max_ngram=3, whole_words=False)
    shown, hidden = masker.hide(sample([4, 6, 7, 9]), target_length=6, random=np.random.RandomState(0))
    assert not hidden.any() and shown.tolist() == sample([4, 6, 7, 9]).tolist()


@pytest.mark.parametrize("words", [[], [CLS], [SEP, CLS, SEP]])
def test_a_sample_without_a_word_hides_none(words: list[int]) -> None:
    masker = TokenMasker(VOCABULARY, mask_prob=1.0, max_ngram=3, whole_words=True)
    assert not masker.hide(sample(words), target_length=100, random=np.random.RandomState(0))[1].any()


def test_a_word_wider_than_the_budget_is_passed_over_for_narrower_ones() -> None:
    """One word of 40 pieces, and ten of one; six tokens may be hidden."""
    tokens = sample([4, *[5] * 39, *[4] * 10])
    masker = TokenMasker(VOCABULARY, mask_prob=0.12, max_ngram=1, whole_words=True)
    for seed in range(50):
        _, hidden = masker.hide(tokens, target_length=60, random=np.random.RandomState(seed))
        assert hidden.sum() == 6
        assert not hidden[2:26].any()
