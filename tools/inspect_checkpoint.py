"""What is in a checkpoint: tensors, configuration, how far the training had come; or how two checkpoints differ.

python tools/inspect_checkpoint.py checkpoints
python tools/inspect_checkpoint.py checkpoints --ckpt-step 1000 --all --json contents.json
python tools/inspect_checkpoint.py checkpoints --compare other-checkpoints

Every element is read and checked against its checksum, one tensor at a time. Tensors that differ in the number of their
layer only share a line: their norm is that of all together; --all gives each its own. Norms, least and largest values
are those of the finite elements; the others are counted.

With --compare the exit status is 1 unless both hold the same tensors, byte for byte.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from command_line import Parser, bytes_of, dtype_name, print_table, progress, run_tool, say, shown, write_json
from text_tools import prepare_output
from torch import Tensor

from megatron.checkpointing import Checkpoint, CheckpointError, is_weight, load_checkpoint
from megatron.config.megatron_config import all_options, difference
from megatron.config.options import Option, shown_value
from megatron.config.problems import counted, listing
from megatron.core.comm_group import CommGroup

# Elements that are looked at together: as float64, some 30 MB.
_AT_ONCE = 2**22
# The sizes of a layout, as they are called.
_LAYOUT = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of the elements of a tensor, or of several together.

    Attributes:
        not_finite: elements that are NaN or infinite; the others are what the rest is of.
        smallest, largest: None where no element is finite.
    """

    not_finite: int
    sum_of_squares: float
    smallest: float | None
    largest: float | None

    @property
    def norm(self) -> float:
        return sqrt(self.sum_of_squares)

    def as_json(self) -> dict[str, Any]:
        return {"norm": self.norm, "min": self.smallest, "max": self.largest, "not_finite": self.not_finite}


def statistics_of(tensor: Tensor) -> Statistics:
    return together([_of_part(part) for part in parts_of(tensor)])


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    flat = tensor.flatten() if tensor.is_floating_point() else tensor.flatten().double()
    return torch.split(flat, _AT_ONCE)


def _of_part(part: Tensor) -> Statistics:
    finite = part
    if part.numel() and not all(end.isfinite() for end in torch.aminmax(part)):  # NaN is both the least and the largest
        finite = part[part.isfinite()]
    least, most = map(float, torch.aminmax(finite)) if finite.numel() else (None, None)
    return Statistics(
        not_finite=part.numel() - finite.numel(),
        sum_of_squares=float(torch.linalg.vector_norm(finite, dtype=torch.float64)) ** 2,
        smallest=least,
        largest=most,
    )


