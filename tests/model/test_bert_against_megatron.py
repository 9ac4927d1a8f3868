"""BERT models that Megatron-LM made, the present one and that of 2021, run by ours: logits, both losses, gradients.

`weights.npz` holds the parameters of a checkpoint under their own names, `outputs_*.npz` what Megatron-LM computed from
them: logits over the padded vocabulary, the loss of each token, and four numbers of each gradient. It fills the scores
of padding with -10000 where ours cannot be attended to at all; of what real positions give, nothing depends on that.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from tests.model.bert import BertInput, build_bert, losses_of, output_of
from tests.model.test_against_megatron import FIXTURES, TANH_GELU, arrays, assert_within, four_numbers
from tests.model.tiny import tiny_config

OF_2021 = FIXTURES.with_name("models_v2.6")
# Outputs in float32 of some hundred terms each, with sums of -10000 among them.
FP32 = 2e-5
NAMES_OF_2021 = {
    r"^language_model\.": "",
    r"\.query_key_value\.": ".linear_qkv.",
    r"self_attention\.dense\.": "self_attention.linear_proj.",
    r"post_attention_layernorm": "pre_mlp_layernorm",
    r"dense_h_to_4h": "linear_fc1",
    r"dense_4h_to_h": "linear_fc2",
    r"^lm_head\.bias$": "output_layer.bias",
}


def our_name(name: str) -> str:
    for pattern, ours in NAMES_OF_2021.items():
        name = re.sub(pattern, ours, name)
    return name.replace("lm_head.layer_norm", "lm_head.layernorm")


def ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {our_name(name): tensor for name, tensor in tensors.items()}


def test_logits_losses_and_gradients_of_the_present_one() -> None:
    weights, expected = (arrays(FIXTURES / "bert" / f"{file}.npz") for file in ("weights", "outputs_fp64"))
    # There the padding of the vocabulary takes part in the softmax, so here its rows belong to the model.
    rows = weights["embedding.word_embeddings.weight"].shape[0]
    config = tiny_config(hidden_size=32, num_attention_heads=4, ffn_hidden_size=None, max_position_embeddings=36)
    model = build_bert(config, vocab_size=rows, padded_vocab_size=rows)
    model.load_state_dict(ours(weights))
    batch = BertInput(
        tokens=expected["tokens"],
        token_types=expected["types"],
        is_real=expected["padding_mask"].bool(),
        labels=expected["labels"].clamp(min=0),
        sentence_labels=expected["is_random"],
        loss_mask=expected["loss_mask"].bool(),
    )
    real = batch.is_real
    assert not real.all() and (batch.loss_mask <= real).all()

    output = output_of(model, batch)
    assert output.pairs is not None
    assert_within(output.tokens[real], expected["logits"][real], TANH_GELU, "logits")
    assert_within(output.pairs, expected["binary_logits"], TANH_GELU, "logits of pairs")

    losses = losses_of(model, batch)
    assert losses.pairs is not None
    masked, pairs = losses.tokens[batch.loss_mask], losses.pairs.mean()
    assert_within(masked, expected["per_token_loss"][batch.loss_mask], TANH_GELU, "losses")
    assert_within(pairs, expected["sop_loss"], TANH_GELU, "loss of pairs")
    loss = masked.mean() + pairs
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        (theirs,) = (key for key in expected if key.startswith("grad/") and our_name(key[5:]) == name)
        assert_within(four_numbers(parameter.grad), expected[theirs], TANH_GELU, name)


def test_logits_and_losses_of_2021() -> None:
    weights, expected = (arrays(OF_2021 / "bert" / f"{file}.npz") for file in ("weights", "outputs_tp1pp1"))
    rows = weights["language_model.embedding.word_embeddings.weight"].shape[0]
    config = tiny_config(hidden_size=24, num_attention_heads=6, ffn_hidden_size=None, max_position_embeddings=28)
    model = build_bert(config, vocab_size=rows, padded_vocab_size=rows, dtype=torch.float32)
    model.load_state_dict(ours(weights))
    real = expected["padding_mask"].bool()
    output = model(expected["tokens"], expected["types"], real)
    assert_within(output.tokens[real], expected["logits"][real], FP32, "logits")
    assert_within(output.pairs, expected["binary_logits"], FP32, "logits of pairs")
    no_pairs = torch.zeros(len(real), dtype=torch.int64)
    losses = model(expected["tokens"], expected["types"], real, labels=expected["labels"], sentence_labels=no_pairs)
    assert_within(losses.tokens[real], expected["per_token_loss"][real], FP32, "losses")
