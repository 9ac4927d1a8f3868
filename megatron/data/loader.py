"""Reads the micro-batches of a step, ahead of time where asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

from megatron.data.sample_dataset import SampleDataset
from megatron.data.samplers import SampleOrder, microbatch_positions

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")


class MicrobatchLoader(Generic[Sample, Batch]):
    """The micro-batches of one data-parallel rank.

    With workers, threads read ahead of the step that is asked for. Threads, not processes: reading is copying
    from mapped files, numpy releases the interpreter while it copies, nothing has to be pickled or handed
    over, nothing is forked from a process that holds a GPU, and nothing draws from a global generator. The
    batches are the same with any number of workers, as each is a function of its position.

    Args:
        dataset: numbered samples.
        order: which of them stands at which position of the run.
        collate: makes a batch of samples and their positions; called from several threads.
        micro_batch_size: samples of a micro-batch.
        dp_rank, dp_size: of the data-parallel group; ranks of one tensor, context or pipeline group read the
            same.
        num_workers: threads; 0 reads when asked.
    """

    def __init__(
        self,
        dataset: SampleDataset[Sample],
        *,
        order: SampleOrder,
        collate: Callable[[Sequence[Sample], Sequence[int]], Batch],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._collate = collate
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._num_workers = num_workers
        self._executor: ThreadPoolExecutor | None = None
        # By the first sample of the whole micro-batch over all ranks: steps of any size are a walk along these.
        self._ahead: dict[int, Future[Batch]] = {}

    def microbatches(self, consumed: int, num_microbatches: int) -> list[Batch]:
        """The micro-batches of the step that begins after `consumed` samples of the whole run.

        Steps may differ in size and need not follow each other; those that do profit from what was read ahead.

        Raises:
            IndexError: the order ends before.
            UserError: a sample does not belong to the vocabulary.
        """
        stride = self._micro_batch_size * self._dp_size
        starts = [consumed + number * stride for number in range(num_microbatches)]
        if self._num_workers == 0:
            return [self._read(start) for start in starts]
        futures = [self._taken(start) for start in starts]
        # Ahead by the next step, if it is as large as this one, and by enough to keep the threads busy.
        end = consumed + num_microbatches * stride
        wanted = range(end, end + max(num_microbatches, 2 * self._num_workers) * stride, stride)
        for start in self._ahead.keys() - set(wanted):  # read for a step that did not come
            self._ahead.pop(start).cancel()
        self._ahead = {start: self._ahead.get(start) or self._submit(start) for start in wanted}
        return [future.result() for future in futures]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        self._ahead.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _taken(self, start: int) -> Future[Batch]:
        """The micro-batch at `start`, from those read ahead or newly asked for."""
        return self._ahead.pop(start) if start in self._ahead else self._submit(start)

    def _submit(self, start: int) -> Future[Batch]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._num_workers, thread_name_prefix="microbatch")
        return self._executor.submit(self._read, start)

    def _read(self, start: int) -> Batch:
        positions = microbatch_positions(
            start, micro_batch_size=self._micro_batch_size, dp_rank=self._dp_rank, dp_size=self._dp_size
        )
        samples = [self._dataset[self._order(position)] for position in positions]
        return self._collate(samples, positions)
