"""A folder of Hugging Face: `config.json`, weights in safetensors, and the files of a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpointing import storage, weight_key
from megatron.checkpointing.index import DTYPES
from megatron.conversion.families import (
    Family,
    family_called,
    family_of_file,
    family_of_model,
)
from megatron.conversion.portable import (
    ConversionError,
    LazyTensor,
    PortableModel,
    global_shapes,
    global_shards,
    largest_difference,
    refuse_differences,
)
from megatron.conversion.settings import HuggingFaceConfig
from megatron.conversion.tokenizer_files import GENERATION, SETTINGS, files_in
from megatron.conversion.transforms import Match, joined, match_of, split, their_shapes
from megatron.conversion.whole_folder import copy_file, read_json, whole_folder, write_json
from megatron.core.shard import Shard
from megatron.model.init import initialize_parameter
from megatron.model.language_model import WORD_EMBEDDINGS

CONFIG = "config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
# Of a head that the files lack: that of a new training, whose --seed is this one when not given.
_SEED = 1234
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")


# ---- reading ----


def read_hugging_face(folder: Path) -> PortableModel:
    """The model in a folder; its weights are read later, one by one.

    Raises:
        ConversionError: the folder holds no such model, one that this program does not know, or one that is damaged;
            sizes in `config.json` do not fit each other.
    """
    if not folder.is_dir():
        raise ConversionError(f"{folder} is no folder: nothing is downloaded, give that of a model on this machine")
    values = read_json(folder / CONFIG)
    family = family_of_file(values, str(folder / CONFIG))
    config = family.read(values, str(folder / CONFIG))
    tensors, lacking = _as_ours(_read_tensors(folder, family), family, config, folder)
    generation = {key: values[key] for key in _TOKENS if values.get(key) is not None}
    if (folder / GENERATION).is_file():
        generation |= read_json(folder / GENERATION)
    return PortableModel(
        config=config.model,
        bert=config.bert,
        vocab_size=config.vocab_size,
        seq_length=config.seq_length,
        tensors=tensors,
        tokenizer_files=files_in(folder),
        generation=generation,
        notes=tuple(
            f"{folder} has no head for {head}: it gets that of a new training with --seed {_SEED}" for head in lacking
        ),
    )


def _as_ours(
    found: dict[str, LazyTensor], family: Family, config: HuggingFaceConfig, folder: Path
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Their tensors as the parameters of our model, and which heads they lack."""
    model = config.model
    bare = not any(name.startswith(family.prefix) for name in found)  # saved without its head: so are the names

    def as_stored(name: str) -> str:
        return name.removeprefix(family.prefix) if bare else name

    shards = global_shards(model, config.bert, config.vocab_size)
    sources: dict[str, tuple[Match, tuple[str, ...]]] = {}
    for name in shards:
        match, theirs = match_of(name, family.matches)
        sources[name] = match, tuple(map(as_stored, theirs))
    if model.tied_embeddings:
        for copy, original in family.copies.items():
            _leave_out_copy(found, copy, as_stored(original), folder)
    for name, shape in family.zeros(config).items():
        _leave_out_zeros(found, as_stored(name), shape, folder)
    lacking = _lacking_heads(found, family, sources)
    drawn = [name for names in lacking.values() for name in names]
    wanted: dict[str, tuple[int, ...]] = {}
    for name, (match, theirs) in sources.items():
        if name not in drawn:
            wanted |= zip(theirs, their_shapes(match, shards[name].global_shape, model), strict=True)
    refuse_differences(str(folder), wanted, found)
    dtype = found[sources[WORD_EMBEDDINGS][1][0]].dtype
    tensors = {
        weight_key(name): _drawn(shards[name], dtype)
        if name in drawn
        else joined(match, {other: found[other] for other in theirs}, shards[name].global_shape, model)
        for name, (match, theirs) in sources.items()
    }
    return tensors, list(lacking)


