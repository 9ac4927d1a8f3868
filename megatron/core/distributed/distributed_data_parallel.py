"""Data parallelism of one model chunk: gradients in contiguous buffers, summed over the ranks once a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.grad_buffer import GradBuffer, main_grad_of
from megatron.core.distributed.replicated_spans import ReplicatedSpans, find_replicated_spans


class DistributedDataParallel(nn.Module):
    """A model chunk whose parameters and gradients live in `GradBuffer`s.

    Linear layers add their weight gradient straight into `weight.main_grad` and give autograd none. What
    autograd does leave in `.grad` (norms, biases, embeddings) is added to `main_grad` as soon as it is there,
    and `.grad` is freed. So gradients accumulate over micro-batches in `grad_dtype`, and `.grad` is never set
    between two backward passes.

    A parameter that the module holds twice has one place in the buffer. Frozen parameters have none. First
    values are a function of the seed, the same on every rank, so nothing is broadcast here.

    Building one is collective over the tensor-parallel group when key and value heads are replicated.
    """

    def __init__(self, module: nn.Module, *, data_group: CommGroup, grad_dtype: torch.dtype) -> None:
        """
        Args:
            module: its parameters carry a `Shard`.
            data_group: the ranks that hold the same parameters and see other samples.
            grad_dtype: of gradients: float32, or float64 when the parameters are float64.
        """
        super().__init__()
        self.module = module
        self.data_group = data_group
        self.grad_dtype = grad_dtype
        trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in reversed(trainable):
            assert torch.promote_types(parameter.dtype, grad_dtype) == grad_dtype, (
                f"the gradient of {name}, a {parameter.dtype} parameter, does not fit in {grad_dtype}"
            )
            by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
        self.grad_buffers = tuple(GradBuffer(named, grad_dtype=grad_dtype) for named in by_dtype.values())
        self.replicated_spans: tuple[ReplicatedSpans, ...] = find_replicated_spans(self.trainable_parameters())
        for parameter in self.trainable_parameters():
            parameter.register_post_accumulate_grad_hook(_move_to_main_grad)  # type: ignore[no-untyped-call]

    def trainable_parameters(self) -> list[nn.Parameter]:
        """In the order of the buffers, the same on all ranks that hold a shard of this chunk."""
        return [entry.parameter for buffer in self.grad_buffers for entry in buffer.entries]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients; call it before the first micro-batch of a step."""
        for buffer in self.grad_buffers:
            buffer.zero_gradients()

    def reduce_gradients(self) -> None:
        """Sum the gradients over the data-parallel group.

        Losses are divided by global counts before their backward pass, so nothing is averaged here.
        """
        for buffer in self.grad_buffers:
            collectives.all_reduce_(buffer.gradients, self.data_group)


def _move_to_main_grad(parameter: Tensor) -> None:
    if parameter.grad is None:  # a linear layer has added to main_grad itself, and given autograd nothing
        return
    main_grad_of(parameter).add_(parameter.grad)
    parameter.grad = None
