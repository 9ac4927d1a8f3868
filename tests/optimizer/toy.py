"""A small model of plain layers, and what its optimizer needs, in any precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.shard import Init, Shard, name_parameters, set_shard, whole_pieces
from megatron.optimizer.adam import AdamW
from megatron.optimizer.grad_scaler import ConstantGradScaler, GradScaler
from megatron.optimizer.optimizer import MegatronOptimizer
from megatron.optimizer.update_rule import UpdateRule


class ToyModel(nn.Module):
    """Embedding, norm, two linear layers; sizes that no alignment divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.layernorm = nn.LayerNorm(7)
        self.linear_fc1 = nn.Linear(7, 13)
        self.linear_fc2 = nn.Linear(13, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layernorm(self.embedding(tokens))
        return self.linear_fc2(torch.tanh(self.linear_fc1(hidden)))


def toy_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> ToyModel:
    """The same values in any dtype, but for rounding."""
    model = ToyModel()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = values.to(dtype)
    return with_whole_shards(model)


def with_whole_shards(model: nn.Module) -> nn.Module:
    """Each parameter is the whole of its global tensor."""
    group = CommGroup.single("tensor")
    for parameter in model.parameters():
        shape = tuple(parameter.shape)
        pieces = whole_pieces(shape[0] if shape else 1, group)
        set_shard(parameter, Shard(global_shape=shape, dim=None, pieces=pieces, group=group, init=Init.zeros()))
    name_parameters(model)
    return model


def data_parallel(model: nn.Module, data: CommGroup | None = None) -> DistributedDataParallel:
    dtype = next(model.parameters()).dtype
    grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    group = CommGroup.single("data") if data is None else data
    return DistributedDataParallel(model, data_group=group, grad_dtype=grad_dtype)


def optimizer_of(
    chunks: Sequence[DistributedDataParallel],
    rule: UpdateRule | None = None,
    *,
    scaler: GradScaler | None = None,
    clip_grad: float = 0.0,
    model_group: CommGroup | None = None,
    count_zeros: bool = False,
) -> MegatronOptimizer:
    return MegatronOptimizer(
        [bucket for chunk in chunks for bucket in reversed(chunk.buckets)],
        AdamW() if rule is None else rule,
        scaler=ConstantGradScaler() if scaler is None else scaler,
        clip_grad=clip_grad,
        model_group=CommGroup.single("model") if model_group is None else model_group,
        device=torch.device("cpu"),
        count_zeros=count_zeros,
    )


def toy_batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """(tokens [n], targets [n, 3]) of one global batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 11, (size,), generator=generator)
    return tokens, torch.randn(size, 3, generator=generator, dtype=torch.float64)


def loss_sum(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Sum over the samples, not yet divided by their number."""
    return (model(tokens).to(targets.dtype) - targets).square().sum()
