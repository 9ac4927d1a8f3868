"""What BERT has and GPT has not: its second loss, and how its samples are masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.config.options import flag
from megatron.config.problems import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig:
    """The section that a configuration has for `pretrain_bert.py` alone."""

    binary_head: bool = field(
        default=True,
        metadata=flag(
            "Learn from pairs of segments whether they are in their order.",
            name="--bert-binary-head",
            off="--bert-no-binary-head",
            off_help="Learn from masked tokens alone: no pairs of segments, no token types, no pooler, no second loss.",
            affects="tensors",
        ),
    )
    mask_prob: float = field(
        default=0.15,
        metadata=flag("Share of the tokens that are to be predicted.", affects="data", above=0, at_most=1),
    )
    short_seq_prob: float = field(
        default=0.1,
        metadata=flag(
            "Share of the samples that are shorter than --seq-length, by chance.", affects="data", at_least=0, at_most=1
        ),
    )
    masking_max_ngram: int = field(
        default=3,
        metadata=flag(
            "Most words in a row that are masked together; runs of n words come 1/n as often as single ones.",
            affects="data",
            at_least=1,
            at_most=100,
        ),
    )
    whole_word_masking: bool = field(
        default=True,
        metadata=flag(
            "Mask all pieces of a word or none.", off_help="Mask pieces of words one by one.", affects="data"
        ),
    )

    @property
    def num_token_types(self) -> int:
        """Rows of the table of token types: one for each segment of a pair; none without pairs, as in Megatron-LM."""
        return 2 if self.binary_head else 0

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section: nothing but values beyond their limits."""
        yield from ()
