"""The layouts of the parity matrix, and covers of their product."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

NUM_HEADS = 24
AnyCase = TypeVar("AnyCase")  # of any frozen dataclass

# How gradients are reduced and weights updated; in buckets so small that each chunk has several.
_DISTRIBUTED, _OVERLAP = ("--use-distributed-optimizer",), ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
DATA_PARALLELISM: dict[str, tuple[str, ...]] = {
    "plain": (),
    "zero": _DISTRIBUTED,
    "overlap": (*_OVERLAP, "--ddp-average-in-collective"),
    "zero-overlap": (*_DISTRIBUTED, *_OVERLAP, "--overlap-param-gather"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a layout of it over at most 8 ranks."""

    tp: int
    pp: int
    vpp: int
    dp: int
    sequence_parallel: bool
    schedule: str
    tied: bool
    groups: int
    layers: int
    dropout: bool
    micro_batch: int
    flavour: str
    order: str
    data: str

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def valid(self) -> bool:
        """Whether the program takes it. Nine layers are for the six or eight chunks that four or five do not fill."""
        return (
            self.world_size <= 8
            and (self.groups % self.tp == 0 or self.tp % self.groups == 0)
            and not (self.sequence_parallel and self.tp == 1)
            and not (self.vpp > 1 and (self.pp == 1 or self.schedule == "gpipe"))
            and not (self.schedule == "gpipe" and self.pp == 1)
            and not (self.data != "plain" and self.dp == 1)
            and not (self.order == "tp-pp-dp" and (self.pp == 1 or self.dp == 1))
            and (self.layers == 9) == (self.pp * self.vpp >= 6)
        )

    @property
    def model_arguments(self) -> tuple[str, ...]:
        """What changes the model, and so the reference on one rank."""
        arguments = [*("--num-layers", str(self.layers))]
        if not self.tied:
            arguments.append("--untie-embeddings-and-output-weights")
        if self.groups != NUM_HEADS:
            arguments += ["--group-query-attention", "--num-query-groups", str(self.groups)]
        if self.dropout:
            arguments += ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
        arguments += {
            "gpt": [],
            "llama": [
                *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
                *("--disable-bias-linear", "--qk-layernorm", "--add-qkv-bias"),
            ],
            "baichuan": [
                *("--position-embedding-type", "alibi", "--normalization", "RMSNorm", "--swiglu"),
                *("--disable-bias-linear", "--normalize-output-weights"),
            ],
        }[self.flavour]
        return tuple(arguments)

    @property
    def layout_arguments(self) -> tuple[str, ...]:
        arguments = [
            *("--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)),
            *("--micro-batch-size", str(self.micro_batch)),
        ]
        if self.sequence_parallel:
            arguments.append("--sequence-parallel")
        if self.vpp > 1:
            arguments += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.schedule == "gpipe":
            arguments += ["--pipeline-schedule", "gpipe"]
        arguments += DATA_PARALLELISM[self.data]
        if self.order == "tp-pp-dp":
            arguments.append("--use-tp-pp-dp-mapping")
        return tuple(arguments)

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        parts += [f"vpp{self.vpp}"] if self.vpp > 1 else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += ["gpipe"] if self.schedule == "gpipe" else []
        parts += [self.data] if self.data != "plain" else []
        parts += ["order"] if self.order == "tp-pp-dp" else []
        parts += [self.flavour, "tied" if self.tied else "untied", f"g{self.groups}", f"l{self.layers}"]
        parts += ["dropout"] if self.dropout else []
        return "-".join([*parts, f"mbs{self.micro_batch}"])


AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 3, 4, 8),
    "pp": (1, 2, 3, 4),
    "vpp": (1, 2),
    "dp": (1, 2, 4),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "gpipe"),
    "tied": (True, False),
    "groups": (NUM_HEADS, 2, 1),
    "layers": (4, 5, 9),
    "dropout": (False, True),
    "micro_batch": (1, 2),
    "flavour": ("gpt", "llama", "baichuan"),
    "order": ("tp-pp", "tp-pp-dp"),
    "data": tuple(DATA_PARALLELISM),
}


def all_cases() -> Iterable[Case]:
    sizes, others = list(AXES.values())[:4], list(AXES.values())[4:]
    for tp, pp, vpp, dp in itertools.product(*sizes):
        if tp * pp * dp > 8:  # most of them: each would be made a thousand times, to be found not valid
            continue
        for values in itertools.product(*others):
            case = Case(**dict(zip(AXES, (tp, pp, vpp, dp, *values))))
            if case.valid():
                yield case


def every_layout(cases: Iterable[Case]) -> list[Case]:
    """Every layout, each with one model: the properties of the model, and how gradients are reduced, are drawn, so that
    all meet all parts of layouts.

    The full product with the models would repeat layouts a hundred times over.
    """
    layout = ("tp", "pp", "vpp", "dp", "sequence_parallel", "schedule", "order", "micro_batch")
    by_layout: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        by_layout.setdefault(tuple(getattr(case, name) for name in layout), []).append(case)
    chooser = random.Random(0)
    return [chooser.choice(alike) for alike in by_layout.values()]


def pairwise_cover(cases: Sequence[AnyCase], seed: int = 0) -> list[AnyCase]:
    """A small set of cases in which each pair of values of two axes occurs that occurs at all; greedy."""
    chooser = random.Random(seed)
    pairs_of = {case: _pairs(case) for case in cases}
    uncovered = set().union(*pairs_of.values())
    chosen: list[AnyCase] = []
    while uncovered:
        sample = chooser.sample(list(cases), min(len(cases), 400))
        best = max(sample, key=lambda case: len(pairs_of[case] & uncovered))
        if not pairs_of[best] & uncovered:
            best = max(cases, key=lambda case: len(pairs_of[case] & uncovered))
        chosen.append(best)
        uncovered -= pairs_of[best]
    return chosen


def _pairs(case: Any) -> set[tuple[str, Any, str, Any]]:
    values = asdict(case)
    names = [field.name for field in fields(case)]
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(names, 2)}
