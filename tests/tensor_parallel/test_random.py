"""Counter-based dropout: masks random enough and the same in every layout; the generator tracker."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.comm_group import CommGroup
from megatron.core.tensor_parallel.random import (
    DropoutStream,
    HiddenDropout,
    RngStateTracker,
    _absorb,
    attention_dropout,
    dropout,
    model_parallel_rng_tracker,
    model_parallel_seed,
    torch_draws,
)
from tests.helpers.numerics import assert_bitwise
from tests.tensor_parallel.ranks import placed

S, B, H = 64, 4, 256
CPU = torch.device("cpu")


GOLDEN = ["0101101000011101", "1110001011111111", "1100110100000001", "1000011110100011"]


def stream(seed: int = 1234, iteration: int = 5, samples: Tensor | None = None) -> DropoutStream:
    sample_ids = torch.arange(40, 40 + B) if samples is None else samples
    return DropoutStream(seed=seed, iteration=iteration, sample_ids=sample_ids)


def kept(p: float, shape: tuple[int, int, int] = (S, B, H), **changes: Any) -> Tensor:
    """Where hidden states of ones survive, as float64 of zeros and ones."""
    layer, site = changes.pop("layer", 3), changes.pop("site", 1)
    ones = torch.ones(shape, dtype=torch.float64)
    kept = dropout(ones, p, stream(**changes), layer=layer, site=site, sample_dim=1, starts=(0, 0, 0))
    return (kept != 0).double()


def single_hidden_dropout(p: float, layer: int = 3, site: int = 1) -> HiddenDropout:
    return HiddenDropout(p, layer=layer, site=site, placement=placed(CommGroup.single("tensor")))


def group_member(rank: int, size: int) -> CommGroup:
    """A member of a group that is never asked to communicate."""
    return CommGroup(name="tensor", ranks=tuple(range(size)), rank=rank, process_group=object())  # type: ignore[arg-type]


# --- statistics: each is a sum of many bounded terms and must lie within 5 of its standard deviations.
# --- A false alarm has a chance below 1e-6, and the numbers never change.


def standardised(mask: Tensor, p: float) -> Tensor:
    return (mask - (1 - p)) / math.sqrt(p * (1 - p))


def assert_uncorrelated(first: Tensor, second: Tensor, name: str) -> None:
    """The mean product of two standardised masks is a normal number of standard deviation n^-1/2."""
    score = float((first * second).mean()) * math.sqrt(first.numel())
    assert abs(score) < 5, f"{name}: correlated by {score:.1f} standard deviations"


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_p_overall_and_in_each_row_column_and_sample(p: float) -> None:
    mask = standardised(kept(p, (256, B, 512)), p)
    for dims, name in (((0, 1, 2), "all"), ((0, 1), "columns"), ((0, 2), "samples")):
        scores = mask.mean(dim=dims) * math.sqrt(mask.numel() / max(1, mask.mean(dim=dims).numel()))
        assert float(scores.abs().max()) < 5, name
        if scores.numel() > 100:  # and they spread as sums of independent elements do: chi-square
            n = scores.numel()
            assert abs(float(scores.square().sum()) - n) < 5 * math.sqrt(2 * n), name
    rows = mask.mean(dim=2).flatten() * math.sqrt(512)
    assert abs(float(rows.square().sum()) - rows.numel()) < 5 * math.sqrt(2 * rows.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_in_every_direction_are_uncorrelated(p: float) -> None:
    mask = standardised(kept(p), p)
    for shift in (1, 2, 3, 4, 8, 16, 32, 64, 128):
        assert_uncorrelated(mask[..., shift:], mask[..., :-shift], f"columns {shift} apart")
    for shift in (1, 2, 4, 8, 16, 32):
        assert_uncorrelated(mask[shift:], mask[:-shift], f"positions {shift} apart")
        assert_uncorrelated(mask[shift:, :, 1:], mask[:-shift, :, :-1], f"diagonals {shift} apart")
    assert_uncorrelated(mask[:, 1:], mask[:, :-1], "samples")


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1235},
        {"seed": 1234 + 2**32},
        {"seed": -1234},
        {"iteration": 6},
        {"iteration": 5 + 2**20},
        {"layer": 4},
        {"site": 2},
        {"layer": 2, "site": 255},
        {"samples": torch.arange(41, 41 + B)},
        {"samples": torch.arange(40, 40 + B) + 2**40},
        {"seed": 5, "iteration": 1234},
    ],
    ids=str,
)
def test_masks_of_different_seeds_iterations_layers_sites_and_samples_are_unrelated(
    p: float, change: dict[str, Any]
) -> None:
    assert_uncorrelated(standardised(kept(p), p), standardised(kept(p, **change), p), str(change))


def test_no_two_columns_are_correlated_over_the_rows() -> None:
    mask = standardised(kept(0.5, (1024, B, 256)), 0.5).flatten(0, 1)
    scores = (mask.t() @ mask) / math.sqrt(mask.shape[0])
    scores.fill_diagonal_(0.0)
    pairs = 256 * 255
    # 32,640 normal numbers: the largest is below 6, and their squares sum to what independence gives
    assert float(scores.abs().max()) < 6
    assert abs(float(scores.square().sum()) - pairs) < 5 * math.sqrt(4 * pairs)


def test_no_two_rows_are_equal_or_correlated_over_the_columns() -> None:
    mask = standardised(kept(0.5, (256, B, 1024)), 0.5).flatten(0, 1)
    scores = (mask @ mask.t()) / math.sqrt(mask.shape[1])
    scores.fill_diagonal_(0.0)
    pairs = 1024 * 1023
    assert float(scores.abs().max()) < 6.5
    assert abs(float(scores.square().sum()) - pairs) < 5 * math.sqrt(4 * pairs)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rectangles_of_rows_and_columns_are_independent(p: float) -> None:
    """Row keys and column hashes meet in an exclusive or: products of four corners would show a weak hash."""
    mask = standardised(kept(p, (256, B, 512)), p)
    for rows in (1, 2, 5, 32, 100):
        for columns in (1, 2, 7, 64, 200):
            upper = mask[:-rows, :, :-columns] * mask[:-rows, :, columns:]
            lower = mask[rows:, :, :-columns] * mask[rows:, :, columns:]
            assert_uncorrelated(upper, lower, f"rectangles of {rows} by {columns}")


def test_every_threshold_bit_is_balanced_and_thresholds_nest() -> None:
    previous = torch.ones(S, B, H, dtype=torch.float64)
    for bit in range(1, 13):
        # u >= p for p = 1 - 2^-k keeps the numbers whose first k bits are ones: each further bit halves them.
        mask = kept(1 - 2.0**-bit)
        assert bool((mask <= previous).all())
        before, now = float(previous.sum()), float(mask.sum())
        assert abs(now - before / 2) < 5 * math.sqrt(before) / 2 + 1
        previous = mask


def test_long_runs_of_columns_have_the_lengths_that_independence_gives() -> None:
    mask = kept(0.5, (64, B, 4096)).bool().flatten(0, 1)
    changes = (mask[:, 1:] != mask[:, :-1]).double().sum(dim=1)
    n = 4095
    scores = (changes - n / 2) / math.sqrt(n / 4)
    assert float(scores.abs().max()) < 5
    assert abs(float(scores.square().sum()) - scores.numel()) < 5 * math.sqrt(2 * scores.numel())


# --- the mask is the same in every layout


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_mask_of_a_sequence_parallel_rank_is_its_slice_of_the_whole_mask(size: int) -> None:
    x = torch.randn(24, B, 10, dtype=torch.float64)
    whole = single_hidden_dropout(0.3)(x, stream())
    parts = []
    for rank in range(size):
        layer = HiddenDropout(0.3, layer=3, site=1, placement=placed(group_member(rank, size), True))
        parts.append(layer(x.chunk(size)[rank], stream()))
        replicated = HiddenDropout(0.3, layer=3, site=1, placement=placed(group_member(rank, size)))
        assert_bitwise(replicated(x, stream()), whole, "without sequence parallelism")
    assert_bitwise(torch.cat(parts), whole)


@pytest.mark.parametrize("size", [2, 3])
def test_mask_of_attention_heads_queries_and_keys_is_a_slice_of_the_whole_mask(size: int) -> None:
    heads, queries, keys = 6, 12, 18
    x = torch.randn(B, heads, queries, keys, dtype=torch.float64)
    whole = attention_dropout(x, 0.3, stream(), layer=3, head_offset=0)
    by_head = [
        attention_dropout(part, 0.3, stream(), layer=3, head_offset=rank * heads // size)
        for rank, part in enumerate(x.chunk(size, dim=1))
    ]
    assert_bitwise(torch.cat(by_head, dim=1), whole)
    by_query = [
        attention_dropout(part, 0.3, stream(), layer=3, head_offset=0, query_offset=rank * queries // size)
        for rank, part in enumerate(x.chunk(size, dim=2))
    ]
    assert_bitwise(torch.cat(by_query, dim=2), whole)
    by_key = [
        attention_dropout(part, 0.3, stream(), layer=3, head_offset=0, key_offset=rank * keys // size)
        for rank, part in enumerate(x.chunk(size, dim=3))
    ]
    assert_bitwise(torch.cat(by_key, dim=3), whole)


def test_mask_of_a_sample_does_not_depend_on_the_micro_batch_it_comes_in() -> None:
    x = torch.randn(S, B, H)
    whole = single_hidden_dropout(0.1)(x, stream())
    one_by_one = [single_hidden_dropout(0.1)(x[:, i : i + 1], stream(samples=torch.tensor([40 + i]))) for i in range(B)]
    assert_bitwise(torch.cat(one_by_one, dim=1), whole)
    order = torch.tensor([2, 0, 3, 1])
    assert_bitwise(single_hidden_dropout(0.1)(x[:, order], stream(samples=order + 40)), whole[:, order])


def test_mask_does_not_depend_on_dtype_strides_threads_or_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(1, 100, (S, B, H)).double()
    expected = kept(0.1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert_bitwise((single_hidden_dropout(0.1)(x.to(dtype), stream()) != 0).double(), expected)
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert_bitwise((single_hidden_dropout(0.1)(strided, stream()) != 0).double(), expected)
    for block in (1, 1000, 1 << 30):
        monkeypatch.setattr("megatron.core.tensor_parallel.random._CPU_CHUNK", block)
        assert_bitwise((single_hidden_dropout(0.1)(x, stream()) != 0).double(), expected)


def splitmix(value: int) -> int:
    """The finalizer of splitmix64, unsigned, as it is published."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def reference_bits(*indices: int) -> int:
    """The 32 bits of the element at `indices` (the last is the column), in unsigned arithmetic."""

    def absorb(key: int, index: int) -> int:
        return splitmix((key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64)

    key = 0
    for index in indices[:-1]:
        key = absorb(key, index)
    low, high = key % 2**32, key >> 32
    bits = (low ^ (absorb(0, indices[-1]) % 2**32)) * 0x21F0AAAD % 2**32
    bits = (bits ^ (bits >> 15) ^ high) * 0xD35A2D97 % 2**32
    return bits ^ 2**31  # torch compares signed numbers: the sign bit is the high bit, inverted


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_bits_are_those_of_unsigned_arithmetic(p: float) -> None:
    samples = [0, 3, 2**33]
    x = torch.ones(5, len(samples), 40)
    seeded = DropoutStream(seed=-7, iteration=100, sample_ids=torch.tensor(samples))
    starts = (2**31 - 2, 0, 2**32 - 20)
    mask = dropout(x, p, seeded, layer=7, site=2, sample_dim=1, starts=starts) != 0
    for position in range(5):
        for column, sample in enumerate(samples):
            expected = [
                reference_bits(-7, 100, sample, 7 * 256 + 2, starts[0] + position, starts[2] + i) >= p * 2**32
                for i in range(40)
            ]
            assert mask[position, column].tolist() == expected


@pytest.mark.parametrize("seed", [0, -7, 2**63 - 1, 2**70])
def test_a_key_on_the_host_is_that_of_a_tensor(seed: int) -> None:
    on_host, in_tensor = 0, torch.zeros((), dtype=torch.int64)
    for index in (seed, 100, 2**33, 7 * 256 + 2):
        on_host, in_tensor = _absorb(on_host, index), _absorb(in_tensor, index)
        assert on_host == int(in_tensor)


def test_torch_draws_from_each_place_other_numbers_and_goes_on_as_if_it_had_not() -> None:
    def drawn(samples: list[int], layer: int = 3, site: int = 1, start: int = 0) -> tuple[float, ...]:
        with torch_draws(stream(samples=torch.tensor(samples)), layer=layer, site=site, start=start):
            return tuple(torch.rand(4).tolist())

    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    places = [drawn([4]), drawn([5]), drawn([4], layer=4), drawn([4], site=2), drawn([4], start=8)]
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    assert len(set(places)) == len(places)
    assert drawn([4]) == drawn([4, 6]) == places[0]


def test_masks_never_change() -> None:
    """A change of these numbers changes every training run with dropout: never by accident."""
    seeded = DropoutStream(seed=1234, iteration=100, sample_ids=torch.tensor([0, 1]))
    mask = single_hidden_dropout(0.5, layer=7, site=2)(torch.ones(2, 2, 16), seeded) != 0
    rows = ["".join(str(int(kept)) for kept in row) for row in mask.flatten(0, 1).tolist()]
    assert rows == GOLDEN


@pytest.mark.parametrize("offset", [2**31 - 8, 2**32 - 8, 2**40])
def test_global_indices_beyond_32_bits_are_distinct(offset: int) -> None:
    x = torch.ones(4, 1, 64)
    base = {"layer": 0, "site": 0, "sample_dim": 1}
    one = stream(samples=torch.tensor([0]))
    near = dropout(x, 0.5, one, starts=(0, 0, 0), **base)
    for starts in ((offset, 0, 0), (0, 0, offset)):
        far = dropout(x, 0.5, one, starts=starts, **base)
        assert not torch.equal(near, far)
        shifted = dropout(x, 0.5, one, starts=tuple(s + (1 if s else 0) for s in starts), **base)
        dim = starts.index(offset)
        assert_bitwise(shifted.narrow(dim, 0, 3), far.narrow(dim, 1, 3))


# --- values, gradients, memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_survivors_are_scaled_and_the_input_is_untouched(dtype: torch.dtype) -> None:
    x = torch.randn(S, B, H).to(dtype)
    before = x.clone()
    y = single_hidden_dropout(0.1)(x, stream())
    assert y.dtype == dtype
    assert_bitwise(y, (x * (1 / (1 - 0.1))) * kept(0.1).to(dtype))
    assert_bitwise(x, before)


def test_backward_uses_the_mask_of_forward_and_keeps_no_tensor() -> None:
    x = torch.randn(S, B, H, requires_grad=True)
    stored: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        stored.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = single_hidden_dropout(0.1)(x, stream())
    gradient = torch.randn(S, B, H)
    y.backward(gradient)
    assert x.grad is not None
    assert_bitwise(x.grad, gradient * (1 / (1 - 0.1)) * kept(0.1).float())
    assert not stored


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=torch.float64)
        self.dropout = single_hidden_dropout(0.2)

    def forward(self, x: Tensor, stream: DropoutStream | None) -> Tensor:
        return x + self.dropout(self.linear(x), stream)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_same_mask_without_any_saved_state(reentrant: bool) -> None:
    block, x = Block(), torch.randn(S, B, H, dtype=torch.float64)
    gradients = []
    for recompute in (False, True):
        inputs = x.clone().requires_grad_()
        if recompute:
            y = checkpoint(block, inputs, stream(), use_reentrant=reentrant, preserve_rng_state=False)
        else:
            y = block(inputs, stream())
        y.square().sum().backward()
        assert inputs.grad is not None
        gradients.append(inputs.grad)
    assert_bitwise(gradients[1], gradients[0])


