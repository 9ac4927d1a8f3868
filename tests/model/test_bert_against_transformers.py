"""Post-norm BERT against `BertForPreTraining` of Hugging Face: logits, both losses and every gradient.

In float64 to 1e-10, in float32 to 1e-5. What its padding gives means nothing, so real positions are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig as TheirConfig
from transformers import BertForPreTraining

from megatron.config.transformer import TransformerConfig
from tests.helpers.numerics import assert_all_reference, assert_reference, assert_within_reference_error
from tests.model.bert import bert_batch, build_bert, losses_of, mean_loss, output_of
from tests.model.test_against_transformers import by_group
from tests.model.tiny import VOCAB, tiny_config

POST_NORM: dict[str, Any] = {"layernorm_placement": "post", "activation": "gelu", "norm_epsilon": 1e-12}


def reference_model(dtype: torch.dtype) -> BertForPreTraining:
    """With noise on every parameter, so that no bias is zero and no norm is one."""
    config = TheirConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    model = BertForPreTraining(config).to(dtype).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def from_transformers(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Weights or gradients of a BERT under our names."""
    whole = {
        "embedding.word_embeddings.weight": "bert.embeddings.word_embeddings.weight",
        "embedding.position_embeddings.weight": "bert.embeddings.position_embeddings.weight",
        "embedding.tokentype_embeddings.weight": "bert.embeddings.token_type_embeddings.weight",
        "output_layer.bias": "cls.predictions.bias",
    }
    names = {
        "embedding.layernorm": "bert.embeddings.LayerNorm",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layernorm": "cls.predictions.transform.LayerNorm",
        "pooler.dense": "bert.pooler.dense",
        "binary_head": "cls.seq_relationship",
    }
    for layer in range(config.num_layers):
        mine, theirs = f"encoder.layers.{layer}.", f"bert.encoder.layer.{layer}."
        names |= {
            f"{mine}self_attention.linear_proj": f"{theirs}attention.output.dense",
            f"{mine}post_attention_layernorm": f"{theirs}attention.output.LayerNorm",
            f"{mine}mlp.linear_fc1": f"{theirs}intermediate.dense",
            f"{mine}mlp.linear_fc2": f"{theirs}output.dense",
            f"{mine}post_mlp_layernorm": f"{theirs}output.LayerNorm",
        }
    ours = {name: tensors[other] for name, other in whole.items()}
    for kind in ("weight", "bias"):
        ours |= {f"{name}.{kind}": tensors[f"{other}.{kind}"] for name, other in names.items()}
        for layer in range(config.num_layers):
            parts = [tensors[f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}"] for part in PARTS]
            ours[f"encoder.layers.{layer}.self_attention.linear_qkv.{kind}"] = by_group(*parts, config)
    return ours


PARTS = ("query", "key", "value")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_16_bits_err_at_most_twice_as_much_as_theirs(dtype: torch.dtype) -> None:
    config, batch = tiny_config(**POST_NORM), bert_batch()
    low, exact, model = reference_model(dtype), reference_model(torch.float64), build_bert(config, dtype=dtype)
    exact.load_state_dict(low.state_dict())
    model.load_state_dict(from_transformers(low.state_dict(), config))
    plain, expected = (
        reference(batch.tokens, attention_mask=batch.is_real.long(), token_type_ids=batch.token_types).prediction_logits
        for reference in (low, exact)
    )
    real, logits = batch.is_real, output_of(model, batch).tokens
    assert logits.dtype == dtype
    assert_within_reference_error(logits[real], plain[real], expected[real], "logits")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_losses_and_gradients(dtype: torch.dtype) -> None:
    config = tiny_config(**POST_NORM)
    reference = reference_model(dtype)
    model = build_bert(config, dtype=dtype)
    model.load_state_dict(from_transformers(reference.state_dict(), config))  # strict: our names, and no other
    batch = bert_batch(lengths=(24, 17, 9))
    real = batch.is_real

    expected = reference(batch.tokens, attention_mask=real.long(), token_type_ids=batch.token_types)
    output = output_of(model, batch)
    assert output.pairs is not None
    assert_reference(output.tokens[real], expected.prediction_logits[real], "logits")
    assert_reference(output.pairs, expected.seq_relationship_logits, "logits of pairs")

    losses = losses_of(model, batch)
    assert losses.pairs is not None
    masked = batch.loss_mask
    token_loss = F.cross_entropy(expected.prediction_logits[masked], batch.labels[masked], reduction="none")
    pair_loss = F.cross_entropy(expected.seq_relationship_logits, batch.sentence_labels, reduction="none")
    assert_reference(losses.tokens[masked], token_loss, "losses")
    assert_reference(losses.pairs, pair_loss, "losses of pairs")

    mean_loss(losses, batch).backward()
    (token_loss.mean() + pair_loss.mean()).backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_all_reference(ours, from_transformers(theirs, config))
