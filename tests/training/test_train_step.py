"""One iteration: what the loss is a mean over, what the gradient is, when a step is skipped, what ramps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.pipeline_layout import StageLayout
from megatron.core.comm_group import CommGroup
from megatron.core.kernels.float_halves import Halves, Numbers
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_state import build_parallel_state
from megatron.core.rank_grid import RankGrid
from megatron.core.shard import name_parameters, shard_of
from megatron.data.batches import GPTBatch
from megatron.model.gpt_model import GPTModel
from megatron.model.init import initialize_weights
from megatron.training.pretrain import train
from megatron.training.run import Loader, Loaders, Run
from megatron.training.setup import build_vocabulary
from megatron.training.train_step import Begun, global_counts, mean_losses, train_step
from pretrain_gpt import forward_step
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import PARITY_FP64, assert_bitwise, assert_parity
from tests.helpers.tiny import tiny_config
from tests.tensor_parallel.ranks import placed
from tests.training.runs import build, counting_corpus, rows_on_ranks, trained


def microbatches_of(run: Run, consumed: int) -> Sequence[GPTBatch]:
    return run.loaders.train.microbatches(consumed, run.batch_sizes.at(consumed).num_microbatches)  # type: ignore[return-value]


def state_of(run: Run) -> dict[str, Tensor]:
    """Parameters of the model, main parameters and optimizer state, copied."""
    tensors = {f"model.{shard_of(p).name}": p.data for chunk in run.chunks for p in chunk.module.parameters()}
    for named in run.optimizer.named_main_parameters():
        tensors[f"main.{named.key.removeprefix('model.')}"] = whole(named.tensor)
    tensors |= {named.key: whole(named.tensor) for named in run.optimizer.named_state()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def whole(numbers: Numbers) -> Tensor:
    return numbers.joined() if isinstance(numbers, Halves) else numbers


def test_losses_fall(tmp_path: Path) -> None:
    _, recorder = trained(
        *counting_corpus(tmp_path),
        *("--train-iters", "30", "--global-batch-size", "4", "--micro-batch-size", "4"),
        *("--lr", "5e-3", "--clip-grad", "1"),
    )
    # from that of a uniform guess; each step has other samples, so single ones go up and down
    assert recorder.losses[0] == pytest.approx(log(251), rel=0.05)
    assert sum(recorder.losses[-5:]) / 5 < recorder.losses[0] - 0.5


# ---- means over tokens ----


@pytest.mark.parametrize("world_size, micro_batch_size", [(1, 8), (2, 2), (4, 1)])
def test_the_loss_depends_neither_on_the_micro_batch_nor_on_data_parallelism(
    world_size: int, micro_batch_size: int, tmp_path: Path
) -> None:
    arguments = ["--fp64", *counting_corpus(tmp_path)]
    run, expected = build(*arguments)
    counts = {float(batch.loss_counts()["lm loss"]) for batch in microbatches_of(run, 0)}
    assert len(counts) > 2, "the micro-batches have the same numbers of tokens, and the test tests nothing"
    train(run)
    ranks = run_distributed(rows_on_ranks, world_size, *arguments, "--micro-batch-size", str(micro_batch_size))
    for rows in ranks:
        assert [row["lm loss"] for row in rows] == pytest.approx(expected.losses, rel=PARITY_FP64)
        assert [row["grad_norm"] for row in rows] == pytest.approx(
            [step.grad_norm for step in expected.steps], rel=PARITY_FP64
        )


def plain_gradients(run: Run, divisors: Sequence[float]) -> dict[str, Tensor]:
    """Of the sum of the losses of the first batch's micro-batches, each by its divisor; by autograd on one model."""
    config, vocabulary = run.config, build_vocabulary(run.config)
    model = GPTModel(
        config.model,
        stage=StageLayout(stage=0, chunk=0, layers=range(config.model.num_layers), has_embedding=True, has_output=True),
        vocab_size=vocabulary.size,
        padded_vocab_size=vocabulary.padded_size,
        placement=placed(CommGroup.single("tensor")),
    )
    name_parameters(model)
    initialize_weights(model, config.training.seed)
    terms = []
    for batch, divisor in zip(microbatches_of(run, 0), divisors, strict=True):
        losses = model(batch.tokens, batch.position_ids, document_ids=batch.document_ids, labels=batch.labels)
        terms.append(losses[batch.loss_mask].sum() / divisor)
    torch.stack(terms).sum().backward()
    return {shard_of(parameter).name: parameter.grad for parameter in model.parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("per_token", [True, False], ids=["per-token", "micro-batch-means"])
def test_gradients_against_autograd_by_hand(per_token: bool, tmp_path: Path) -> None:
    run, _ = build(
        "--fp64",
        "--clip-grad",
        "0",
        *counting_corpus(tmp_path),
        *(() if per_token else ("--no-calculate-per-token-loss",)),
    )
    counts = [float(batch.loss_counts()["lm loss"]) for batch in microbatches_of(run, 0)]
    divisors = [sum(counts)] * len(counts) if per_token else [count * len(counts) for count in counts]
    expected = plain_gradients(run, divisors)
    train_step(run)
    parameters = {shard_of(p).name: p for chunk in run.chunks for p in chunk.module.parameters()}
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert_parity(main_grad_of(parameter), expected[name], name)


def test_the_logged_loss_is_the_mean_over_tokens_whatever_the_gradient_is() -> None:
    losses = [
        trained("--fp64", "--train-iters", "1", *flags)[1].losses for flags in ((), ("--no-calculate-per-token-loss",))
    ]
    assert losses[0] == losses[1]


# ---- what is asked of a device, and of other ranks ----


class HostReads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors: on a GPU it waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("flags", [(), ("--no-calculate-per-token-loss",)], ids=["per-token", "micro-batch-means"])
def test_the_host_waits_for_nothing_before_the_first_forward(flags: tuple[str, ...]) -> None:
    reads, before_forwards = HostReads(), []

    def watched(*arguments: Any) -> Tensor | dict[str, Tensor]:
        before_forwards.append(reads.number)
        return forward_step(*arguments)

    run, _ = build(*flags, forward_step=watched)
    with reads:
        train_step(run)
    assert before_forwards[0] == 0
    assert reads.number > 0, "the numbers of a report are read, or this test counts nothing"


class TwoTerms:
    """A micro-batch whose loss terms stand in another order on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sample_ids = torch.tensor([rank])

    def loss_counts(self) -> dict[str, Tensor]:
        counts = {"lm loss": torch.tensor(10 + self.rank), "auxiliary loss": torch.tensor(1)}
        return counts if self.rank == 0 else dict(reversed(counts.items()))

    def to(self, device: torch.device) -> TwoTerms:
        return self


def counts_of_two_terms(rank: int, world_size: int) -> tuple[dict[str, float], int]:
    data = build_parallel_state(RankGrid(dp=world_size), rank=rank).data
    original, collectives = dist.all_reduce, []
    dist.all_reduce = lambda *arguments, **keywords: collectives.append(original(*arguments, **keywords))
    counts = global_counts([TwoTerms(rank)] * 3, data, torch.device("cpu"))
    return {name: float(count) for name, count in counts.items()}, len(collectives)


def test_the_host_waits_once_for_all_the_losses_and_once_to_know_whether_all_have_tokens() -> None:
    counts = {name: torch.tensor(count, dtype=torch.float64) for name, count in (("a", 3), ("b", 0), ("c", 7))}
    sums = {name: torch.tensor(6.0) for name in "cba"}
    rest = dict.fromkeys(("start", "batch", "microbatches", "divisors", "learning_rate", "weight_decay", "loss_scale"))
    begun = Begun(counts=counts, **rest)  # type: ignore[arg-type]
    with HostReads() as reads:
        losses = mean_losses(sums, counts, CommGroup.single("data"))
    assert losses == {"a": 2.0, "c": 6 / 7}
    assert reads.number == 0, "a list is read at once"
    with HostReads() as reads:
        assert not begun.has_all_terms
    assert reads.number == 1
    counts["b"] += 1
    with HostReads() as reads:
        assert begun.has_all_terms
    assert reads.number == 1


def test_the_counts_of_all_terms_take_one_collective_whatever_their_order() -> None:
    expected = {"auxiliary loss": 3.0 * 2, "lm loss": 3.0 * (10 + 11)}
    assert run_distributed(counts_of_two_terms, 2) == [(expected, 1)] * 2


# ---- steps that are skipped ----


class WithoutTokens:
    """A loader whose batches have no unmasked token from one position on to another."""

    def __init__(self, loader: Loader, first: int, last: int) -> None:
        self.loader, self.first, self.last = loader, first, last

    def microbatches(self, consumed: int, num_microbatches: int) -> Sequence[GPTBatch]:
        batches: Sequence[GPTBatch] = self.loader.microbatches(consumed, num_microbatches)  # type: ignore[assignment]
        if not self.first <= consumed < self.last:
            return batches
        return [replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) for batch in batches]

    def close(self) -> None:
        self.loader.close()


@pytest.mark.parametrize("flags", [(), ("--no-calculate-per-token-loss",)], ids=["per-token", "micro-batch-means"])
def test_a_batch_without_an_unmasked_token_is_skipped(flags: tuple[str, ...]) -> None:
    run, _ = build(*flags, "--lr-warmup-iters", "1")
    run.loaders = Loaders(train=WithoutTokens(run.loaders.train, 8, 16))
    train_step(run)
    before, position = state_of(run), run.scheduler.num_steps
    skipped = train_step(run)
    assert not skipped.applied
    assert not skipped.nan
    assert skipped.losses == {}
    assert skipped.consumed_samples == 16
    assert skipped.next_learning_rate == skipped.learning_rate
    assert run.scheduler.num_steps == position == 8
    assert run.optimizer.state_dict()["num_updates"] == 1
    for name, tensor in state_of(run).items():
        assert_bitwise(tensor, before[name], name)
    after = train_step(run)
    assert after.applied
    assert after.losses


def test_a_micro_batch_without_a_token_among_others_counts_as_nothing() -> None:
    class FirstEmpty(WithoutTokens):
        def microbatches(self, consumed: int, num_microbatches: int) -> Sequence[GPTBatch]:
            first, *others = self.loader.microbatches(consumed, num_microbatches)
            return [replace(first, loss_mask=torch.zeros_like(first.loss_mask)), *others]  # type: ignore[type-var]

    for flags in ((), ("--no-calculate-per-token-loss",)):
        run, _ = build("--fp64", *flags)
        run.loaders = Loaders(train=FirstEmpty(run.loaders.train, 0, 0))
        report = train_step(run)
        assert report.applied
        assert not report.nan


# ---- ramps ----


def test_the_batch_size_ramps_up() -> None:
    # the tiny model's --train-iters is set back: a ramp counts in samples
    config = replace(
        tiny_config("--micro-batch-size", "2").training,
        train_iters=None,
        train_samples=40,
        rampup_batch_size=(2, 2, 16),
    )
    run, recorder = build("--micro-batch-size", "2", training=config)
    train(run)
    assert [step.global_batch_size for step in recorder.steps] == [2, 2, 2, 4, 4, 6, 8, 8]
    assert [step.consumed_samples for step in recorder.steps] == [2, 4, 6, 10, 14, 20, 28, 36]


def test_the_weight_decay_ramps_up() -> None:
    _, recorder = trained(
        *("--train-iters", "4", "--start-weight-decay", "0", "--end-weight-decay", "0.1"),
        *("--weight-decay-incr-style", "linear"),
    )
    assert [step.weight_decay for step in recorder.steps] == pytest.approx([0, 0.025, 0.05, 0.075])


def test_the_learning_rate_warms_up_and_decays() -> None:
    _, recorder = trained("--train-iters", "6", "--lr-warmup-iters", "2", "--lr-decay-style", "linear")
    assert [step.learning_rate for step in recorder.steps] == pytest.approx([0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert [step.next_learning_rate for step in recorder.steps[:-1]] == [
        step.learning_rate for step in recorder.steps[1:]
    ]
