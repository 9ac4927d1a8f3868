"""Convert a model between Hugging Face, checkpoints of this program, and Megatron-LM, on CPUs, tensor by tensor.

python tools/convert_checkpoint.py --from hf --to native models/Llama-3.2-1B checkpoints/llama
python tools/convert_checkpoint.py --from native --to hf --dtype bfloat16 checkpoints/run models/mine
python tools/convert_checkpoint.py --from megatron --to native --true-vocab-size 50257 old/checkpoints checkpoints/mine

IN and OUT are folders; OUT must be new or empty. At the end the logits of both are compared.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from command_line import Parser, at_least, bytes_of, dtype_name, elapsed, progress, run_tool, say, size_of
from torch import Tensor
from tqdm import tqdm

from megatron.checkpointing import is_weight
from megatron.config.options import flag_name
from megatron.config.problems import UserError, listing
from megatron.conversion.families import FAMILIES
from megatron.conversion.forms import FORMS, refuse_other_form
from megatron.conversion.megatron_lm.writer import IMPLEMENTATIONS
from megatron.conversion.portable import LazyTensor, PortableModel, in_dtype, not_finite
from megatron.conversion.self_check import Side, bound_of, fixed_tokens, self_check
from megatron.conversion.whole_folder import refuse_existing, remove_leftovers
from megatron.core.allocator import give_freed_memory_back
from megatron.training.failures import exiting

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def parser() -> Parser:
    made = Parser(__doc__)
    made.argument_default = argparse.SUPPRESS  # what is not given is no attribute of the options
    made.add_argument("input", metavar="IN", type=Path, help="folder of the model")
    made.add_argument("output", metavar="OUT", type=Path, help="folder to write, new or empty")
    made.add_argument("--from", dest="source", required=True, choices=FORMS, help="form of IN")
    made.add_argument("--to", dest="target", required=True, choices=FORMS, help="form of OUT")
    made.add_argument("--dtype", choices=DTYPES, help="of the weights in OUT (default: as they are)")
    made.add_argument("--ckpt-step", type=at_least(0), help="iteration to read (default: the newest)")
    made.add_argument(
        "--true-vocab-size", type=at_least(1), help="rows of the vocabulary that are no padding (default: all are kept)"
    )
    made.add_argument("--weights-only", action="store_true", help="leave the optimizer and the training out")
    made.add_argument("--hf-family", choices=[family.name for family in FAMILIES], help="default: the first that fits")
    for what, of in (("tensor", "ranks"), ("pipeline", "stages"), ("virtual-pipeline", "model chunks a stage")):
        made.add_argument(f"--target-{what}-parallel-size", type=at_least(1), help=f"{of} in OUT (default 1)")
    made.add_argument(
        "--target-transformer-impl",
        choices=IMPLEMENTATIONS,
        help=f"--transformer-impl of the Megatron-LM that loads OUT (default {IMPLEMENTATIONS[0]})",
    )
    made.add_argument(
        "--target-make-vocab-size-divisible-by",
        type=at_least(1),
        help="pads the vocabulary of OUT with zeros (default 128)",
    )
    made.add_argument(
        "--no-self-check", action="store_true", default=False, help="do not compare the logits of IN and OUT"
    )
    return made


def keywords(
    options: argparse.Namespace, form: str, keywords_of: Mapping[str, Mapping[str, str]], *, of: str
) -> dict[str, Any]:
    """What the options say to the reader or the writer of a form.

    Args:
        keywords_of: of each form, by option.
        of: the flag that names the form.

    Raises:
        UserError: an option says nothing to this form.
    """
    told = {}
    for option in dict.fromkeys(option for known in keywords_of.values() for option in known):
        if option in options:
            if option not in keywords_of[form]:
                forms = " or ".join(other for other, known in keywords_of.items() if option in known)
                raise UserError(f"{flag_name(option)} belongs to {of} {forms}, and {of} is {form}; leave it out")
            told[keywords_of[form][option]] = getattr(options, option)
    return told


def watched(model: PortableModel, bar: tqdm[Any], wrong: list[str]) -> PortableModel:
    """The model, whose tensors move a bar when they are read for the first time.

    Args:
        wrong: gets a line for each tensor that holds numbers that are not finite.
    """
    seen: set[str] = set()

    def watch(key: str, lazy: LazyTensor) -> LazyTensor:
        def read_it() -> Tensor:
            values = lazy.read()
            if key not in seen:
                seen.add(key)
                bar.update(bytes_of([lazy]))
                if count := not_finite(values):
                    wrong.append(f"{key} holds {count}" + (f", read from {lazy.source}" if lazy.source else ""))
            return values

        return LazyTensor(shape=lazy.shape, dtype=lazy.dtype, read=read_it, source=lazy.source)

    return replace(model, tensors={key: watch(key, lazy) for key, lazy in model.tensors.items()})


def described(model: PortableModel) -> str:
    """What the model is, in a line."""
    config = model.config
    weights = [lazy for key, lazy in model.tensors.items() if is_weight(key)]
    kinds = sorted({dtype_name(lazy.dtype) for lazy in weights})
    kind = "" if model.bert is None else f"BERT {'with' if model.bert.binary_head else 'without'} pairs of segments, "
    return (
        f"{kind}{sum(prod(lazy.shape) for lazy in weights):,} parameters in {' and '.join(kinds)}: "
        f"{config.num_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads ({config.query_groups} of keys and values), "
        f"MLP {config.ffn_size} {config.activation}, {config.normalization}, positions "
        f"{config.position_embedding_type}, vocabulary {model.vocab_size:,}, context {model.seq_length:,}"
    )


class Terminated(BaseException):
    """SIGTERM has come."""


@contextmanager
def ending() -> Iterator[None]:
    """As tools end; SIGTERM too, with its status, after what is unfinished has been removed."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    with exiting():
        try:
            yield
        except Terminated:
            print("terminated", file=sys.stderr, flush=True)
            sys.exit(128 + signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)


