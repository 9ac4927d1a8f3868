"""Whether two forms of a model compute the same: logits of both on fixed tokens, in processes of their own.

A conversion has let go of the model when it ends, and a check must not make it need more memory: so each side runs in a
process, in float32. Our side goes through the model layer by layer, and holds one layer at a time; that of Hugging Face
is the model of `transformers`, whole, where that is installed and has the family. A BERT is given two segments, and
padding, which takes no part in the comparison; what it says of pairs is compared too, where both sides have that.

python -m megatron.conversion.self_check FORM FOLDER TOKENS.npy LOGITS.npz '{"step": 100}'

The process ends when its stdin does, which its parent holds open: no signal that ends the parent leaves it behind.
"""

from __future__ import annotations

import json
import math
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
from megatron.config.bert import BertConfig
from megatron.conversion.families import family_of_file
from megatron.conversion.forms import FORMS
from megatron.conversion.hugging_face import CONFIG
from megatron.conversion.portable import ConversionError, PortableModel, build_chunk
from megatron.conversion.whole_folder import read_json
from megatron.core.shard import shard_of
from megatron.model.bert_model import BertModel, BertOutput

# Both sides compute in float32, each in its own order: thousands of roundings deep, and deeper where single activations
# are a hundred times as large as the others. The logits of a wrong conversion are off by themselves.
SAME_WEIGHTS = 1024 * torch.finfo(torch.float32).eps
# Weights that were rounded to a dtype differ by up to half of its epsilon, and what they compute by some times that.
ROUNDED_WEIGHTS = 16.0

