"""Randomness without state: dropout as a function of what is dropped, and the field's generator tracker.

Note [Counter-based dropout]
A mask is a function of (seed, iteration, sample, layer, site, global index of the element) and of nothing
else, so it is the same for every tensor-parallel size, with and without sequence parallelism, on every
pipeline stage, in a recomputed forward, after a resume, on CPU and on GPU. Nothing is drawn from a
generator, so no generator state can go out of step or needs saving, and backward recomputes the mask
instead of storing it.

The last dimension of a tensor is its columns, the others make its rows. A row (position and sample, or
sample, head and query) gets a 64-bit key by a chain of splitmix64 steps (Steele et al. 2014) over its
indices; rows are few, so this is done in int64 without haste. An element is its row key combined with a
32-bit hash of its column by a multiply, xor-shift, multiply round: seven passes of wrapping int32
arithmetic. Indices stay 64 bits wide up to the column hash, so tensors of more than 2^31 elements and any
global offset are fine.

A kernel that drops by itself draws from torch's generator, which `torch_draws` gives a seed for this one call, by the
same chain: it depends on the shapes and on the kernel, and on nothing that was drawn before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.device import to_device
from megatron.core.tensor_parallel.mappings import apply_eagerly
from megatron.core.tensor_parallel.placement import Placement


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of the low `bits` of `value`: torch scalars are signed."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_HOST = torch.device("cpu")
_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)
_SPLITMIX_1 = _signed(0xBF58476D1CE4E5B9, 64)
_SPLITMIX_2 = _signed(0x94D049BB133111EB, 64)
# Scalars as tensors: torch would make and convert one at each call, which costs as much as hashing a thousand elements.
_ELEMENT_1 = torch.tensor(_signed(0x21F0AAAD, 32), dtype=torch.int32)
_ELEMENT_2 = torch.tensor(_signed(0xD35A2D97, 32), dtype=torch.int32)
_SHIFT = torch.tensor(15, dtype=torch.int32)
_SHIFT_MASK = torch.tensor(0x1FFFF, dtype=torch.int32)
# Elements hashed at a time. On a CPU, by each thread: two int32 buffers of this length stay close to the core, and each
# of the nine passes, a parallel region at whose end threads of a busy machine wait for each other, has enough to do. On
# a GPU the temporaries stay small beside the activations.
_CPU_CHUNK = 1 << 18
_ACCELERATOR_CHUNK = 1 << 26


Keys = TypeVar("Keys", int, Tensor)


def _wrap(keys: Keys) -> Keys:
    """Modulo 2^64, as int64 does it by itself."""
    return _signed(keys, 64) if isinstance(keys, int) else keys


def _mix(keys: Keys) -> Keys:
    """The splitmix64 finalizer: a bijection of int64; each input bit flips each output bit half the time."""
    # Right shifts of signed integers copy the sign; the masks make them logical.
    keys = _wrap((keys ^ ((keys >> 30) & 0x3FFFFFFFF)) * _SPLITMIX_1)
    keys = _wrap((keys ^ ((keys >> 27) & 0x1FFFFFFFFF)) * _SPLITMIX_2)
    return keys ^ ((keys >> 31) & 0x1FFFFFFFF)


def _absorb(keys: Keys, values: Keys | int) -> Keys:
    """Extend each key by one more index, any integer; broadcasts."""
    step = _signed((values + 1) * _GOLDEN_64, 64) if isinstance(values, int) else (values + 1) * _GOLDEN_64
    return _mix(_wrap(keys + step))


@dataclass(frozen=True, kw_only=True)
class DropoutStream:
    """The randomness of one forward and backward pass over the samples of a micro-batch.

    Attributes:
        seed: seed of the run.
        iteration: training iteration, so that a sample seen again gets another mask.
        sample_ids: [b] int64 on the host, which sample of the run (not of the micro-batch) each column of the batch is.
        device: where the masks are made.
        keys: [b] int64 on `device`, one key per sample; derived.
        first_key: [] that of the first sample, on the host, to be read without waiting; derived.
    """

    seed: int
    iteration: int
    sample_ids: Tensor
    device: torch.device = _HOST
    keys: Tensor = field(init=False)
    first_key: Tensor = field(init=False)

    def __post_init__(self) -> None:
        start = torch.zeros_like(self.sample_ids, dtype=torch.int64)
        keys = _absorb(_absorb(_absorb(start, self.seed), self.iteration), self.sample_ids.to(torch.int64))
        object.__setattr__(self, "keys", to_device(keys, self.device))
        object.__setattr__(self, "first_key", keys[0])


def _row_keys(sample_keys: Tensor, shape: Sequence[int], starts: Sequence[int], sample_dim: int) -> Tensor:
    """A 64-bit key for each row (all dimensions but the last) of a tensor of `shape`."""
    rows = len(shape) - 1
    keys = sample_keys.view([-1 if dim == sample_dim else 1 for dim in range(rows)])
    for dim in range(rows):
        if dim != sample_dim:
            index = torch.arange(starts[dim], starts[dim] + shape[dim], device=keys.device)
            keys = _absorb(keys, index.view([-1 if other == dim else 1 for other in range(rows)]))
    return keys.contiguous()


def _halves(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 tensors [n, 1] from int64 keys of n elements."""
    low, high = keys.flatten().view(torch.int32).view(-1, 2, 1).unbind(1)
    return low, high


