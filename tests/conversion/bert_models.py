"""Tiny BERT models, as Hugging Face saves them and as ours, with something to compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import BertConfig as TheirConfig
from transformers import BertForMaskedLM, BertForPreTraining, BertModel, PreTrainedModel

from megatron.config.bert import BertConfig
from megatron.conversion.portable import LazyTensor, PortableModel, build_chunk, global_shapes
from megatron.model.bert_model import BertOutput
from tests.conversion.models import VOCAB
from tests.model.bert import BertInput, bert_batch
from tests.model.tiny import tiny_config

CLASSES: dict[str, Callable[..., PreTrainedModel]] = {
    "BertForPreTraining": BertForPreTraining,
    "BertForMaskedLM": BertForMaskedLM,
    "BertModel": BertModel,
}


def their_bert(
    architecture: str = "BertForPreTraining", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A model with noise on every parameter, so that no bias is zero and no norm is one."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    lengths = {"intermediate_size": 52, "max_position_embeddings": 40}
    config = TheirConfig(**(sizes | lengths | changes), attn_implementation="sdpa")
    torch.manual_seed(3)
    model = CLASSES[architecture](config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.1 * torch.randn(parameter.shape, dtype=torch.float64)).to(dtype)
    return model


def saved_bert(folder: Path, architecture: str = "BertForPreTraining", **changes: Any) -> Path:
    their_bert(architecture, **changes).save_pretrained(folder)
    return folder


def our_bert(*, binary_head: bool = True, vocab_size: int = VOCAB, **settings: Any) -> PortableModel:
    """A model of four layers."""
    config, bert = tiny_config(**{"num_layers": 4, **settings}), BertConfig(binary_head=binary_head)
    generator = torch.Generator().manual_seed(0)

    def lazy(shape: tuple[int, ...]) -> LazyTensor:
        tensor = torch.randn(shape, generator=generator)
        return LazyTensor(shape=shape, dtype=tensor.dtype, read=tensor.clone)

    shapes = global_shapes(config, bert, vocab_size)
    tensors = {f"model.{name}": lazy(shape) for name, shape in shapes.items()}
    return PortableModel(config=config, bert=bert, vocab_size=vocab_size, seq_length=24, tensors=tensors)


def computed(model: PortableModel, batch: BertInput, dtype: torch.dtype, **labels: Tensor) -> BertOutput:
    """What our model says of a batch: logits, or with labels losses."""
    layers = range(model.config.num_layers)
    chunk = build_chunk(model.config, model.bert, model.vocab_size, layers, device="cpu").to(dtype)
    chunk.load_state_dict({key.removeprefix("model."): lazy.read() for key, lazy in model.tensors.items()})
    with torch.no_grad():
        return cast(BertOutput, chunk(batch.tokens, batch.token_types, batch.is_real, **labels))


def batch() -> BertInput:
    return bert_batch(lengths=(24, 17, 9))
