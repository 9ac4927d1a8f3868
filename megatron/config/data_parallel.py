"""How gradients are reduced, and weights updated, over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron.config.options import flag
from megatron.config.problems import Problem

_DISTRIBUTED, _REDUCE, _GATHER = "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelConfig:
    """Choices of data parallelism. None of them changes a number but by rounding: sums have another order, and
    averages of products another last bit."""

    use_distributed_optimizer: bool = field(
        default=False,
        metadata=flag("Split optimizer state, main weights and the update over the data-parallel ranks (ZeRO-1)."),
    )
    overlap_grad_reduce: bool = field(
        default=False,
        metadata=flag("Reduce gradients during the last backward pass of a step, bucket by bucket."),
    )
    overlap_param_gather: bool = field(
        default=False,
        metadata=flag(f"Gather updated weights during the next forward pass; with {_DISTRIBUTED} and {_REDUCE}."),
    )
    ddp_bucket_size: int | None = field(
        default=None,
        metadata=flag(
            f"Parameters of a bucket, with {_REDUCE}; when not given 40 million, or a million for each data-parallel "
            "rank if that is more.",
            at_least=1,
        ),
    )
    ddp_num_buckets: int | None = field(
        default=None,
        metadata=flag(
            "Number of buckets on each rank, instead of their size; besides them those of tied weights and of "
            "gradients that are summed over tensor-parallel ranks.",
            at_least=1,
        ),
    )
    ddp_average_in_collective: bool = field(
        default=False,
        metadata=flag("Let the reduction average gradients of losses that the number of ranks multiplies, not sum."),
    )
    ddp_pad_buckets_for_high_nccl_busbw: bool = field(
        default=False,
        metadata=flag(f"Make buckets multiples of 2^16 elements, which NCCL moves fastest; with {_DISTRIBUTED}."),
    )

    def bucket_size(self, *, ranks: int) -> int | None:
        """Parameters after which a bucket is closed, with so many data-parallel ranks.

        None: it is not closed by its size, as nothing overlaps with its reduction, or as `ddp_num_buckets` is given.
        """
        if not self.overlap_grad_reduce or self.ddp_num_buckets is not None:
            return None
        return max(40_000_000, 1_000_000 * ranks) if self.ddp_bucket_size is None else self.ddp_bucket_size

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section."""
        present = {_DISTRIBUTED: self.use_distributed_optimizer, _REDUCE: self.overlap_grad_reduce}
        missing = [name for name, is_present in present.items() if not is_present]
        if self.overlap_param_gather and missing:
            yield _needs(_GATHER, missing, "gathers the slices that each rank has updated, bucket by bucket")
        sizes = {"--ddp-bucket-size": self.ddp_bucket_size, "--ddp-num-buckets": self.ddp_num_buckets}
        for name, value in sizes.items():
            if value is not None and not self.overlap_grad_reduce:
                yield _needs(name, [_REDUCE], "cuts gradients into buckets that are reduced one by one", value)
        if None not in sizes.values():
            yield Problem(
                flags=tuple(sizes),
                value=self.ddp_bucket_size,
                rule=f"says the same as --ddp-num-buckets {self.ddp_num_buckets} in another way",
                works="one of the two",
            )
        if self.ddp_pad_buckets_for_high_nccl_busbw and not self.use_distributed_optimizer:
            yield _needs("--ddp-pad-buckets-for-high-nccl-busbw", [_DISTRIBUTED], "is about the slices of buckets")


def _needs(name: str, others: Sequence[str], what: str, value: int | None = None) -> Problem:
    return Problem(
        flags=(name, *others),
        value=value,
        rule=f"{what}, which needs {' and '.join(others)}",
        works=f"{' '.join(others)} with it; or leave out {name}",
    )
