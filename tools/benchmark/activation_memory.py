"""Bytes that layers keep for the backward, in each layout and with each recomputation, and the time that it costs.

torchrun --nproc-per-node 2 tools/benchmark/activation_memory.py --json memory.json --picture memory.png

Two ranks run forward and backward of the same layers of a GPT in bf16: each the whole of them (none), split over both
(TP2), and with the sequence split too (TP2+SP); without recomputation, with that of the core of attention (selective),
and with that of whole layers (full); with dropout of 0.1, and without. Bytes are those of saved tensors, each storage
once, in units of s·b·h bytes a layer, beside the formulas of Korthikanti et al. 2022 (arXiv 2205.05198). All run by
turns; a time is the median over the turns of the ratio to the same layout without recomputation in that turn, by the
clock and of the processor. On a busy machine the second is the one to trust.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from torch import Tensor
from turns import markdown, ratios, take_turns, write_json

from megatron.config.transformer import TransformerConfig
from megatron.core.collectives import barrier
from megatron.core.comm_group import CommGroup
from megatron.core.shard import name_parameters
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import DropoutStream
from megatron.model.attention import computes_weights
from megatron.model.init import initialize_weights
from megatron.model.masks import attention_mask
from megatron.model.transformer import TransformerBlock
from megatron.planning.activations import paper_bytes_per_layer
from megatron.planning.saved_tensors import SavedBytes

matplotlib.use("Agg")
from matplotlib import pyplot

LAYOUTS = {"none": (1, False), "TP2": (2, False), "TP2+SP": (2, True)}
RECOMPUTATIONS: dict[str, dict[str, object]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
WARM_UP_TURNS = 1


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the layers and of a micro-batch."""

    sequence: int
    batch: int
    hidden: int
    heads: int
    layers: int


def name_of(dropout: float, layout: str, recompute: str) -> str:
    return f"dropout {dropout:g}, {layout}, {recompute}"


