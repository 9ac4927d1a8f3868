"""Models as Megatron-LM core loads them: its `torch` layout for any size, a stage's files at a time.

They are a release: weights without a training, as for `--load FOLDER --ckpt-format torch --no-load-optim --finetune`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from megatron.checkpointing import storage
from megatron.config.options import LARGEST_VOCABULARY, section_options, spelled
from megatron.config.problems import ConfigError, Problem, divisors, near
from megatron.config.tokenizer import TokenizerConfig, padded_vocab_size
from megatron.config.transformer import TransformerConfig
from megatron.conversion.megatron_lm.arguments import write_arguments
from megatron.conversion.megatron_lm.contents import RANK_FILE, RELEASE, TRACKER, rank_folder
from megatron.conversion.megatron_lm.names import OF_LAST, OF_VOCABULARY, core_name
from megatron.conversion.megatron_lm.shards import cut, cut_shape, model_chunks, split_dimension
from megatron.conversion.megatron_lm.torch_files import TensorToCome, TorchWriter
from megatron.conversion.portable import LazyTensor, PortableModel, global_shapes
from megatron.conversion.whole_folder import whole_folder

# Linear layers of core keep a state of their implementation, which is nothing here but is looked for.
_LINEAR = (
    *("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"),
    "output_layer",
)

# The converter's flags for the sizes.
_RANKS, _STAGES = "--target-tensor-parallel-size", "--target-pipeline-parallel-size"
_CHUNKS, _DIVISOR = "--target-virtual-pipeline-parallel-size", "--target-make-vocab-size-divisible-by"

Implementation = Literal["transformer_engine", "local"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


def write_megatron(
    model: PortableModel,
    folder: Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int = 1,
    make_vocab_size_divisible_by: int = 128,
    transformer_impl: Implementation = "transformer_engine",
) -> None:
    """Write a model into a folder that does not exist, or is empty.

    Args:
        tensor, pipeline, virtual: tensor-parallel ranks, pipeline stages, model chunks of each stage.
        make_vocab_size_divisible_by: with the tensor-parallel size, of what the rows of the vocabulary become a
            multiple, by rows of zeros.
        transformer_impl: whose names the norms get, by the flag of Megatron-LM and its default. With other names it
            would load all but the norms.

    Raises:
        ConfigError: not in these sizes.
        ConversionError: Megatron-LM can not hold the model; or the folder is not empty.
    """
    config = model.config
    _check_sizes(model, tensor=tensor, pipeline=pipeline, virtual=virtual, divisible_by=make_vocab_size_divisible_by)
    padded = padded_vocab_size(model.vocab_size, make_vocab_size_divisible_by, tensor)
    arguments = write_arguments(
        model,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        padded_vocab_size=padded,
        divisible_by=make_vocab_size_divisible_by,
        transformer_impl=transformer_impl,
    )
    named = model_chunks(
        config,
        global_shapes(config, model.bert, 1),
        pipeline=pipeline,
        virtual=virtual,
        transformer_impl=transformer_impl,
    )
    with whole_folder(folder) as unfinished:
        for stage in range(pipeline):
            chunks = [
                {
                    name: _padded(name, model.tensors[f"model.{ours}"], padded)
                    for name, ours in named[number, stage].items()
                }
                for number in range(virtual)
            ]
            state = {
                "args": arguments,
                "checkpoint_version": 3.0,
                "iteration": 0,
                **_described(chunks, tensor, transformer_impl),
            }
            ranks = [rank_folder(rank, stage, pipeline=pipeline) for rank in range(tensor)]
            _write_stage([unfinished / RELEASE / rank for rank in ranks], state, chunks, gated=config.gated)
        storage.write_file(unfinished / TRACKER, RELEASE.encode())


def _write_stage(
    folders: Sequence[Path], state: Mapping[str, Any], chunks: Sequence[Mapping[str, LazyTensor]], *, gated: bool
) -> None:
    """The files of a stage's tensor-parallel ranks side by side, so that each tensor is read once."""
    with ExitStack() as files:
        writers = []
        for folder in folders:
            folder.mkdir(parents=True)
            writers.append(files.enter_context(TorchWriter(folder / RANK_FILE, state)))
        for chunk in chunks:
            for name, lazy in chunk.items():
                whole = lazy.read()
                for rank, writer in enumerate(writers):
                    writer.write(cut(name, whole, rank, len(writers), gated=gated))


def _check_sizes(model: PortableModel, *, tensor: int, pipeline: int, virtual: int, divisible_by: int) -> None:
    """Refuse sizes that do not divide the model, chunks without stages to go round, and a vocabulary of padding.

    Raises:
        ConfigError: all of them, by the flags of the converter.
    """
    problems = [
        *_rank_problems(model, tensor),
        *_stage_problems(model.config.num_layers, pipeline, virtual),
        *_vocabulary_problems(model.vocab_size, divisible_by, tensor),
    ]
    if problems:
        raise ConfigError(problems)


