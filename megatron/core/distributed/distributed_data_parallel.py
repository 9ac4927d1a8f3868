"""Data parallelism of one model chunk: gradients in contiguous buffers, reduced over the ranks once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import Reduction
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.grad_buffer import ALIGNMENT, Bucket, BucketContent, GradBuffer, main_grad_of
from megatron.core.distributed.replicated_spans import ReplicatedSpans, find_replicated_spans
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
    ) -> None:
        """
        Args:
            module: its parameters carry a `Shard`.
            data_group: the ranks that hold the same parameters and see other samples.
            grad_dtype: of gradients: float32, or float64 when the parameters are float64; bfloat16 saves memory and
                communication, and rounds each time that a micro-batch or a rank is added.
            config: by default all ranks update all parameters after one reduction at the end.
        """
        super().__init__()
        self.module = module
        self.data_group = data_group
        self.grad_dtype = grad_dtype
        self.config = config or DistributedDataParallelConfig()
        trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        by_kind: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        # Reversed, that is about the order in which a backward pass finishes the gradients.
        for name, parameter in reversed(trainable):
            assert torch.promote_types(parameter.dtype, grad_dtype) == grad_dtype, (
                f"the gradient of {name}, a {parameter.dtype} parameter, does not fit in {grad_dtype}"
            )
            apart = self.config.matrices_apart and bool(shard_of(parameter).matrices)
            by_kind.setdefault((parameter.dtype, apart), []).append((name, parameter))
        self.grad_buffers = tuple(
            GradBuffer(
                bucket_contents(named, self.config),
                grad_dtype=grad_dtype,
                data_group=data_group,
                sharded=self.config.use_distributed_optimizer,
                bucket_multiple=self._bucket_multiple(),
            )
            for named in by_kind.values()
        )
        self.replicated_spans: tuple[ReplicatedSpans, ...] = find_replicated_spans(self.trainable_parameters())
        arrival = {parameter: i for i, (_, parameter) in enumerate(reversed(trainable))}
        buckets = [bucket for buffer in self.grad_buffers for bucket in buffer.buckets]
        # In the order in which they are reduced; the next forward pass needs them about the other way round.
        self.buckets = tuple(
            sorted(buckets, key=lambda bucket: max(arrival[entry.parameter] for entry in bucket.entries))
        )
        self._bucket_of = {entry.parameter: bucket for bucket in self.buckets for entry in bucket.entries}
        self._reduced: set[Bucket] = set()
        self._non_finite: list[str] = []
        self._arrivals: _Arrivals | None = None
        self._looks_for_nan = False
        for parameter in self.trainable_parameters():
            parameter.register_post_accumulate_grad_hook(self._receive_gradient)  # type: ignore[no-untyped-call]
        if self.config.overlap_param_gather:
            self._wait_before_each_forward()

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
        for buffer in self.grad_buffers:
            buffer.zero_gradients()
        self._reduced.clear()
        self._non_finite.clear()

    def non_finite_gradients(self) -> list[str]:
        """Parameters whose gradient on this rank holds a NaN or an infinity, before anything is reduced.

        Of the buckets that `last_backward` has reduced it knows only if that was told to look.
        """
        rest = [bucket for bucket in self.buckets if bucket not in self._reduced]
        return self._non_finite + [name for bucket in rest for name in _non_finite_in(bucket)]

    def reduce_gradients(self) -> None:
        """Sum the gradients over the data-parallel group: what `last_backward` has not begun, and the end of all.

        Losses are divided by global counts before their backward pass, so nothing is averaged here.
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
            look_for_nan: find out for `non_finite_gradients` what this rank adds to a bucket before it is reduced,
                for one more pass over the gradients, and on a GPU a wait for each bucket.
        """
        if not self.config.overlap_grad_reduce:
            yield
            return
        self._arrivals = _Arrivals([bucket for bucket in self.buckets if not bucket.late])
        self._looks_for_nan = look_for_nan
        try:
            yield
            for bucket in self._arrivals.rest():
                self._start_early(bucket)
        finally:
            self._arrivals = None

    def _start_early(self, bucket: Bucket) -> None:
        if self._looks_for_nan:
            self._non_finite += _non_finite_in(bucket)
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
            for complete in self._arrivals.after(bucket, parameter):
                self._start_early(complete)

    def _start_reduction(self, bucket: Bucket) -> None:
        self._reduced.add(bucket)
        op: Reduction = "mean" if self.config.average_in_collective else "sum"
        bucket.start_reduction(op)

    # ---- parameters ----

    def wait_for_parameters(self) -> None:
        """Make all parameters whole, for whoever reads them otherwise than by calling their module."""
        for bucket in self.buckets:
            bucket.finish_gather()

    def _wait_before_each_forward(self) -> None:
        for module in self.module.modules():
            needed = [self._bucket_of[p] for p in module.parameters(recurse=False) if p in self._bucket_of]
            if needed:
                module.register_forward_pre_hook(_waiting_for(tuple(dict.fromkeys(needed))))


def _non_finite_in(bucket: Bucket) -> list[str]:
    """A NaN or an infinity anywhere makes the sum one; the search by parameter is for the bad case only."""
    if bucket.gradients.sum().isfinite():
        return []
    return [
        shard_of(entry.parameter).name or entry.name
        for entry in bucket.entries
        if not main_grad_of(entry.parameter).isfinite().all()
    ]


def _waiting_for(buckets: Sequence[Bucket]) -> Callable[[nn.Module, Any], None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(module: nn.Module, inputs: Any) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    return wait  # type: ignore[no-any-return]


class _Arrivals:
    """Which gradients of the last micro-batch are still to come, for buckets that are reduced in order."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
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


def bucket_contents(
    named_parameters: Sequence[tuple[str, nn.Parameter]], config: DistributedDataParallelConfig
) -> list[BucketContent]:
    """Cut parameters of one dtype into buckets.

    Without slices and overlap one bucket holds all. Else tied parameters have a bucket of their own, in the order of
    their names: on both stages the same elements lie at the same places, so that slices of the same elements meet. And
    so have those whose gradients are sums over the tensor-parallel group, which are complete after the backward only.
    """
    if not (config.use_distributed_optimizer or config.overlap_grad_reduce):
        return [BucketContent(named_parameters=named_parameters)]
    tied = sorted(
        (pair for pair in named_parameters if shard_of(pair[1]).tied), key=lambda pair: shard_of(pair[1]).name
    )
    untied = [pair for pair in named_parameters if not shard_of(pair[1]).tied]
    late = [pair for pair in untied if _is_late(pair[1])]
    contents = [
        BucketContent(named_parameters=part)
        for part in _cut([pair for pair in untied if not _is_late(pair[1])], config.bucket_size)
    ]
    contents.append(BucketContent(named_parameters=tied, late=any(_is_late(parameter) for _, parameter in tied)))
    contents.append(BucketContent(named_parameters=late, late=True))
    return [content for content in contents if content.named_parameters]


def _is_late(parameter: nn.Parameter) -> bool:
    shard = shard_of(parameter)
    return shard.group.size > 1 and (shard.partial_gradient or shard.replicated_pieces)


def _cut(
    named_parameters: Sequence[tuple[str, nn.Parameter]], bucket_size: int | None
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Runs of parameters, each closed when it has `bucket_size` elements or more."""
    run: list[tuple[str, nn.Parameter]] = []
    size = 0
    for pair in named_parameters:
        run.append(pair)
        size += pair[1].numel()
        if bucket_size is not None and size >= bucket_size:
            yield run
            run, size = [], 0
    yield run