def test_generators_of_torch_are_neither_read_nor_advanced() -> None:
    torch.manual_seed(1)
    first = single_hidden_dropout(0.1)(torch.ones(S, B, H), stream())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = single_hidden_dropout(0.1)(torch.ones(S, B, H), stream())
    assert_bitwise(first, second)
    assert_bitwise(torch.get_rng_state(), state)


def test_without_a_stream_or_with_probability_zero_dropout_is_the_identity_and_leaves_no_trace() -> None:
    x = torch.randn(S, B, H)
    layer = single_hidden_dropout(0.5)
    trained = layer(x, stream())
    assert layer(x, None) is x
    assert single_hidden_dropout(0.0)(x, stream()) is x
    assert_bitwise(layer(x, stream()), trained, "after an evaluation")


def test_a_nan_is_not_hidden_by_dropping_it() -> None:
    y = single_hidden_dropout(0.5)(torch.full((S, B, H), math.nan), stream())
    assert bool(torch.isnan(y).all())


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_probabilities_outside_the_range_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"dropout probability .* at least 0 and less than 1"):
        single_hidden_dropout(p)


# --- the generator tracker


def test_seeds_are_those_of_megatron() -> None:
    seeds = model_parallel_seed(1234, tp_rank=3, pp_rank=2)
    assert (seeds.data_parallel, seeds.model_parallel) == (1434, 1434 + 2718 + 3)


