"""Tiny models of every family that can be converted, of odd sizes, as other programs save them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron.config.pipeline_layout import StageLayout
from megatron.conversion.portable import PortableModel
from megatron.core.comm_group import CommGroup
from megatron.core.tensor_parallel.placement import Placement
from megatron.model.gpt_model import GPTModel
from megatron.model.masks import alibi_slopes

# No size is that of another, or its multiple by a usual factor; the vocabulary is a prime. Two tensor-parallel ranks
# and two pipeline stages divide the rest.
VOCAB, SEQUENCE = 61, 17
LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "tie_word_embeddings": False,
}
SIZES: dict[str, Any] = LLAMA_SIZES | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",  # the eager path rounds its softmax to float32
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class BaichuanAttention(nn.Module):
    """Queries, keys and values from one matrix; ALiBi."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.W_pack = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.W_pack(x).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) / (hidden // self.heads) ** 0.5
        positions = torch.arange(length, dtype=x.dtype)
        distances = positions[None, :] - positions[:, None]
        scores = scores + torch.tensor(alibi_slopes(self.heads), dtype=x.dtype)[:, None, None] * distances
        scores = scores.masked_fill(distances > 0, float("-inf"))
        mixed = scores.softmax(dim=-1) @ value
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return output


class BaichuanMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class BaichuanLayer(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.self_attn, self.mlp = BaichuanAttention(hidden, heads), BaichuanMLP(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Baichuan(nn.Module):
    """Baichuan2-13B, which transformers lacks: the plain formulas, under its names of tensors."""

    def __init__(self) -> None:
        super().__init__()
        hidden, inner, heads, eps = 48, 52, 6, 1e-6
        self.settings = {
            "architectures": ["BaichuanForCausalLM"],
            "model_type": "baichuan",
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "hidden_act": "silu",
            "model_max_length": 40,
            "rms_norm_eps": eps,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            "z_loss_weight": 0,
        }
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, hidden)
        self.model.layers = nn.ModuleList([BaichuanLayer(hidden, inner, heads, eps) for _ in range(2)])
        self.model.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return F.linear(self.model.norm(x), F.normalize(self.lm_head.weight))


def rope(theta: float = 10000.0, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | changes}


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    sizes = {"vocab_size": VOCAB, "n_positions": 40, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 52}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": 2, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**(sizes | drops | ids | changes), attn_implementation="sdpa"))


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "llama 2": lambda: llama(num_key_value_heads=4),
    "llama 3.2": lambda: llama(tie_word_embeddings=True, head_dim=16, **rope(500000.0, **LLAMA3_SCALING)),
    "llama linear scaling": lambda: llama(num_key_value_heads=1, **rope(rope_type="linear", factor=4.0)),
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **rope(1000000.0))),
    "qwen2 tied with windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **(SIZES | {"tie_word_embeddings": True}), use_sliding_window=True, sliding_window=6, max_window_layers=0
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "baichuan2": Baichuan,
}


class PlainRMSNorm(nn.Module):
    """RMSNorm in the dtype of its input: that of `transformers` computes in float32 whatever it is given."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of a family with noise on every parameter, so that no bias is zero and no norm is one."""
    torch.manual_seed(3)
    model = FAMILIES[name]().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.1 * torch.randn(parameter.shape, dtype=torch.float64)).to(dtype)
    return model


def in_float64(model: nn.Module) -> nn.Module:
    """Ready for a forward that rounds to float64 only."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                setattr(parent, name, PlainRMSNorm(child))
    return model


def save(model: nn.Module, folder: Path) -> Path:
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(folder)
    else:
        assert isinstance(model, Baichuan)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(model.settings))
        save_file(dict(model.state_dict()), folder / "model.safetensors")
    return folder


def save_tensors(tensors: Mapping[str, Tensor], model: Path, folder: Path) -> Path:
    """A folder with these tensors in place of the weights of a model."""
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens).logits if isinstance(model, PreTrainedModel) else model(tokens)
    return logits


def built(portable: PortableModel, dtype: torch.dtype) -> GPTModel:
    """Our model, whole, with the weights that were read."""
    model = GPTModel(
        portable.config,
        stage=StageLayout(
            stage=0, chunk=0, layers=range(portable.config.num_layers), has_embedding=True, has_output=True
        ),
        vocab_size=portable.vocab_size,
        padded_vocab_size=portable.vocab_size,
        placement=Placement(
            group=CommGroup.single("tensor"), sequence_parallel=False, dtype=dtype, device=torch.device("cpu")
        ),
    )
    model.load_state_dict({key.removeprefix("model."): lazy.read() for key, lazy in portable.tensors.items()})
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and labels, [2, s] each."""
    text = torch.randint(0, VOCAB, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(5))
    return text[:, :-1], torch.arange(SEQUENCE).expand(2, -1), text[:, 1:].contiguous()
