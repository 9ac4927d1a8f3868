"""Imported once by the process that ranks are forked from: all that they need, and nothing that computes.

What is missing here each rank imports anew: pytest alone would take it a third of the time of a tiny training.
"""

import gc

import hypothesis
import pytest
import torch
import torch._dynamo  # the first forward of a layer would import it on each rank

import pretrain_gpt
import tests.helpers.launch
import tests.helpers.numerics
import tests.helpers.tiny

__all__ = ["hypothesis", "pretrain_gpt", "pytest", "tests"]

torch.set_num_threads(1)
gc.freeze()  # a collection on a rank would copy the memory that it looks through
