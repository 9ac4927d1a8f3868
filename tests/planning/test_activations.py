"""What layers keep for the backward: at most what the paper says, and what the account predicts."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.core.comm_group import CommGroup
from megatron.core.shard import name_parameters
from megatron.core.tensor_parallel.recompute import recompute
from megatron.model.init import initialize_weights
from megatron.model.language_model import OutputLayer
from megatron.planning.activations import chunk_bytes, kept_by_layers, paper_bytes_per_layer
from megatron.planning.saved_tensors import SavedBytes
from tests.helpers.distributed import run_distributed
from tests.helpers.tiny import tiny_config
from tests.planning.measured import saved_by_layers
from tests.tensor_parallel.ranks import placed, tensor_group

# The prediction counts statistics of norms in fp32, as on GPUs; torch keeps those of a LayerNorm in bf16 on CPUs.
PREDICTED = 0.05
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one-rank": (1, ()),
    "tp2": (2, ()),
    "tp2-sp": (2, ("--sequence-parallel",)),
}
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SELECTIVE = ("--recompute-granularity", "selective")
RECOMPUTED: dict[str, tuple[str, ...]] = {"none": (), "selective": SELECTIVE, "full": FULL}
PARTS = {
    "norms": (*SELECTIVE, "--recompute-modules", "layernorm"),
    "mlp": (*SELECTIVE, "--recompute-modules", "mlp"),
    "all parts": (*SELECTIVE, "--recompute-modules", "core_attn", "layernorm", "mlp"),
    "one layer of two": (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "block",
        "--recompute-num-layers",
        "1",
    ),
}
DROPOUT = {"dropout": ("--hidden-dropout", "0.1", "--attention-dropout", "0.1"), "no-dropout": ()}
LLAMA = (
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--group-query-attention", "--num-query-groups", "2"),
)
FLAVOURS: dict[str, tuple[str, ...]] = {
    "gpt": (),
    "llama": LLAMA,
    "squared-relu": ("--squared-relu",),
    "qk-norm": ("--qk-layernorm", "--position-embedding-type", "rope"),
    "fp32": (),
}


def _saved_each_way(
    rank: int, world_size: int, lines: tuple[tuple[str, ...], ...]
) -> list[tuple[MegatronConfig, int, int]]:
    return [saved_by_layers(rank, world_size, line) for line in lines]


def paper_bytes(config: MegatronConfig, recompute: str | None) -> float:
    return paper_bytes_per_layer(
        sequence_length=config.data.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        hidden_size=config.model.hidden_size,
        num_attention_heads=config.model.num_attention_heads,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute=recompute,
    )


@pytest.mark.parametrize("dropout", DROPOUT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_more_is_kept_than_the_paper_says(layout: str, dropout: str) -> None:
    ranks, arguments = LAYOUTS[layout]
    lines = tuple(("--bf16", *arguments, *DROPOUT[dropout], *way) for way in RECOMPUTED.values())
    for results in run_distributed(_saved_each_way, ranks, lines):
        for way, (config, kept, left) in zip(RECOMPUTED, results):
            paper = paper_bytes(config, None if way == "none" else way)
            assert kept / config.model.num_layers <= paper, way
            assert left == 0


def test_selective_recomputation_and_sequence_parallelism_keep_34_sbh_over_t() -> None:
    """Korthikanti et al., equation 6 and below it, with 0.1 of dropout and without."""
    lines = tuple(("--bf16", "--sequence-parallel", *dropout, *SELECTIVE) for dropout in DROPOUT.values())
    for results in run_distributed(_saved_each_way, 2, lines):
        for config, kept, _ in results:
            sbh = config.data.seq_length * config.training.micro_batch_size * config.model.hidden_size
            assert kept / config.model.num_layers <= 34 * sbh / 2


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("layout", ["one-rank", "tp2-sp", pytest.param("tp2", marks=pytest.mark.full)])
def test_what_is_kept_is_what_is_predicted(layout: str, flavour: str) -> None:
    ranks, arguments = LAYOUTS[layout]
    precision = () if flavour == "fp32" else ("--bf16",)
    lines = tuple(
        (*precision, *arguments, *FLAVOURS[flavour], *dropout, *way)
        for dropout in DROPOUT.values()
        for way in (*RECOMPUTED.values(), *PARTS.values())
    )
    for results in run_distributed(_saved_each_way, ranks, lines):
        for line, (config, kept, _) in zip(lines, results):
            predicted = kept_by_layers(config, range(config.model.num_layers))
            assert kept == pytest.approx(predicted, rel=PREDICTED), line


def bytes_of_tensors() -> int:
    """Of all tensors that are reachable in this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _kept_inputs(rank: int, world_size: int, distributed: bool) -> int:
    """Bytes that a function whose activations are recomputed keeps, by a count of all tensors."""
    group = tensor_group(rank, world_size) if distributed else None
    x = torch.ones(30, 3, requires_grad=True)
    before = bytes_of_tensors()
    y = recompute(lambda x: x.exp().log(), x + 1, distributed_over=group)
    kept = bytes_of_tensors() - before - y.untyped_storage().nbytes()
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(30, 3))
    return kept


def test_each_rank_keeps_its_part_of_the_inputs() -> None:
    whole, parts = (run_distributed(_kept_inputs, 4, distributed) for distributed in (False, True))
    assert [more - less for more, less in zip(whole, parts)] == [(30 * 3 - 23) * 4] * 4


def test_the_paper_s_example_of_gpt_3() -> None:
    """Section 4.1: 5as/h is 80 for GPT-3, so that recomputing the core of attention spares 70 % of 114."""
    size = {"sequence_length": 2048, "micro_batch_size": 1, "hidden_size": 12288, "num_attention_heads": 96}
    sbh = 2048 * 12288
    assert paper_bytes_per_layer(**size) == (34 + 80) * sbh
    assert paper_bytes_per_layer(**size, recompute="selective") / paper_bytes_per_layer(**size) == pytest.approx(
        34 / 114
    )
    assert paper_bytes_per_layer(**size, tensor_parallel_size=8) == sbh * (10 + 24 / 8 + 80 / 8)
    with_sequence = paper_bytes_per_layer(**size, tensor_parallel_size=8, sequence_parallel=True)
    assert with_sequence == sbh / 8 * 114


@pytest.mark.parametrize("precision", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_a_normalized_output_weight_is_kept_as_predicted(precision: tuple[str, ...]) -> None:
    kept, predicted = [], []
    for flags in ((), ("--normalize-output-weights",)):
        config = tiny_config(*precision, *flags)
        placement = placed(CommGroup.single("tensor"), False, config.optimizer.params_dtype)
        head = OutputLayer(config.model, vocab_size=251, padded_vocab_size=256, placement=placement)
        name_parameters(head)
        initialize_weights(head, seed=1)
        x = torch.ones(24, 1, config.model.hidden_size, dtype=placement.dtype, requires_grad=True)
        with SavedBytes(head.parameters()) as saved:
            logits = head(x)  # which holds the graph
        kept.append(saved.bytes)
        del logits
        stage = StageLayout(stage=0, chunk=0, layers=range(0), has_embedding=False, has_output=True)
        predicted.append(chunk_bytes(config, stage, padded_vocab_size=256))
    measured = kept[1] - kept[0]
    assert measured == pytest.approx(predicted[1] - predicted[0], rel=PREDICTED)
