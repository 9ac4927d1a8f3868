"""Transformer layers whose saved bytes are counted."""

from __future__ import annotations

import torch

from megatron.config.megatron_config import MegatronConfig
from megatron.core.shard import name_parameters
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.attention import computes_weights
from megatron.model.init import initialize_weights
from megatron.model.masks import attention_mask
from megatron.model.rotary import rotary_table
from megatron.model.transformer import TransformerBlock
from megatron.planning.saved_tensors import SavedBytes
from tests.helpers.tiny import tiny_config
from tests.tensor_parallel.ranks import placed, tensor_group

SIZES = (
    *("--hidden-size", "128", "--num-attention-heads", "8", "--kv-channels", "16", "--ffn-hidden-size", "512"),
    *("--num-layers", "2", "--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "2"),
    "--no-reset-attention-mask",
)


def saved_by_layers(rank: int, world_size: int, arguments: tuple[str, ...]) -> tuple[MegatronConfig, int, int]:
    """The configuration, the bytes that two layers keep of a micro-batch, and what is left after their backward.

    What all layers share, the mask and the rotary table, is left out.
    """
    config = tiny_config(*SIZES, *arguments, "--tensor-model-parallel-size", str(world_size), world_size=world_size)
    model, dtype = config.model, config.optimizer.params_dtype
    placement = placed(tensor_group(rank, world_size), config.parallel.sequence_parallel, dtype)
    layers = TransformerBlock(model, layers=range(model.num_layers), final_layernorm=False, placement=placement)
    name_parameters(layers)
    initialize_weights(layers, seed=1)
    length, batch = config.data.seq_length, config.training.micro_batch_size
    dropout = DropoutStream(seed=1, iteration=0, sample_ids=torch.arange(batch))
    mask = attention_mask(
        sequence_length=length,
        document_ids=None,
        window=None,
        slopes=None,
        explicit=computes_weights(model, dropout),
        dtype=dtype,
        device=placement.device,
    )
    rotary = None
    if model.position_embedding_type == "rope":
        rotary = rotary_table(model, torch.arange(length).expand(batch, -1), dtype)
    own_length = length // world_size if config.parallel.sequence_parallel else length
    x = torch.ones(own_length, batch, model.hidden_size, dtype=dtype, requires_grad=True)
    shared = [tensor for tensor in (mask, *(rotary or ())) if tensor is not None]
    with SavedBytes([*layers.parameters(), *shared]) as saved:
        y = layers(x, rotary=rotary, mask=mask, dropout=dropout)
    kept = saved.bytes
    y.float().sum().backward()
    del y
    return config, kept, saved.bytes
