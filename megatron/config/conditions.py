"""Flags that ask for nothing but what is so, under a condition: what must hold for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from megatron.config.problems import Problem

if TYPE_CHECKING:
    from megatron.config.megatron_config import MegatronConfig

# The problems that keep a configuration from what a flag, spelled with its words, asks for.
Condition = Callable[["MegatronConfig", str], Iterator[Problem]]


def positions_are_rotary(config: MegatronConfig, flag: str) -> Iterator[Problem]:
    if config.model.position_embedding_type == "learned_absolute":
        yield Problem(
            flags=(flag, "--position-embedding-type"),
            rule="goes with rotary positions; without them it leaves no positions at all",
            works="--position-embedding-type rope or none",
        )


def gradients_are_wide(config: MegatronConfig, flag: str) -> Iterator[Problem]:
    optimizer = config.optimizer
    narrow = {
        "--grad-reduce-in-bf16": optimizer.grad_reduce_in_bf16,
        "--main-grads-dtype": optimizer.main_grads_dtype == "bf16",
    }
    for other in (name for name, given in narrow.items() if given):
        yield Problem(
            flags=(flag, other),
            rule=f"and {other}{' bf16' if other == '--main-grads-dtype' else ''} ask for opposite things",
            works="one of the two",
        )


def checkpoint_must_exist(config: MegatronConfig, flag: str) -> Iterator[Problem]:
    if config.checkpoint.load_if_exists:
        yield Problem(
            flags=(flag, "--load-if-exists"),
            rule="and --load-if-exists ask for opposite things",
            works="one of the two",
        )


def nothing_is_compiled(config: MegatronConfig, flag: str) -> Iterator[Problem]:
    if config.training.torch_compile:
        yield Problem(
            flags=(flag, "--torch-compile"),
            rule="and --torch-compile ask for opposite things",
            works="one of the two",
        )


def flash_kernel_fits(config: MegatronConfig, flag: str) -> Iterator[Problem]:
    """What keeps torch's attention from a flash kernel."""
    model = config.model
    obstacles = {
        "--attention-dropout": (
            model.drops_attention_weights,
            f"--attention-dropout {model.attention_dropout} takes an explicit path, whose masks do not "
            "depend on the layout",
            "--attention-dropout 0, or --fast-attention-dropout",
        ),
        "--apply-query-key-layer-scaling": (
            model.apply_query_key_layer_scaling,
            "--apply-query-key-layer-scaling takes an explicit path, where scores are divided before they are rounded",
            "--no-query-key-layer-scaling",
        ),
        "--bf16": (
            config.optimizer.precision not in ("bf16", "fp16"),
            f"flash kernels compute in 16 bits, and the precision is {config.optimizer.precision}",
            "--bf16",
        ),
        "--position-embedding-type": (
            model.position_embedding_type == "alibi",
            "flash kernels take no bias on the scores, which ALiBi is",
            "--position-embedding-type rope",
        ),
        "--window-size": (
            model.window_size not in (None, (-1, -1), (-1, 0)),
            "torch's flash kernel has no window",
            "another kernel, by leaving the flag out",
        ),
        "--reset-attention-mask": (
            config.data.reset_attention_mask,
            "torch's flash kernel takes no mask of documents",
            "another kernel, by leaving the flag out",
        ),
        "padding": (
            config.bert is not None,
            "samples of BERT are padded, and torch's flash kernel takes no mask of padding",
            "another kernel, by leaving the flag out",
        ),
    }
    for obstacle, (stands, rule, works) in obstacles.items():
        if stands:
            yield Problem(flags=(flag, obstacle), rule=f"cannot be: {rule}", works=works)
