"""Speed and memory on one GPU, beside what the GPU itself reaches: the measurements of tools/dev/gpu_check.sh.

python tools/benchmark/gpu_check.py --output result.json
python tools/benchmark/gpu_check.py --device cpu --quick

First the rate of a bf16 product of matrices and the bandwidth of a copy. Then, as shares of these:
- an AdamW update with its bf16 copy, by this project's kernel, by torch's fused AdamW, and by NVIDIA Apex's where it is
  installed, by turns: 30 bytes a parameter (gradient in, main parameter and two moments in and out, copy out)
- training steps of pretrain_gpt.py: layers as wide as those of a GPT of 1.3 B and a Llama of 7 B parameters, few of
  them, in bf16, as they are and with --torch-compile. Their model FLOPs by the rate of the product are the utilisation;
  beside the memory that a step takes at most stands what megatron/planning reckons before anything is built.
Times are medians of the device's work. --quick has tiny sizes, which try the program and measure nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from turns import markdown, take_turns

from megatron.core.kernels.adam import AdamHyperParameters, HyperSpan, HyperSpans, adamw_
from megatron.core.kernels.apex import adamw_by_apex_, apex_obstacle, multi_tensor_adam
from megatron.core.parallel_state import destroy_model_parallel
from megatron.planning.memory import predict_memory
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.initialize import initialize_megatron
from megatron.training.pretrain import build_run
from megatron.training.setup import flops_per_sample
from megatron.training.train_step import train_step

ENTRY_POINT = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
BYTES_OF_UPDATE = 30
WARM_UP_STEPS = 3
HYPER = AdamHyperParameters(step=1, lr=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        product: rows and columns of the matrices.
        elements: of a copy, and of the buffer that is updated.
    """

    product: int
    elements: int
    turns: int
    steps: int
    models: Mapping[str, Sequence[str]]


def model_flags(*, layers: int, hidden: int, heads: int, sequence: int, micro_batch: int, vocabulary: int) -> list[str]:
    values = {
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--num-attention-heads": heads,
        "--seq-length": sequence,
        "--micro-batch-size": micro_batch,
        "--global-batch-size": micro_batch,
        "--vocab-size": vocabulary,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--train-iters": 1_000_000,
        "--eval-iters": 0,
        "--tokenizer-type": "NullTokenizer",
        "--lr": HYPER.lr,
    }
    return [*(str(word) for pair in values.items() for word in pair), "--mock-data", "--bf16"]


def gpt_flags(*, sequence: int, **sizes: int) -> list[str]:
    positions = ["--position-embedding-type", "learned_absolute", "--max-position-embeddings", str(sequence)]
    return model_flags(sequence=sequence, **sizes) + positions


