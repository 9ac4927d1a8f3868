"""The masked language model of J. Devlin et al., BERT (2018), §3.1: which tokens are hidden, and by what.

Number for number Megatron-LM's choice, which hides words, or runs of up to `masking_max_ngram` of them, in place of
tokens. Its order of random draws is kept: the words in random order; for each the length of its run; for each token of
the run what hides it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_MASK_SHARE = 0.8  # of the hidden tokens; of the others one half is replaced by a random word and one half is kept


@dataclass(frozen=True, kw_only=True)
class BertVocabulary:
    """What the samples of BERT know of its tokenizer.

    Attributes:
        size: ids are below it; a random word is any of them.
        cls, sep, mask: ids of [CLS], [SEP] and [MASK].
        pad: id that fills batches.
        continues_word: [size], True for the pieces that continue a word; None where words are not told apart.
    """

    size: int
    cls: int
    sep: int
    mask: int
    pad: int
    continues_word: BoolArray | None


class TokenMasker:
    """Hides tokens of a sample.

    Args:
        vocabulary: of the tokens.
        mask_prob: share of the tokens to hide.
        max_ngram: most words in a row that are hidden together; a run of n words is 1/n as likely as one word.
        whole_words: hide all pieces of a word or none; otherwise each piece counts as a word.
    """

    def __init__(self, vocabulary: BertVocabulary, *, mask_prob: float, max_ngram: int, whole_words: bool) -> None:
        assert vocabulary.continues_word is not None or not whole_words
        self._vocabulary = vocabulary
        self._mask_prob = mask_prob
        self._max_ngram = max_ngram
        self._whole_words = whole_words
        likelihood = 1 / np.arange(1, max_ngram + 1)
        likelihood /= likelihood.sum()
        likelihood /= likelihood.sum()  # twice, as Megatron-LM does: the last bit decides whose turn it is
        cumulative = likelihood.cumsum()
        self._run_lengths: list[float] = (cumulative / cumulative[-1]).tolist()

    def hide(
        self, tokens: Int64Array, *, target_length: int, random: np.random.RandomState
    ) -> tuple[Int64Array, BoolArray]:
        """The tokens with some of them hidden, and which: [n] each.

        Hidden are at most mask_prob of the tokens, rounded and at least one, and at most mask_prob of `target_length`,
        which may be none. Neither [CLS] nor [SEP] is hidden, whoever wrote them.

        Args:
            tokens: [n] int64 of a whole sample.
            target_length: tokens that the sample aims at.
            random: advanced.
        """
        positions, starts = self._words(tokens)
        num_words = len(starts) - 1
        order = np.arange(num_words)
        random.shuffle(order)
        budget = int(min(self._mask_prob * target_length, max(1, round(len(tokens) * self._mask_prob))))
        shown, hidden = tokens.copy(), np.zeros(tokens.shape, dtype=np.bool_)
        taken = bytearray(len(positions))
        num_hidden = 0
        draw = random.random_sample
        for word in order.tolist():
            if num_hidden == budget:
                break
            length = bisect_right(self._run_lengths, draw()) + 1
            begin = starts[word]
            while length and num_hidden + starts[min(word + length, num_words)] - begin > budget:
                length -= 1
            end = starts[min(word + length, num_words)]
            if length == 0 or any(taken[begin:end]):
                continue
            for number in range(begin, end):
                taken[number] = 1
                position = positions[number]
                if draw() < _MASK_SHARE:
                    shown[position] = self._vocabulary.mask
                elif draw() >= 0.5:
                    shown[position] = random.randint(0, self._vocabulary.size)
                hidden[position] = True
            num_hidden += end - begin
        return shown, hidden

    def _words(self, tokens: Int64Array) -> tuple[list[int], list[int]]:
        """Positions of the tokens of all words, and where in this list each word begins, then its length.

        A word that was cut in two, with a [SEP] or nothing before its second half, counts as one with the word before.
        """
        special = (tokens == self._vocabulary.cls) | (tokens == self._vocabulary.sep)
        positions = np.flatnonzero(~special)
        if self._whole_words:
            assert self._vocabulary.continues_word is not None
            begins = ~self._vocabulary.continues_word[tokens[positions]]
            begins[:1] = True
            starts = np.flatnonzero(begins)
        else:
            starts = np.arange(len(positions))
        return positions.tolist(), [*starts.tolist(), len(positions)]