def test_forks_draw_from_their_own_state_and_leave_the_present_one_alone() -> None:
    torch.manual_seed(7)
    undisturbed = [torch.rand(3) for _ in range(2)]
    torch.manual_seed(7)
    tracker = model_parallel_rng_tracker(1234, tp_rank=1, pp_rank=0, device=CPU)
    first = torch.rand(3)
    with tracker.fork():
        inside = F.dropout(torch.ones(100), 0.5)
    with tracker.fork():
        further = F.dropout(torch.ones(100), 0.5)
    second = torch.rand(3)
    assert_bitwise(first, undisturbed[0])
    assert_bitwise(second, undisturbed[1])
    torch.manual_seed(1234 + 2718 + 1)
    assert_bitwise(inside, F.dropout(torch.ones(100), 0.5))
    assert_bitwise(further, F.dropout(torch.ones(100), 0.5))


def test_tensor_ranks_differ_in_the_model_parallel_state_and_agree_in_the_other() -> None:
    drawn: dict[str, list[Tensor]] = {"model-parallel-rng": [], "data-parallel-rng": []}
    for rank in range(2):
        tracker = model_parallel_rng_tracker(1, tp_rank=rank, pp_rank=0, device=CPU)
        for name, values in drawn.items():
            with tracker.fork(name):
                values.append(torch.rand(4))
    assert not torch.equal(*drawn["model-parallel-rng"])
    assert_bitwise(*drawn["data-parallel-rng"])


def test_an_error_inside_a_fork_restores_too() -> None:
    tracker = RngStateTracker(CPU)
    tracker.add("dropout", 3)
    before = torch.get_rng_state()

    def draw_and_fail() -> None:
        with tracker.fork("dropout"):
            torch.rand(4)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        draw_and_fail()
    assert_bitwise(torch.get_rng_state(), before)


def test_duplicate_and_unknown_states_are_refused_by_name() -> None:
    tracker = RngStateTracker(CPU)
    tracker.add("dropout", 3)
    with pytest.raises(ValueError, match="'dropout' exists"):
        tracker.add("dropout", 4)
    with pytest.raises(ValueError, match="seed 3"):
        tracker.add("other", 3)
    with (
        pytest.raises(ValueError, match="'missing' does not exist; there are \\['dropout'\\]"),
        tracker.fork("missing"),
    ):
        pass
