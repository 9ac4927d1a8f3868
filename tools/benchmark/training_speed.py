"""Training speed of pretrain_gpt.py --bf16 beside what else would train the same GPT, and its share of the matmul rate.

python tools/benchmark/training_speed.py --size s384 s768 --threads 1 --json result.json
python tools/benchmark/training_speed.py --size s384 --programs framework framework-tp2 framework-dp2

Each program runs in processes of its own, with and without the allocator setting of pretrain_gpt.py, which is one of a
whole process. The framework, one other and the products of a step are started and warmed up, then take turns; what
waits for its turn uses no processor. Then comes the next other one, as all at once would need 25 GB. Measured are
forward, backward, clipping and AdamW:

- framework: the loop of pretrain_gpt.py, hooks and data included; framework-tp2, framework-dp2: two ranks of it over
  gloo, each with the threads of the others (their processor time is that of rank 0)
- plain-sdpa, plain-eager: a plain PyTorch loop under bf16 autocast, with torch's attention and with explicit weights
- plain-compiled: plain-sdpa under torch.compile
- transformers, transformers-compiled: GPT-2 of Hugging Face in the same loop

On a busy machine trust what --threads 1 gives by processor time. MFU is the model's operations over the rate of the
bf16 products of a step with its weights, forward and backward, measured in the same turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import runpy
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from plain_gpt import SIZES, PlainGPT, Size, flags, plain_trainer
from torch import Tensor, nn
from turns import Times, cell, in_turn, markdown, ratios, shown, write_json

from megatron.core.allocator import keep_freed_memory
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.initialize import initialize_megatron
from megatron.training.pretrain import build_run
from megatron.training.train_step import train_step

ENTRY_POINT = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
WARM_UP_STEPS = 3
TWO_RANKS = ("framework-tp2", "framework-dp2")
PLAIN = ("plain-sdpa", "plain-eager", "plain-compiled", "transformers", "transformers-compiled")
PROGRAMS = ("framework", *PLAIN, *TWO_RANKS)
MATMUL = "matmul"

# Runs one step.
Step = Callable[[], object]


# ---- in a program's own processes ----


def framework_step(size: Size, program: str, *, kept: bool) -> Step:
    words = flags(size, bf16=True)
    if not kept:
        words.append("--no-keep-freed-memory")
    if program == "framework-tp2":
        words += ["--tensor-model-parallel-size", "2"]
    if program == "framework-dp2":
        words += ["--micro-batch-size", str(size.micro_batch // 2)]
    forward_step = runpy.run_path(str(ENTRY_POINT))["forward_step"]
    run = build_run(initialize_megatron(words), gpt_datasets, gpt_model, forward_step)
    for hook in run.hooks:
        hook.on_start(run)

    def step() -> None:
        report = train_step(run)
        for hook in run.hooks:
            hook.after_step(run, report)

    return step


class TransformersGPT(nn.Module):
    """GPT-2 of Hugging Face, called as `PlainGPT`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel  # a development dependency, slow to import

        config = GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=size.sequence,
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            n_inner=size.ffn,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits  # [b, s, v]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_step(size: Size, program: str) -> Step:
    torch.manual_seed(0)
    gpt = (
        TransformersGPT(size) if program.startswith("transformers") else PlainGPT(size, eager=program == "plain-eager")
    )
    model: nn.Module = torch.compile(gpt) if program.endswith("-compiled") else gpt  # type: ignore[assignment]
    text = torch.randint(size.vocabulary, (16, size.micro_batch, size.sequence + 1))
    trainer = plain_trainer(model, [(tokens[:, :-1], tokens[:, 1:]) for tokens in text], bf16=True)
    return lambda: trainer(1)


