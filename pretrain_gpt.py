"""Pretrain a GPT model.

torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 …
`python pretrain_gpt.py --help` lists the arguments; examples/pretrain_gpt.sh is a whole command.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from megatron.core.tensor_parallel.random import DropoutStream
from megatron.data.batches import GPTBatch
from megatron.model.gpt_model import GPTModel
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.pretrain import pretrain


def forward_step(
    batch: GPTBatch, chunk: nn.Module, hidden_states: Tensor | None, dropout: DropoutStream | None
) -> Tensor | dict[str, Tensor]:
    """One micro-batch through one pipeline chunk: hidden states, or the loss summed over the tokens that count."""
    model = cast(GPTModel, chunk)
    output: Tensor = model(
        batch.tokens,
        batch.position_ids,
        document_ids=batch.document_ids,
        document_lengths=batch.document_lengths,
        labels=batch.labels,
        hidden_states=hidden_states,
        dropout=dropout,
    )
    if not model.stage.has_output:
        return output
    return {"lm loss": (output * batch.loss_mask).sum()}


if __name__ == "__main__":
    pretrain(gpt_datasets, gpt_model, forward_step)
