"""A converter needs memory for a few tensors, not for the model: less than a quarter of one of 2 GB."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.config.transformer import TransformerConfig
from megatron.conversion.hugging_face import write_hugging_face
from megatron.conversion.portable import LazyTensor, PortableModel, global_shapes
from tests.helpers.tools import ROOT

# Starts as the tool does, and says how many bytes it took at most, beyond what its imports had left it with.
MEASURED = """
import sys
sys.path.insert(0, {tools!r})
import convert_checkpoint

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024

before = status("VmRSS")
convert_checkpoint.main()
print(status("VmHWM") - before)
"""


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def model_of_2_gb() -> PortableModel:
    config = TransformerConfig(
        num_layers=19,
        hidden_size=2048,
        num_attention_heads=16,
        ffn_hidden_size=5632,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
    )
    tensors = {
        f"model.{name}": LazyTensor(shape=shape, dtype=torch.bfloat16, read=partial(random, shape, seed))
        for seed, (name, shape) in enumerate(global_shapes(config, None, 32_000).items())
    }
    return PortableModel(config=config, vocab_size=32_000, seq_length=4096, tensors=tensors)


def peak(*arguments: str | Path) -> int:
    """Bytes that a conversion takes at most."""
    program = MEASURED.format(tools=str(ROOT / "tools"))
    words = [sys.executable, "-c", program, *map(str, arguments), "--no-self-check"]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_memory_of_a_conversion_is_below_a_quarter_of_the_model(tmp_path: Path) -> None:
    model = model_of_2_gb()
    size = sum(prod(lazy.shape) * 2 for lazy in model.tensors.values())
    assert 1.9e9 < size < 2.2e9
    write_hugging_face(model, tmp_path / "hf")
    last = "hf"
    for form in ("native", "megatron", "hf"):
        taken = peak("--from", last, "--to", form, tmp_path / last, tmp_path / f"next_{form}")
        assert taken < size / 4, f"{last} to {form} took {taken / 1e6:,.0f} MB"
        shutil.rmtree(tmp_path / last)
        (tmp_path / f"next_{form}").rename(tmp_path / form)
        last = form
