"""Convert a model between Hugging Face, checkpoints of this program, and Megatron-LM, on CPUs, tensor by tensor.

python tools/convert_checkpoint.py --from hf --to native models/Llama-3.2-1B checkpoints/llama
python tools/convert_checkpoint.py --from native --to hf --dtype bfloat16 checkpoints/run models/mine
python tools/convert_checkpoint.py --from megatron --to native --true-vocab-size 50257 old/checkpoints checkpoints/mine

IN and OUT are folders; OUT must be new or empty. At the end the logits of both are compared.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from command_line import Parser, elapsed, progress, run_tool, say, size_of
from torch import Tensor
from tqdm import tqdm

from megatron.checkpointing import is_weight
from megatron.config.problems import UserError
from megatron.conversion.families import FAMILIES
from megatron.conversion.hugging_face import read_hugging_face, write_hugging_face
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.megatron_lm.writer import IMPLEMENTATIONS, write_megatron
from megatron.conversion.native import read_native, write_native
from megatron.conversion.portable import LazyTensor, PortableModel, cast
from megatron.conversion.self_check import Side, bound_of, fixed_tokens, self_check
from megatron.conversion.whole_folder import refuse_existing
from megatron.core.allocator import give_freed_memory_back

FORMS = ("hf", "native", "megatron")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Flags that say how one form is read or written.
READING = {"ckpt_step": ("native", "megatron"), "true_vocab_size": ("megatron",), "weights_only": ("megatron",)}
WRITING = {
    "hf_family": ("hf",),
    "target_tensor_parallel_size": ("megatron",),
    "target_pipeline_parallel_size": ("megatron",),
    "target_virtual_pipeline_parallel_size": ("megatron",),
    "target_transformer_impl": ("megatron",),
    "target_make_vocab_size_divisible_by": ("megatron",),
}


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("input", metavar="IN", type=Path, help="folder of the model")
    made.add_argument("output", metavar="OUT", type=Path, help="folder to write, new or empty")
    made.add_argument("--from", dest="source", required=True, choices=FORMS, help="form of IN")
    made.add_argument("--to", dest="target", required=True, choices=FORMS, help="form of OUT")
    made.add_argument("--dtype", choices=DTYPES, help="of the weights in OUT (default: as they are)")
    made.add_argument("--ckpt-step", type=int, help="iteration to read (default: the newest)")
    made.add_argument(
        "--true-vocab-size", type=int, help="rows of the vocabulary that are no padding (default: all are kept)"
    )
    made.add_argument("--weights-only", action="store_true", help="leave the optimizer and the training out")
    made.add_argument("--hf-family", choices=[family.name for family in FAMILIES], help="default: the first that fits")
    for what, of in (("tensor", "ranks"), ("pipeline", "stages"), ("virtual-pipeline", "model chunks a stage")):
        made.add_argument(f"--target-{what}-parallel-size", type=int, help=f"{of} in OUT (default 1)")
    made.add_argument(
        "--target-transformer-impl",
        choices=IMPLEMENTATIONS,
        help=f"--transformer-impl of the Megatron-LM that loads OUT (default {IMPLEMENTATIONS[0]})",
    )
    made.add_argument(
        "--target-make-vocab-size-divisible-by", type=int, help="pads the vocabulary of OUT with zeros (default 128)"
    )
    made.add_argument("--no-self-check", action="store_true", help="do not compare the logits of IN and OUT")
    return made


def check_options(options: argparse.Namespace) -> None:
    """Refuse flags that say nothing about this conversion, and numbers that none can have."""
    for uses, form, of in ((READING, options.source, "--from"), (WRITING, options.target, "--to")):
        for name, forms in uses.items():
            flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
            if value not in (None, False) and form not in forms:
                raise UserError(f"{flag} belongs to {of} {' or '.join(forms)}, and {of} is {form}; leave it out")
            if type(value) is int and value < (0 if name == "ckpt_step" else 1):
                raise UserError(f"{flag} ({value}) must be at least {0 if name == 'ckpt_step' else 1}")


def reader_options(options: argparse.Namespace) -> dict[str, Any]:
    """What the reader of IN is told."""
    given: dict[str, Any] = {}
    if options.ckpt_step is not None:
        given["step"] = options.ckpt_step
    if options.source == "megatron":
        given["weights_only"] = options.weights_only or options.target != "native"
        given["true_vocab_size"] = options.true_vocab_size
    return given


def read(form: str, folder: Path, given: dict[str, Any]) -> PortableModel:
    if form == "hf":
        return read_hugging_face(folder)
    return read_native(folder, **given) if form == "native" else read_megatron(folder, **given)


def write(model: PortableModel, options: argparse.Namespace) -> None:
    if options.target == "hf":
        write_hugging_face(model, options.output, family_name=options.hf_family)
    elif options.target == "native":
        write_native(model, options.output)
    else:
        write_megatron(
            model,
            options.output,
            tensor=options.target_tensor_parallel_size or 1,
            pipeline=options.target_pipeline_parallel_size or 1,
            virtual=options.target_virtual_pipeline_parallel_size or 1,
            make_vocab_size_divisible_by=options.target_make_vocab_size_divisible_by or 128,
            transformer_impl=options.target_transformer_impl or IMPLEMENTATIONS[0],
        )


def bytes_of(lazy: LazyTensor) -> int:
    return prod(lazy.shape) * lazy.dtype.itemsize


def watched(model: PortableModel, bar: tqdm[Any]) -> PortableModel:
    """The model, whose tensors move a bar when they are read for the first time."""
    seen: set[str] = set()

    def watch(key: str, lazy: LazyTensor) -> LazyTensor:
        def read_it() -> Tensor:
            values = lazy.read()
            if key not in seen:
                seen.add(key)
                bar.update(bytes_of(lazy))
            return values

        return replace(lazy, read=read_it)

    return replace(model, tensors={key: watch(key, lazy) for key, lazy in model.tensors.items()})


def described(model: PortableModel) -> str:
    """What the model is, in a line."""
    config = model.config
    weights = [lazy for key, lazy in model.tensors.items() if is_weight(key)]
    kinds = sorted({str(lazy.dtype).removeprefix("torch.") for lazy in weights})
    return (
        f"{sum(prod(lazy.shape) for lazy in weights):,} parameters in {' and '.join(kinds)}: "
        f"{config.num_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads ({config.query_groups} of keys and values), "
        f"MLP {config.ffn_size} {config.activation}, {config.normalization}, positions "
        f"{config.position_embedding_type}, vocabulary {model.vocab_size:,}, context {model.seq_length:,}"
    )


def main() -> None:
    options = parser().read()
    check_options(options)
    give_freed_memory_back()
    refuse_existing(options.output)
    given = reader_options(options)
    model = read(options.source, options.input, given)
    say(f"{options.input}: {described(model)}")
    if model.training is not None:
        say(f"  with its training, {model.training.iteration:,} iterations; --weights-only leaves it out")
    say(f"  tokenizer: {', '.join(model.tokenizer_files) or 'no files of one'}")
    started = time.perf_counter()
    total = sum(map(bytes_of, model.tensors.values()))
    with progress(total, "converting", unit="B") as bar:
        wanted = watched(model, bar)
        if options.dtype is not None:
            wanted = cast(wanted, DTYPES[options.dtype])
        write(wanted, options)
    say(f"{options.output}: {size_of(total)} converted in {elapsed(started)}")
    if options.no_self_check:
        return
    tokens = fixed_tokens(model.vocab_size, model.seq_length)
    source = Side(form=options.source, folder=options.input, options=given)
    target = Side(form=options.target, folder=options.output, options={})
    comparison = self_check(source, target, tokens, bound_of(model, wanted), say)
    say(f"self-check: {comparison}")
    if not comparison.agrees:
        raise UserError(f"{options.output} does not compute what {options.input} does: {comparison}")


if __name__ == "__main__":
    run_tool(main)