def _leave_out_copy(found: dict[str, LazyTensor], copy: str, original: str, folder: Path) -> None:
    """A copy that is stored although the model has the tensor once must be the same; it is left out then."""
    if copy not in found:
        return
    stored, tied = found.pop(copy), found.get(original)
    if tied is not None and (stored.shape != tied.shape or largest_difference(stored.read(), tied.read())):
        raise ConversionError(
            f"{folder}: {copy} differs from {original}, and tie_word_embeddings of {CONFIG} says that they are one"
        )


def _leave_out_zeros(found: dict[str, LazyTensor], name: str, shape: tuple[int, ...], folder: Path) -> None:
    """A tensor that our model has not must be zero; it is left out then. One of another shape is none of the model."""
    if name not in found or found[name].shape != shape:
        return
    if found.pop(name).read().any():
        raise ConversionError(
            f"{folder}: {name} is added to every token, and a model without pairs of segments has no such tensor"
        )


def _lacking_heads(
    found: Mapping[str, LazyTensor], family: Family, sources: Mapping[str, tuple[Match, tuple[str, ...]]]
) -> dict[str, list[str]]:
    """The heads of our model of which the files have no tensor, and our names in each. What a head that they have is
    built on is not among them: it is missing."""
    lacking = {}
    for head, pattern in family.heads.items():
        ours = [name for name in sources if re.fullmatch(pattern, name)]
        if ours and not any(other in found for name in ours for other in sources[name][1]):
            lacking[head] = ours
    for head, base in family.built_on.items():
        if head not in lacking:
            lacking.pop(base, None)
    return lacking


def _drawn(shard: Shard, dtype: torch.dtype) -> LazyTensor:
    """A parameter with the values that it begins a training with."""

    def read() -> Tensor:
        values = torch.empty(shard.global_shape, dtype=dtype)
        initialize_parameter(values, shard, _SEED)
        return values

    return LazyTensor(shape=shard.global_shape, dtype=dtype, read=read)


def _read_tensors(folder: Path, family: Family) -> dict[str, LazyTensor]:
    """All tensors of a folder that a family does not ignore, by their present names.

    Raises:
        ConversionError: there are none in safetensors, or the index and the files do not agree.
    """
    if (folder / WEIGHTS).is_file():  # first, as transformers has it
        found = dict(_tensors_of_file(folder / WEIGHTS, family))
    else:
        found = _tensors_of_index(folder, family)
    return {family.present_name(name): tensor for name, tensor in found.items()}


