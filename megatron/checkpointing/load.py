"""Finding, checking and reading a checkpoint: whichever layout wrote it, into whichever layout reads it."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import storage
from megatron.checkpointing.errors import CheckpointBelowError, CheckpointError, NoCheckpointError
from megatron.checkpointing.index import Index, StoredTensor, check_cover, check_version, parse_index, parse_json
from megatron.checkpointing.model_tensors import is_weight, weight_key
from megatron.checkpointing.resharding import Transfer, misfit, transfers
from megatron.checkpointing.slices import HeldPart, held_parts
from megatron.config.megatron_config import MegatronConfig
from megatron.config.problems import UserError, counted, listing
from megatron.core.agreement import agree
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import Halves, Numbers, narrow_
from megatron.core.shard import NamedTensor

_ITERATION = re.compile(r"[0-9]{1,18}")
# What is in the folder of an iteration that Megatron-LM has saved, in its older and its newer form, as seen from there
# and from the folder above.
MARKS_OF_MEGATRON_LM = tuple(
    f"{place}{name}" for place in ("", "iter_*/", "release/") for name in ("mp_rank_*", ".metadata")
)


@dataclass(frozen=True, kw_only=True)
class LoadSummary:
    """What this rank has loaded.

    Attributes:
        tensors: number of tensors.
        bytes_read: from the files.
        casts: one line for each conversion of a floating-point kind, to be shown to the user.
        left: one line for each tensor that was left out, as `partial` allows, on any rank.
    """

    tensors: int
    bytes_read: int
    casts: tuple[str, ...]
    left: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """What a rank asks for beside what there is.

    Attributes:
        asked: one byte for each key of the checkpoint, in order: whether the rank asks for it.
        misfits: by key, why what it asks for cannot be had.
    """

    asked: bytes
    misfits: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk, opened: its index and metadata are checked, its tensors not read yet.

    Attributes:
        folder: where it is.
        iteration: number of iterations done when it was saved.
        metadata: what was given to `save_checkpoint`; tuples have become lists.
        index: the global tensors and their slices.
        identity: CRC-32 of the index, to tell whether two ranks have opened the same checkpoint.
    """

    folder: Path
    iteration: int
    metadata: dict[str, Any]
    index: Index
    identity: int

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Global tensors by key: dtype, shape, slices."""
        return self.index.tensors

    @property
    def config(self) -> MegatronConfig:
        """The configuration that it was saved with.

        Raises:
            CheckpointError: there is none, or one that this version does not know.
        """
        try:
            return MegatronConfig.from_dict(self.metadata.get("config", {}))
        except UserError as error:
            raise CheckpointError(f"{self.folder / storage.METADATA_FILE}: {error}") from error

    def load_into(
        self,
        tensors: Iterable[NamedTensor],
        *,
        world: CommGroup,
        ignore: Sequence[str] = (),
        partial: Sequence[str] = (),
    ) -> LoadSummary:
        """Fill local tensors with their parts of the global ones; a collective over `world`.

        Whole tensors, copies of tied ones and replicated pieces are filled too; padding, which is in no
        piece, is left as it is. Nothing is written into any tensor before all keys, shapes and dtypes were
        found to fit on all ranks. If a file proves damaged while it is read, the tensors are left partly filled.

        Args:
            tensors: this rank's tensors. All ranks together must ask for every tensor of the checkpoint.
            ignore: prefixes of keys that need not be asked for, as "optimizer." for weights only.
            partial: patterns as "model.output_layer.*": what they name may be missing, surplus or of another shape or
                dtype, and is then left as it is. The optimizer's state of a weight goes by the weight's key too.

        Raises:
            CheckpointError: on all ranks: a list of tensors that are missing, surplus, or of another shape or dtype;
                a pattern that names nothing; or the file and tensor that are damaged.
        """
        asked = list(tensors)
        phase = f"loading {self.folder}"
        misfits, surplus = self._differences(asked, world, phase)
        surplus = {key: line for key, line in surplus.items() if not key.startswith(tuple(ignore))}
        allowed = self._named(partial, misfits, phase)
        wrong = [[line for key, line in each.items() if key not in allowed] for each in (misfits, surplus)]
        if any(wrong):
            raise CheckpointError(
                f"{phase}: {counted(sum(map(len, wrong)), 'tensor')} of model and checkpoint do not match:\n"
                + "\n".join(listing(lines) for lines in wrong if lines)
                + "\n--load-partial GLOB leaves those that it names out"
            )
        fitting = [named for named in asked if named.key not in misfits]
        summaries: list[LoadSummary] = []
        agree(world, phase, lambda: summaries.append(self._read(fitting)), raises=CheckpointError)
        return replace(summaries[0], left=(*misfits.values(), *surplus.values()))

    def read(self, key: str) -> Tensor:
        """A global tensor, whole, on the CPU.

        Raises:
            CheckpointError: naming the file and the tensor, when they are damaged.
        """
        stored = self.tensors[key]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for file in sorted({part.file for part in stored.slices}):
            with storage.ShardReader(self.folder / file, self.index.files[file], self.index.block_bytes) as reader:
                for part in stored.slices:
                    if part.file == file:
                        reader.copy_into(whole[part.box.index], part, stored.dtype, part.box, store=_store)
        return whole

    def _differences(
        self, asked: Sequence[NamedTensor], world: CommGroup, phase: str
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Over all ranks, each with a line to show: what cannot be filled, and what nobody asks for; by key."""
        keys = sorted(self.tensors)
        found = agree(world, phase, lambda: self._compare(asked, keys), raises=CheckpointError)
        misfits = {key: line for each in found for key, line in each.misfits.items()}
        is_asked = [any(marks) for marks in zip(*(each.asked for each in found), strict=True)]
        surplus = {
            key: f"{key} {self.tensors[key].shape}: in the checkpoint only"
            for key, here in zip(keys, is_asked, strict=True)
            if not here
        }
        return misfits, surplus

    def _compare(self, asked: Sequence[NamedTensor], keys: Sequence[str]) -> _Comparison:
        misfits = {}
        for named in asked:
            problem = misfit(self.tensors, named.key, named.shard.global_shape, named.tensor.dtype)
            if problem is not None:
                misfits[named.key] = problem
        wanted = {named.key for named in asked}
        return _Comparison(asked=bytes(key in wanted for key in keys), misfits=misfits)

    def _named(self, patterns: Sequence[str], misfits: Iterable[str], phase: str) -> set[str]:
        """The keys of model and checkpoint that any pattern names."""
        keys = {*self.tensors, *misfits}
        found: set[str] = set()
        for pattern in patterns:
            named = {key for key in keys if any(fnmatchcase(name, pattern) for name in {key, _weight_of(key)})}
            if not named:
                raise CheckpointError(
                    f"{phase}: {pattern!r} names no tensor of the model or of the checkpoint; "
                    f"the first one there is {min(keys)}"
                )
            found |= named
        return found

    def _read(self, asked: Sequence[NamedTensor]) -> LoadSummary:
        """Read file by file, so that at most one is open."""
        jobs: dict[str, list[tuple[Transfer, HeldPart, str]]] = {}
        casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
        for named in asked:
            stored = self.tensors[named.key]
            if stored.dtype != named.tensor.dtype:
                casts[stored.dtype, named.tensor.dtype] += 1
            for part in held_parts(named):
                for transfer in transfers(stored.slices, part.placed):
                    jobs.setdefault(transfer.source.file, []).append((transfer, part, named.key))
        bytes_read = 0
        for file, transfers_of_file in sorted(jobs.items()):
            size = self.index.files[file]
            with storage.ShardReader(self.folder / file, size, self.index.block_bytes) as reader:
                copies: list[Future[int]] = []
                for transfer, part, key in transfers_of_file:
                    target = part.values[transfer.box.seen_from(part.placed.offset).index]
                    dtype, store = self.tensors[key].dtype, _store_weights if is_weight(key) else _store
                    copies += reader.start_copy(target, transfer.source, dtype, transfer.box, store=store)
                bytes_read += sum(copy.result() for copy in copies)
        lines = tuple(
            f"{counted(count, 'tensor')}: {stored} in the checkpoint, converted to {wanted}"
            for (stored, wanted), count in casts.items()
        )
        return LoadSummary(tensors=len(asked), bytes_read=bytes_read, casts=lines)