def weight_shapes(size: Size) -> list[tuple[int, int]]:
    """Rows and columns of all matrices that a step multiplies."""
    assert not size.llama, "these are those of GPT-2"
    hidden = size.hidden
    layer = [(3 * hidden, hidden), (hidden, hidden), (size.ffn, hidden), (hidden, size.ffn)]
    return [*layer * size.layers, (size.vocabulary, hidden)]


def matmul_step(size: Size) -> Step:
    """The products of a step with its weights, forward and backward, and nothing else."""
    operands = {
        (rows, columns): [
            torch.randn(shape, dtype=torch.bfloat16)
            for shape in ((rows, columns), (size.tokens, columns), (size.tokens, rows))
        ]
        for rows, columns in weight_shapes(size)
    }

    def step() -> None:
        for shape in weight_shapes(size):
            weight, x, gradient = operands[shape]
            x @ weight.t()
            gradient @ weight
            gradient.t() @ x

    return step


def products_of(size: Size) -> float:
    """Operations of a `matmul_step`: two a multiply-add, three products a weight."""
    return 6.0 * size.tokens * sum(rows * columns for rows, columns in weight_shapes(size))


def operations(size: Size) -> float:
    """Of a step, forward and backward: those products, and the half of the attention scores that is needed."""
    return products_of(size) + 6.0 * size.tokens * size.layers * size.hidden * size.sequence


def serve(size: Size, program: str, *, kept: bool, threads: int) -> None:
    """Warm up, say so, and run a step for each line that comes in; each answer is a line of JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(threads)
    if program.startswith("framework"):
        step = framework_step(size, program, kept=kept)
    else:
        if kept:
            keep_freed_memory()
        step = matmul_step(size) if program == MATMUL else plain_step(size, program)
    for _ in range(WARM_UP_STEPS):
        step()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak}), file=answers, flush=True)
    os._exit(0)  # the other rank may have left already, and a communicator would wait for it


# ---- in the process that measures ----


@dataclass(frozen=True, kw_only=True)
class Side:
    """A program in its processes."""

    processes: tuple[subprocess.Popen[str], ...]

    def wait(self) -> list[str]:
        """The next line of each rank.

        Raises:
            RuntimeError: a rank has ended.
        """
        lines = [process.stdout.readline() if process.stdout is not None else "" for process in self.processes]
        if not all(lines):
            raise RuntimeError(f"a program has ended, perhaps for want of memory: {self.processes[0].args!r}")
        return lines

    def step(self) -> dict[str, float]:
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # a rank that has ended does not answer either
                process.stdin.write("step\n")
                process.stdin.flush()
        answers = [json.loads(line) for line in self.wait()]
        return {
            "seconds": max(answer["seconds"] for answer in answers),
            "cpu": answers[0]["cpu"],
            "peak": sum(answer["peak"] for answer in answers),
        }

    def close(self) -> None:
        for process in self.processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self.processes:
            process.wait()


def start(size: str, program: str, *, kept: bool, threads: int) -> Side:
    ranks = 2 if program in TWO_RANKS else 1
    command = [sys.executable, __file__, "--serve", program, "--size", size, "--threads", str(threads)]
    if not kept:
        command.append("--as-users-run-it")
    variables: dict[str, object] = {"OMP_NUM_THREADS": threads}
    if ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    processes = []
    for rank in range(ranks):
        if ranks > 1:
            variables |= {"RANK": rank, "LOCAL_RANK": rank}
        line = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
        processes.append(subprocess.Popen(line, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    return Side(processes=tuple(processes))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What ran by turns: the framework, the products and one other program, `+` marking the allocator setting.

    Attributes:
        peak: the most memory of each, in bytes.
    """

    size: str
    threads: int
    times: Times
    peak: dict[str, float]