_SAMPLES, _LENGTH, _SEED = 2, 64, 1234
# What a model says, as it is called in messages: of each token, and of each pair of segments.
_OF_TOKENS, _OF_PAIRS = "logits", "logits of pairs"


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
        what: is compared.
        difference: the largest one of two logits.
        scale: the largest logit.
        divergence: Kullback-Leibler, the mean over positions, in nats.
        bound: the largest difference that is allowed, as a part of the scale.
        count: of the logits.
        left_out: as many of them are NaN, or the same infinity, in both forms.
    """

    what: str
    difference: float
    scale: float
    divergence: float
    bound: float
    count: int
    left_out: int

    @property
    def agrees(self) -> bool:
        return self.is_conclusive and math.isfinite(self.difference) and self.difference <= self.bound * self.scale

    @property
    def is_conclusive(self) -> bool:
        return self.left_out < self.count

    def __str__(self) -> str:
        if not self.is_conclusive:
            return f"none of the {self.count:,} {self.what} of either is a finite number, and nothing is compared"
        beside = f"; {self.left_out:,} of {self.count:,} are no finite numbers in both" if self.left_out else ""
        return (
            f"largest difference {self.difference:.3g} of {self.what} up to {self.scale:.3g} (allowed "
            f"{self.bound * self.scale:.3g}), KL divergence {self.divergence:.3g}{beside}"
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


def compare(expected: Tensor, found: Tensor, bound: float, what: str = _OF_TOKENS) -> Comparison:
    """Of logits [..., v]; columns that only one of them has, as padding, take no part, and neither does what is NaN, or
    the same infinity, in both."""
    columns = min(expected.shape[-1], found.shape[-1])
    expected, found = (logits[..., :columns].double() for logits in (expected, found))
    left_out = ~expected.isfinite() & ((expected == found) | (expected.isnan() & found.isnan()))
    expected, found = (logits.masked_fill(left_out, 0.0) for logits in (expected, found))
    likely, other = expected.log_softmax(dim=-1), found.log_softmax(dim=-1)
    return Comparison(
        what=what,
        difference=float((expected - found).abs().max()),
        scale=float(expected.abs().max()),
        divergence=float((likely.exp() * (likely - other)).sum(dim=-1).mean()),
        bound=bound,
        count=left_out.numel(),
        left_out=int(left_out.sum()),
    )


def self_check(
    source: Side, target: Side, tokens: Tensor, bound: float, say: Callable[[str], None]
) -> list[Comparison]:
    """Compute the logits of both sides for tokens [b, s], and compare what both have.

    Args:
        say: is told what computes each side.

    Raises:
        ConversionError: a side could not be computed, as when memory is full.
    """
    logits = []
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "tokens.npy"), Path(folder, "logits.npz")
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
            with np.load(made, allow_pickle=False) as file:
                logits.append({what: torch.from_numpy(file[what]) for what in file.files})
    expected, found = logits
    return [compare(expected[what], found[what], bound, what) for what in expected if what in found]


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


def segments_and_padding(tokens: Tensor, bert: BertConfig) -> tuple[Tensor, Tensor]:
    """Of tokens [b, s] their types, two halves where the model knows pairs, and which are real: the last sample ends
    with a quarter of padding. [b, s] each.
    """
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    types = (places >= tokens.shape[1] // 2).long() * (1 if bert.binary_head else 0)
    is_real = torch.ones_like(tokens, dtype=torch.bool)
    is_real[-1, tokens.shape[1] * 3 // 4 :] = False
    return types, is_real


@torch.no_grad()
def layerwise_logits(model: PortableModel, tokens: Tensor) -> dict[str, Tensor]:
    """What our model computes of tokens [b, s], in float32, by what it is: [b, s, v] of a GPT; of a BERT [n, v] for the
    real tokens, and [b, 2] for pairs. One layer at a time is in memory.
    """
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden_states: Tensor | BertOutput | None = None
    for layer in range(model.config.num_layers):
        chunk = build_chunk(model.config, model.bert, model.vocab_size, range(layer, layer + 1), device="cpu")
        for parameter in chunk.parameters():
            parameter.copy_(model.tensors[weight_key(shard_of(parameter).name)].read())
        if isinstance(chunk, BertModel):
            types, is_real = segments_and_padding(tokens, chunk.bert)
            hidden_states = chunk(tokens, types, is_real, hidden_states=hidden_states)
        else:
            hidden_states = chunk(tokens, positions, hidden_states=hidden_states)
    if not isinstance(hidden_states, BertOutput):
        assert hidden_states is not None
        return {_OF_TOKENS: hidden_states}
    of_pairs = {} if hidden_states.pairs is None else {_OF_PAIRS: hidden_states.pairs}
    return {_OF_TOKENS: hidden_states.tokens[is_real], **of_pairs}


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Tensor, bert: BertConfig | None) -> dict[str, Tensor]:
    """What the model of `transformers`, which must be installed, computes in float32, as `layerwise_logits` gives it.

    Args:
        bert: of a BERT, of which nothing is computed by a head that its files lack.
    """
    from transformers import AutoModelForCausalLM, AutoModelForPreTraining

    how = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    if bert is None:
        return {_OF_TOKENS: AutoModelForCausalLM.from_pretrained(folder, **how).eval()(tokens).logits}
    model, loading = AutoModelForPreTraining.from_pretrained(folder, output_loading_info=True, **how)
    types, is_real = segments_and_padding(tokens, bert)
    output = model.eval()(tokens, token_type_ids=types, attention_mask=is_real.long())
    heads = {
        _OF_TOKENS: (("cls.predictions.",), output.prediction_logits[is_real]),
        _OF_PAIRS: (("bert.pooler.", "cls.seq_relationship."), output.seq_relationship_logits),
    }
    return {
        what: logits
        for what, (names, logits) in heads.items()
        if not any(name.startswith(names) for name in loading["missing_keys"])
    }


def logits_of(side: Side, tokens: Tensor) -> tuple[dict[str, Tensor], str]:
    """What a side computes of tokens [b, s], see `layerwise_logits`, and what computes it."""
    program = "this program"
    if side.form == "hf":
        values, source = read_json(side.folder / CONFIG), str(side.folder / CONFIG)
        family = family_of_file(values, source)
        lacks = why_not_transformers(family.name)
        if not lacks:
            logits = transformers_logits(side.folder, tokens, family.read(values, source).bert)
            if logits:
                return logits, "transformers"
            lacks = "the files have no head"
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
    arrays: dict[str, Any] = {what: values.numpy() for what, values in logits.items()}
    np.savez(made, **arrays)
    print(program)


if __name__ == "__main__":
    main()