def _weight_of(key: str) -> str:
    """The key of the weight that "optimizer.<kind>.<name>" is state of; other keys are their own."""
    state = re.fullmatch(r"optimizer\.[^.]+\.(.+)", key)
    return weight_key(state[1]) if state else key


def _store(values: Tensor, target: Numbers) -> None:
    target.copy_(values)


def _store_weights(values: Tensor, target: Numbers) -> None:
    """A model that is loaded to be used has the weights that it was trained with: both round main ones alike."""
    if isinstance(target, Halves) or values.dtype == target.dtype:
        target.copy_(values)
    else:
        narrow_(values, target)


def read_tracker(root: str | os.PathLike[str]) -> int | None:
    """The iteration that `latest_checkpointed_iteration.txt` names; None without that file.

    Ask `load_checkpoint` whether there is something to load: the process may have been killed after a
    checkpoint was completed and before the first tracker was written.

    Raises:
        CheckpointError: the file holds anything else.
    """
    path = Path(root) / storage.TRACKER_FILE
    if not os.path.lexists(path):
        return None
    text = storage.read_file(path, limit=4096).decode(errors="replace").strip()
    if _ITERATION.fullmatch(text):
        return int(text)
    if text == "release":
        raise CheckpointError(f"{path} says 'release': that is a checkpoint of Megatron-LM, not one of this form")
    raise CheckpointError(f"{path} is damaged: it holds {text[:40]!r}, not an iteration")