def measure(name: str, other: str, *, turns: int, threads: int) -> Result:
    """A program beside the framework, or the framework alone."""
    programs = dict.fromkeys(["framework", other])
    wanted = {f"{program} +" if kept else program: (program, kept) for program in programs for kept in (False, True)}
    wanted[f"{MATMUL} +"] = (MATMUL, True)
    sides: dict[str, Side] = {}
    times, peak = Times(), dict[str, float]()
    # As many at a time as there are cores: most of a start is imports and compilers, in one thread.
    cores, labels = len(os.sched_getaffinity(0)), list(wanted)
    try:
        for first in range(0, len(labels), cores):
            together = labels[first : first + cores]
            for label in together:
                program, kept = wanted[label]
                sides[label] = start(name, program, kept=kept, threads=threads)
            for label in together:
                sides[label].wait()
        for turn in range(turns):
            for program in in_turn(list(sides), turn):
                answer = sides[program].step()
                times.add(program, answer["seconds"], answer["cpu"])
                peak[program] = answer["peak"]
    finally:
        for side in sides.values():
            side.close()
    return Result(size=name, threads=threads, times=times, peak=peak)


def row(program: str, results: Sequence[Result]) -> list[str]:
    """Of all turns of a program with a size."""
    results = [result for result in results if program in result.times.seconds]
    size = SIZES[results[0].size]

    def seconds(of: str) -> list[float]:
        return [second for result in results for second in result.times.seconds[of]]

    def cpu(of: str) -> list[float]:
        return [second for result in results for second in result.times.cpu[of]]

    products = [second * operations(size) / products_of(size) for second in cpu(f"{MATMUL} +")]
    return [
        *(results[0].size, str(results[0].threads), program),
        *(cell([size.tokens / second for second in times], ",.0f") for times in (seconds(program), cpu(program))),
        *(cell(ratios(of("framework +"), of(program)), ".2f") for of in (seconds, cpu)),
        f"{statistics.median(ratios(products, cpu(program))):.2f}",
        f"{max(result.peak[program] for result in results) / 1e9:.2f}",
    ]


def table(results: Sequence[Result]) -> str:
    rows = []
    for name in dict.fromkeys(result.size for result in results):
        of_size = [result for result in results if result.size == name]
        programs = dict.fromkeys(program for result in of_size for program in result.times.seconds)
        rows += [row(program, of_size) for program in programs if not program.startswith(MATMUL)]
    head = ["model", "threads", "program", "tokens/s (range)", "by processor time (range)"]
    head += ["speed / framework + (range)", "by processor time (range)", "MFU", "peak GB"]
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [name for name, size in SIZES.items() if not size.llama]
    parser.add_argument("--size", nargs="+", choices=sizes, default=["s384"], help="default: s384")
    parser.add_argument(
        "--programs",
        nargs="+",
        choices=PROGRAMS,
        help="default: all, with --quick those not compiled; framework always",
    )
    parser.add_argument("--turns", type=int, default=7, help="turns of each program (default 7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each process")
    parser.add_argument("--quick", action="store_true", help="one turn of a model of no size: does it run?")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--serve", choices=(*PROGRAMS, MATMUL), help=argparse.SUPPRESS)
    parser.add_argument("--as-users-run-it", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        kept = not options.as_users_run_it
        return serve(SIZES[options.size[0]], options.serve, kept=kept, threads=options.threads)
    names, turns = (["smoke"], 1) if options.quick else (options.size, options.turns)
    usual = [program for program in PROGRAMS if not (options.quick and program.endswith("-compiled"))]
    programs = options.programs or usual
    others = [program for program in programs if program != "framework"] or ["framework"]
    pairs = [(name, other) for name in names for other in others]
    results = [
        measure(name, other, turns=turns, threads=options.threads)
        for name, other in shown(pairs, "training speed: comparison")
    ]
    print(table(results))
    if options.json is not None:
        document = [
            {
                "size": result.size,
                "threads": result.threads,
                "seconds": result.times.seconds,
                "cpu": result.times.cpu,
                "peak": result.peak,
            }
            for result in results
        ]
        write_json(options.json, document)


if __name__ == "__main__":
    main()
