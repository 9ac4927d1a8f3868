"""Data parallelism of one model chunk: gradients in contiguous buffers, reduced over the ranks once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.problems import UserError
from megatron.core.collectives import Reduction
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.bucket_contents import one_bucket, parameters_by_buffer, several_buckets
from megatron.core.distributed.grad_buffer import ALIGNMENT, Bucket, BucketContent, GradBuffer
from megatron.core.distributed.replicated_spans import ReplicatedSpans, find_replicated_spans
from megatron.core.main_grad import main_grad_of
from megatron.core.shard import shard_of

# NCCL is at its fastest with messages that a large power of two divides, whatever the number of ranks.
_BUS_BANDWIDTH_MULTIPLE = 2**16


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """How gradients are reduced and weights updated over the data-parallel ranks.

    Attributes:
        use_distributed_optimizer: each rank updates a slice of each bucket, see Note [Slices].
        overlap_grad_reduce: reduce a bucket as soon as its gradients are there, in the last backward of a step.
        overlap_param_gather: let the next forward pass wait for a bucket when it comes to a module that needs it.
        bucket_size: parameters after which a bucket is closed; None: it never is.
        average_in_collective: losses carry the number of ranks as a factor, which the collective divides by.
        pad_buckets_for_high_nccl_busbw: make the lengths of buckets multiples of 2**16.
        matrices_apart: have the matrices inside layers in buckets of their own, for an update rule of their own.
    """

    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    pad_buckets_for_high_nccl_busbw: bool = False
    matrices_apart: bool = False


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

    def __init__(
        self,
        module: nn.Module,
        *,
        data_group: CommGroup,
        grad_dtype: torch.dtype,
        config: DistributedDataParallelConfig | None = None,
        num_buckets: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            module: its parameters carry a `Shard`.
            data_group: the ranks that hold the same parameters and see other samples.
            grad_dtype: of gradients: float32, or float64 when the parameters are float64; bfloat16 saves memory and
                communication, and rounds each time that a micro-batch or a rank is added.
            config: by default all ranks update all parameters after one reduction at the end.
            num_buckets: of ordinary parameters in each buffer (`numbers_of_buckets`), instead of their size.

        Raises:
            UserError: gradients of a parameter do not fit in `grad_dtype`.
        """
        super().__init__()
        self.module = module
        self.data_group = data_group
        self.config = config or DistributedDataParallelConfig()
        named_of_buffers = parameters_by_buffer(module, matrices_apart=self.config.matrices_apart)
        for name, parameter in (pair for named in named_of_buffers for pair in named):
            _check_that_gradients_fit(name, parameter, grad_dtype)
        numbers = [None] * len(named_of_buffers) if num_buckets is None else num_buckets
        self.grad_buffers = tuple(
            GradBuffer(
                self._contents(named, number),
                grad_dtype=grad_dtype,
                data_group=data_group,
                sharded=self.config.use_distributed_optimizer,
                awaited_by_modules=self.config.overlap_param_gather,
                bucket_multiple=self._bucket_multiple(),
            )
            for named, number in zip(named_of_buffers, numbers, strict=True)
        )
        self.replicated_spans: tuple[ReplicatedSpans, ...] = find_replicated_spans(self.trainable_parameters())
        arrival = {parameter: i for i, parameter in enumerate(reversed(list(module.parameters())))}
        buckets = [bucket for buffer in self.grad_buffers for bucket in buffer.buckets]
        # In the order in which they are reduced; the next forward pass needs them about the other way round.
        self.buckets = tuple(
            sorted(buckets, key=lambda bucket: max(arrival[entry.parameter] for entry in bucket.entries))
        )
        self._bucket_of = {entry.parameter: bucket for bucket in self.buckets for entry in bucket.entries}
        self._reduced: set[Bucket] = set()
        self._sums: dict[Bucket, Tensor] = {}
        self._arrivals: _Arrivals | None = None
        for parameter in self.trainable_parameters():
            parameter.register_post_accumulate_grad_hook(self._receive_gradient)  # type: ignore[no-untyped-call]
        if self.config.overlap_param_gather:
            self._wait_before_each_forward()

    def _contents(self, named: Sequence[tuple[str, nn.Parameter]], number: int | None) -> list[BucketContent]:
        if not (self.config.use_distributed_optimizer or self.config.overlap_grad_reduce):
            return one_bucket(named)
        return several_buckets(named, bucket_size=self.config.bucket_size, number=number)

    def _bucket_multiple(self) -> int:
        multiple = ALIGNMENT * (self.data_group.size if self.config.use_distributed_optimizer else 1)
        return lcm(multiple, _BUS_BANDWIDTH_MULTIPLE) if self.config.pad_buckets_for_high_nccl_busbw else multiple

    def trainable_parameters(self) -> list[nn.Parameter]:
        """In the order of the buffers, the same on all ranks that hold a shard of this chunk."""
        return [entry.parameter for buffer in self.grad_buffers for entry in buffer.entries]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)

    # ---- gradients ----

    @property
    def loss_factor(self) -> float:
        """What the losses must be multiplied by before the backward pass; the reduction takes it back."""
        return float(self.data_group.size) if self.config.average_in_collective else 1.0

    def zero_grad_buffer(self) -> None:
        """Forget all gradients; call it before the first micro-batch of a step."""
        for bucket in self.buckets:
            bucket.finish_reduction()  # which an error may have left open, and which writes to them
        for buffer in self.grad_buffers:
            buffer.forget_gradients()
        self._reduced.clear()
        self._sums.clear()

    def non_finite_gradients(self) -> list[str]:
        """Parameters whose gradient on this rank holds a NaN or an infinity, before anything is reduced.

        Of the buckets that `last_backward` has reduced it knows only if that was told to look. On a GPU the host waits
        here, once, for all sums.
        """
        rest = [bucket for bucket in self.buckets if bucket not in self._reduced]
        sums = self._sums | {bucket: _sums_of(bucket) for bucket in rest}
        if not sums:
            return []
        parameters = [entry.parameter for bucket in sums for entry in bucket.entries]
        finite = torch.cat([each.double() for each in sums.values()]).isfinite().tolist()
        return [
            shard_of(parameter).name for parameter, is_finite in zip(parameters, finite, strict=True) if not is_finite
        ]

    def reduce_gradients(self) -> None:
        """Sum the gradients over the data-parallel group: begin what `last_backward` has not begun, and wait for all.

        Losses are divided by global counts before their backward pass, so that the sum is what is asked for. With
        `average_in_collective` it is the average of gradients that `loss_factor` has multiplied.
        """
        for bucket in self.buckets:
            if bucket not in self._reduced:
                self._start_reduction(bucket)
        for bucket in self.buckets:
            bucket.finish_reduction()

    @contextmanager
    def last_backward(self, *, look_for_nan: bool) -> Iterator[None]:
        """Around the backward pass of a step's last micro-batch: reduce buckets as soon as their gradients are there.

        Without `overlap_grad_reduce` it does nothing. Buckets are begun in one order on all ranks, so that the same
        ones meet, also when a parameter gets its gradient later on one rank than on another, or none at all: a bucket
        waits for those before it. What is not begun when the pass is over, is then. Late buckets are left to
        `reduce_gradients`.

        Args:
            look_for_nan: keep for `non_finite_gradients` sums of what this rank adds to a bucket before it is reduced,
                for one more pass over the gradients.
        """
        if not self.config.overlap_grad_reduce:
            yield
            return
        self._arrivals = _Arrivals([bucket for bucket in self.buckets if not bucket.late], look_for_nan=look_for_nan)
        try:
            yield
            self._start_early(self._arrivals, self._arrivals.rest())
        finally:
            self._arrivals = None

    def _start_early(self, arrivals: _Arrivals, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if arrivals.look_for_nan:
                self._sums[bucket] = _sums_of(bucket)
            self._start_reduction(bucket)

    def _receive_gradient(self, parameter: Tensor) -> None:
        """Runs when the backward pass is done with a parameter. A linear layer has added to main_grad itself, and given
        autograd nothing."""
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        if bucket.is_gathering:
            raise RuntimeError(
                f"{shard_of(parameter).name} was used before it was gathered: the module that holds it was not called, "
                f"but something else has read its parameter. Call the module, or leave out --overlap-param-gather"
            )
        if parameter.grad is not None:
            main_grad_of(parameter).add_(parameter.grad)
            parameter.grad = None
        if self._arrivals is not None and not bucket.late:
            assert bucket not in self._reduced, f"{shard_of(parameter).name} got a gradient after its reduction"
            self._start_early(self._arrivals, self._arrivals.after(bucket, parameter))

    def _start_reduction(self, bucket: Bucket) -> None:
        self._reduced.add(bucket)
        op: Reduction = "mean" if self.config.average_in_collective else "sum"
        bucket.start_reduction(op)

    # ---- parameters ----

    def wait_for_parameters(self) -> None:
        """Make all parameters whole, for whoever reads them otherwise than by calling their module."""
        _finish_gathers(self.buckets)

    def _wait_before_each_forward(self) -> None:
        """A module waits for its own parameters. One that a list or dictionary of modules holds, as a layer, waits for
        those of all modules in it: then it may also read them without calling these."""
        lists = [module for module in self.module.modules() if isinstance(module, nn.ModuleList | nn.ModuleDict)]
        layers = {layer for each in lists for layer in each.children()}
        for module in self.module.modules():
            parameters = module.parameters(recurse=module in layers)
            needed = [self._bucket_of[parameter] for parameter in parameters if parameter in self._bucket_of]
            if needed:
                module.register_forward_pre_hook(_waiting_for(tuple(dict.fromkeys(needed))))


def _check_that_gradients_fit(name: str, parameter: nn.Parameter, grad_dtype: torch.dtype) -> None:
    if torch.promote_types(parameter.dtype, grad_dtype) != grad_dtype:
        flag = "leave out --grad-reduce-in-bf16" if grad_dtype == torch.bfloat16 else "use --fp64"
        raise UserError(
            f"the gradients of {name}, a parameter in {parameter.dtype}, do not fit in {grad_dtype}, in which they are "
            f"summed; {flag}, or make the parameter in a narrower type"
        )


def _sums_of(bucket: Bucket) -> Tensor:
    """The sum of the gradient of each parameter of a bucket: a NaN or an infinity makes it one."""
    return torch.stack([main_grad_of(entry.parameter).sum() for entry in bucket.entries])


def _waiting_for(buckets: Sequence[Bucket]) -> Callable[[nn.Module, Any], None]:
    def wait(module: nn.Module, inputs: Any) -> None:
        finish = _finish_gathers
        if torch.compiler.is_compiling():  # only then: the decorator imports the compiler, which takes seconds
            finish = torch.compiler.disable(finish)  # type: ignore[no-untyped-call]
        finish(buckets)

    return wait


def _finish_gathers(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.finish_gather()


class _Arrivals:
    """Which gradients of the last micro-batch are still to come, for buckets that are reduced in order."""

    def __init__(self, buckets: Sequence[Bucket], *, look_for_nan: bool) -> None:
        self.look_for_nan = look_for_nan
        self._missing = {bucket: {entry.parameter for entry in bucket.entries} for bucket in buckets}

    def after(self, bucket: Bucket, parameter: Tensor) -> list[Bucket]:
        """The buckets that may be reduced now that the gradient of a parameter is there."""
        self._missing[bucket].discard(parameter)
        complete = []
        for bucket, missing in self._missing.items():
            if missing:
                break
            complete.append(bucket)
        for bucket in complete:
            del self._missing[bucket]
        return complete

    def rest(self) -> list[Bucket]:
        return list(self._missing)