def _column_hash(columns: int, start: int, device: torch.device) -> Tensor:
    """[columns] int32: unrelated values for neighbouring columns, so that a short element hash is enough."""
    index = torch.arange(start, start + columns, device=device)
    return _halves(_absorb(torch.zeros((), dtype=torch.int64, device=device), index))[0].flatten().contiguous()


def _element_bits(low: Tensor, high: Tensor, column_hash: Tensor, bits: Tensor, shifted: Tensor) -> Tensor:
    """[rows, columns] int32 in `bits`, the high ones best mixed: they decide. `shifted` is scratch."""
    torch.bitwise_xor(low, column_hash, out=bits)
    bits *= _ELEMENT_1
    torch.bitwise_right_shift(bits, _SHIFT, out=shifted)
    shifted &= _SHIFT_MASK
    bits ^= shifted
    # The second half of the row key: two rows that agree in the first half still get unrelated masks.
    bits ^= high
    bits *= _ELEMENT_2
    return bits


def _threshold(p: float) -> int:
    """The int32 from which on uniform bits mean "keep": a fraction `p` of the signed range lies below it."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability ({p}) must be at least 0 and less than 1")
    return min(round(p * 2.0**32), 2**32 - 1) - 2**31


def _apply_mask(x: Tensor, row_keys: Tensor, column_start: int, p: float) -> Tensor:
    """x / (1 - p) where the element's uniform number is at least p, else 0; the same device and dtype."""
    columns = x.shape[-1]
    source = x.contiguous().view(-1, columns)
    target = torch.empty_like(source)
    threshold, scale = torch.tensor(_threshold(p), dtype=torch.int32), 1.0 / (1.0 - p)
    column_hash = _column_hash(columns, column_start, x.device)
    chunk = _CPU_CHUNK * torch.get_num_threads() if x.device.type == "cpu" else _ACCELERATOR_CHUNK
    rows = max(1, min(chunk // columns, source.shape[0]))
    scratch = torch.empty(2, rows, columns, dtype=torch.int32, device=x.device).unbind()
    parts = [part.split(rows) for part in (*_halves(row_keys), source, target)]  # type: ignore[no-untyped-call]
    for low, high, source_rows, target_rows in zip(*parts):
        bits = _element_bits(low, high, column_hash, *(buffer[: low.shape[0]] for buffer in scratch))
        # The comparison writes 0 or 1 in the dtype of x, several times faster than through a bool;
        # multiplying keeps a NaN visible; the scale is applied last so that low precision rounds once.
        torch.ge(bits, threshold, out=target_rows).mul_(source_rows).mul_(scale)
    return target.view(x.shape)


class _Dropout(torch.autograd.Function):
    """forward: x * mask / (1 - p); backward: dy * mask / (1 - p), the mask recomputed from the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sample_keys: Tensor,
        p: float,
        salt: int,
        starts: tuple[int, ...],
        sample_dim: int,
    ) -> Tensor:
        # By itself, not as a saved tensor: the recomputation of a layer ends at the last of those, before this dropout.
        ctx.plan = (sample_keys, p, salt, starts, sample_dim)
        return _drop(x, *ctx.plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _drop(gradient, *ctx.plan), None, None, None, None, None


def _drop(x: Tensor, sample_keys: Tensor, p: float, salt: int, starts: tuple[int, ...], sample_dim: int) -> Tensor:
    row_keys = _row_keys(_absorb(sample_keys, salt), x.shape, starts, sample_dim)
    return _apply_mask(x, row_keys, starts[-1], p)


def dropout(
    x: Tensor,
    p: float,
    stream: DropoutStream | None,
    *,
    layer: int,
    site: int,
    sample_dim: int,
    starts: tuple[int, ...],
) -> Tensor:
    """Zero each element of `x` with probability `p`, scale the rest by 1/(1 - p). See Note [Counter-based dropout].

    Args:
        x: any shape of at least two dimensions; one that is not the last counts the samples of `stream`.
        p: probability in [0, 1); 0 is the identity.
        stream: None, in evaluation and inference, is the identity.
        layer: global number of the layer.
        site: which dropout of the layer, 0 to 255.
        sample_dim: the dimension of the samples, not negative.
        starts: for each dimension the global index of the first element of `x`; not used for `sample_dim`.
    """
    threshold = _threshold(p)
    if stream is None or threshold == -(2**31):
        return x
    assert len(starts) == x.dim(), f"{starts} for {tuple(x.shape)}"
    assert 0 <= sample_dim < x.dim() - 1, f"samples in dimension {sample_dim} of {x.dim()}"
    assert x.shape[sample_dim] == stream.keys.shape[0], f"{tuple(x.shape)} for {stream.keys.shape[0]} samples"
    return apply_eagerly(_Dropout, x, stream.keys, p, _salt(layer, site), starts, sample_dim)


def _salt(layer: int, site: int) -> int:
    assert 0 <= site < 256, f"dropout site {site}"
    return layer * 256 + site


class HiddenDropout(nn.Module):
    """Dropout of hidden states [s, b, h], or [s/t, b, h] under sequence parallelism.

    With sequence parallelism the mask is the slice of the full mask for this rank's positions; without,
    every rank of the group drops the same elements, as it must: the hidden states are the same on all of them.
    """

    def __init__(self, p: float, *, layer: int, site: int, placement: Placement) -> None:
        super().__init__()
        _threshold(p)
        self.p, self.layer, self.site = p, layer, site
        self.position_rank = placement.group.rank if placement.sequence_parallel else 0

    def forward(self, hidden_states: Tensor, stream: DropoutStream | None) -> Tensor:
        starts = (self.position_rank * hidden_states.shape[0], 0, 0)
        return dropout(hidden_states, self.p, stream, layer=self.layer, site=self.site, sample_dim=1, starts=starts)

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}, site={self.site}"


def attention_dropout(
    probabilities: Tensor,
    p: float,
    stream: DropoutStream | None,
    *,
    layer: int,
    site: int = 0,
    head_offset: int,
    query_offset: int = 0,
    key_offset: int = 0,
) -> Tensor:
    """Dropout of attention probabilities [b, a/t, s, s]; an offset is the global index of the first."""
    starts = (0, head_offset, query_offset, key_offset)
    return dropout(probabilities, p, stream, layer=layer, site=site, sample_dim=0, starts=starts)


@contextmanager
def torch_draws(stream: DropoutStream, *, layer: int, site: int, start: int) -> Iterator[None]:
    """Let torch's generator for the stream's device follow, inside the block, from the stream and the place alone.

    The generator is as it was after the block, and the host waits for no device.

    Args:
        layer: global number of the layer.
        site: which dropout of the layer, 0 to 255.
        start: global index of what this rank's part of the tensor begins with.
    """
    generator = _default_generator(stream.device)
    present = generator.get_state()
    generator.manual_seed(_absorb(_absorb(int(stream.first_key), _salt(layer, site)), start))
    try:
        yield
    finally:
        generator.set_state(present)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


class RngStateTracker:
    """Named states of torch's own generator, for users' layers that draw from it: `F.dropout`, `torch.randn`.

    The framework's own layers draw nothing and do not need it. An object to pass around, not a global.

    Args:
        device: whose generator: the CPU's or that of one accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def add(self, name: str, seed: int) -> None:
        """Make the state `name`, seeded with `seed`; both must be new, as equal seeds draw equal numbers."""
        if name in self._states:
            raise ValueError(f"random state {name!r} exists already; there are {sorted(self._states)}")
        if seed in self._seeds:
            raise ValueError(f"seed {seed} of random state {name!r} is in use by another state")
        self._seeds.add(seed)
        present = self._get()
        _default_generator(self.device).manual_seed(seed)
        self._states[name] = self._get()
        self._set(present)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state `name` inside the block, and go on with the present state after it."""
        if name not in self._states:
            raise ValueError(f"random state {name!r} does not exist; there are {sorted(self._states)}")
        present = self._get()
        self._set(self._states[name])
        try:
            yield
        finally:
            self._states[name] = self._get()
            self._set(present)

    def states(self) -> dict[str, Tensor]:
        """The present state under each name, for `replaying`."""
        return dict(self._states)

    @contextmanager
    def replaying(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Draw from earlier states inside the block, as a recomputed forward must, and go on with the present after."""
        present, self._states = self._states, dict(states)
        try:
            yield
        finally:
            self._states = present

    def _get(self) -> Tensor:
        return _default_generator(self.device).get_state()

    def _set(self, state: Tensor) -> None:
        _default_generator(self.device).set_state(state)


@dataclass(frozen=True, kw_only=True)
class ModelParallelSeeds:
    """Seeds of a rank: `data_parallel` is the same on all tensor-parallel ranks, `model_parallel` is not."""

    data_parallel: int
    model_parallel: int


def model_parallel_seed(seed: int, *, tp_rank: int, pp_rank: int) -> ModelParallelSeeds:
    """Megatron-LM's seeds of its generator states: s = seed + 100 pp_rank, and s + 2718 + tp_rank."""
    stage_seed = seed + 100 * pp_rank
    return ModelParallelSeeds(data_parallel=stage_seed, model_parallel=stage_seed + 2718 + tp_rank)


def model_parallel_rng_tracker(seed: int, *, tp_rank: int, pp_rank: int, device: torch.device) -> RngStateTracker:
    """A tracker with the field's two states, "data-parallel-rng" and "model-parallel-rng"."""
    seeds = model_parallel_seed(seed, tp_rank=tp_rank, pp_rank=pp_rank)
    tracker = RngStateTracker(device)
    tracker.add("data-parallel-rng", seeds.data_parallel)
    tracker.add("model-parallel-rng", seeds.model_parallel)
    return tracker
