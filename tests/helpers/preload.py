"""Imported once by the process that ranks are forked from: all that they need, and nothing that computes."""

import torch
import torch._dynamo  # the first forward of a layer would import it on each rank

import megatron.training.pretrain  # noqa: F401

torch.set_num_threads(1)
