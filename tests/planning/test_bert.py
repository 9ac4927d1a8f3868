"""What a BERT keeps for the backward, and its parameters and operations, are what is predicted."""

from __future__ import annotations

import pytest
import torch

from megatron.config.bert import BertConfig
from megatron.config.transformer import TransformerConfig
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.flops import bert_flops_per_batch, built_parameter_count, parameter_count
from megatron.planning.activations import chunk_bytes
from megatron.planning.saved_tensors import SavedBytes
from tests.helpers.bert import tiny_bert_config
from tests.model.bert import bert_batch, build_bert, losses_of
from tests.model.tiny import VOCAB, tiny_config, whole
from tests.planning.test_activations import DROPOUT, FULL, PREDICTED

SIZES = (
    *("--hidden-size", "128", "--num-attention-heads", "8", "--kv-channels", "16", "--ffn-hidden-size", "512"),
    *("--num-layers", "2", "--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "2"),
)


@pytest.mark.parametrize("way", [(), FULL], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dropout", DROPOUT)
@pytest.mark.parametrize("norms", ["pre", "post"])
def test_what_a_model_keeps_is_what_is_predicted(norms: str, dropout: str, way: tuple[str, ...]) -> None:
    config = tiny_bert_config(*SIZES, "--bf16", "--layernorm-placement", norms, *DROPOUT[dropout], *way)
    model = build_bert(config.model, dtype=torch.bfloat16, padded_vocab_size=64)
    batch = bert_batch((64, 40), sequence=64)
    stream = DropoutStream(seed=1, iteration=0, sample_ids=torch.arange(2))
    with SavedBytes(model.parameters()) as saved:
        losses = losses_of(model, batch, dropout=stream)
    kept = saved.bytes
    assert kept == pytest.approx(chunk_bytes(config, whole(config.model), padded_vocab_size=64), rel=PREDICTED)
    assert losses.pairs is not None
    (losses.tokens.sum() + losses.pairs.sum()).backward()


@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_parameters_of_the_configuration_are_those_of_the_model(placement: str, binary_head: bool) -> None:
    config = tiny_config(layernorm_placement=placement)
    model = build_bert(config, binary_head=binary_head, padded_vocab_size=VOCAB + 3)
    held = sum(parameter.numel() for parameter in model.parameters())
    padding = 3 * (config.hidden_size + 1)
    assert parameter_count(config, VOCAB, model.bert) == built_parameter_count([model]) == held - padding


def test_parameters_of_bert_base() -> None:
    """Those of `BertForPreTraining` of bert-base-uncased."""
    config = TransformerConfig(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        max_position_embeddings=512,
        layernorm_placement="post",
    )
    assert parameter_count(config, 30522, BertConfig()) == 110_106_428


def test_operations_are_those_of_the_products() -> None:
    """6 a weight and token; of attention all scores count."""
    config, sequence = tiny_config(), 8
    model = build_bert(config)
    products = [parameter for name, parameter in model.encoder.named_parameters() if parameter.dim() == 2]
    weights = sum(parameter.numel() for parameter in products) + config.hidden_size * (config.hidden_size + VOCAB)
    scores = 2 * config.num_layers * sequence * config.query_size  # two products with each key
    pairs = config.hidden_size * (config.hidden_size + 2)
    expected = 6 * (sequence * (weights + scores) + pairs)
    found = bert_flops_per_batch(config, BertConfig(), batch_size=1, sequence_length=sequence, padded_vocab_size=VOCAB)
    assert found == expected == model.flops_per_sample(sequence)
