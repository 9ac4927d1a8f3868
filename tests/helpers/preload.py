"""Imported once by the process that ranks are forked from. It must not compute anything."""

import torch
import torch.distributed
import torch.nn.functional  # noqa: F401

torch.set_num_threads(1)