class Layers:
    """A stack of layers in one layout, with one recomputation."""

    def __init__(self, sizes: Sizes, layout: str, recompute: str, dropout: float, world: CommGroup) -> None:
        self.sizes, self.layout, self.recompute, self.dropout = sizes, layout, recompute, dropout
        self.name = name_of(dropout, layout, recompute)
        ranks, sequence_parallel = LAYOUTS[layout]
        config = TransformerConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            max_position_embeddings=sizes.sequence,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            **RECOMPUTATIONS[recompute],  # type: ignore[arg-type]
        )
        device = torch.device("cpu")
        self.block = TransformerBlock(
            config,
            layers=range(sizes.layers),
            final_layernorm=False,
            placement=Placement(
                group=world if ranks > 1 else CommGroup.single("tensor"),
                sequence_parallel=sequence_parallel,
                dtype=torch.bfloat16,
                device=device,
            ),
        )
        name_parameters(self.block)
        initialize_weights(self.block, seed=1)
        for parameter in self.block.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
        self.stream = DropoutStream(seed=1, iteration=0, sample_ids=torch.arange(sizes.batch)) if dropout else None
        self.mask = attention_mask(
            sequence_length=sizes.sequence,
            document_ids=None,
            window=None,
            slopes=None,
            explicit=computes_weights(config, self.stream),
            dtype=torch.bfloat16,
            device=device,
        )
        length = sizes.sequence // ranks if sequence_parallel else sizes.sequence
        self.x = torch.ones(length, sizes.batch, sizes.hidden, dtype=torch.bfloat16, requires_grad=True)

    def forward(self) -> Tensor:
        output: Tensor = self.block(self.x, rotary=None, mask=self.mask, dropout=self.stream)
        return output

    def bytes_of_a_layer(self) -> float:
        """What forward keeps, in units of s·b·h; the mask, which all layers share, left out."""
        shared = [] if self.mask is None else [self.mask]
        with SavedBytes([*self.block.parameters(), *shared]) as saved:
            output = self.forward()
        kept = saved.bytes / self.sizes.layers
        torch.autograd.backward(output, torch.ones_like(output))
        return kept / (self.sizes.sequence * self.sizes.batch * self.sizes.hidden)

    def bytes_of_the_paper(self) -> float:
        ranks, sequence_parallel = LAYOUTS[self.layout]
        return paper_bytes_per_layer(
            sequence_length=self.sizes.sequence,
            micro_batch_size=self.sizes.batch,
            hidden_size=self.sizes.hidden,
            num_attention_heads=self.sizes.heads,
            tensor_parallel_size=ranks,
            sequence_parallel=sequence_parallel,
            recompute=None if self.recompute == "none" else self.recompute,
        ) / (self.sizes.sequence * self.sizes.batch * self.sizes.hidden)

    def run(self) -> None:
        """Forward and backward."""
        output = self.forward()
        torch.autograd.backward(output, torch.ones_like(output))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; bytes in units of s·b·h a layer, times of those without recomputation."""

    dropout: float
    layout: str
    recompute: str
    measured: float
    paper: float
    relative_time: float
    relative_cpu_time: float


def measure(sizes: Sizes, world: CommGroup, turns: int) -> list[Row]:
    """All combinations, by turns."""
    everything = [
        Layers(sizes, layout, recompute, dropout, world)
        for dropout in (0.1, 0.0)
        for layout in LAYOUTS
        for recompute in RECOMPUTATIONS
    ]
    kept = {layers.name: layers.bytes_of_a_layer() for layers in everything}
    times = take_turns(
        {layers.name: layers.run for layers in everything},
        turns=turns,
        warm_up=WARM_UP_TURNS,
        before_side=lambda: barrier(world),
        what="all layouts",
        silent=not world.is_first,
    )
    rows = []
    for layers in everything:
        plain = name_of(layers.dropout, layers.layout, "none")
        by_clock, by_processor = (
            statistics.median(ratios(measured[layers.name], measured[plain])) for measured in (times.seconds, times.cpu)
        )
        rows.append(
            Row(
                dropout=layers.dropout,
                layout=layers.layout,
                recompute=layers.recompute,
                measured=kept[layers.name],
                paper=layers.bytes_of_the_paper(),
                relative_time=by_clock,
                relative_cpu_time=by_processor,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    whole = {row.dropout: row.measured for row in rows if row.layout == row.recompute == "none"}
    lines = [
        [
            *(f"{row.dropout:g}", row.layout, row.recompute, f"{row.measured:.1f}", f"{row.paper:.1f}"),
            f"{row.measured / whole[row.dropout]:.0%}",
            *(f"{row.relative_time:.2f}", f"{row.relative_cpu_time:.2f}"),
        ]
        for row in rows
    ]
    head = ["dropout", "layout", "recompute", "measured", "paper", "of none", "time", "processor time"]
    return markdown(head, lines)


def draw(rows: Sequence[Row], picture: Path) -> None:
    """Bars of what is measured, and a mark at what the paper says."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axes, dropout in zip(panels, sorted({row.dropout for row in rows}, reverse=True)):
        shown = [row for row in rows if row.dropout == dropout]
        places = range(len(shown))
        axes.bar(places, [row.measured for row in shown], label="measured")
        axes.plot(places, [row.paper for row in shown], "k_", markersize=16, label="formula of the paper")
        axes.set_xticks(places, [f"{row.layout}\n{row.recompute}" for row in shown], fontsize=7)
        axes.set_title(f"dropout {dropout:g}")
    panels[0].set_ylabel("bytes a layer / (s·b·h)")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=2, help="samples of a micro-batch")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--layers", type=int, default=2, help="layers")
    parser.add_argument("--turns", type=int, default=7, help="how often each combination runs")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--picture", type=Path, help="file to draw them into, as PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = CommGroup(
        name="tensor", ranks=tuple(range(dist.get_world_size())), rank=dist.get_rank(), process_group=dist.group.WORLD
    )
    if world.size != 2:
        raise SystemExit("start two ranks: torchrun --nproc-per-node 2 tools/benchmark/activation_memory.py")
    sizes = Sizes(
        sequence=options.sequence,
        batch=options.batch,
        hidden=options.hidden,
        heads=options.heads,
        layers=options.layers,
    )
    rows = measure(sizes, world, options.turns)
    if world.is_first:
        print(table(rows))
        if options.json is not None:
            write_json(options.json, {**asdict(sizes), "rows": [asdict(row) for row in rows]})
        if options.picture is not None:
            draw(rows, options.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
