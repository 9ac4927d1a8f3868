"""From the records of a block to the arrays of a dataset."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.problems import UserError
from preprocess.fast_tokenizer import BatchTokenizer
from preprocess.records import Record, Text, parts_of


class Documents(NamedTuple):
    """Documents as `IndexedDatasetWriter.add_documents` takes them."""

    ids: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Gives a document its sequences: of each sentence its ids, or of the whole text.

    Sentences that the input has one by one stay as they are.

    A sentence without ids is no sequence, and a document without ids has none, nor an end-of-document id: as in
    Megatron-LM.

    Attributes:
        keys: which texts of a record are documents, each of a dataset of its own.
        eod: id that ends each document, None for none.
        split: from a text to its sentences, None where the text is one sequence.
    """

    keys: Sequence[str]
    eod: int | None
    split: Callable[[str], list[str]] | None

    def __call__(self, records: Sequence[Record], tokenize: BatchTokenizer) -> list[Documents]:
        """Of each key the documents of good records.

        Raises:
            UserError: the tokenizer refuses a text.
        """
        return [self._documents([record.texts[key] for record in records], tokenize) for key in range(len(self.keys))]

    def refusal(self, record: Record, tokenize: BatchTokenizer) -> str:
        """Why the tokenizer refuses a record, "" when it does not."""
        for key, text in zip(self.keys, record.texts):
            try:
                self._documents([text], tokenize)
            except UserError as error:
                return f"key {key!r}: {error}"
        return ""

    def _documents(self, texts: Sequence[Text], tokenize: BatchTokenizer) -> Documents:
        parts = [self._sequences(text) for text in texts]
        ids, lengths = tokenize([part for each in parts for part in each])
        document_of = np.repeat(np.arange(len(texts)), [len(each) for each in parts])
        document_of, lengths = document_of[lengths > 0], lengths[lengths > 0]
        if self.eod is not None:
            last = np.flatnonzero(np.diff(document_of, append=-1))  # the last sequence of each document that has one
            ids = np.insert(ids, np.cumsum(lengths)[last], self.eod)
            lengths[last] += 1
        return Documents(ids, lengths, np.bincount(document_of, minlength=len(texts)))

    def _sequences(self, text: Text) -> list[str]:
        return self.split(text) if self.split is not None and isinstance(text, str) else parts_of(text)