def together(parts: Sequence[Statistics]) -> Statistics:
    return Statistics(
        not_finite=sum(part.not_finite for part in parts),
        sum_of_squares=sum(part.sum_of_squares for part in parts),
        smallest=min((part.smallest for part in parts if part.smallest is not None), default=None),
        largest=max((part.largest for part in parts if part.largest is not None), default=None),
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a tensor of one checkpoint differs from that of the other.

    Attributes:
        identical: byte for byte.
        not_finite: elements that differ by no number: one of the two is NaN or infinite, or both are, and not the same.
        largest: of the differences between the other elements.
        sum_of_squares: of these differences; sum_of_squares_before: of the elements of the first.
    """

    identical: bool
    not_finite: int
    largest: float
    sum_of_squares: float
    sum_of_squares_before: float

    @property
    def relative(self) -> float:
        """The norm of the difference by that of the first tensor."""
        if self.sum_of_squares == 0:
            return 0.0
        return sqrt(self.sum_of_squares / self.sum_of_squares_before) if self.sum_of_squares_before else float("inf")

    def as_json(self) -> dict[str, Any]:
        relative = self.relative if self.sum_of_squares_before else None
        return {
            "identical": self.identical,
            "not_finite": self.not_finite,
            "largest": self.largest,
            "relative": relative,
        }


def change_of(one: Tensor, other: Tensor) -> Change:
    """Of two tensors of one shape."""
    if one.dtype == other.dtype and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)):
        return Change(identical=True, not_finite=0, largest=0.0, sum_of_squares=0.0, sum_of_squares_before=0.0)
    differences, before = [], []
    for part, changed in zip(parts_of(one), parts_of(other), strict=True):
        same = (part == changed) | (part.isnan() & changed.isnan())
        differences.append(_of_part((changed.double() - part.double()).masked_fill_(same, 0.0)))
        before.append(_of_part(part))
    found = together(differences)
    return Change(
        identical=False,
        not_finite=found.not_finite,
        largest=max(found.largest or 0.0, -(found.smallest or 0.0)),
        sum_of_squares=found.sum_of_squares,
        sum_of_squares_before=together(before).sum_of_squares,
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="checkpoint folder: the --save of the training")
    parser.add_argument("--ckpt-step", type=int, help="iteration to look at (default: the newest)")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="another checkpoint, to compare this one with")
    parser.add_argument("--compare-step", type=int, help="iteration of that one (default: its newest)")
    parser.add_argument("--all", action="store_true", help="a line for each tensor, not for each kind of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is found here, too, of each tensor")
    options = parser.read()
    if options.json is not None:
        prepare_output(options.json, flag="--json")
    checkpoint = load_checkpoint(options.folder, step=options.ckpt_step, world=CommGroup.single("world"))
    if options.compare is None:
        same, found = True, inspect(checkpoint, by_layer=not options.all)
    else:
        other = load_checkpoint(options.compare, step=options.compare_step, world=CommGroup.single("world"))
        same, found = compare(checkpoint, other, by_layer=not options.all)
    if options.json is not None:
        write_json(options.json, found)
    if not same:
        sys.exit(1)


# ---- one checkpoint ----


def inspect(checkpoint: Checkpoint, *, by_layer: bool) -> dict[str, Any]:
    """Print what is in a checkpoint; the same as JSON."""
    head = head_of(checkpoint)
    print_table([[f"{name}:", shown(value)] for name, value in head.items()])
    lines = configuration_of(checkpoint)
    if lines:
        say("\nconfiguration, where it is not as by default:\n" + "\n".join(f"  {line}" for line in lines))
    found = {}
    with progress(bytes_of(checkpoint.tensors.values()), "reading", unit="B") as bar:
        for key in sorted(checkpoint.tensors, key=in_order):
            found[key] = statistics_of(checkpoint.read(key))
            bar.update(bytes_of([checkpoint.tensors[key]]))
    rows = [["tensor", "number", "shape", "dtype", "norm", "min", "max", "not finite"]]
    for name, keys in groups(checkpoint, found, by_layer=by_layer).items():
        of_group, stored = together([found[key] for key in keys]), checkpoint.tensors[keys[0]]
        numbers = [shown(value) for value in of_group.as_json().values()]
        rows.append([name, str(len(keys)), shape_of(checkpoint, keys[0]), dtype_name(stored.dtype), *numbers])
    say("")
    print_table(rows)
    wrong = [f"{key}: {counted(each.not_finite, 'element')}" for key, each in found.items() if each.not_finite]
    if wrong:
        say(f"\n{counted(len(wrong), 'tensor')} with NaN or infinite elements:\n{listing(wrong)}")
    return {
        **head,
        "configuration": checkpoint.metadata.get("config"),
        "tensors": {key: {**stored_as(checkpoint, key), **each.as_json()} for key, each in found.items()},
    }


def head_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint is, and who wrote it."""
    weights = [key for key in checkpoint.tensors if is_weight(key)]
    saved = checkpoint.metadata.get("progress")
    return {
        "folder": str(checkpoint.folder),
        "iteration": checkpoint.iteration,
        "samples": saved.get("consumed_train_samples") if isinstance(saved, dict) else None,
        "parameters": sum(prod(checkpoint.tensors[key].shape) for key in weights),
        "tensors of the model": len(weights),
        "other tensors": len(checkpoint.tensors) - len(weights),
        "bytes": sum(checkpoint.index.files.values()),
        "files": len(checkpoint.index.files),
        "written by": layout_of(checkpoint),
    }


def layout_of(checkpoint: Checkpoint) -> str:
    """The ranks of the training, and its precision."""
    try:
        parallel, precision = checkpoint.config.parallel, checkpoint.config.optimizer.precision
    except CheckpointError:
        return "a program that has left no configuration"
    if parallel.world_size is None:
        return f"a conversion, {precision}"
    sizes = {name: getattr(parallel, field) for name, field in _LAYOUT.items()}
    sizes["data"] = parallel.world_size // prod(sizes.values())
    along = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{counted(parallel.world_size, 'rank')}{' = ' * bool(along)}{along}, {precision}"


def configuration_of(checkpoint: Checkpoint) -> list[str]:
    """The options of the training that are not as by default."""
    try:
        config = checkpoint.config
    except CheckpointError:
        return []
    values = [(option, getattr(getattr(config, option.section), option.field)) for option in all_options(config.task)]
    return [given(option, value) for option, value in values if value != option.default]


def given(option: Option, value: Any) -> str:
    """An option as a command line has it."""
    if option.kind == "switch":
        return option.name if value else option.off_name
    return f"{option.name} {shown_value(value)}"


# ---- two checkpoints ----


def compare(one: Checkpoint, other: Checkpoint, *, by_layer: bool) -> tuple[bool, dict[str, Any]]:
    """Print how the second differs from the first; whether all tensors are the same, and what was printed as JSON."""
    heads = [head_of(each) for each in (one, other)]
    print_table([[f"{name}:", shown(heads[0][name]), shown(heads[1][name])] for name in heads[0]])
    options = changed_options(one, other)
    say("\nconfiguration: " + ("\n" + "\n".join(f"  {line}" for line in options) if options else "no difference"))
    missing = sorted(one.tensors.keys() - other.tensors.keys(), key=in_order)
    surplus = sorted(other.tensors.keys() - one.tensors.keys(), key=in_order)
    shared = sorted(one.tensors.keys() & other.tensors.keys(), key=in_order)
    reshaped = [key for key in shared if one.tensors[key].shape != other.tensors[key].shape]
    for keys, what, holder in (
        (missing, "that only the first has", one),
        (surplus, "that only the second has", other),
        (reshaped, "of another shape in the second", other),
    ):
        if keys:
            lines = [
                f"{name} {shape_of(holder, members[0])}"
                for name, members in groups(holder, keys, by_layer=by_layer).items()
            ]
            say(f"\n{counted(len(keys), 'tensor')} {what}:\n{listing(lines)}")
    comparable = [key for key in shared if one.tensors[key].shape == other.tensors[key].shape]
    changes = {}
    sizes = {key: bytes_of([one.tensors[key], other.tensors[key]]) for key in comparable}
    with progress(sum(sizes.values()), "reading", unit="B") as bar:
        for key in comparable:
            changes[key] = change_of(one.read(key), other.read(key))
            bar.update(sizes[key])
    changed = [key for key, change in changes.items() if not change.identical]
    say("")
    if changed:
        rows = [["tensor", "number", "largest difference", "relative", "not finite"]]
        for name, keys in groups(one, changed, by_layer=by_layer).items():
            largest, relative = (max(getattr(changes[key], name) for key in keys) for name in ("largest", "relative"))
            not_finite = sum(changes[key].not_finite for key in keys)
            rows.append([name, str(len(keys)), shown(largest), shown(relative), shown(not_finite)])
        print_table(rows)
        say(f"\nthe first that differs is {changed[0]}")
    alike = len(comparable) - len(changed)
    say(f"{alike:,} of {counted(len(comparable), 'tensor')} of one shape in both are the same, byte for byte")
    found = {
        "checkpoints": heads,
        "configuration": options,
        "missing": missing,
        "surplus": surplus,
        "reshaped": reshaped,
        "first_changed": changed[0] if changed else None,
        "tensors": {key: change.as_json() for key, change in changes.items()},
    }
    return not (missing or surplus or reshaped or changed), found


def changed_options(one: Checkpoint, other: Checkpoint) -> list[str]:
    try:
        return [str(change) for change in difference(one.config, other.config)]
    except CheckpointError as error:
        return [str(error)]


# ---- tensors ----


def groups(checkpoint: Checkpoint, keys: Sequence[str] | Mapping[str, Any], *, by_layer: bool) -> dict[str, list[str]]:
    """Keys under the name of their line: those that differ in a number only, and are alike, have one together."""
    found: dict[str, list[str]] = {}
    alike: dict[tuple[str, tuple[int, ...], torch.dtype], list[str]] = {}
    for key in keys:
        stored = checkpoint.tensors[key]
        pattern = re.sub(r"\.\d+(?=\.)", ".*", key) if by_layer else key
        kind = (pattern, stored.shape, stored.dtype)
        alike.setdefault(kind, []).append(key)
    for (pattern, _, _), members in alike.items():
        found[members[0] if len(members) == 1 else numbered(pattern, members)] = members
    return found


def numbered(pattern: str, members: Sequence[str]) -> str:
    """The pattern with the numbers that it stands for, where they are one run."""
    numbers = sorted(int(number) for key in members for number in re.findall(r"\.(\d+)(?=\.)", key))
    run = pattern.count("*") == 1 and numbers == [*range(numbers[0], numbers[-1] + 1)]
    return pattern.replace("*", f"{numbers[0]}-{numbers[-1]}") if run else f"{pattern} from {members[0]}"


def in_order(key: str) -> list[tuple[int, str]]:
    """Sorts the model first, and numbers as numbers."""
    parts = re.split(r"(\d+)", key)
    return [(not is_weight(key), "")] + [(int(part) if part.isdecimal() else -1, part) for part in parts]


def stored_as(checkpoint: Checkpoint, key: str) -> dict[str, Any]:
    stored = checkpoint.tensors[key]
    return {"shape": list(stored.shape), "dtype": dtype_name(stored.dtype)}


def shape_of(checkpoint: Checkpoint, key: str) -> str:
    return " x ".join(map(str, checkpoint.tensors[key].shape)) or "1"


if __name__ == "__main__":
    run_tool(main)
