"""Models that Megatron-LM made, run by ours in float64: logits, losses and gradients as it computed them.

`weights.npz` holds the parameters of a checkpoint under their own names, which are ours; `outputs_fp64.npz`
what Megatron-LM computed from them: logits over the padded vocabulary, the loss of each token, and of each
gradient the norm, the sum, the largest magnitude and sum(g[i] cos(0.37 i)).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.numerics import PARITY_FP64
from tests.model.tiny import build, tiny_config

FIXTURES = Path(__file__).parents[1] / "fixtures/models"
# Megatron-LM's tanh GELU has the constant 0.79788456, 1e-9 from torch's sqrt(2/pi); layers add it up.
TANH_GELU = 1e-8
MODELS: dict[str, dict[str, Any]] = {
    "gpt2_learned": {
        "num_layers": 4,
        "num_attention_heads": 8,
        "ffn_hidden_size": None,
        "max_position_embeddings": 40,
    },
    "llama_gqa": {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 4,
        "ffn_hidden_size": 52,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "rope_interleaved_half": {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "kv_channels": 8,
        "ffn_hidden_size": None,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "rotary_base": 5000,
        "activation": "squared_relu",
        "untie_embeddings_and_output_weights": True,
    },
    "qk_layernorm": {
        "hidden_size": 32,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 12,
        "ffn_hidden_size": 64,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "qk_layernorm": True,
        "add_bias_linear": False,
    },
}
CASES = [
    ("gpt2_learned", "outputs_fp64", {}, TANH_GELU),
    ("gpt2_learned", "outputs_fp64_erf_gelu", {"activation": "gelu"}, PARITY_FP64),
    ("llama_gqa", "outputs_fp64", {}, PARITY_FP64),
    ("rope_interleaved_half", "outputs_fp64", {}, PARITY_FP64),
    ("qk_layernorm", "outputs_fp64", {}, PARITY_FP64),
]


def arrays(path: Path) -> dict[str, Tensor]:
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def four_numbers(gradient: Tensor) -> Tensor:
    flat = gradient.flatten()
    wave = torch.cos(0.37 * torch.arange(flat.numel(), dtype=torch.float64))
    return torch.stack((flat.norm(), flat.sum(), flat.abs().max(), (flat * wave).sum()))


def assert_within(actual: Tensor, expected: Tensor, bound: float, name: str) -> None:
    difference = float((actual.detach() - expected).abs().max())
    assert difference <= bound * max(1.0, float(expected.abs().max())), f"{name}: differs by {difference:.3e}"


@pytest.mark.parametrize("name, outputs, changes, bound", CASES)
def test_logits_losses_and_gradients(name: str, outputs: str, changes: dict[str, Any], bound: float) -> None:
    weights = arrays(FIXTURES / name / "weights.npz")
    inputs, expected = (arrays(FIXTURES / name / f"{file}.npz") for file in ("outputs_fp64", outputs))
    # There the padding of the vocabulary takes part in the softmax, so here its rows belong to the model.
    rows = weights["embedding.word_embeddings.weight"].shape[0]
    model = build(tiny_config(**MODELS[name], **changes), vocab_size=rows, padded_vocab_size=rows)
    model.load_state_dict(weights)

    tokens, labels = inputs["tokens"].long(), inputs["labels"].long()
    position_ids = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(tokens, position_ids)
    assert_within(logits[: expected["logits"].shape[0]], expected["logits"], bound, "logits")
    losses = model(tokens, position_ids, labels=labels)
    assert_within(losses, expected["per_token_loss"], bound, "losses")
    loss_mask = inputs["loss_mask"].double()
    ((losses * loss_mask).sum() / loss_mask.sum()).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found = four_numbers(parameter.grad)
        assert_within(found, expected[f"grad/{parameter_name}"], bound, parameter_name)
