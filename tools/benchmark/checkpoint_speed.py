"""Time of saving and loading 1 GB, beside the same bytes written and read plainly; and how long training stands still.

python tools/benchmark/checkpoint_speed.py --folder /scratch --json result.json
python tools/benchmark/checkpoint_speed.py --gigabytes 0.2 --turns 3

The tensors are those of a GPT with Adam in fp32: weights and two moments, each kind in one flat buffer, as an optimizer
has them. The sides run by turns in this process, on one file system:
- plain write: one file of as many bytes from memory, by blocks of 16 MiB, and fsync
- save: `save_checkpoint`: checksums, index, fsync, renames
- passes: the products of forward and backward passes of 512 tokens with these weights, as the next iteration makes them
- passes beside: `AsyncSaver.start`, the same passes, and `wait_for_copy`, as with `--async-save`; what lies before and
  after the passes is the stall, for which the training stands still; and the passes beside the copy, and beside what is
  written by then, over those alone are what they lose by it
- plain read: that one file into memory that is there, by blocks of 16 MiB, nothing of it being cached
- load: `load_checkpoint` and `load_into`, likewise, all checksums being checked
Medians over the turns are reported, and the medians of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from turns import cell, markdown, ratios, take_turns, write_json

from megatron.checkpointing import AsyncSaver, load_checkpoint, save_checkpoint
from megatron.core.comm_group import CommGroup
from megatron.core.shard import Init, NamedTensor, Shard, whole_pieces

HIDDEN, VOCABULARY = 1024, 8192
TOKENS = 512
BLOCK = 16 * 2**20
ALONE = CommGroup.single("world")


def shapes_of_layer(number: int) -> dict[str, tuple[int, ...]]:
    prefix, h = f"decoder.layers.{number}", HIDDEN
    return {
        f"{prefix}.input_layernorm.weight": (h,),
        f"{prefix}.self_attention.linear_qkv.weight": (3 * h, h),
        f"{prefix}.self_attention.linear_proj.weight": (h, h),
        f"{prefix}.pre_mlp_layernorm.weight": (h,),
        f"{prefix}.mlp.linear_fc1.weight": (4 * h, h),
        f"{prefix}.mlp.linear_fc2.weight": (h, 4 * h),
    }


def state_of_training(size: int) -> tuple[list[NamedTensor], list[Tensor]]:
    """Weights and moments of about `size` bytes: by name, and the three flat buffers that they are views of."""
    shapes: dict[str, tuple[int, ...]] = {}
    layer = 0
    while 12 * sum(torch.Size(shape).numel() for shape in shapes.values()) < size:
        shapes |= shapes_of_layer(layer) if layer else {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN)}
        layer += 1
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    named, buffers = [], []
    for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        flat = torch.randn(total)
        buffers.append(flat)
        for (name, shape), values in zip(
            shapes.items(), torch.split(flat, [torch.Size(shape).numel() for shape in shapes.values()]), strict=True
        ):
            shard = Shard(
                name=name,
                global_shape=shape,
                dim=None,
                pieces=whole_pieces(shape[0], ALONE),
                group=ALONE,
                init=Init.zeros(),
            )
            named.append(NamedTensor(key=f"{kind}.{name}", tensor=values.view(shape), shard=shard))
    return named, buffers


def matrices(named: Sequence[NamedTensor]) -> list[Tensor]:
    """The weights of the model that are some."""
    weights = [each.tensor for each in named if each.key.startswith("model.")]
    return [weight for weight in weights if isinstance(weight, Tensor) and weight.dim() == 2]


def passes(weights: Sequence[Tensor]) -> None:
    """The three products with each weight [n, k] that an iteration makes, which take its time and read all weights."""
    for weight in weights:
        inputs = torch.ones(TOKENS, weight.shape[1])
        outputs = inputs @ weight.t()  # [tokens, n]
        outputs @ weight  # the gradient of the inputs
        outputs.t() @ inputs  # and of the weight


class BesideASave:
    """Passes while a checkpoint is being saved.

    Attributes:
        start, passes, wait: seconds, of each turn.
    """

    def __init__(self, saver: AsyncSaver, folder: Path, named: Sequence[NamedTensor]) -> None:
        self._saver, self._folder, self._named = saver, folder, named
        self._weights = matrices(named)
        self.start: list[float] = []
        self.passes: list[float] = []
        self.wait: list[float] = []

    def __call__(self) -> None:
        moments = [time.perf_counter()]
        self._saver.start(self._folder, 1, self._named, {})
        moments.append(time.perf_counter())
        passes(self._weights)
        moments.append(time.perf_counter())
        self._saver.wait_for_copy()
        moments.append(time.perf_counter())
        for seconds, (before, after) in zip((self.start, self.passes, self.wait), pairwise(moments), strict=True):
            seconds.append(after - before)


def write_plainly(path: Path, parts: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for part in parts:
        for first in range(0, len(part), BLOCK):
            block = part[first : first + BLOCK]
            while block:
                block = block[os.write(descriptor, block) :]
    os.fsync(descriptor)
    os.close(descriptor)


def read_plainly(path: Path, parts: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for part in parts:
        position = 0
        while position < len(part):
            position += os.readv(descriptor, [part[position : position + BLOCK]])
    os.close(descriptor)


def forget(folder: Path) -> None:
    """Drop the cached pages of all files, which are on the disk already."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint (default: 1)")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch (default: as many as it takes)")
    parser.add_argument("--folder", type=Path, help="on the file system to measure (default: that of temporary files)")
    parser.add_argument("--json", type=Path, help="write every turn to this file")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    named, buffers = state_of_training(int(arguments.gigabytes * 1e9))
    memory = [memoryview(buffer.view(torch.uint8).numpy()) for buffer in buffers]  # type: ignore[arg-type]
    size = sum(map(len, memory))
    saver = AsyncSaver(world=ALONE, replicas=ALONE)
    saver.reserve(named)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        file, saved, written, background = (folder / name for name in ("plain", "saved", "written", "background"))
        write_plainly(file, memory)
        save_checkpoint(saved, 1, named, {}, world=ALONE)

        def make_ready() -> None:
            saver.finish()
            for root in (written, background):
                shutil.rmtree(root, ignore_errors=True)
            os.sync()
            forget(folder)

        weights = matrices(named)
        beside = BesideASave(saver, background, named)
        sides: dict[str, Callable[[], object]] = {
            "plain write": lambda: write_plainly(folder / "again", memory),
            "save": lambda: save_checkpoint(written, 1, named, {}, world=ALONE),
            "passes": lambda: passes(weights),
            "passes beside": beside,
            "plain read": lambda: read_plainly(file, memory),
            "load": lambda: load_checkpoint(saved, world=ALONE).load_into(named, world=ALONE),
        }
        times = take_turns(sides, turns=arguments.turns, warm_up=1, before_side=make_ready)
        saver.finish()
    seconds = times.seconds
    del seconds["passes beside"]
    for name, measured in (("start", beside.start), ("wait", beside.wait), ("passes beside", beside.passes)):
        seconds[name] = measured[1:]  # without the turn of warming up
    seconds["stall"] = [before + after for before, after in zip(seconds["start"], seconds["wait"], strict=True)]
    of_speed = {
        "save": ratios(seconds["plain write"], seconds["save"]),
        "load": ratios(seconds["plain read"], seconds["load"]),
        "stall": ratios(seconds["stall"], seconds["save"]),
        "passes beside": ratios(seconds["passes beside"], seconds["passes"]),
    }
    meaning = {
        "save": "of the plain write's speed",
        "load": "of the plain read's speed",
        "stall": "of the save's time",
        "passes beside": "of the passes' time",
    }
    rows = [
        [
            side,
            cell(each, ".3f"),
            cell([size / 1e9 / one for one in each], ".2f") if side in ("save", "load") or "plain" in side else "",
            f"{cell(of_speed[side], '.3f')} {meaning[side]}" if side in meaning else "",
        ]
        for side, each in seconds.items()
    ]
    print(f"{size / 1e9:.2f} GB, {torch.get_num_threads()} threads, medians (and ranges) of {arguments.turns} turns\n")
    print(markdown(["", "s", "GB/s", "ratio"], rows))
    if arguments.json is not None:
        write_json(arguments.json, {"bytes": size, "seconds": seconds, "cpu_seconds": times.cpu, "ratios": of_speed})
    sys.stdout.flush()


if __name__ == "__main__":
    main()
