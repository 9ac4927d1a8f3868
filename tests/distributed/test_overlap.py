"""When buckets are reduced and gathered: as early as can be, in one order on all ranks, and never too early."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads, non_finite_gradients
from megatron.core.distributed.grad_buffer import Bucket
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_state import ParallelState
from tests.distributed import toy_shards
from tests.distributed.toy_shards import Layout, state_of
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise, assert_parity
from tests.optimizer.toy import loss_sum, optimizer_of, toy_batch, toy_model, with_whole_shards

SINGLE = CommGroup.single("data")
# Each parameter has a bucket of its own.
REDUCE = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
GATHER = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1
)


def chunk_of(
    model: nn.Module, group: CommGroup = SINGLE, config: DistributedDataParallelConfig = REDUCE
) -> DistributedDataParallel:
    return DistributedDataParallel(model, data_group=group, grad_dtype=torch.float64, config=config)


def backward(chunk: DistributedDataParallel, *, last: bool, loss: Callable[[], Tensor] | None = None) -> None:
    result = loss_sum(chunk, *toy_batch(0)) if loss is None else loss()
    if last:
        with chunk.last_backward(look_for_nan=False):
            result.backward()
    else:
        result.backward()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of each reduction that is begun the parameters of its bucket, in order."""
    return record_starts(monkeypatch.setattr)


def record_starts(replace: Callable[[Any, str, Any], None]) -> list[list[str]]:
    begun: list[list[str]] = []
    original = Bucket.start_reduction

    def start(bucket: Bucket, op: Any) -> None:
        begun.append([entry.name for entry in bucket.entries])
        original(bucket, op)

    replace(Bucket, "start_reduction", start)
    return begun


# ---- reductions ----


