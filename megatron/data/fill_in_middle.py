"""Samples that teach to fill in the middle: of a document, the middle is moved behind what comes before and after it.

Bavarian et al. 2022, https://arxiv.org/abs/2207.14255. The document is cut at two characters, each of which may lie
within a token, as one that is typed does, so each of the three parts is tokenized anew. Then they are joined, with PRE,
SUF and MID the tokens that stand before them:
  PSM   PRE prefix SUF suffix MID middle
  SPM   PRE SUF suffix MID prefix middle

Documents are the runs of ids between two ends within a sample, so a sample is all that is needed, and what becomes of
it is a function of its ids, the seed and its number. Special tokens within a document are text as others are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.index_builder import derived_seed
from megatron.data.sample_dataset import SampleDataset, TokenArray

_NO_CHARACTER = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class MiddleMover:
    """How middles are moved.

    Attributes:
        rate: share of the documents whose middle is moved.
        spm_rate: share of these that become SPM.
        fragment_rate: of documents that are cut to fragments, the share of these whose middle is moved.
        no_prefix: what begins with this text stays as it is.
        prefix, middle, suffix: ids that stand before the parts.
        pad: id that fills what became shorter.
        eod: id that ends a document.
        split: id at which documents are cut to fragments; None: they are not.
        encode, decode: text to ids, of which nothing else is in them, and back; called from several threads.
    """

    rate: float
    spm_rate: float
    fragment_rate: float | None
    no_prefix: str | None
    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]

    def __call__(self, ids: TokenArray, random: np.random.RandomState) -> TokenArray:
        """The ids with middles moved, [n] -> [n or less] int64.

        What becomes longer is cut at its end. What becomes shorter is left so: padding is for those who know where it
        begins.
        """
        documents = [self._document(document, random) for document in _runs(ids, self.eod)]
        return _joined(documents, self.eod)[: ids.size]

    def _document(self, ids: TokenArray, random: np.random.RandomState) -> TokenArray:
        if self.split is None:
            return self._moved(ids, self.rate, random)
        if random.random_sample() >= self.rate:
            return ids
        assert self.fragment_rate is not None
        fragments = [self._moved(fragment, self.fragment_rate, random) for fragment in _runs(ids, self.split)]
        return _joined(fragments, self.split)

    def _moved(self, ids: TokenArray, rate: float, random: np.random.RandomState) -> TokenArray:
        """The ids with their middle moved, or as they are.

        They stay so too where they have no text: a sample may begin or end within a character, and half of it, once it
        is text, is lost.
        """
        if ids.size == 0 or random.random_sample() >= rate:
            return ids
        text = self.decode(ids.tolist())
        if _NO_CHARACTER in text or (self.no_prefix is not None and text.startswith(self.no_prefix)):
            return ids
        start, stop = sorted(random.randint(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (self.encode(part) for part in (text[:start], text[start:stop], text[stop:]))
        if random.random_sample() < self.spm_rate:
            moved = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            moved = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(moved, dtype=np.int64)


def _runs(ids: TokenArray, end: int) -> list[TokenArray]:
    """What stands before, between and behind the ids `end`: one run more than there are of these."""
    borders = np.flatnonzero(ids == end)
    return [ids[begin:stop] for begin, stop in zip([0, *(borders + 1).tolist()], [*borders.tolist(), ids.size])]


def _joined(runs: Sequence[TokenArray], end: int) -> TokenArray:
    """The inverse of `_runs`."""
    between = np.array([end], dtype=np.int64)
    return np.concatenate([part for run in runs for part in (between, run)][1:]).astype(np.int64, copy=False)


class FillInTheMiddleDataset:
    """The samples of a dataset with middles moved.

    Args:
        seed: of the run.
        split: a name, so that two datasets of a run have other draws.
    """

    def __init__(self, dataset: SampleDataset[TokenArray], mover: MiddleMover, *, seed: int, split: str) -> None:
        self._dataset, self._mover = dataset, mover
        self._seed, self._split = seed, split

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> TokenArray:
        random = np.random.RandomState(derived_seed(self._seed, "fill in the middle", self._split, index))
        return self._mover(self._dataset[index], random)
