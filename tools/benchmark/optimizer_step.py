"""Time of a whole update of the weights, beside the sequence of torch that it replaces and the bytes that it moves.

python tools/benchmark/optimizer_step.py --elements 100000000 --json result.json
python tools/benchmark/optimizer_step.py --elements 20000000 --threads 1

Both sides turn gradients in fp32 that carry a loss scale into new weights in bf16, with the same numbers as a result:
- ours: `MegatronOptimizer.step()`: norm, unscale, clip, AdamW, main parameters and their bf16 copy
- torch: unscale, `clip_grad_norm_`, `AdamW(fused=True)`, copy to bf16, each in torch's fastest form for lists
They run by turns in this process together with a triad (a = b + s·c), so that whatever else the machine does falls on
all; medians over the turns are reported, and the medians of the ratios within a turn: of the time, and of the processor
time (with --threads 1 that is the one to trust on a busy machine).

An update moves 34 bytes a parameter: the gradient twice, once for the norm (8), main parameter and two moments in and
out (24), the copy (2). The triad moves 12 an element; the column of bandwidths is 34 bytes over our time, as a share of
the triad's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from turns import Timed, cell, markdown, ratios, take_turns, write_json

from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.main_grad import main_grad_of
from megatron.core.shard import Init, Shard, name_parameters, set_shard, shard_of, whole_pieces
from megatron.optimizer.adam import AdamW
from megatron.optimizer.grad_scaler import ConstantGradScaler
from megatron.optimizer.optimizer import MegatronOptimizer

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPS, CLIP_GRAD, LOSS_SCALE = 1e-4, 0.1, (0.9, 0.95), 1e-8, 1.0, 1024.0
SMALL_PARAMETER = 10_000
BYTES_OF_UPDATE, BYTES_OF_TRIAD = 34, 12
# A step moves a weight by the learning rate. Both sides compute in fp32 and round in other places. Torch sums the
# squares of a parameter in fp32: its norm of 100 M elements is off by a hundredth, and with it the clip factor.
TOLERANCE = 1e-2 * LEARNING_RATE
WARM_UP_TURNS = 1


class Weights(nn.Module):
    """Nothing but parameters, every second one a vector: without weight decay, so that no two share their spans."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        rows = 100 if elements % 100 == 0 else 1
        self.parameters_ = nn.ParameterList(
            torch.zeros((rows, elements // rows) if index % 2 == 0 else (elements,), dtype=torch.bfloat16)
            for index in range(count)
        )
        group = CommGroup.single("tensor")
        for parameter in self.parameters():
            shape = tuple(parameter.shape)
            pieces = whole_pieces(shape[0], group)
            set_shard(parameter, Shard(global_shape=shape, dim=None, pieces=pieces, group=group, init=Init.zeros()))
        name_parameters(self)


class Sides:
    """The same weights and gradients on both sides.

    Attributes:
        main: fp32 parameters of torch's side.
        low: their bf16 copies.
    """

    def __init__(self, count: int, elements: int) -> None:
        chunk = DistributedDataParallel(
            Weights(count, elements), data_group=CommGroup.single("data"), grad_dtype=torch.float32
        )
        self.ours = MegatronOptimizer(
            chunk.buckets,
            AdamW(beta1=BETAS[0], beta2=BETAS[1], eps=EPS),
            scaler=ConstantGradScaler(LOSS_SCALE),
            clip_grad=CLIP_GRAD,
            model_group=CommGroup.single("model"),
            device=torch.device("cpu"),
        )
        self.ours.set_schedule(LEARNING_RATE, WEIGHT_DECAY)
        self.parameters = list(chunk.parameters())
        generator = torch.Generator().manual_seed(0)
        self.gradient = torch.randn(elements, generator=generator).mul_(LOSS_SCALE)
        self.main = [torch.zeros(parameter.shape).requires_grad_() for parameter in self.parameters]
        for parameter in self.main:
            parameter.grad = torch.zeros_like(parameter)
        self.low = [torch.zeros_like(parameter) for parameter in self.parameters]
        groups = [
            {"params": [p for p in self.main if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.main if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.theirs = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True
        )

    def lay_out_gradients(self) -> None:
        """Torch's side overwrites them."""
        for parameter, main in zip(self.parameters, self.main):
            for gradient in (main_grad_of(parameter), main.grad):
                assert gradient is not None
                gradient.view(-1).copy_(self.gradient)

    def step_of_ours(self) -> None:
        self.ours.step()

    @torch.no_grad()
    def step_of_theirs(self) -> None:
        gradients = [parameter.grad for parameter in self.main if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1 / LOSS_SCALE)
        nn.utils.clip_grad_norm_(self.main, CLIP_GRAD)
        self.theirs.step()
        torch._foreach_copy_(self.low, self.main)

    def largest_difference(self) -> float:
        """Between the fp32 parameters of the two sides."""
        ours = {named.key: named.tensor for named in self.ours.named_main_parameters()}
        keys = [f"model.{shard_of(parameter).name}" for parameter in self.parameters]
        pairs = [(ours[key], main.detach()) for key, main in zip(keys, self.main)]
        return max(float((mine - main).abs().max()) for mine, main in pairs if isinstance(mine, Tensor))


class Triad:
    """a = b + 3c over buffers as long as the parameters."""

    def __init__(self, elements: int) -> None:
        self.a, self.b, self.c = (torch.zeros(elements) for _ in range(3))

    def run(self) -> None:
        torch.add(self.b, self.c, alpha=3.0, out=self.a)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of each turn.

    Attributes:
        cpu: processor time, over all threads.
    """

    parameters: int
    elements: int
    threads: int
    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def ratios(self, times: dict[str, list[float]]) -> list[float]:
        """Time of ours over that of torch's sequence, in each turn."""
        return ratios(times["ours"], times["torch"])

    def shares(self, times: dict[str, list[float]]) -> list[float]:
        """Bandwidth of ours over that of the triad, in each turn."""
        return [
            (BYTES_OF_UPDATE / ours) / (BYTES_OF_TRIAD / triad) for ours, triad in zip(times["ours"], times["triad"])
        ]

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "ratio": statistics.median(self.ratios(self.seconds)),
            "cpu_ratio": statistics.median(self.ratios(self.cpu)),
            "share_of_triad": statistics.median(self.shares(self.seconds)),
            "cpu_share_of_triad": statistics.median(self.shares(self.cpu)),
        }


def measure(count: int, elements: int, *, turns: int) -> Result:
    """`count` parameters of `elements` each.

    Raises:
        RuntimeError: the two sides do not compute the same update.
    """
    sizes = f"{count:,} x {elements:,}"
    print(f"{sizes}: laying out both sides", file=sys.stderr)
    sides, triad = Sides(count, elements), Triad(count * elements)
    runners: dict[str, Timed] = {"ours": sides.step_of_ours, "torch": sides.step_of_theirs, "triad": triad.run}

    def check(turn: int) -> None:
        if turn < 0 and (difference := sides.largest_difference()) > TOLERANCE:
            raise RuntimeError(f"{sizes}: the parameters of the two sides differ by {difference:.1e}")

    times = take_turns(
        runners, turns=turns, warm_up=WARM_UP_TURNS, before=sides.lay_out_gradients, after=check, what=sizes
    )
    seconds, cpu = times.seconds, times.cpu
    return Result(parameters=count, elements=elements, threads=torch.get_num_threads(), seconds=seconds, cpu=cpu)


def table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        bandwidth = BYTES_OF_TRIAD * result.parameters * result.elements / statistics.median(result.seconds["triad"])
        rows.append(
            [
                f"{result.parameters:,} x {result.elements:,}",
                str(result.threads),
                *(cell(result.seconds[name], ".1f", 1e3) for name in ("ours", "torch")),
                *(cell(result.ratios(times), ".3f") for times in (result.seconds, result.cpu)),
                f"{bandwidth / 1e9:.1f}",
                *(cell(result.shares(times), ".3f") for times in (result.seconds, result.cpu)),
            ]
        )
    head = ["parameters", "threads", "ours, ms (range)", "torch, ms (range)", "ratio (range)"]
    head += ["by processor time (range)", "triad, GB/s", "share of it (range)", "by processor time (range)"]
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements",
        type=int,
        default=100_000_000,
        help=f"in all: as one parameter, and as parameters of {SMALL_PARAMETER:,} (default 100,000,000)",
    )
    parser.add_argument("--turns", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--threads", type=int, help="of all sides (default: torch's own choice)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    small = options.elements // SMALL_PARAMETER
    results = [measure(*case, turns=options.turns) for case in ((1, options.elements), (small, SMALL_PARAMETER))]
    print(table(results))
    if options.json is not None:
        write_json(options.json, [result.as_json() for result in results])


if __name__ == "__main__":
    main()
