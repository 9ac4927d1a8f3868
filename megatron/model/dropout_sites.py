"""The places of dropout in a model. A mask depends on the number, so a number once given keeps its place."""

from typing import Final

ATTENTION_WEIGHTS: Final = 0
ATTENTION_OUTPUT: Final = 1
MLP_OUTPUT: Final = 2
EMBEDDING: Final = 3
