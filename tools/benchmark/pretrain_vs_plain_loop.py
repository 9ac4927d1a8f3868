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
import json
import math
import platform
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megatron.core.parallel_state import destroy_model_parallel
from megatron.data.batches import GPTBatch
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.initialize import initialize_megatron
from megatron.training.pretrain import build_run
from megatron.training.run import Run
from megatron.training.train_step import train_step

ENTRY_POINT = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
LEARNING_RATE, WEIGHT_DECAY, BETAS, EPS, CLIP_GRAD = 1e-4, 0.1, (0.9, 0.95), 1e-8, 1.0
ROTARY_BASE = 10_000
# Relative difference of the first losses. Both sides sum in fp32, in another order; with bf16 they round in other
# places to 8 bits, and the mean over thousands of tokens is still this close.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its batch.

    Attributes:
        llama: rotary positions, RMSNorm, SwiGLU and no biases; else learned positions, LayerNorm, GELU, biases (GPT-2).
        steps: iterations of one turn.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    sequence: int
    micro_batch: int
    vocabulary: int
    llama: bool
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batch * self.sequence


SIZES = {
    # the model of `make quickstart`
    "tiny": Size(
        layers=4,
        hidden=192,
        heads=6,
        ffn=512,
        sequence=256,
        micro_batch=8,
        vocabulary=1024,
        llama=True,
        steps=2,
    ),
    "s384": Size(
        layers=6,
        hidden=384,
        heads=6,
        ffn=1536,
        sequence=256,
        micro_batch=8,
        vocabulary=50_304,
        llama=False,
        steps=1,
    ),
    "s768": Size(
        layers=12,
        hidden=768,
        heads=12,
        ffn=3072,
        sequence=512,
        micro_batch=2,
        vocabulary=50_304,
        llama=False,
        steps=1,
    ),
}


def flags(size: Size, *, bf16: bool) -> list[str]:
    """The command line of pretrain_gpt.py."""
    architecture = ["--position-embedding-type", "learned_absolute"]
    if size.llama:
        architecture = ["--position-embedding-type", "rope", "--rotary-base", str(ROTARY_BASE)]
        architecture += ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"]
    values = {
        "--num-layers": size.layers,
        "--hidden-size": size.hidden,
        "--num-attention-heads": size.heads,
        "--ffn-hidden-size": size.ffn,
        "--seq-length": size.sequence,
        "--max-position-embeddings": size.sequence,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--micro-batch-size": size.micro_batch,
        "--global-batch-size": size.micro_batch,
        "--train-iters": 1_000_000,
        "--log-interval": 1_000_000,
        "--eval-iters": 0,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": size.vocabulary,
        "--lr": LEARNING_RATE,
        "--lr-decay-style": "constant",
        "--weight-decay": WEIGHT_DECAY,
        "--adam-beta1": BETAS[0],
        "--adam-beta2": BETAS[1],
        "--adam-eps": EPS,
        "--clip-grad": CLIP_GRAD,
    }
    words = [str(word) for pair in values.items() for word in pair]
    return [*words, *architecture, "--mock-data", *(["--bf16"] if bf16 else [])]


class PlainBlock(nn.Module):
    """One layer. Its parameters come in the order of the framework's."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.norm1 = plain_norm(size)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=not size.llama)
        self.projection = nn.Linear(size.hidden, size.hidden, bias=not size.llama)
        self.norm2 = plain_norm(size)
        self.fc1 = nn.Linear(size.hidden, size.ffn * (2 if size.llama else 1), bias=not size.llama)
        self.fc2 = nn.Linear(size.ffn, size.hidden, bias=not size.llama)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        batch, sequence, hidden = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.size.heads, -1)  # [b, s, 3, a, d]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [b, a, s, d] each
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(context.transpose(1, 2).reshape(batch, sequence, hidden))
        inner = self.fc1(self.norm2(x))  # [b, s, f], with SwiGLU [b, s, 2f]
        if self.size.llama:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")
        output: Tensor = x + self.fc2(inner)
        return output


class PlainGPT(nn.Module):
    """The same GPT in plain torch, with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = None if size.llama else nn.Embedding(size.sequence, size.hidden)
        self.blocks = nn.ModuleList(PlainBlock(size) for _ in range(size.layers))
        self.norm = plain_norm(size)
        dim = size.hidden // size.heads
        frequencies = 1.0 / (ROTARY_BASE ** (torch.arange(0, dim, 2) / dim))
        angles = torch.outer(torch.arange(size.sequence), frequencies).repeat(1, 2)  # [s, d]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Tokens and labels [b, s] -> the mean loss."""
        x = self.words(tokens)  # [b, s, h]
        rotary = None
        if self.positions is None:
            rotary = self.cos.to(x.dtype), self.sin.to(x.dtype)
        else:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, rotary)
        logits = F.linear(self.norm(x), self.words.weight)  # [b, s, v]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_norm(size: Size) -> nn.Module:
    return nn.RMSNorm(size.hidden, eps=1e-5) if size.llama else nn.LayerNorm(size.hidden)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


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