def list_checkpoints(root: str | os.PathLike[str]) -> tuple[int, ...]:
    """Iterations that have a completed checkpoint, in order; their tensors are not looked at."""
    folder = Path(root)
    return tuple(
        iteration
        for iteration in storage.iterations_present(folder)
        if (storage.locate(folder, iteration) / storage.COMPLETE_FILE).is_file()
    )


def load_checkpoint(root: str | os.PathLike[str], *, world: CommGroup, step: int | None = None) -> Checkpoint:
    """Open the checkpoint that the tracker names, or that of iteration `step`.

    Without a tracker the newest complete one is opened: the save that made it was killed just before its last step.

    Args:
        world: the ranks that open it together: all get the same one or the same error. By default this
            process alone.

    Raises:
        NoCheckpointError: the folder holds none; a `CheckpointBelowError` where a folder in it does.
        CheckpointError: it is incomplete or damaged (the text offers the newest good one), or of another
            form.
    """
    path = Path(root)
    opened: list[Checkpoint] = []

    def open_one() -> tuple[int, int]:
        checkpoint = _open_chosen(path, step)
        opened.append(checkpoint)
        return checkpoint.iteration, checkpoint.identity

    identities = agree(world, f"opening a checkpoint in {root}", open_one, raises=CheckpointError)
    for rank, identity in enumerate(identities):
        if identity != identities[0]:
            raise CheckpointError(
                f"{root} is not the same folder everywhere: rank 0 sees iteration {identities[0][0]}, "
                f"rank {rank} iteration {identity[0]} or another save of it; "
                "--load must be a file system that all nodes share"
            )
    return opened[0]


def _open_chosen(root: Path, step: int | None) -> Checkpoint:
    present = storage.iterations_present(root)
    try:
        iteration = read_tracker(root) if step is None else step
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_offer(root, present)}") from error
    if iteration is None:
        complete = list_checkpoints(root)
        if not complete:
            raise _nothing_there(root, present)
        iteration = complete[-1]
    if iteration not in present:
        if step is not None and not present:
            raise _nothing_there(root, present)
        named = "--ckpt-step asks for" if step is not None else f"{storage.TRACKER_FILE} names"
        raise CheckpointError(f"{root}: {named} iteration {iteration}, which is not there; {_offer(root, present)}")
    try:
        return _open(storage.locate(root, iteration), iteration)
    except CheckpointError as error:
        others = [other for other in present if other != iteration]
        raise CheckpointError(f"{error}; {_offer(root, others)}") from error


