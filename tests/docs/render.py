"""The parts of the documents that follow from the code. `python -m tests.docs.render` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megatron.config.megatron_flags import _ALREADY_SO, known_flag
from megatron.config.optimizer import OptimizerConfig
from megatron.config.options import flag_name
from megatron.core.parallel_state import describe_groups
from megatron.core.pipeline_parallel.schedule_plan import build_plan
from megatron.core.pipeline_parallel.simulate import draw
from megatron.core.rank_grid import RankGrid

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(<!-- rendered: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# Those of published launch scripts that come up most, one or two of each reason.
_REFUSED = """
--overlap-param-gather-with-optimizer-step --no-align-grad-reduce
--checkpoint-activations --transformer-impl=transformer_engine --attention-backend=fused --ckpt-format --use-dist-ckpt
--use-mp-args-from-checkpoint-args --non-persistent-save-interval
--context-parallel-size=2 --num-experts --use-legacy-models
--deterministic-mode --use-torch-fsdp2 --fp8-format --tp-comm-overlap --profile
--log-memory-to-tensorboard --wandb-project --manual-gc --yaml-cfg --train-data --max-preds-per-seq
"""


def documents() -> list[Path]:
    """All documents that a user reads."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def already_so() -> str:
    lines = ["| because | flags |", "| --- | --- |"]
    for because, names in _ALREADY_SO:
        shown = (f"`{name.replace('=*', '').replace('=', ' ')}`" for name in names.split())
        lines.append(f"| {because} | {', '.join(shown).replace('|', ' or ')} |")
    return "\n".join(lines)


def refused() -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for word in _REFUSED.split():
        name, _, value = word.partition("=")
        known = known_flag(name)
        if known is None:  # an option that is refused with this value only
            key = ("training with it is not available in this version", "1")
        else:
            assert known.reason and not known.already_so(value.split()), name
            key = (known.reason, known.instead)
        reasons.setdefault(key, []).append(f"`{name} {value}`" if value else f"`{name}`")
    lines = ["| flags | why | in their place |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(flags)} | {reason} | {instead} |" for (reason, instead), flags in reasons.items()]
    return "\n".join(lines)


def rank_map() -> str:
    """What the command below it prints."""
    map_of_16 = describe_groups(RankGrid(tp=2, dp=2, pp=4), [f"node{rank // 8}" for rank in range(16)])
    return "\n".join(["```text", map_of_16, "```"])


def pipelines() -> str:
    plans: list[tuple[str, int]] = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2)]
    drawings = [
        draw(build_plan(schedule, num_stages=4, num_microbatches=8, num_chunks=chunks), num_chunks=chunks)
        for schedule, chunks in plans
    ]
    return "\n".join(["```text", "\n\n".join(drawings), "```"])


# Flags beside the defaults of adam, each a row of the table.
_STATES = (
    {},
    {"precision": "bf16"},
    {"precision": "bf16", "grad_reduce_in_bf16": True},
    {"precision": "bf16", "use_precision_aware_optimizer": True},
    {"precision": "bf16", "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    {
        "precision": "bf16",
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
        "main_grads_dtype": "bf16",
    },
    {"precision": "fp16"},
    {"precision": "fp64"},
    {"precision": "bf16", "optimizer": "sgd"},
    {"precision": "bf16", "optimizer": "muon"},
)


def bytes_per_parameter() -> str:
    lines = [
        "| flags | weight | gradient | main weight and moments | together |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for fields in _STATES:
        config = OptimizerConfig(lr=1e-4, **fields)
        flags = " ".join(
            f"--{value}" if name == "precision" else flag_name(name) + ("" if value is True else f" {value}")
            for name, value in fields.items()
        )
        parts = (config.params_dtype.itemsize, config.grad_dtype.itemsize, config.state_bytes_per_parameter)
        note = ", a matrix inside a layer" if config.optimizer == "muon" else ""
        shown = f"`{flags}`{note}" if flags else "none"
        lines.append(f"| {shown} | {' | '.join(map(str, parts))} | {config.bytes_per_parameter} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "already-so": already_so,
    "refused": refused,
    "rank-map": rank_map,
    "pipelines": pipelines,
    "bytes-per-parameter": bytes_per_parameter,
}


def rendered(text: str) -> str:
    """The document with its rendered parts as they should be."""
    return BLOCK.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[4]}", text)


if __name__ == "__main__":
    for document in documents():
        document.write_text(rendered(document.read_text(encoding="utf-8")), encoding="utf-8")