# Runs that many iterations and returns the loss of the last one.
Trainer = Callable[[int], float]


def framework_trainer(run: Run) -> Trainer:
    """The loop of `train`, hooks included."""

    def steps(number: int) -> float:
        for _ in range(number):
            report = train_step(run)
            for hook in run.hooks:
                hook.after_step(run, report)
        return report.losses["lm loss"]

    return steps


def plain_trainer(model: PlainGPT, batches: Sequence[tuple[Tensor, Tensor]], *, bf16: bool) -> Trainer:
    """The loop that one would write by hand, over ready batches."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        fused=True,
    )
    iteration = 0

    def steps(number: int) -> float:
        nonlocal iteration
        for _ in range(number):
            tokens, labels = batches[iteration % len(batches)]
            iteration += 1
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                loss = model(tokens, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
            optimizer.step()
            value = float(loss.detach())  # a loop that reports its loss waits for it, as the framework does
        return value

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
    read = [run.loaders.train.microbatches(index * size.micro_batch, 1)[0] for index in range(16)]
    batches = [(batch.tokens, batch.labels) for batch in cast("list[GPTBatch]", read)]
    trainers = {"framework": framework_trainer(run), "plain": plain_trainer(plain, batches, bf16=bf16)}
    for hook in run.hooks:
        hook.on_start(run)
    losses = {side: [trainer(1) for _ in range(WARM_UP_STEPS)] for side, trainer in trainers.items()}
    for ours, theirs in zip(losses["framework"], losses["plain"]):
        if not math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE[precision]):
            raise RuntimeError(f"{name} {precision}: the losses differ, so the models do: {losses}")
    speeds: dict[str, list[float]] = {side: [] for side in trainers}
    cpu_speeds: dict[str, list[float]] = {side: [] for side in trainers}
    for turn in range(turns):
        order = list(trainers) if turn % 2 == 0 else list(trainers)[::-1]
        for side in order:
            start, cpu_start = time.perf_counter(), time.process_time()
            trainers[side](size.steps)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            speeds[side].append(size.steps * size.tokens / seconds)
            cpu_speeds[side].append(size.steps * size.tokens / cpu_seconds)
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
        ratios=[ours / theirs for ours, theirs in zip(speeds["framework"], speeds["plain"])],
        cpu_ratios=[ours / theirs for ours, theirs in zip(cpu_speeds["framework"], cpu_speeds["plain"])],
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
    """Markdown."""

    def cell(values: Sequence[float], form: str) -> str:
        return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"

    lines = [
        "| model | precision | threads | framework, tokens/s (range) | plain loop, tokens/s (range) | ratio (range) "
        "| ratio by processor time (range) |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        speeds = f"{cell(result.framework, ',.0f')} | {cell(result.plain, ',.0f')}"
        ratios = f"{cell(result.ratios, '.3f')} | {cell(result.cpu_ratios, '.3f')}"
        lines.append(f"| {result.size} | {result.precision} | {result.threads} | {speeds} | {ratios} |")
    return "\n".join(lines)


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
        machine = {"torch": torch.__version__, "machine": platform.machine(), "python": sys.version.split()[0]}
        document = {**machine, "results": [asdict(result) for result in results]}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