def main() -> None:
    options = parser().read()
    reader, writer = FORMS[options.source], FORMS[options.target]
    to_read = keywords(options, reader.name, {form.name: form.reading for form in FORMS.values()}, of="--from")
    to_write = keywords(options, writer.name, {form.name: form.writing for form in FORMS.values()}, of="--to")
    if "weights_only" in reader.reading and writer.name != "native":  # no other form has a training
        to_read["weights_only"] = True
    give_freed_memory_back()
    refuse_existing(options.output)
    for leftover in remove_leftovers(options.output):
        say(f"{leftover}: a conversion that was killed had left it, and it is removed")
    refuse_other_form(reader, options.input)
    model = reader.read(options.input, **to_read)
    say(f"{options.input}: {described(model)}")
    if model.training is not None:
        say(f"  with its training, {model.training.iteration:,} iterations; --weights-only leaves it out")
    for note in model.notes:
        say(f"  {note}")
    say(f"  tokenizer: {', '.join(model.tokenizer_files) or 'no files of one'}")
    started = time.perf_counter()
    total = bytes_of(model.tensors.values())
    wrong: list[str] = []
    with progress(total, "converting", unit="B") as bar:
        wanted = watched(model, bar, wrong)
        if "dtype" in options:
            wanted = in_dtype(wanted, DTYPES[options.dtype])
        writer.write(wanted, options.output, **to_write)
    say(f"{options.output}: {size_of(total)} converted in {elapsed(started)}")
    if wrong:
        say(f"{options.input} holds numbers that are not finite, and so does {options.output}:\n{listing(wrong)}")
    if options.no_self_check:
        return
    tokens = fixed_tokens(model.vocab_size, model.seq_length)
    source = Side(form=reader.name, folder=options.input, options=to_read)
    target = Side(form=writer.name, folder=options.output, options={})
    comparisons = self_check(source, target, tokens, bound_of(model, wanted), say)
    for comparison in comparisons:
        say(f"self-check: {comparison}")
    for comparison in comparisons:
        if not comparison.is_conclusive:
            raise UserError(
                f"{options.output} is written, and the self-check cannot say that it is right: {comparison}"
            )
        if not comparison.agrees:
            because = f"; {options.input} holds numbers that are not finite" if wrong else ""
            raise UserError(f"{options.output} does not compute what {options.input} does: {comparison}{because}")


if __name__ == "__main__":
    run_tool(main, ending)
