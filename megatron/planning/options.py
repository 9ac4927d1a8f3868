"""What would make a run smaller, by its cost: for a run that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import pipeline_layout
from megatron.core.pipeline_parallel.simulate import simulate
from megatron.planning.memory import plans_of_step, predict_memory

# Shares of the time of a step, rough: they order options, and are printed as "about". Half a micro-batch makes smaller
# products, and twice the tensor-parallel ranks make smaller ones and wait for more of what they communicate.
_HALF_MICRO_BATCH, _TWICE_TENSOR = 0.05, 0.15
# A dearer change has to spare this share more than a cheaper one, or than none, to be worth a word.
_LEAST_SPARED = 0.01


@dataclass(frozen=True, kw_only=True)
class Change:
    """Flags to give, what they make of a configuration, and what they cost.

    Attributes:
        names: of the single changes that it is made of, whatever the numbers in their flags.
        flags: as words of a command line.
        left_out: flags that must not be given beside them.
        settings: what the flags set, by section and field.
        cost: of the time of a step, as a share of it.
    """

    names: frozenset[str]
    flags: tuple[str, ...]
    left_out: tuple[str, ...]
    settings: Mapping[tuple[str, str], object]
    config: MegatronConfig
    cost: float


@dataclass(frozen=True, kw_only=True)
class SmallerRun:
    """A configuration that was changed, and the bytes that its largest stage needs."""

    change: Change
    bytes: int

    def __str__(self) -> str:
        cost = f"about {self.change.cost:+.0%} time" if self.change.cost >= 0.005 else "no more time"
        without = f", without {' and '.join(self.change.left_out)}" if self.change.left_out else ""
        return f"{' '.join(self.change.flags)}{without}: {self.bytes / 1e6:,.1f} MB, {cost}"


def cheapest_that_fit(
    config: MegatronConfig, *, vocab_size: int, available: int, on_cpu: bool = False, most: int = 3
) -> list[SmallerRun]:
    """The changes of one or two flags after which the largest stage needs no more than `available` bytes.

    The cheapest ones first; where none fits, those that need least. A pair is listed only where neither of its flags
    fits alone, and nothing that spares no more than a cheaper change.

    Args:
        config: with the number of processes, which stays as it is.
        on_cpu: whether the staging of `--async-save` takes of the same memory.
    """
    singles = [name for change in changes(config) for name in change.names]
    fitting: list[SmallerRun] = []
    others: list[SmallerRun] = []
    for names in (*((name,) for name in singles), *combinations(singles, 2)):
        if any(fits.change.names < set(names) for fits in fitting):
            continue
        combined = _combined(config, names)
        if combined is None:
            continue
        run = SmallerRun(change=combined, bytes=_largest_stage(combined.config, vocab_size, on_cpu=on_cpu))
        (fitting if run.bytes <= available else others).append(run)
    today = _largest_stage(config, vocab_size, on_cpu=on_cpu)
    if fitting:
        return _worth_their_cost(fitting, today)[:most]
    return _worth_their_cost(others, today)[: -most - 1 : -1]


def _worth_their_cost(runs: Sequence[SmallerRun], today: int) -> list[SmallerRun]:
    """By cost, those that need less than `today` and than all that are cheaper."""
    found: list[SmallerRun] = []
    least = today
    for run in sorted(runs, key=lambda run: (round(run.change.cost, 3), run.bytes)):
        if run.bytes <= (1 - _LEAST_SPARED) * least:
            found.append(run)
            least = run.bytes
    return found


def _largest_stage(config: MegatronConfig, vocab_size: int, *, on_cpu: bool) -> int:
    stages = predict_memory(config, padded_vocab_size=config.padded_vocab_size(vocab_size))
    return max(stage.needed(on_cpu=on_cpu) for stage in stages)


def _combined(config: MegatronConfig, names: Sequence[str]) -> Change | None:
    """The changes one after the other, as the second may depend on the first; None where they do not go together, as
    where the second undoes the first."""
    flags: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    settings: dict[tuple[str, str], object] = {}
    cost = 0.0
    for name in names:
        step = next((change for change in changes(config) if name in change.names), None)
        if step is None:
            return None
        if any(settings.get(knob, value) != value for knob, value in step.settings.items()):
            return None
        config, flags, cost = step.config, flags + step.flags, cost + step.cost
        left_out, settings = left_out + step.left_out, {**settings, **step.settings}
    if config.problems(check_files=False):
        return None
    return Change(names=frozenset(names), flags=flags, left_out=left_out, settings=settings, config=config, cost=cost)


def changes(config: MegatronConfig) -> Iterator[Change]:
    """Single changes that make a run smaller, possible or not. All keep the global batch."""
    model, parallel, training = config.model, config.parallel, config.training
    tensor, stages, replicas = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        config.data_parallel_size,
    )
    batch = config.global_batch_size
    same_batch = () if training.global_batch_size else ("--global-batch-size", str(batch))
    if tensor > 1 and not parallel.sequence_parallel:
        flags: tuple[str, ...] = ("--sequence-parallel",)
        yield _change("sequence parallelism", config, flags, 0.0, parallel={"sequence_parallel": True})
    if replicas > 1 and not config.data_parallel.use_distributed_optimizer:
        flags = ("--use-distributed-optimizer",)
        sharded = {"use_distributed_optimizer": True}
        yield _change("distributed optimizer", config, flags, 0.0, data_parallel=sharded)
    optimizer = config.optimizer
    if optimizer.precision == "bf16" and optimizer.optimizer == "adam" and not optimizer.use_precision_aware_optimizer:
        # Narrower moments would spare more, but change what is trained.
        flags = ("--use-precision-aware-optimizer",)
        aware = {"use_precision_aware_optimizer": True}
        yield _change("weights in halves", config, flags, 0.0, optimizer=aware)
    if not model.fuses_output_layer:
        flags = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear")
        in_chunks = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
        yield _change("loss without logits", config, flags, _output_share(config), model=in_chunks)
    if training.micro_batch_size % 2 == 0:
        size = training.micro_batch_size // 2
        halved = {"micro_batch_size": size, "global_batch_size": batch}
        flags = ("--micro-batch-size", str(size), *same_batch)
        yield _change("half the micro-batch", config, flags, _HALF_MICRO_BATCH, training=halved)
    if model.recompute_granularity is None:
        flags = ("--recompute-activations",)
        selective = {"recompute_granularity": "selective"}
        yield _change("selective recomputation", config, flags, _core_share(config), model=selective)
    if model.recompute_granularity != "full":
        flags = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
        full = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "recompute_modules": None,
        }
        # One forward more beside a forward and a backward of twice it.
        whole = _change("full recomputation", config, flags, 1 / 3, model=full)
        given = {
            "--recompute-activations": model.recompute_granularity == "selective",
            "--recompute-modules": model.recompute_modules is not None,
        }
        yield replace(whole, left_out=tuple(name for name, is_given in given.items() if is_given))
    if replicas % 2 == 0:
        kept = {"global_batch_size": batch}
        flags = ("--tensor-model-parallel-size", str(2 * tensor), *same_batch)
        wider = {"tensor_model_parallel_size": 2 * tensor}
        yield _change("twice the tensor ranks", config, flags, _TWICE_TENSOR, parallel=wider, training=kept)
        flags = ("--pipeline-model-parallel-size", str(2 * stages), *same_batch)
        more = {"pipeline_model_parallel_size": 2 * stages}
        deeper = _change("twice the stages", config, flags, 0.0, parallel=more, training=kept)
        if not deeper.config.problems(check_files=False):
            yield replace(deeper, cost=_bubble(deeper.config) - _bubble(config))


def _change(
    name: str, config: MegatronConfig, flags: tuple[str, ...], cost: float, **sections: Mapping[str, object]
) -> Change:
    changed = {section: replace(getattr(config, section), **values) for section, values in sections.items()}
    settings = {(section, field): value for section, values in sections.items() for field, value in values.items()}
    return Change(
        names=frozenset({name}),
        flags=flags,
        left_out=(),
        settings=settings,
        config=replace(config, **changed),
        cost=cost,
    )


def _core_share(config: MegatronConfig) -> float:
    """The core of attention once more, as a share of the three passes of a layer."""
    model, length = config.model, config.data.seq_length
    core = 2 * model.query_size * length
    return core / (3 * (core + model.attention_weights + model.mlp_weights))


def _output_share(config: MegatronConfig) -> float:
    """The logits once more, as a share of the three passes of the model."""
    model = config.model
    output = model.hidden_size * _assumed_vocabulary(config)
    core = 2 * model.query_size * config.data.seq_length
    return output / (3 * (output + model.num_layers * (core + model.attention_weights + model.mlp_weights)))


def _assumed_vocabulary(config: MegatronConfig) -> int:
    """For the sake of costs; a tokenizer that has a file does not say its size in the configuration."""
    return config.padded_vocab_size(config.tokenizer.vocab_size or 1)


def _bubble(config: MegatronConfig) -> float:
    layout = pipeline_layout(config.model, config.parallel, _assumed_vocabulary(config))
    return simulate(plans_of_step(config, layout), num_chunks=layout.num_chunks).bubble_fraction
