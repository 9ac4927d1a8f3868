"""Muon: momentum whose matrices are orthogonalized.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the sizes of updates after Liu et al.,
"Muon is Scalable for LLM Training", 2025, section 2.2. With the coefficients "simple" and the size "shape_scaling" it
is `torch.optim.Muon`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from math import sqrt

import torch
from torch import Tensor

from megatron.config.optimizer import MuonCoefficients, MuonScale
from megatron.core import collectives
from megatron.core.kernels.float_halves import narrow_
from megatron.core.main_grad import main_grad_of
from megatron.core.shard import Shard, shard_of
from megatron.optimizer.update_rule import FlatStep

# Of the polynomial a x + b x^3 + c x^5, a step each, and from the first again: those of the first publication, and
# those of J. You for the record of modded-nanogpt, which bring smaller singular values near 1.
_COEFFICIENTS: dict[MuonCoefficients, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
_LEAST_NORM = 1e-7


@dataclass(frozen=True, kw_only=True)
class Muon:
    """m = μ·m + (1 - μ)·g; p -= lr·(decay·p + size·orthogonal(m)), or of (1 - μ)·g + μ·m with Nesterov's momentum.

    For buckets of matrices inside layers. The momentum is updated element by element, on any slice; what is
    orthogonalized is the whole global matrix, on each rank that holds a part of it, so that all layouts make the same
    update.

    Attributes:
        split_qkv: queries, keys and values are three matrices, not one.
        half_precision: orthogonalize float32 momentum in bfloat16.
    """

    momentum: float = 0.9
    nesterov: bool = False
    scale_mode: MuonScale = "spectral"
    extra_scale_factor: float = 1.0
    num_steps: int = 5
    coefficients: MuonCoefficients = "quintic"
    split_qkv: bool = True
    half_precision: bool = True

    @property
    def name(self) -> str:
        return "muon"

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",)

    @property
    def narrow_states(self) -> frozenset[str]:
        return frozenset()

    def update_(self, step: FlatStep) -> None:
        assert isinstance(step.parameter, Tensor)
        assert not step.entries or all(
            span.weight_decay_multiplier == span.lr_multiplier == 1.0 for span in step.spans.spans
        ), "matrices all have the decay and the learning rate of the step"
        self._write_directions(step)
        for entry in step.entries:
            shard = shard_of(entry.parameter)
            direction = whole_matrix(main_grad_of(entry.parameter), shard)
            update = torch.empty_like(direction, dtype=step.parameter.dtype)
            for source, target in zip(self._matrices(direction, shard), self._matrices(update, shard)):
                target.copy_(self._orthogonal(source))
            mine = own_part(update, shard, tuple(entry.parameter.shape)).reshape(-1)[entry.first : entry.stop]
            entry.view(step.parameter).mul_(1 - step.lr * step.weight_decay).add_(mine, alpha=-step.lr)
        if step.low_precision is not None:
            narrow_(step.parameter, step.low_precision)

    def _write_directions(self, step: FlatStep) -> None:
        """Put what is to be orthogonalized in the place of the gradients, of all elements that this rank holds."""
        momentum = step.state["momentum"]
        gradient = step.gradient.to(momentum.dtype)
        if step.gradient_scale != 1.0:
            gradient.div_(step.gradient_scale)
        momentum.lerp_(gradient, 1 - self.momentum)
        step.gradient.copy_(gradient.lerp(momentum, self.momentum) if self.nesterov else momentum)
        if step.bucket.sharded:
            collectives.all_gather_(step.bucket.gradients, step.bucket.data_group)

    def _matrices(self, tensor: Tensor, shard: Shard) -> Iterator[Tensor]:
        """Views of a global tensor [rows, columns], one for each matrix in it: [runs, rows of a run, columns]."""
        runs = shard.matrices if self.split_qkv else (sum(shard.matrices),)
        yield from tensor.view(-1, sum(runs), tensor.shape[-1]).split_with_sizes(runs, dim=1)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """The update of a matrix [runs, rows of a run, columns], of the same shape."""
        flat = matrix.flatten(0, 1)
        rows, columns = flat.shape
        size = {
            "spectral": sqrt(max(rows, columns)),
            "unit_rms_norm": sqrt(rows / columns),
            "shape_scaling": sqrt(max(1.0, rows / columns)),
        }[self.scale_mode]
        narrow = self.half_precision and flat.dtype != torch.float64
        dtype = torch.bfloat16 if narrow else torch.promote_types(flat.dtype, torch.float32)
        result = orthogonalized(flat.to(dtype, copy=True), _COEFFICIENTS[self.coefficients], self.num_steps)
        wide = result.to(torch.promote_types(dtype, torch.float32))
        return wide.mul_(size * self.extra_scale_factor).view(matrix.shape)


def orthogonalized(matrix: Tensor, coefficients: tuple[tuple[float, float, float], ...], num_steps: int) -> Tensor:
    """About U V^T of a matrix [rows, columns] with the singular values U S V^T, by Newton-Schulz steps in its dtype.

    The matrix is overwritten.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x.div_(x.norm().clamp(min=_LEAST_NORM))  # so that no singular value is above 1
    for a, b, c in islice(cycle(coefficients), num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def whole_matrix(local: Tensor, shard: Shard) -> Tensor:
    """The global tensor that the ranks of a tensor-parallel group hold parts of, put together on each."""
    if shard.dim is None or shard.group.size == 1:
        return local
    whole = local.new_zeros(shard.global_shape)
    for piece in (piece for piece in shard.pieces if piece.owned):  # by this rank of its stage, which may hold a copy
        part = local.narrow(shard.dim, piece.local, piece.length)
        whole.narrow(shard.dim, piece.start, piece.length).copy_(part)
    collectives.all_reduce_(whole, shard.group)  # each element is one number and zeros: nothing is rounded
    return whole


def own_part(whole: Tensor, shard: Shard, shape: tuple[int, ...]) -> Tensor:
    """The part of a global tensor that this rank holds, in its local shape."""
    if shard.dim is None or shard.group.size == 1:
        return whole
    local = whole.new_zeros(shape)
    for piece in shard.pieces:
        part = whole.narrow(shard.dim, piece.start, piece.length)
        local.narrow(shard.dim, piece.local, piece.length).copy_(part)
    return local