def _tensors_of_index(folder: Path, family: Family) -> dict[str, LazyTensor]:
    if not (folder / WEIGHTS_INDEX).is_file():
        raise _no_weights(folder)
    places = read_json(folder / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConversionError(f"{folder / WEIGHTS_INDEX} is damaged: weight_map is no object with names of files")
    for name, file in places.items():
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise ConversionError(
                f"{folder / WEIGHTS_INDEX} is damaged: the file of {name[:100]} is {json.dumps(file)[:100]}, "
                "must be a plain name like model-00001-of-00002.safetensors"
            )
    found: dict[str, LazyTensor] = {}
    for file in sorted(set(places.values())):
        for name, tensor in _tensors_of_file(folder / file, family):
            if places.get(name) != file:
                raise ConversionError(f"{folder / file} holds {name}, and {WEIGHTS_INDEX} places it elsewhere")
            found[name] = tensor
    for name, file in places.items():
        if name not in found and not family.ignores(name):
            raise ConversionError(f"{folder / file} lacks {name}, which {WEIGHTS_INDEX} places there")
    return found


def _no_weights(folder: Path) -> ConversionError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if not pickles:
        return ConversionError(f"{folder} has no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}")
    return ConversionError(
        f"{folder} has its weights in {pickles[0]}, a pickle, which could run any program when it is read; where you "
        "trust it, transformers writes safetensors from it: "
        "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(OTHER)"
    )


def _tensors_of_file(path: Path, family: Family) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of a safetensors file, whose header the library has checked. The file is open while one is read."""
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118, it is no mapping
            if family.ignores(name):
                continue
            header = file.get_slice(name)
            dtype = DTYPES.get(header.get_dtype())
            if dtype is None or not dtype.is_floating_point:
                raise ConversionError(
                    f"{path}: {name} is of {header.get_dtype()}; weights in F64, F32, F16 and BF16 can be converted"
                )
            yield (
                name,
                LazyTensor(
                    shape=tuple(header.get_shape()),
                    dtype=dtype,
                    read=_reader(path, name),
                    source=f"{name} of {path}",
                ),
            )


def _reader(path: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with _opened(path) as file:
            values: Tensor = file.get_tensor(name)
            return values.clone()  # what the library gives is a part of the mapped file, which it keeps in memory

    return read


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise ConversionError(f"{path} cannot be read: there is no such file")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error


# ---- writing ----


@dataclass(frozen=True)
class _WholeTensor:
    """A tensor that a file is written with, read when its turn comes."""

    name: str
    lazy: LazyTensor

    @property
    def dtype(self) -> torch.dtype:
        return self.lazy.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lazy.shape

    @property
    def tensor(self) -> Tensor:
        return self.lazy.read()


def write_hugging_face(model: PortableModel, folder: Path, *, family_name: str | None = None) -> None:
    """Write a model as `transformers` reads it, one tensor at a time, in files of at most 5 GB.

    Args:
        family_name: as in `FAMILIES`, where several families have the model; the first of them when None.

    Raises:
        ConversionError: no family, or not this one, has the model, or the folder is not empty.
    """
    config = HuggingFaceConfig(
        model=model.config, bert=model.bert, vocab_size=model.vocab_size, seq_length=model.seq_length
    )
    family = _family(config, family_name)
    tensors = _as_theirs(model, family, config)
    values = family.write(config)
    values |= {key: model.generation.get(key) for key in _TOKENS}
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) == 1:
        values["torch_dtype"] = dtypes.pop()
    with whole_folder(folder) as inside:
        _write_weights(inside, tensors)
        write_json(inside / CONFIG, values)
        if family.task == "gpt":  # others do not continue texts
            write_json(inside / GENERATION, model.generation)
        for name, path in model.tokenizer_files.items():
            copy_file(path, inside / name)
        if model.tokenizer_settings:
            write_json(inside / SETTINGS, model.tokenizer_settings)


def _family(config: HuggingFaceConfig, name: str | None) -> Family:
    if name is None:
        return family_of_model(config)
    family = family_called(name)
    if differences := family.differences(config):
        raise ConversionError(f"the model is no {name}, which differs: {'; '.join(differences)}")
    return family


def _as_theirs(model: PortableModel, family: Family, config: HuggingFaceConfig) -> dict[str, LazyTensor]:
    """The parameters of our model as their tensors. A tied head is left out: `tie_word_embeddings` makes it."""
    tensors: dict[str, LazyTensor] = {}
    for name in global_shapes(model.config, model.bert, model.vocab_size):
        match, theirs = match_of(name, family.matches)
        tensors |= split(match, theirs, model.tensors[weight_key(name)], model.config)
    dtype = model.tensors[weight_key(WORD_EMBEDDINGS)].dtype
    for name, shape in family.zeros(config).items():
        tensors[name] = LazyTensor(shape=shape, dtype=dtype, read=partial(torch.zeros, shape, dtype=dtype))
    return tensors


def _write_weights(folder: Path, tensors: Mapping[str, LazyTensor]) -> None:
    shards: list[list[_WholeTensor]] = [[]]
    size = 0
    for name, lazy in tensors.items():
        part = _WholeTensor(name, lazy)
        if shards[-1] and size + storage.size_of(part) > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += storage.size_of(part)
    if len(shards) == 1:
        storage.write_shard(folder / WEIGHTS, shards[0], storage.BLOCK_BYTES)
        return
    places: dict[str, str] = {}
    for number, parts in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        storage.write_shard(folder / file, parts, storage.BLOCK_BYTES)
        places |= {part.name: file for part in parts}
    total = sum(storage.size_of(part) for parts in shards for part in parts)
    write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
