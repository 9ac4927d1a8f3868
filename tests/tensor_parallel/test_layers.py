"""Tensor- and sequence-parallel layers against the same mathematics in plain torch, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.collectives import all_reduce
from megatron.core.comm_group import CommGroup
from megatron.core.shard import Init, Piece, shard_of
from megatron.core.tensor_parallel.async_linear import parallel_linear
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel_linear,
)
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise, assert_parity
from tests.helpers.operations import RecordedOperations
from tests.tensor_parallel.collective_log import kinds, recorded_collectives
from tests.tensor_parallel.ranks import (
    drawn,
    fill,
    give_main_grads,
    local_part,
    placed,
    sequence_part,
    tensor_group,
)

LAYOUTS = [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]
LAYOUT_IDS = [f"tp{size}{'-sp' if sequence_parallel else ''}" for size, sequence_parallel in LAYOUTS]
S, B, H, FFN = 12, 2, 12, 24


class ParallelPair(nn.Module):
    """Column-parallel, GELU, row-parallel: the MLP of the papers, with nonzero biases."""

    def __init__(self, group: CommGroup, sequence_parallel: bool, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        common: dict[str, Any] = {
            "placement": placed(group, sequence_parallel, dtype),
            "bias": True,
            "init": Init.normal(0.02),
        }
        self.fc1 = ColumnParallelLinear(H, FFN, **common)
        self.fc2 = RowParallelLinear(FFN, H, **common)
        for seed, parameter in enumerate(self.parameters()):
            fill(parameter, drawn(seed, *shard_of(parameter).global_shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def dense_pair(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same in plain torch."""
    dense = nn.Sequential(nn.Linear(H, FFN), nn.GELU(), nn.Linear(FFN, H)).to(dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(dense.parameters()):
            parameter.copy_(drawn(seed, *parameter.shape))
    return dense


def gradient_of(parameter: nn.Parameter, group: CommGroup) -> Tensor:
    """What training would use: partial gradients summed over the group, as the shard record says."""
    gradient = getattr(parameter, "main_grad", parameter.grad)
    assert gradient is not None
    return all_reduce(gradient, group) if shard_of(parameter).partial_gradient else gradient


def assert_same_gradients(parallel: nn.Module, dense: nn.Module, group: CommGroup) -> None:
    names = [name for name, _ in parallel.named_parameters()]
    for name, ours, theirs in zip(names, parallel.parameters(), dense.parameters()):
        assert theirs.grad is not None
        assert_parity(gradient_of(ours, group), local_part(ours, theirs.grad), name)


def check_pair(rank: int, world_size: int, sequence_parallel: bool, use_main_grad: bool) -> None:
    group = tensor_group(rank, world_size)
    parallel, dense = ParallelPair(group, sequence_parallel), dense_pair()
    if use_main_grad:
        give_main_grads(list(parallel.parameters())[::2], torch.float64)  # the weights
    for microbatch in range(2):
        whole_x = drawn(10 + microbatch, S, B, H)
        gradient = drawn(20 + microbatch, S, B, H)
        dense_x = whole_x.clone().requires_grad_()
        dense_y = dense(dense_x)
        dense_y.backward(gradient)
        x = sequence_part(whole_x, group, sequence_parallel).requires_grad_()
        before = x.detach().clone()
        y = parallel(x)
        y.backward(sequence_part(gradient, group, sequence_parallel))
        assert x.grad is not None
        assert dense_x.grad is not None
        assert_parity(y.detach(), sequence_part(dense_y.detach(), group, sequence_parallel), "output")
        assert_parity(x.grad, sequence_part(dense_x.grad, group, sequence_parallel), "input gradient")
        assert_bitwise(x.detach(), before, "input")
    assert_same_gradients(parallel, dense, group)
    for layer in (parallel.fc1, parallel.fc2):
        assert (layer.weight.grad is None) == use_main_grad


def check_pairs(rank: int, world_size: int, sequence_parallel: bool) -> None:
    for use_main_grad in (False, True):
        check_pair(rank, world_size, sequence_parallel, use_main_grad)


@pytest.mark.parametrize(("world_size", "sequence_parallel"), LAYOUTS, ids=LAYOUT_IDS)
def test_pair_equals_dense_in_outputs_and_all_gradients_over_two_microbatches(
    world_size: int, sequence_parallel: bool
) -> None:
    run_distributed(check_pairs, world_size, sequence_parallel)


def pair_collectives(
    rank: int, world_size: int, sequence_parallel: bool
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    group = tensor_group(rank, world_size)
    pair = ParallelPair(group, sequence_parallel)
    x = sequence_part(drawn(1, S, B, H), group, sequence_parallel).requires_grad_()
    with recorded_collectives() as forward:
        y = pair(x)
    with recorded_collectives() as backward:
        y.sum().backward()
    return forward, backward


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_pair_costs_one_all_reduce_forward_and_one_backward(world_size: int) -> None:
    once = [("all_reduce", S * B * H)] if world_size > 1 else []
    for forward, backward in run_distributed(pair_collectives, world_size, False):
        assert forward == once
        assert backward == once


@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_parallel_pair_moves_the_same_bytes_and_gathers_its_input_again(world_size: int) -> None:
    size = S * B * H
    for forward, backward in run_distributed(pair_collectives, world_size, True):
        assert forward == [("all_gather", size), ("reduce_scatter", size)]
        # the gradient of the output; the input again, behind the input gradient; the input gradient
        assert backward == [("all_gather", size), ("all_gather", size), ("reduce_scatter", size)]


class RecordedWork:
    """Stands for a collective in flight: notes what had been computed when it was waited for."""

    def __init__(self, work: Any, at_wait: Callable[[], None]) -> None:
        self.work, self.at_wait = work, at_wait

    def wait(self) -> None:
        self.at_wait()
        self.work.wait()


def check_overlap(rank: int, world_size: int, sequence_parallel: bool) -> None:
    group = tensor_group(rank, world_size)
    pair = ParallelPair(group, sequence_parallel)
    weight = pair.fc1.weight
    give_main_grads([weight], torch.float64)
    x = sequence_part(drawn(1, S, B, H), group, sequence_parallel).requires_grad_()
    y = pair.fc1(x)
    name = "reduce_scatter_single" if sequence_parallel else "all_reduce"
    launch = getattr(dist, name)
    events: list[tuple[str, bool]] = []

    def weight_gradient_done() -> bool:
        return bool(weight.main_grad.any())  # type: ignore[attr-defined]

    def recording(*args: Any, **kwargs: Any) -> RecordedWork:
        events.append(("launch", weight_gradient_done()))
        assert kwargs["async_op"]
        return RecordedWork(launch(*args, **kwargs), lambda: events.append(("wait", weight_gradient_done())))

    with patch.object(dist, name, recording):
        y.sum().backward()
    assert events == [("launch", False), ("wait", True)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_gradient_is_computed_while_the_input_gradient_is_reduced(sequence_parallel: bool) -> None:
    run_distributed(check_overlap, 2, sequence_parallel)


def check_gathered_input_is_not_stored(rank: int, world_size: int) -> None:
    group = tensor_group(rank, world_size)
    layer = ParallelPair(group, True).fc1
    x = sequence_part(drawn(1, S, B, H), group, True).requires_grad_()
    stored: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        stored.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert sorted(stored) == sorted([x.numel(), layer.weight.numel()])


def test_sequence_parallel_linear_stores_only_its_own_positions() -> None:
    run_distributed(check_gathered_input_is_not_stored, 3)


class TiedModel(nn.Module):
    """Embedding, a pair, and the embedding table again as output head."""

    def __init__(self, group: CommGroup, sequence_parallel: bool, vocab_size: int, padded_vocab_size: int) -> None:
        super().__init__()
        self.placement, self.vocab_size = placed(group, sequence_parallel), vocab_size
        self.embedding = VocabParallelEmbedding(
            vocab_size, H, padded_vocab_size=padded_vocab_size, placement=self.placement, init=Init.normal(0.02)
        )
        fill(self.embedding.weight, drawn(9, vocab_size, H))
        self.pair = ParallelPair(group, sequence_parallel)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.pair(hidden)
        logits = column_parallel_linear(hidden, self.embedding.weight, None, self.placement)
        return vocab_parallel_cross_entropy(logits, labels.t(), group=self.placement.group, vocab_size=self.vocab_size)


class DenseTiedModel(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(9, vocab_size, H))
        self.pair = dense_pair()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = F.embedding(tokens.t(), self.weight)
        hidden = hidden + self.pair(hidden)
        return F.cross_entropy((hidden @ self.weight.t()).flatten(0, 1), labels.t().flatten(), reduction="none")


def check_tied_model(
    rank: int, world_size: int, sequence_parallel: bool, vocab_size: int, padded: int, use_main_grad: bool
) -> None:
    group = tensor_group(rank, world_size)
    parallel = TiedModel(group, sequence_parallel, vocab_size, padded)
    dense = DenseTiedModel(vocab_size)
    table = parallel.embedding.weight
    if use_main_grad:
        give_main_grads([table], torch.float64)
    for microbatch in range(2):
        generator = torch.Generator().manual_seed(microbatch)
        tokens, labels = torch.randint(vocab_size, (2, B, S), generator=generator)
        theirs = dense(tokens, labels)
        theirs.sum().backward()
        ours = parallel(tokens, labels)
        ours.sum().backward()
        assert_parity(ours.detach().flatten(), theirs.detach(), "loss")
    assert_same_gradients(parallel, dense, group)
    assert (table.grad is None) == use_main_grad
    padding = torch.ones(table.shape[0], dtype=torch.bool)
    for piece in shard_of(table).pieces:
        padding[piece.local : piece.local + piece.length] = False
    assert_bitwise(gradient_of(table, group)[padding], torch.zeros(int(padding.sum()), H).double(), "padding")


def check_tied_models(rank: int, world_size: int, sequence_parallel: bool) -> None:
    # divisible by the group; padded; so padded that some ranks hold nothing but padding
    for vocab_size, padded in ((12, 12), (13, 24), (5, 24)):
        for use_main_grad in (False, True):
            check_tied_model(rank, world_size, sequence_parallel, vocab_size, padded, use_main_grad)


@pytest.mark.parametrize(("world_size", "sequence_parallel"), LAYOUTS, ids=LAYOUT_IDS)
def test_embedding_pair_tied_head_and_loss_equal_dense_for_any_vocabulary(
    world_size: int, sequence_parallel: bool
) -> None:
    run_distributed(check_tied_models, world_size, sequence_parallel)


def embedding_collectives(rank: int, world_size: int, sequence_parallel: bool) -> list[str]:
    group = tensor_group(rank, world_size)
    model = TiedModel(group, sequence_parallel, 13, 24)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    with recorded_collectives() as log:
        model.embedding(tokens).sum().backward()
    return kinds(log)


@pytest.mark.parametrize(
    ("sequence_parallel", "collectives"),
    [(False, ["all_reduce"]), (True, ["reduce_scatter", "all_gather"])],
)
def test_embedding_costs_one_reduction_forward(sequence_parallel: bool, collectives: list[str]) -> None:
    for log in run_distributed(embedding_collectives, 2, sequence_parallel):
        assert log == collectives


def out_of_vocabulary_is_an_error(rank: int, world_size: int, token: int) -> bool:
    model = TiedModel(tensor_group(rank, world_size), False, 24, 24)
    try:
        with patch("megatron.core.tensor_parallel.layers.reduce_from_tensor_parallel_region"):
            model.embedding(torch.full((B, S), token))
    except IndexError:
        return True
    return False


@pytest.mark.parametrize(("token", "failing"), [(24, [False, False, True]), (-1, [True, False, False])])
def test_a_token_outside_the_vocabulary_is_an_error_on_the_rank_at_that_end(token: int, failing: list[bool]) -> None:
    assert run_distributed(out_of_vocabulary_is_an_error, 3, token) == failing


def check_pieces(rank: int, world_size: int) -> None:
    group = tensor_group(rank, world_size)
    common: dict[str, Any] = {"placement": placed(group), "bias": True, "init": Init.normal(1.0)}
    weight, bias, x = drawn(1, FFN, H), drawn(2, FFN), drawn(3, S, B, H)

    # Rows 0..3 on both ranks, then each rank its own four: as grouped keys beside queries.
    pieces = (
        Piece(local=0, start=0, length=4, holders=world_size, owned=rank == 0),
        Piece(local=4, start=4 + 4 * rank, length=4),
    )
    pieced = ColumnParallelLinear(H, 12, pieces=pieces, **common)
    fill(pieced.weight, weight[:12])
    assert pieced.bias is not None
    fill(pieced.bias, bias[:12])
    rows = torch.cat((torch.arange(4), torch.arange(4) + 4 + 4 * rank))
    assert_parity(pieced(x).detach(), F.linear(x, weight[rows], bias[rows]), "output of pieces")
    assert shard_of(pieced.weight).replicated_pieces


def test_uneven_pieces_equal_dense() -> None:
    run_distributed(check_pieces, 2)


def check_padded_untied_head(rank: int, world_size: int) -> None:
    group = tensor_group(rank, world_size)
    head = ColumnParallelLinear(
        H, 13, padded_out_features=24, placement=placed(group), bias=False, init=Init.normal(1.0)
    )
    weight, x = drawn(1, 13, H), drawn(3, S, B, H)
    fill(head.weight, weight)
    width = 24 // world_size
    expected = F.linear(x, torch.cat((weight, torch.zeros(11, H).double())))
    assert_parity(head(x).detach(), expected[..., rank * width : (rank + 1) * width])
    assert shard_of(head.weight).global_shape == (13, H)


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_untied_head_has_the_padding_rows_of_the_embedding(world_size: int) -> None:
    run_distributed(check_padded_untied_head, world_size)


def shards_of_pair(rank: int, world_size: int, sequence_parallel: bool) -> list[tuple[Any, ...]]:
    pair = ParallelPair(tensor_group(rank, world_size), sequence_parallel)
    records = []
    for parameter in pair.parameters():
        shard = shard_of(parameter)
        (piece,) = shard.pieces
        records.append(
            (
                tuple(parameter.shape),
                shard.global_shape,
                shard.dim,
                piece.start,
                piece.owned,
                shard.partial_gradient,
            )
        )
    return records


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_record_which_part_of_which_tensor_they_are(sequence_parallel: bool) -> None:
    half = FFN // 2
    for rank, records in enumerate(run_distributed(shards_of_pair, 2, sequence_parallel)):
        assert records == [
            ((half, H), (FFN, H), 0, half * rank, True, False),
            ((half,), (FFN,), 0, half * rank, True, False),
            ((H, half), (H, FFN), 1, half * rank, True, False),
            ((H,), (H,), None, 0, rank == 0, sequence_parallel),
        ]


def check_frozen_and_first_layers(rank: int, world_size: int, sequence_parallel: bool) -> None:
    group = tensor_group(rank, world_size)
    whole_x = drawn(1, S, B, H)
    dense = dense_pair()
    dense_x = whole_x.clone().requires_grad_()
    dense(dense_x).square().sum().backward()
    assert dense_x.grad is not None

    frozen = ParallelPair(group, sequence_parallel).requires_grad_(False)
    give_main_grads(list(frozen.parameters()), torch.float64)
    x = sequence_part(whole_x, group, sequence_parallel).requires_grad_()
    with recorded_collectives() as log:
        frozen(x).square().sum().backward()
    assert x.grad is not None
    assert_parity(x.grad, sequence_part(dense_x.grad, group, sequence_parallel), "through frozen weights")
    assert not any(parameter.main_grad.any() for parameter in frozen.parameters())  # type: ignore[operator]
    # A frozen weight does not need its input again: one collective less under sequence parallelism.
    assert len(log) == (4 if sequence_parallel else 2)

    first = ParallelPair(group, sequence_parallel)
    with recorded_collectives() as log:
        first(x.detach()).square().sum().backward()
    assert_same_gradients(first, dense, group)
    # No input gradient to reduce: forward as ever, then only what the weight gradients need.
    assert kinds(log) == (
        ["all_gather", "reduce_scatter", "all_gather", "all_gather"] if sequence_parallel else ["all_reduce"]
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_weights_and_inputs_without_gradient_cost_nothing(sequence_parallel: bool) -> None:
    run_distributed(check_frozen_and_first_layers, 2, sequence_parallel)


def check_recomputation(rank: int, world_size: int, sequence_parallel: bool, reentrant: bool) -> None:
    group = tensor_group(rank, world_size)
    pairs = []
    for recompute in (False, True):
        pair = ParallelPair(group, sequence_parallel)
        give_main_grads([pair.fc1.weight, pair.fc2.weight], torch.float64)
        x = sequence_part(drawn(1, S, B, H), group, sequence_parallel).requires_grad_()
        y = checkpoint(pair, x, use_reentrant=reentrant) if recompute else pair(x)
        y.square().sum().backward()
        pairs.append((pair, x))
    (plain, plain_x), (recomputed, recomputed_x) = pairs
    assert plain_x.grad is not None
    assert recomputed_x.grad is not None
    assert_bitwise(recomputed_x.grad, plain_x.grad)
    for ours, theirs in zip(recomputed.parameters(), plain.parameters()):
        assert_bitwise(gradient_of(ours, group), gradient_of(theirs, group))


def check_recomputations(rank: int, world_size: int, sequence_parallel: bool) -> None:
    for reentrant in (False, True):
        check_recomputation(rank, world_size, sequence_parallel, reentrant)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_forward_gives_the_same_bits_and_still_fills_main_grad(sequence_parallel: bool) -> None:
    run_distributed(check_recomputations, 2, sequence_parallel)


def check_compiled_caller(rank: int, world_size: int, sequence_parallel: bool) -> None:
    group = tensor_group(rank, world_size)
    pair = ParallelPair(group, sequence_parallel)
    compiled = copy.deepcopy(pair.state_dict())
    other = ParallelPair(group, sequence_parallel)
    other.load_state_dict(compiled)
    give_main_grads([*pair.parameters()][::2] + [*other.parameters()][::2], torch.float64)
    x = sequence_part(drawn(1, S, B, H), group, sequence_parallel)
    y = torch.compile(pair, backend="aot_eager")(x)
    y.square().sum().backward()
    expected = other(x)
    expected.square().sum().backward()
    assert_parity(y.detach(), expected.detach())
    for ours, theirs in zip(pair.parameters(), other.parameters()):
        assert_parity(gradient_of(ours, group), gradient_of(theirs, group))


def check_compiled_callers(rank: int, world_size: int) -> None:
    for sequence_parallel in (False, True):
        check_compiled_caller(rank, world_size, sequence_parallel)


def test_layers_work_inside_a_compiled_module() -> None:
    run_distributed(check_compiled_callers, 2, timeout=120.0)


def test_low_precision_gradients_are_summed_in_the_precision_of_main_grad() -> None:
    weight = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(4, 8)  # type: ignore[attr-defined]
    single = CommGroup.single("tensor")
    for size in (1.0, 2.0**-12):  # their sum is lost in bfloat16
        x = torch.full((1, 1, 8), size, dtype=torch.bfloat16)
        y = parallel_linear(x, weight, None, group=single, sequence_parallel=False, input_gradient_reduce=True)
        y.sum().backward()
    assert weight.grad is None
    assert_bitwise(weight.main_grad, torch.full((4, 8), 1.0 + 2.0**-12))  # type: ignore[attr-defined]


def test_elsewhere_than_on_a_cpu_the_product_itself_is_wide() -> None:
    """Without an accelerator, the shapes and dtypes of what torch runs there; tests/gpu has the numbers."""
    weight = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16, device="meta"))
    weight.main_grad = torch.zeros(4, 8, device="meta")  # type: ignore[attr-defined]
    x = torch.ones(3, 2, 8, dtype=torch.bfloat16, device="meta")
    single = CommGroup.single("tensor")
    with RecordedOperations() as recorded:
        y = parallel_linear(x, weight, None, group=single, sequence_parallel=False, input_gradient_reduce=True)
        y.sum().backward()
    assert "aten::addmm.dtype_out" in recorded.names
    assert weight.grad is None


def test_embedding_adds_repeated_tokens_of_low_precision_in_main_grad() -> None:
    embedding = VocabParallelEmbedding(
        6,
        2,
        padded_vocab_size=6,
        placement=placed(CommGroup.single("tensor"), dtype=torch.bfloat16),
        init=Init.normal(1.0),
    )
    with torch.no_grad():
        embedding.weight.zero_()
    give_main_grads([embedding.weight], torch.float32)
    embedding(torch.full((1, 513), 3)).sum().backward()
    expected = torch.zeros(6, 2)
    expected[3] = 513.0  # 512 in bfloat16
    assert embedding.weight.grad is None
    assert_bitwise(embedding.weight.main_grad, expected)  # type: ignore[arg-type]


def indivisible_error(rank: int, world_size: int) -> list[str]:
    group = tensor_group(rank, world_size)
    common: dict[str, Any] = {"placement": placed(group), "bias": False, "init": Init.normal(1.0)}
    messages = []
    for layer, sizes in ((ColumnParallelLinear, (8, 10)), (RowParallelLinear, (10, 8))):
        with pytest.raises(ValueError, match="10") as error:
            layer(*sizes, **common)
        assert error.type is ValueError  # a misuse: what a user asks for is checked with the configuration
        messages.append(str(error.value))
    return messages


def test_a_size_that_does_not_split_is_refused_with_the_sizes_that_do() -> None:
    for column, row in run_distributed(indivisible_error, 4):
        assert column == (
            "output size of a column-parallel layer (10) must be divisible by the tensor-parallel size (4), "
            "as 8 and 12 are"
        )
        assert row.startswith("input size of a row-parallel layer (10)")