def _rank_problems(model: PortableModel, tensor: int) -> Iterator[Problem]:
    config = model.config
    shapes = global_shapes(config, model.bert, 1)
    if rule := _rank_rule(config, shapes, tensor):
        heads = divisors(config.num_attention_heads)
        fitting = near((size for size in heads if not _rank_rule(config, shapes, size)), tensor)
        yield Problem(flags=(_RANKS,), value=spelled(tensor), rule=rule, works=f"{_RANKS} {fitting}")


def _rank_rule(config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]], tensor: int) -> str:
    """What so many tensor-parallel ranks break; "" for nothing. The vocabulary is padded to fit."""
    groups = config.query_groups
    for number, what in ((config.num_attention_heads, "query heads"), (config.ffn_size, "columns of the MLP")):
        if number % tensor:
            return f"must divide the {number} {what}"
    if groups % tensor and tensor % groups:
        return f"must divide the {groups} query groups, or be a multiple of them"
    for name, shape in shapes.items():
        dim = None if name in OF_VOCABULARY else split_dimension(name)
        if dim is not None and shape[dim] % tensor:
            return f"must divide the {shape[dim]} {('rows', 'columns')[dim]} of {name}"
    return ""


def _stage_problems(layers: int, pipeline: int, virtual: int) -> Iterator[Problem]:
    chunks = f" x {_CHUNKS} {spelled(virtual)}" if virtual > 1 else ""
    if virtual > 1 and pipeline == 1:
        yield Problem(
            flags=(_CHUNKS, _STAGES),
            value=spelled(virtual),
            rule=f"Megatron-LM has model chunks from {_STAGES} 2 on",
            works=f"{_STAGES} 2 or more; or leave it out",
        )
    elif layers % (pipeline * virtual):
        fitting = [size for size in divisors(layers) if layers % (size * virtual) == 0 and (size > 1 or virtual == 1)]
        alone = f"{_STAGES} {near(divisors(layers), pipeline)}, and leave out {_CHUNKS}"
        yield Problem(
            flags=(_STAGES, _CHUNKS),
            value=f"{spelled(pipeline)}{chunks}",
            rule=f"must divide the {layers} layers",
            works=f"{_STAGES} {near(fitting, pipeline)}" if fitting else alone,
        )


def _vocabulary_problems(vocab_size: int, divisible_by: int, tensor: int) -> Iterator[Problem]:
    options = section_options("tokenizer", TokenizerConfig)
    (option,) = (each for each in options if each.field == "make_vocab_size_divisible_by")
    rows = padded_vocab_size(vocab_size, divisible_by, tensor)
    rule = option.rule(divisible_by)
    if not rule and rows > LARGEST_VOCABULARY:
        rule = f"pads the vocabulary to {spelled(rows)} rows, and it has at most {spelled(LARGEST_VOCABULARY)}"
    if rule:
        works = f"{_DIVISOR} {option.default}"
        yield Problem(flags=(_DIVISOR, _RANKS), value=spelled(divisible_by), rule=rule, works=works)


def _padded(name: str, lazy: LazyTensor, rows: int) -> LazyTensor:
    """The tensor, of a vocabulary with rows of zeros after its own."""
    if name not in OF_VOCABULARY or lazy.shape[0] == rows:
        return lazy

    def read() -> Tensor:
        columns = (0, 0) * (len(lazy.shape) - 1)  # a bias has none
        return F.pad(lazy.read(), (*columns, 0, rows - lazy.shape[0]))

    return LazyTensor(shape=(rows, *lazy.shape[1:]), dtype=lazy.dtype, read=read)


def _described(chunks: list[dict[str, LazyTensor]], size: int, transformer_impl: str) -> dict[str, dict[str, Any]]:
    """The states of a rank's chunks before their tensors are written."""
    states = []
    for chunk in chunks:
        state: dict[str, Any] = {}
        for name, lazy in chunk.items():
            state[core_name(name, transformer_impl)] = TensorToCome(
                shape=cut_shape(name, lazy.shape, size), dtype=lazy.dtype
            )
            module, _, kind = name.rpartition(".")
            if module.endswith(_LINEAR) and (kind == "bias" or f"{module}.bias" not in chunk):
                state[f"{module}._extra_state"] = None
        if any(name.startswith(OF_LAST) for name in chunk):
            # The layer is there, also where it has nothing but the weight of the embedding.
            state.setdefault("output_layer._extra_state", None)
        states.append(state)
    return (
        {"model": states[0]} if len(states) == 1 else {f"model{number}": state for number, state in enumerate(states)}
    )
