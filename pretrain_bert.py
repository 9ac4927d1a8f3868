"""Pretrain a BERT model.

torchrun --nproc-per-node 8 pretrain_bert.py --tensor-model-parallel-size 8 …
`python pretrain_bert.py --help` lists the arguments; examples/pretrain_bert.sh is a whole command.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from megatron.core.tensor_parallel.random import DropoutStream
from megatron.data.bert_batches import BertBatch
from megatron.model.bert_model import BertModel, BertOutput
from megatron.training.bert import bert_datasets, bert_model
from megatron.training.pretrain import pretrain


def forward_step(
    batch: BertBatch, chunk: nn.Module, hidden_states: Tensor | None, dropout: DropoutStream | None
) -> Tensor | dict[str, Tensor]:
    """One micro-batch through one pipeline chunk: hidden states, or each loss summed over what counts in it."""
    model = cast(BertModel, chunk)
    output: Tensor | BertOutput = model(
        batch.tokens,
        batch.token_types,
        batch.is_real,
        labels=batch.labels,
        sentence_labels=batch.sentence_labels,
        hidden_states=hidden_states,
        dropout=dropout,
    )
    if isinstance(output, Tensor):
        return output
    losses = {"lm loss": (output.tokens * batch.loss_mask).sum()}
    return losses if output.pairs is None else losses | {"sop loss": output.pairs.sum()}


if __name__ == "__main__":
    pretrain(bert_datasets, bert_model, forward_step, task="bert")