def _nothing_there(root: Path, present: Sequence[int]) -> CheckpointError:
    """The error for a folder without a complete checkpoint, told apart by what it holds."""
    if not root.exists():
        return NoCheckpointError(f"no checkpoint in {root}: there is no such folder")
    if not root.is_dir():
        return CheckpointError(f"no checkpoint in {root}: it is not a folder")
    if (root / storage.INDEX_FILE).exists():
        return CheckpointError(f"{root} is a single checkpoint: give its parent folder, and --ckpt-step to choose it")
    other_form = _other_form(root)
    if other_form is not None:
        return CheckpointError(f"no checkpoint in {root}: {other_form}")
    if present:
        names = ", ".join(storage.iteration_folder(root, iteration).name for iteration in present)
        return CheckpointError(f"no complete checkpoint in {root}: {names} without {storage.COMPLETE_FILE}")
    interrupted = [entry.name for entry in root.iterdir() if storage.is_temporary(entry)]
    detail = f": {', '.join(interrupted)} is a save that was never completed" if interrupted else ""
    below = _below(root)
    if below is not None:
        return CheckpointBelowError(f"no checkpoint in {root}{detail}; {below} has one")
    return NoCheckpointError(f"no checkpoint in {root}{detail}")


def _below(root: Path) -> Path | None:
    """A folder with a complete checkpoint, at most two levels down."""
    for levels in ("*", "*/*"):
        for marker in sorted(root.glob(f"{levels}/iter_*/{storage.COMPLETE_FILE}")):
            return marker.parents[1]
    return None


def _other_form(root: Path) -> str | None:
    """What a folder holds in place of a checkpoint of this form, and the command that makes one of it."""
    if (root / "config.json").is_file() and any(root.glob("*.safetensors")):
        holds, form = "a model of Hugging Face (config.json, *.safetensors)", "hf"
    elif any(any(root.glob(mark)) for mark in MARKS_OF_MEGATRON_LM):
        holds, form = "a checkpoint of Megatron-LM", "megatron"
    else:
        return None
    return (
        f"it holds {holds}; make one of this form, in a new folder OUT: "
        f"python tools/convert_checkpoint.py --from {form} --to native {root} OUT"
    )


def _offer(root: Path, present: Sequence[int]) -> str:
    for iteration in reversed(present):
        try:
            _open(storage.locate(root, iteration), iteration)
        except CheckpointError:
            continue
        return f"the newest good one is iteration {iteration}: --ckpt-step {iteration} loads it"
    return _other_form(root) or "there is no good one in that folder"


def _open(folder: Path, iteration: int) -> Checkpoint:
    """Check all that can be checked without reading tensors: marker, index, metadata, sizes of the files."""
    marker_path = folder / storage.COMPLETE_FILE
    if not os.path.lexists(marker_path):
        raise CheckpointError(f"{folder} is incomplete: it has no {storage.COMPLETE_FILE}")
    marker = parse_json(storage.read_file(marker_path, limit=4096), str(marker_path))
    check_version(marker, str(marker_path))
    if marker.get("iteration") != iteration:
        raise CheckpointError(
            f"{folder} was saved as iteration {str(marker.get('iteration'))[:40]}: "
            f"the folder was renamed, or {storage.COMPLETE_FILE} is damaged"
        )
    index_text = _read_marked(folder, storage.INDEX_FILE, marker)
    index = parse_index(index_text, str(folder / storage.INDEX_FILE))
    check_cover(index, str(folder / storage.INDEX_FILE))
    if index.iteration != iteration:
        raise CheckpointError(f"{folder / storage.INDEX_FILE} is that of iteration {index.iteration}")
    metadata_text = _read_marked(folder, storage.METADATA_FILE, marker)
    metadata = parse_json(metadata_text, str(folder / storage.METADATA_FILE))
    for file, size in index.files.items():
        storage.check_size(folder / file, size)
    return Checkpoint(
        folder=folder, iteration=iteration, metadata=metadata, index=index, identity=zlib.crc32(index_text)
    )


def _read_marked(folder: Path, name: str, marker: Mapping[str, Any]) -> bytes:
    """A file whose size and checksum the completeness marker records."""
    files = marker.get("files")
    entry = files.get(name) if isinstance(files, dict) else None
    if not isinstance(entry, dict):
        raise CheckpointError(f"{folder / storage.COMPLETE_FILE} is damaged: it does not speak of {name}")
    text = storage.read_file(folder / name)
    if (len(text), zlib.crc32(text)) != (entry.get("bytes"), entry.get("crc32")):
        raise CheckpointError(f"{folder / name} is damaged: wrong size or checksum")
    return text
