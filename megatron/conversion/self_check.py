"""Whether two forms of a model compute the same: logits of both on fixed tokens, in processes of their own.

A conversion has let go of the model when it ends, and a check must not make it need more memory: so each side runs in a
process, in float32. Our side goes through the model layer by layer, and holds one layer at a time; that of Hugging Face
is the model of `transformers`, whole, where that is installed and has the family.

python -m megatron.conversion.self_check FORM FOLDER TOKENS.npy LOGITS.npy '{"step": 100}'

The process ends when its stdin does, which its parent holds open: no signal that ends the parent leaves it behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpointing import is_weight, weight_key
from megatron.config.pipeline_layout import StageLayout
from megatron.conversion.families import family_of_file
from megatron.conversion.forms import FORMS
from megatron.conversion.hugging_face import CONFIG
from megatron.conversion.portable import ConversionError, PortableModel
from megatron.conversion.whole_folder import read_json
from megatron.core.comm_group import CommGroup
from megatron.core.shard import shard_of
from megatron.core.tensor_parallel.placement import Placement
from megatron.model.gpt_model import GPTModel

# Both sides compute in float32, each in its own order: thousands of roundings deep, and deeper where single activations
# are a hundred times as large as the others. The logits of a wrong conversion are off by themselves.
SAME_WEIGHTS = 1024 * torch.finfo(torch.float32).eps
# Weights that were rounded to a dtype differ by up to half of its epsilon, and what they compute by some times that.
ROUNDED_WEIGHTS = 16.0

_SAMPLES, _LENGTH, _SEED = 2, 64, 1234


@dataclass(frozen=True, kw_only=True)
class Side:
    """A model on disk.

    Attributes:
        form: its name, as in `FORMS`.
        options: keywords of its reader.
    """

    form: str
    folder: Path
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far two forms of a model are apart.

    Attributes:
        difference: the largest one of two logits.
        scale: the largest logit.
        divergence: Kullback-Leibler, the mean over positions, in nats.
        bound: the largest difference that is allowed, as a part of the scale.
    """

    difference: float
    scale: float
    divergence: float
    bound: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound * self.scale  # which NaN does not

    def __str__(self) -> str:
        return (
            f"largest difference {self.difference:.3g} of logits up to {self.scale:.3g} (allowed "
            f"{self.bound * self.scale:.3g}), KL divergence {self.divergence:.3g}"
        )


def bound_of(source: PortableModel, target: PortableModel) -> float:
    """How far the logits may be apart, as a part of the largest, when the weights of the target are those of the source
    or were rounded from them."""
    rounded = [
        torch.finfo(lazy.dtype).eps
        for key, lazy in target.tensors.items()
        if is_weight(key) and torch.finfo(lazy.dtype).eps > torch.finfo(source.tensors[key].dtype).eps
    ]
    return max([SAME_WEIGHTS, *(ROUNDED_WEIGHTS * epsilon for epsilon in rounded)])


def compare(expected: Tensor, found: Tensor, bound: float) -> Comparison:
    """Of logits [b, s, v]; columns that only one of them has, as padding, take no part."""
    columns = min(expected.shape[-1], found.shape[-1])
    expected, found = (logits[..., :columns].double() for logits in (expected, found))
    likely, other = expected.log_softmax(dim=-1), found.log_softmax(dim=-1)
    return Comparison(
        difference=float((expected - found).abs().max()),
        scale=float(expected.abs().max()),
        divergence=float((likely.exp() * (likely - other)).sum(dim=-1).mean()),
        bound=bound,
    )


def self_check(source: Side, target: Side, tokens: Tensor, bound: float, say: Callable[[str], None]) -> Comparison:
    """Compute the logits of both sides for tokens [b, s], and compare them.

    Args:
        say: is told what computes each side.

    Raises:
        ConversionError: a side could not be computed, as when memory is full.
    """
    logits = []
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "tokens.npy"), Path(folder, "logits.npy")
        np.save(given, tokens.numpy())
        for side in (source, target):
            arguments = [side.form, str(side.folder), str(given), str(made), json.dumps(dict(side.options))]
            done = _run([sys.executable, "-m", __name__, *arguments])
            if done.returncode != 0:
                reason = done.stderr.strip() or f"its process ended with {done.returncode}, as when memory is full"
                raise ConversionError(
                    f"{target.folder} is written, and the self-check could not compute {side.folder}: "
                    f"{reason.splitlines()[-1]}"
                )
            say(f"  {side.folder} computed by {done.stdout.splitlines()[-1]}")
            logits.append(torch.from_numpy(np.load(made, allow_pickle=False)))
    return compare(logits[0], logits[1], bound)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdin stays open as long as this process waits for it, and lives."""
    stdin, held = os.pipe()
    try:
        return subprocess.run(command, stdin=stdin, capture_output=True, text=True)
    finally:
        os.close(stdin)
        os.close(held)


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def fixed_tokens(vocab_size: int, seq_length: int) -> Tensor:
    """Always the same ones, [b, s]."""
    shape = (_SAMPLES, min(_LENGTH, seq_length))
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(_SEED))


@torch.no_grad()
def layerwise_logits(model: PortableModel, tokens: Tensor) -> Tensor:
    """What our model computes of tokens [b, s], in float32: [b, s, v]. One layer at a time is in memory."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    last = model.config.num_layers - 1
    hidden_states: Tensor | None = None
    for layer in range(model.config.num_layers):
        chunk = GPTModel(
            model.config,
            stage=StageLayout(
                stage=layer,
                chunk=0,
                layers=range(layer, layer + 1),
                has_embedding=layer == 0,
                has_output=layer == last,
            ),
            vocab_size=model.vocab_size,
            padded_vocab_size=model.vocab_size,
            placement=Placement(
                group=CommGroup.single("tensor"),
                sequence_parallel=False,
                dtype=torch.float32,
                device=torch.device("cpu"),
            ),
        )
        for parameter in chunk.parameters():
            parameter.copy_(model.tensors[weight_key(shard_of(parameter).name)].read())
        hidden_states = chunk(tokens, positions, hidden_states=hidden_states)
    assert hidden_states is not None
    return hidden_states


def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    """What the model of `transformers`, which must be installed, computes in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits
    return logits


def logits_of(side: Side, tokens: Tensor) -> tuple[Tensor, str]:
    """Logits [b, s, v] of tokens [b, s], and by what they are computed."""
    program = "this program"
    if side.form == "hf":
        family = family_of_file(read_json(side.folder / CONFIG), str(side.folder / CONFIG))
        lacks = why_not_transformers(family.name)
        if not lacks:
            return transformers_logits(side.folder, tokens), "transformers"
        program += f", since {lacks}"
    return layerwise_logits(FORMS[side.form].read(side.folder, **side.options), tokens), program


def why_not_transformers(family: str) -> str:
    """What keeps a model from being computed by another program; "" for nothing."""
    if find_spec("transformers") is None:
        return "transformers is not installed"
    from transformers import CONFIG_MAPPING

    return "" if family in CONFIG_MAPPING else f"transformers has no {family}"


def main() -> None:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    form, folder, tokens, made, options = sys.argv[1:]
    side = Side(form=form, folder=Path(folder), options=json.loads(options))
    logits, program = logits_of(side, torch.from_numpy(np.load(tokens, allow_pickle=False)))
    np.save(made, logits.numpy())
    print(program)


if __name__ == "__main__":
    main()
