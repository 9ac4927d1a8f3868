"""What a step of pretrain_gpt.py costs besides its kernels: Python, hooks and data, as a share of the step.

python tools/benchmark/step_overhead.py --size tiny s384 --threads 1 --json step_overhead.json

Two measurements of each size, in bf16:

- around: what is left of a step beside forward with loss, backward, reduction and optimizer, by the timers of
  --timing-log-level 2: the data, the executor, counts and losses, the report and all hooks
- hollow: a step of a model with as many layers and parameters of no size. It is nearly all overhead: that around, the
  modules' Python, and torch's dispatch of each operator. So it is more than the framework's own

Steps of both models run by turns in this process. Shares are medians of those of a turn; by processor time is the
one to trust on a busy machine.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from plain_gpt import SIZES, Size, flags
from turns import cell, markdown, ratios, take_turns, write_json

from megatron.core.parallel_state import destroy_model_parallel
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.initialize import initialize_megatron
from megatron.training.pretrain import build_run
from megatron.training.run import Run
from megatron.training.train_step import train_step

ENTRY_POINT = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
KERNELS = ("forward-compute", "backward-compute", "grads-reduce", "optimizer")
WARM_UP_TURNS = 3


def hollow(size: Size) -> Size:
    """As many layers, heads and operators, over next to nothing."""
    return replace(size, hidden=2 * size.heads, ffn=8, sequence=8, micro_batch=1, vocabulary=128)


def built(size: Size) -> Run:
    run = build_run(
        initialize_megatron([*flags(size, bf16=True), "--timing-log-level", "2"]),
        gpt_datasets,
        gpt_model,
        runpy.run_path(str(ENTRY_POINT))["forward_step"],
    )
    destroy_model_parallel()  # a run has its groups; the next one makes its own
    for hook in run.hooks:
        hook.on_start(run)
    return run


def step_of(run: Run, around: list[float]) -> Callable[[], None]:
    """A step with its hooks.

    Args:
        around: gets, of each step, the share of its time that no kernel's timer has.
    """

    def step() -> None:
        start = time.perf_counter()
        report = train_step(run)
        parts = run.timers.over_ranks(run.state.world, iterations=1)  # before a hook reports them, and sets them back
        for hook in run.hooks:
            hook.after_step(run, report)
        seconds = time.perf_counter() - start
        around.append(1 - sum(parts[name][0] for name in KERNELS) / 1e3 / seconds)

    return step


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of each turn.

    Attributes:
        seconds, cpu: of a step of the model and of the hollow one, by the clock and of the processor.
        around: the share of the step that is outside of the model, loss, reduction and optimizer.
    """

    size: str
    threads: int
    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]
    around: list[float]


def measure(name: str, *, turns: int) -> Result:
    around: list[float] = []
    runs = {"model": built(SIZES[name]), "hollow": built(hollow(SIZES[name]))}
    times = take_turns(
        {"model": step_of(runs["model"], around), "hollow": step_of(runs["hollow"], [])},
        turns=turns,
        warm_up=WARM_UP_TURNS,
        what=name,
    )
    for run in runs.values():
        for hook in run.hooks:
            hook.close()
        run.loaders.close()
    return Result(
        size=name,
        threads=torch.get_num_threads(),
        seconds=times.seconds,
        cpu=times.cpu,
        around=around[WARM_UP_TURNS:],
    )


def table(results: Sequence[Result]) -> str:
    rows = [
        [
            *(result.size, str(result.threads), cell(result.seconds["model"], ".1f", 1e3)),
            cell(result.around, ".2%"),
            cell(result.seconds["hollow"], ".2f", 1e3),
            *(cell(ratios(times["hollow"], times["model"]), ".2%") for times in (result.seconds, result.cpu)),
        ]
        for result in results
    ]
    head = ["model", "threads", "step, ms (range)", "around (range)", "hollow step, ms (range)", "hollow (range)"]
    return markdown([*head, "by processor time (range)"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny", "s384"], help="default: tiny s384")
    parser.add_argument("--turns", type=int, default=15, help="steps of each model (default 15)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results = [measure(name, turns=options.turns) for name in options.size]
    print(table(results))
    if options.json is not None:
        document = [
            {
                **asdict(result),
                "around_share": statistics.median(result.around),
                "hollow_share": statistics.median(ratios(result.cpu["hollow"], result.cpu["model"])),
            }
            for result in results
        ]
        write_json(options.json, document)


if __name__ == "__main__":
    main()