def llama_flags(*, ffn: int, **sizes: int) -> list[str]:
    architecture = ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"]
    without = ["--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    return [*model_flags(**sizes), *architecture, *without, "--ffn-hidden-size", str(ffn)]


FULL = Sizes(
    product=8192,
    elements=2**28,
    turns=10,
    steps=10,
    models={
        "GPT 1.3B, 6 layers": gpt_flags(
            layers=6, hidden=2048, heads=16, sequence=2048, micro_batch=8, vocabulary=50_304
        ),
        "Llama 7B, 3 layers": llama_flags(
            layers=3, hidden=4096, heads=32, ffn=11_008, sequence=4096, micro_batch=2, vocabulary=32_000
        ),
    },
)
QUICK = Sizes(
    product=128,
    elements=2**12,
    turns=1,
    steps=1,
    models={
        "tiny GPT": gpt_flags(layers=1, hidden=64, heads=2, sequence=32, micro_batch=2, vocabulary=128),
        "tiny Llama": llama_flags(layers=1, hidden=64, heads=2, ffn=96, sequence=32, micro_batch=2, vocabulary=128),
    },
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        value: in `unit`; None where it failed or is not to be had, as `note` says.
        share: of what the device reaches.
        peak_memory: of the device, in bytes; None on a CPU.
        reckoned_memory: the account of the same, in bytes.
    """

    what: str
    value: float | None
    unit: str
    share: float | None = None
    peak_memory: int | None = None
    reckoned_memory: int | None = None
    note: str = ""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(runs: Mapping[str, Callable[[], object]], device: torch.device, turns: int) -> dict[str, float]:
    """Seconds of each, by turns, after two that are not counted."""

    def whole(run: Callable[[], object]) -> None:
        run()
        synchronize(device)

    times = take_turns(
        {name: partial(whole, run) for name, run in runs.items()},
        turns=turns,
        warm_up=2,
        before_side=partial(synchronize, device),
        silent=True,  # the script that starts this has a limit of its own for each step
    )
    return {name: statistics.median(seconds) for name, seconds in times.seconds.items()}


def device_rates(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Operations a second of a bf16 product, and bytes a second of a copy, read and written both counted."""
    left, right = (torch.randn(sizes.product, sizes.product, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    source = torch.ones(sizes.elements, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(
        {"product": lambda: torch.mm(left, right, out=out), "copy": lambda: target.copy_(source)}, device, sizes.turns
    )
    return 2 * sizes.product**3 / seconds["product"], 2 * source.nbytes / seconds["copy"]


def updates(device: torch.device, elements: int) -> dict[str, Callable[[], object]]:
    """An AdamW update of as many parameters, by each implementation that is here."""
    spans = HyperSpans([HyperSpan(length=elements)], device)
    parameter, gradient, exp_avg, exp_avg_sq = (torch.zeros(elements, device=device) for _ in range(4))
    gradient.fill_(1e-3)
    copy = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    tensors = (parameter, gradient, exp_avg, exp_avg_sq)
    theirs = torch.nn.Parameter(parameter)
    theirs.grad = gradient
    optimizer = torch.optim.AdamW([theirs], lr=HYPER.lr, fused=True)

    def by_torch() -> None:
        optimizer.step()
        copy.copy_(theirs.detach())

    runs: dict[str, Callable[[], object]] = {
        "this project's kernel": lambda: adamw_(*tensors, spans=spans, hyper=HYPER, low_precision=copy),
        "torch's fused AdamW, and a copy": by_torch,
    }
    if device.type == "cuda" and not apex_obstacle():
        runs["NVIDIA Apex's Adam, and a copy"] = lambda: adamw_by_apex_(
            multi_tensor_adam(), *tensors, spans=spans, hyper=HYPER, low_precision=copy
        )
    return runs


def update_rows(device: torch.device, sizes: Sizes, copy_rate: float) -> list[Row]:
    rows = []
    for name, seconds in median_seconds(updates(device, sizes.elements), device, sizes.turns).items():
        rate = BYTES_OF_UPDATE * sizes.elements / seconds
        rows.append(Row(what=f"update: {name}", value=rate / 1e9, unit="GB/s", share=rate / copy_rate))
    return rows


def training_row(name: str, flags: Sequence[str], device: torch.device, steps: int, product_rate: float) -> Row:
    """Tokens a second of a model. What fails is said in the row: the other measurements go on."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        run = build_run(
            initialize_megatron([*flags, "--distributed-backend", backend]),
            gpt_datasets,
            gpt_model,
            runpy.run_path(str(ENTRY_POINT))["forward_step"],
        )
        for _ in range(WARM_UP_STEPS):
            train_step(run)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = median_seconds({name: lambda: train_step(run)}, device, steps)[name]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        config = run.context.config
        flops = flops_per_sample(run.chunks[0].module, config.data.seq_length)
        vocabulary = config.tokenizer.vocab_size
        assert vocabulary is not None
        padded = config.padded_vocab_size(vocabulary)
        (reckoned,) = predict_memory(config, padded_vocab_size=padded)
    except RuntimeError as error:  # out of memory, or a layer that does not compile
        return Row(what=name, value=None, unit="tokens/s", note=f"FAILED: {str(error).splitlines()[0]}")
    finally:
        destroy_model_parallel()
    assert flops is not None
    samples = config.global_batch_size
    return Row(
        what=name,
        value=samples * config.data.seq_length / seconds,
        unit="tokens/s",
        share=flops * samples / seconds / product_rate,
        peak_memory=peak,
        reckoned_memory=reckoned.total,
    )


def measure(device: torch.device, sizes: Sizes) -> list[Row]:
    product_rate, copy_rate = device_rates(device, sizes)
    rows = [
        Row(what=f"bf16 product of {sizes.product} x {sizes.product}", value=product_rate / 1e12, unit="TFLOP/s"),
        Row(what="copy", value=copy_rate / 1e9, unit="GB/s"),
        *update_rows(device, sizes, copy_rate),
    ]
    for name, flags in sizes.models.items():
        for mode, more in (("eager", []), ("compiled", ["--torch-compile"])):
            rows.append(training_row(f"{name}, {mode}", [*flags, *more], device, sizes.steps, product_rate))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        value = row.note if row.value is None else f"{row.value:,.1f} {row.unit}"
        share = "" if row.share is None else f"{row.share:.3f}"
        memory = ["" if size is None else f"{size / 1e9:.2f}" for size in (row.peak_memory, row.reckoned_memory)]
        lines.append([row.what, value, share, *memory])
    return markdown(["what", "value", "share of the device's", "peak memory, GB", "reckoned"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: try the program")
    parser.add_argument("--output", type=Path, help="write the results as JSON to this file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU: there is nothing to measure; --device cpu --quick tries the program on a CPU")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    rows = measure(device, QUICK if options.quick else FULL)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} (no GPU)"
    print(f"\n{name}, torch {torch.__version__}" + (": tiny sizes, which measure nothing" if options.quick else ""))
    print(table(rows))
    if options.output is not None:
        document = {"device": name, "torch": torch.__version__, "quick": options.quick, "rows": [*map(asdict, rows)]}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if any(row.value is None for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
