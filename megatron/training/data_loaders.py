"""The data of a run: how many samples it needs, and the loaders of this data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.megatron_config import MegatronConfig
from megatron.config.training import TrainingConfig
from megatron.data.blended_dataset import FilledUp, extend_blocks
from megatron.data.loader import MicrobatchLoader
from megatron.data.origin import origin_of
from megatron.data.sample_dataset import SampleDataset, TokenSource
from megatron.data.samplers import CyclicOrder, SampleOrder, SequentialOrder
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training.initialize import MegatronContext
from megatron.training.microbatches import BatchSizeSchedule
from megatron.training.progress import Progress
from megatron.training.run import Loader, Loaders, Microbatch, ValidationSet
from megatron.training.setup import Vocabulary


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """Samples that a run will read.

    Attributes:
        train: the number asked for at the start, and one more for each resume that asked for more. The order of the
            data depends on these numbers, as in Megatron-LM, so they are kept in checkpoints. None with `--skip-train`.
        valid, test: 0 when nothing is evaluated; of validation None for all samples, each once (`--full-validation`).
    """

    train: Sequence[int]
    valid: int | None
    test: int


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """Numbered samples of each split, and what makes a batch of some of them.

    Attributes:
        train, valid, test: anything with `len` and `[number]`; None where there is no data by choice. With
            `--skip-train` no training data is read. The validation sets by what each is called in logs: "validation"
            where there is one, "validation NAME" where there are several.
        collate: (samples, their positions in the order of the run) -> a micro-batch.
        blank: a sample that no loss is on, which fills up the last batch of `--full-validation`; None where none is.
        sources: what the training samples are cut from. A checkpoint keeps their fingerprints, and is not resumed with
            others.
    """

    train: SampleDataset[Any] | None
    valid: Mapping[str, SampleDataset[Any]]
    test: SampleDataset[Any] | None
    collate: Callable[[Sequence[Any], Sequence[int]], Microbatch]
    blank: Any = None
    sources: Sequence[TokenSource] = ()


DatasetsProvider = Callable[[MegatronContext, Vocabulary, SampleCounts], Datasets]


def sample_counts(
    training: TrainingConfig, *, batch_sizes: BatchSizeSchedule, train_iters: int, progress: Progress
) -> SampleCounts:
    """Megatron-LM's numbers of samples. Those of the training data go on from the blocks in `progress`."""
    batch = batch_sizes.global_batch_size
    wanted = training.train_samples or batch_sizes.samples_after(train_iters)
    train = () if training.skip_train else extend_blocks(progress.train_blocks, wanted)
    evaluated = max(training.eval_iters, 0) * batch
    valid = None if training.full_validation else training.evaluations(train_iters) * evaluated
    return SampleCounts(train=train, valid=valid, test=evaluated)


def build_loaders(
    context: MegatronContext,
    vocabulary: Vocabulary,
    provider: DatasetsProvider,
    *,
    batch_sizes: BatchSizeSchedule,
    train_iters: int,
    progress: Progress,
) -> Loaders:
    """Loaders of this rank. Each tensor- and pipeline-parallel rank reads the samples of its replica itself: they come
    from mapped files that the ranks of a node share, and no rank waits for another one's data."""
    config, state = context.config, context.state
    counts = sample_counts(config.training, batch_sizes=batch_sizes, train_iters=train_iters, progress=progress)
    if len(counts.train) > len(progress.train_blocks) > 0:
        context.say(
            f"training data: {counts.train[-1]:,} more samples are appended to the {sum(counts.train[:-1]):,} of "
            "before, whose order stays"
        )
    if counts.train:
        progress.train_blocks = list(counts.train)
    datasets = provider(context, vocabulary, counts)
    for line in _other_tokenizers(datasets.sources, vocabulary.tokenizer) if context.reports else ():
        context.say(f"warning: {line}")

    def loader(dataset: SampleDataset[Any], order: SampleOrder) -> Loader:
        return MicrobatchLoader(
            dataset,
            order=order,
            collate=datasets.collate,
            micro_batch_size=config.training.micro_batch_size,
            dp_rank=state.data.rank,
            dp_size=state.data.size,
            num_workers=config.data.num_workers,
        )

    def validation_set(dataset: SampleDataset[Any], split: str) -> ValidationSet:
        iterations = config.training.eval_iters
        if config.training.full_validation:
            iterations = -(-len(dataset) // batch_sizes.global_batch_size)
            assert datasets.blank is not None, "--full-validation needs a sample that no loss is on, Datasets.blank"
            dataset = FilledUp(dataset, datasets.blank, iterations * batch_sizes.global_batch_size)
        order = SequentialOrder(len(dataset), wrap=True, name=split)
        return ValidationSet(split=split, loader=loader(dataset, order), iterations=iterations)

    train = None
    if counts.train:
        assert datasets.train is not None  # the configuration has refused a run with nothing to train on
        train = loader(datasets.train, _train_order(config, len(datasets.train)))
    return Loaders(
        train=train,
        valid=[validation_set(dataset, split) for split, dataset in datasets.valid.items() if counts.valid != 0],
        test=None
        if datasets.test is None or counts.test == 0
        else loader(datasets.test, SequentialOrder(len(datasets.test), wrap=True, name="test")),
        sources=datasets.sources,
    )


def _other_tokenizers(sources: Iterable[TokenSource], tokenizer: Tokenizer) -> Iterator[str]:
    """A line for each source whose ids another tokenizer has made. A NullTokenizer stands for any."""
    for source in sources if tokenizer.name != "NullTokenizer" else ():
        origin = origin_of(source.prefix)
        if origin is not None and origin.fingerprint != tokenizer.fingerprint():
            other = "another " if origin.tokenizer_type == tokenizer.name else ""
            yield (
                f"{source.prefix} was made with {other}{origin.tokenizer_type}, and this run has --tokenizer-type "
                f"{tokenizer.name}, for which its ids mean other tokens; give the tokenizer that it was made with"
            )


def _train_order(config: MegatronConfig, size: int) -> SampleOrder:
    if config.data.dataloader_type == "cyclic":
        return CyclicOrder(size, seed=config.training.seed)
    return SequentialOrder(size)