def test_a_reduction_begins_with_the_last_gradient_of_its_bucket_in_the_last_micro_batch(
    starts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = chunk_of(toy_model())
    there: list[set[str]] = []
    recording = Bucket.start_reduction

    def start(bucket: Bucket, op: Any) -> None:
        there.append({name for name, p in chunk.module.named_parameters() if main_grad_of(p).any()})
        recording(bucket, op)

    monkeypatch.setattr(Bucket, "start_reduction", start)
    chunk.zero_grad_buffer()
    backward(chunk, last=True)
    names = [name for name, _ in chunk.module.named_parameters()]
    assert starts == [[name] for name in reversed(names)]
    assert all(set(started) <= gradients for started, gradients in zip(starts, there))
    # the head is on its way when the embedding, which the pass comes to last, has no gradient yet
    assert "embedding.weight" not in there[0]
    assert there[-1] == set(names)
    chunk.reduce_gradients()
    assert len(starts) == len(names), "nothing is reduced twice"


def test_nothing_is_reduced_before_the_last_micro_batch_and_every_step_anew(starts: list[list[str]]) -> None:
    chunk = chunk_of(toy_model())
    for _ in range(2):
        starts.clear()
        chunk.zero_grad_buffer()
        backward(chunk, last=False)
        backward(chunk, last=False)
        assert starts == []
        backward(chunk, last=True)
        assert len(starts) == 7
        chunk.reduce_gradients()
        assert len(starts) == 7


def test_without_overlap_all_is_reduced_at_the_end(starts: list[list[str]]) -> None:
    chunk = chunk_of(toy_model(), config=DistributedDataParallelConfig())
    chunk.zero_grad_buffer()
    backward(chunk, last=True)
    assert starts == []
    chunk.reduce_gradients()
    assert len(starts) == 1


class WithSpare(nn.Module):
    """A model with a layer between two others that some forward passes leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.spare = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.last = nn.Linear(3, 3, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, with_spare: bool) -> Tensor:
        hidden = self.first(x)
        return self.last(self.spare(hidden) if with_spare else hidden).square().sum()


def spare_model() -> nn.Module:
    torch.manual_seed(0)
    return with_whole_shards(WithSpare())


def inputs(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def test_a_bucket_whose_parameter_gets_no_gradient_is_reduced_when_the_pass_is_over(starts: list[list[str]]) -> None:
    chunk = chunk_of(spare_model())
    chunk.zero_grad_buffer()
    backward(chunk, last=False, loss=lambda: chunk(inputs(0), True))
    kept = main_grad_of(chunk.module.spare.weight).clone()
    assert kept.any()
    with chunk.last_backward(look_for_nan=False):
        chunk(inputs(1), False).backward()
        assert starts == [["last.weight"]], "those behind it wait, so that all ranks begin them in one order"
    assert starts == [["last.weight"], ["spare.weight"], ["first.weight"]]
    chunk.reduce_gradients()
    assert_bitwise(main_grad_of(chunk.module.spare.weight), kept)


def ranks_that_use_different_parameters(
    rank: int, world_size: int, config: DistributedDataParallelConfig
) -> dict[str, Tensor]:
    chunk = chunk_of(spare_model(), state_of(Layout(data=world_size), rank).data, config)
    chunk.zero_grad_buffer()
    backward(chunk, last=False, loss=lambda: chunk(inputs(rank), True))
    backward(chunk, last=True, loss=lambda: chunk(inputs(10 + rank), rank == 1))
    chunk.reduce_gradients()
    return {name: main_grad_of(parameter).clone() for name, parameter in chunk.module.named_parameters()}


def test_ranks_that_use_different_parameters_reduce_the_same_buckets_together() -> None:
    plain = run_distributed(ranks_that_use_different_parameters, 2, DistributedDataParallelConfig())
    overlapped = run_distributed(ranks_that_use_different_parameters, 2, REDUCE)
    for results, expected in zip(overlapped, plain):
        for name, gradient in results.items():
            assert_bitwise(gradient, expected[name], name)


def test_buckets_of_several_buffers_begin_as_their_gradients_come(starts: list[list[str]]) -> None:
    """Those of one dtype do not wait for all of another."""
    model = toy_model(torch.float64)
    model.layernorm.weight.data = model.layernorm.weight.data.float()
    model.layernorm.bias.data = model.layernorm.bias.data.float()
    model.layernorm.register_forward_pre_hook(lambda _, inputs: tuple(each.float() for each in inputs))
    model.layernorm.register_forward_hook(lambda _, inputs, output: output.double())
    chunk = chunk_of(model)
    assert len(chunk.grad_buffers) == 2
    with chunk.last_backward(look_for_nan=False):
        loss_sum(chunk, *toy_batch(0)).backward()
    assert all(main_grad_of(parameter).any() for parameter in model.parameters())
    names = [name for name, _ in model.named_parameters()]
    assert sorted(starts) == [[name] for name in sorted(names)]
    assert starts[-1] == ["embedding.weight"] and starts[0][0].startswith("linear_fc2")
    assert starts == [[name] for name in reversed(names)]


def test_frozen_parameters_are_in_no_bucket_and_hold_nothing_up(starts: list[list[str]]) -> None:
    model = toy_model()
    model.linear_fc1.weight.requires_grad_(False)
    model.layernorm.bias.requires_grad_(False)
    chunk = chunk_of(model)
    chunk.zero_grad_buffer()
    with chunk.last_backward(look_for_nan=False):
        loss_sum(chunk, *toy_batch(0)).backward()
        assert len(starts) == 5
    assert [name for (name,) in starts] == [
        "linear_fc2.bias", "linear_fc2.weight", "linear_fc1.bias", "layernorm.weight", "embedding.weight",
    ]  # fmt: skip


def test_a_gradient_that_comes_after_its_reduction_is_a_bug_that_is_seen() -> None:
    chunk = chunk_of(toy_model())
    chunk.zero_grad_buffer()
    with chunk.last_backward(look_for_nan=False):
        loss_sum(chunk, *toy_batch(0)).backward()
        with pytest.raises(AssertionError, match="got a gradient after its reduction"):
            loss_sum(chunk, *toy_batch(1)).backward()


def kinds_of_buckets(rank: int, world_size: int, layout: Layout) -> tuple[list[bool], list[list[str]]]:
    """Which buckets are late, and what is reduced before the reductions over the tensor-parallel group."""
    state = state_of(layout, rank)
    chunk = toy_shards.build_chunk(layout, state, REDUCE)
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    begun = record_starts(replace)
    with chunk.last_backward(look_for_nan=False):
        pass
    early = list(begun)
    finalize_model_grads([chunk], tensor=state.tensor, embedding=state.embedding)
    for owner, name, value in replaced:
        setattr(owner, name, value)
    assert sorted(map(tuple, begun)) == sorted(tuple(e.name for e in bucket.entries) for bucket in chunk.buckets)
    return [bucket.late for bucket in chunk.buckets], early


def test_gradients_that_are_sums_over_tensor_ranks_wait_for_these() -> None:
    layout = Layout(tensor=2, query_groups=1, data=2)
    for late, early in run_distributed(kinds_of_buckets, 4, layout):
        assert late.count(True) == 1
        assert early
        assert not any("norm" in name or "qkv" in name for names in early for name in names)


def test_a_tied_parameter_has_a_bucket_of_its_own() -> None:
    """At the same place on both stages, so that slices of the same elements meet."""
    layout = Layout(pipeline=2, data=2)
    for late, early in run_distributed(kinds_of_buckets, 4, layout):
        assert not any(late)
        assert early[-1] == ["embedding_weight"]


def test_every_kind_of_shard_is_reduced_with_overlap_as_without() -> None:
    layout = Layout(tensor=2, query_groups=1, pipeline=2, data=2)
    run_distributed(compare_with_plain, 8, layout)


def compare_with_plain(rank: int, world_size: int, layout: Layout) -> None:
    state = state_of(layout, rank)
    gradients = []
    for config in (DistributedDataParallelConfig(), REDUCE):
        chunk = toy_shards.build_chunk(layout, state, config)
        toy_shards.set_raw_gradients(chunk, state, step=0)
        with chunk.last_backward(look_for_nan=False):
            pass
        finalize_model_grads([chunk], tensor=state.tensor, embedding=state.embedding)
        gradients.append({name: main_grad_of(p).clone() for name, p in chunk.module.named_parameters()})
    for name, gradient in gradients[1].items():
        assert_bitwise(gradient, gradients[0][name], f"{name} on rank {rank}")


def bad_gradient_behind_overlap(rank: int, world_size: int) -> list[str]:
    chunk = chunk_of(toy_model(), state_of(Layout(data=2), rank).data)
    chunk.zero_grad_buffer()
    if rank == 1:
        main_grad_of(chunk.module.linear_fc1.weight)[0, 0] = math.nan
    with chunk.last_backward(look_for_nan=True):
        loss_sum(chunk, *toy_batch(0)).backward()
    named = non_finite_gradients([chunk])
    chunk.reduce_gradients()
    assert main_grad_of(chunk.module.linear_fc1.weight).isnan().any(), "both ranks have it now"
    return named


def test_the_rank_of_a_bad_gradient_names_it_although_it_is_reduced_already() -> None:
    assert run_distributed(bad_gradient_behind_overlap, 2) == [[], ["linear_fc1.weight"]]


class Forgotten(Exception):
    pass


def test_a_reduction_that_an_error_has_left_open_is_ended_before_gradients_are_zeroed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = chunk_of(toy_model(), config=REDUCE)
    chunk.zero_grad_buffer()
    late: list[str] = []
    for name in ("all_reduce_", "reduce_scatter_"):
        monkeypatch.setattr(collectives, name, lambda *_, **__: LaterWork(lambda: late.append("written")))
    with suppress(Forgotten), chunk.last_backward(look_for_nan=False):
        loss_sum(chunk, *toy_batch(0)).backward()
        raise Forgotten
    assert late == []
    chunk.zero_grad_buffer()
    assert late == ["written"] * 7
    assert not any(main_grad_of(parameter).any() for parameter in chunk.trainable_parameters())


def test_the_host_does_not_look_at_gradients_before_the_backward_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it would wait for each bucket."""
    chunk = chunk_of(toy_model())
    chunk.zero_grad_buffer()
    looked: list[str] = []
    for name in ("__bool__", "item", "tolist"):
        original = getattr(Tensor, name)

        def look(tensor: Tensor, name: str = name, original: Any = original) -> Any:
            looked.append(name)
            return original(tensor)

        monkeypatch.setattr(Tensor, name, look)
    result = loss_sum(chunk, *toy_batch(0))
    with chunk.last_backward(look_for_nan=True):
        result.backward()
    assert looked == []
    assert non_finite_gradients([chunk]) == []
    assert looked == ["tolist"]


def averaged(rank: int, world_size: int, config: DistributedDataParallelConfig) -> dict[str, Tensor]:
    chunk = chunk_of(toy_model(), state_of(Layout(data=world_size), rank).data, config)
    chunk.zero_grad_buffer()
    (loss_sum(chunk, *toy_batch(rank)) * chunk.loss_factor).backward()
    chunk.reduce_gradients()
    return {name: main_grad_of(parameter).clone() for name, parameter in chunk.module.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_average_of_multiplied_losses_is_their_sum(ranks: int) -> None:
    """To the bit where the factor is a power of two."""
    plain = run_distributed(averaged, ranks, DistributedDataParallelConfig())
    average = run_distributed(averaged, ranks, DistributedDataParallelConfig(average_in_collective=True))
    for name, gradient in average[0].items():
        (assert_bitwise if ranks == 2 else assert_parity)(gradient, plain[0][name], name)


# ---- gathers ----


class LaterWork:
    """A gather that has not ended: what it brings is there when somebody waits for it."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        self.deliver = deliver

    def wait(self) -> None:
        self.deliver()


@pytest.fixture
def delay_gathers(monkeypatch: pytest.MonkeyPatch) -> Callable[[DistributedDataParallel], list[str]]:
    """Begins all gathers of a chunk; the names of the parameters that are delivered, in order, later."""

    def delay(chunk: DistributedDataParallel) -> list[str]:
        delivered: list[str] = []
        for bucket in chunk.buckets:
            names = [entry.name for entry in bucket.entries]
            work = LaterWork(lambda names=names: delivered.extend(names))  # type: ignore[misc]
            monkeypatch.setattr(collectives, "all_gather_", lambda *_, work=work, **__: work)
            bucket.start_gather()
        assert all(bucket.is_gathering for bucket in chunk.buckets)
        return delivered

    return delay


DelayGathers = Callable[[DistributedDataParallel], list[str]]


def test_a_module_waits_for_its_own_parameters_when_it_is_called_and_for_no_others(delay_gathers: DelayGathers) -> None:
    chunk = chunk_of(toy_model(), config=GATHER)
    delivered = delay_gathers(chunk)
    at_calls: list[list[str]] = []
    for module in chunk.module.children():
        module.register_forward_hook(lambda *_: at_calls.append(sorted(delivered)))
    loss_sum(chunk, *toy_batch(0))
    expected: list[str] = []
    for name in ("embedding", "layernorm", "linear_fc1", "linear_fc2"):
        expected += [each for each, _ in chunk.module.named_parameters() if each.startswith(name)]
        assert at_calls.pop(0) == sorted(expected)
    assert not any(bucket.is_gathering for bucket in chunk.buckets)


class Layer(nn.Module):
    """Reads the weights of its module without calling it, at first."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x @ self.proj.weight)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Layer() for name in "12"})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_a_layer_waits_for_all_that_is_in_it_and_for_no_other_layer(delay_gathers: DelayGathers) -> None:
    chunk = chunk_of(with_whole_shards(Layers()), config=GATHER)
    delivered = delay_gathers(chunk)
    at_starts: list[list[str]] = []
    for layer in chunk.module.layers.values():
        layer.register_forward_pre_hook(lambda *_: at_starts.append(list(delivered)))
    chunk(inputs(0)).sum().backward()
    assert at_starts == [[f"layers.{number}.proj.weight" for number in numbers] for numbers in ("1", "12")]


def test_a_parameter_that_is_read_before_its_module_is_called_is_an_error(delay_gathers: DelayGathers) -> None:
    chunk = chunk_of(with_whole_shards(Layer()), config=GATHER)
    delay_gathers(chunk)
    loss = chunk(inputs(0).requires_grad_()).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    chunk(inputs(0).requires_grad_()).sum().backward()


def test_a_parameter_that_is_read_without_its_module_is_an_error_that_names_it(delay_gathers: DelayGathers) -> None:
    chunk = chunk_of(toy_model(), config=GATHER)
    delay_gathers(chunk)
    with pytest.raises(
        RuntimeError, match=r"linear_fc2\.weight was used before it was gathered.*--overlap-param-gather"
    ):
        (chunk.module.linear_fc2.weight * 2).sum().backward()


def test_whoever_reads_parameters_otherwise_waits_for_all(delay_gathers: DelayGathers) -> None:
    chunk = chunk_of(toy_model(), config=GATHER)
    delivered = delay_gathers(chunk)
    chunk.wait_for_parameters()
    assert sorted(delivered) == sorted(name for name, _ in chunk.module.named_parameters())


def steps_with_bad_ones(rank: int, world_size: int, config: DistributedDataParallelConfig) -> list[dict[str, Tensor]]:
    """Parameters after a good step, one with a NaN, one with nothing to learn from, and a good one."""
    state: ParallelState = state_of(Layout(data=world_size), rank)
    chunk = chunk_of(toy_model(), state.data, config)
    sharded = config.use_distributed_optimizer
    optimizer = optimizer_of([chunk], model_group=state.world if sharded else state.model)
    optimizer.set_schedule(0.1, 0.1)
    seen = []
    for step, kind in enumerate(("good", "nan", "empty", "good")):
        chunk.zero_grad_buffer()
        loss = loss_sum(chunk, *toy_batch(10 * step + rank))
        with chunk.last_backward(look_for_nan=False):
            (loss * (math.nan if kind == "nan" and rank == 1 else 1.0)).backward()
        chunk.reduce_gradients()
        report = optimizer.skip_step() if kind == "empty" else optimizer.step()
        assert report.applied == (kind == "good")
        gathering = [bucket.is_gathering for bucket in chunk.buckets]
        assert all(gathering) if kind == "good" and sharded else not any(gathering), kind
        if step < 3:
            with torch.no_grad():
                seen.append({"evaluation": loss_sum(chunk, *toy_batch(99))})
        else:
            chunk.wait_for_parameters()
            seen.append({name: parameter.detach().clone() for name, parameter in chunk.module.named_parameters()})
    return seen


def test_a_skipped_step_leaves_no_gather_open_and_the_next_one_goes_on() -> None:
    plain = run_distributed(steps_with_bad_ones, 2, DistributedDataParallelConfig())
    overlapped = run_distributed(steps_with_bad_ones, 2, GATHER)
    for results, expected in zip(overlapped, plain):
        for here, there in zip(results, expected, strict=True):
            for name, tensor in here.items():
                assert_bitwise(tensor, there[name], name)
