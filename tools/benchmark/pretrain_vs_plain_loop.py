"""Training speed of pretrain_gpt.py in one process, beside a plain PyTorch loop that trains the same GPT.

python tools/benchmark/pretrain_vs_plain_loop.py --size tiny s384 --output result.json
python tools/benchmark/pretrain_vs_plain_loop.py --size s384 --bf16 --profile 15

Both start from the same weights, read the same batches and must report the same losses. They run by turns in this
process, so that whatever else the machine does falls on both; medians over the turns are reported, and the medians
of the ratios of neighbouring turns: of the speeds, and of the processor time per token (with --threads 1 that is the
one to trust on a busy machine; more threads spend processor time on waiting for each other). The plain loop is what
a user would write for this one model: one module, torch's own attention, cross entropy, clipping and fused AdamW,
its batches ready in memory. With --bf16 it uses autocast.
"""

from __future__ import annotations

import argparse
import math
import runpy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from plain_gpt import SIZES, PlainGPT, Size, Trainer, flags, plain_trainer
from torch.profiler import ProfilerActivity, profile
from turns import cell, markdown, ratios, take_turns, write_json

from megatron.core.parallel_state import destroy_model_parallel
from megatron.data.batches import GPTBatch
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.initialize import initialize_megatron
from megatron.training.pretrain import build_run
from megatron.training.run import Run
from megatron.training.train_step import train_step

ENTRY_POINT = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
# Relative difference of the first losses. Both sides sum in fp32, in another order; with bf16 they round in other
# places to 8 bits, and the mean over thousands of tokens is still this close.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}
WARM_UP_STEPS = 2


@torch.no_grad()
def copy_weights(run: Run, plain: PlainGPT, size: Size) -> int:
    """Give the plain model the framework's weights; returns the number of parameters, the same on both sides."""
    pairs = list(zip(run.chunks[0].module.named_parameters(), plain.named_parameters(), strict=True))
    for (name, source), (plain_name, target) in pairs:
        assert source.shape == target.shape, f"{name} {tuple(source.shape)}, {plain_name} {tuple(target.shape)}"
        if ".linear_qkv." in name:  # rows [a, 3, d] here, [3, a, d] there
            rows = source.view(size.heads, 3, -1, *source.shape[1:]).transpose(0, 1)
            target.copy_(rows.reshape(target.shape))
        else:
            target.copy_(source)
    return sum(target.numel() for _, (_, target) in pairs)


def framework_trainer(run: Run) -> Trainer:
    """The loop of `train`, hooks included."""

    def steps(number: int) -> float:
        for _ in range(number):
            report = train_step(run)
            for hook in run.hooks:
                hook.after_step(run, report)
        return report.losses["lm loss"]

    return steps


@dataclass(frozen=True, kw_only=True)
class Result:
    """Tokens per second of each turn, and the ratios framework / plain of neighbouring turns.

    Attributes:
        ratios: of tokens per second.
        cpu_ratios: of tokens per second of processor time, over all threads.
    """

    size: str
    precision: str
    threads: int
    parameters: int
    first_losses: dict[str, list[float]]
    framework: list[float]
    plain: list[float]
    ratios: list[float]
    cpu_ratios: list[float]


def measure(name: str, *, bf16: bool, turns: int, profiled_rows: int) -> Result:
    """Train one size both ways, by turns.

    Raises:
        RuntimeError: the two sides do not train the same model.
    """
    size, precision = SIZES[name], "bf16" if bf16 else "fp32"
    run = build_run(
        initialize_megatron(flags(size, bf16=bf16)),
        gpt_datasets,
        gpt_model,
        runpy.run_path(str(ENTRY_POINT))["forward_step"],
    )
    plain = PlainGPT(size)
    parameters = copy_weights(run, plain, size)
    assert run.loaders.train is not None
    read = [run.loaders.train.microbatches(index * size.micro_batch, 1)[0] for index in range(16)]
    batches = [(batch.tokens, batch.labels) for batch in cast("list[GPTBatch]", read)]
    trainers = {"framework": framework_trainer(run), "plain": plain_trainer(plain, batches, bf16=bf16)}
    for hook in run.hooks:
        hook.on_start(run)
    losses = {side: [trainer(1) for _ in range(WARM_UP_STEPS)] for side, trainer in trainers.items()}
    for ours, theirs in zip(losses["framework"], losses["plain"]):
        if not math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE[precision]):
            raise RuntimeError(f"{name} {precision}: the losses differ, so the models do: {losses}")
    times = take_turns({side: partial(trainer, size.steps) for side, trainer in trainers.items()}, turns=turns)
    tokens = size.steps * size.tokens
    speeds, cpu_speeds = (
        {side: [tokens / seconds for seconds in measured[side]] for side in trainers}
        for measured in (times.seconds, times.cpu)
    )
    if profiled_rows:
        print(differences(trainers, size.steps, profiled_rows))
    for hook in run.hooks:
        hook.close()
    destroy_model_parallel()
    return Result(
        size=name,
        precision=precision,
        threads=torch.get_num_threads(),
        parameters=parameters,
        first_losses=losses,
        framework=speeds["framework"],
        plain=speeds["plain"],
        ratios=ratios(speeds["framework"], speeds["plain"]),
        cpu_ratios=ratios(cpu_speeds["framework"], cpu_speeds["plain"]),
    )


def differences(trainers: dict[str, Trainer], steps: int, rows: int) -> str:
    """The operations that take most more or less time on one side, in milliseconds of a step."""
    times: dict[str, dict[str, tuple[float, float]]] = {}
    for side, trainer in trainers.items():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            trainer(steps)
        for event in profiler.key_averages():
            per_step = (event.self_cpu_time_total / 1e3 / steps, event.count / steps)
            times.setdefault(event.key, {})[side] = per_step
    table = [
        (operation, *by_side.get("framework", (0.0, 0.0)), *by_side.get("plain", (0.0, 0.0)))
        for operation, by_side in times.items()
    ]
    table.sort(key=lambda row: -abs(row[1] - row[3]))
    lines = [f"{'ms per step':>46}  framework (calls)      plain (calls)  difference"]
    for operation, ours, our_calls, theirs, their_calls in table[:rows]:
        lines.append(
            f"{operation[:46]:>46}  {ours:9.2f} ({our_calls:5.0f})  {theirs:9.2f} ({their_calls:5.0f})"
            f"  {ours - theirs:+10.2f}"
        )
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    rows = [
        [
            *(result.size, result.precision, str(result.threads)),
            *(cell(values, ",.0f") for values in (result.framework, result.plain)),
            *(cell(values, ".3f") for values in (result.ratios, result.cpu_ratios)),
        ]
        for result in results
    ]
    speeds = ["framework, tokens/s (range)", "plain loop, tokens/s (range)"]
    return markdown(
        ["model", "precision", "threads", *speeds, "ratio (range)", "ratio by processor time (range)"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny", "s384"], help="default: tiny s384")
    parser.add_argument("--bf16", action="store_true", help="instead of fp32; the plain loop uses autocast")
    parser.add_argument("--turns", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--threads", type=int, help="of both sides (default: torch's own choice)")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="ROWS", help="also list the operations that differ most"
    )
    parser.add_argument("--output", type=Path, help="write the results as JSON to this file")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results = [
        measure(name, bf16=options.bf16, turns=options.turns, profiled_rows=options.profile) for name in options.size
    ]
    print(table(results))
    if options.output is not None:
        write_json(options.output, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
