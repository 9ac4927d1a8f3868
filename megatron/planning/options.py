"""What would make a run smaller, by its cost: for a run that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import pipeline_layout
from megatron.core.pipeline_parallel.simulate import simulate
from megatron.planning.memory import plans_of_step, predict_memory

# Shares of the time of a step, rough: they order options, and are printed as "about". Half a micro-batch makes smaller
# products, and twice the tensor-parallel ranks make smaller ones and wait for more of what they communicate.
_HALF_MICRO_BATCH, _TWICE_TENSOR = 0.05, 0.15


@dataclass(frozen=True, kw_only=True)
class Change:
    """Flags to give, what they make of a configuration, and what they cost.

    cost: of the time of a step, as a share of it.
    """

    flags: tuple[str, ...]
    config: MegatronConfig
    cost: float

    def then(self, other: Change) -> Change:
        return Change(flags=(*self.flags, *other.flags), config=other.config, cost=self.cost + other.cost)


@dataclass(frozen=True, kw_only=True)
class SmallerRun:
    """A configuration that was changed, and the bytes of its largest stage."""

    change: Change
    bytes: int

    def __str__(self) -> str:
        cost = f"about {self.change.cost:+.0%} time" if self.change.cost >= 0.005 else "no more time"
        return f"{' '.join(self.change.flags)}: {self.bytes / 1e9:,.2f} GB, {cost}"


def cheapest_that_fit(config: MegatronConfig, *, vocab_size: int, available: int, most: int = 3) -> list[SmallerRun]:
    """The changes of one or two flags after which the largest stage needs no more than `available` bytes.

    The cheapest ones first; where none fits, those that need least. A pair is listed only where neither of its flags
    fits alone.

    Args:
        config: with the number of processes, which stays as it is.
    """
    singles = [(change,) for change in _changes(config)]
    pairs = [(first, second) for (first,), (second,) in combinations(singles, 2)]
    fitting: list[tuple[tuple[Change, ...], SmallerRun]] = []
    others: list[SmallerRun] = []
    for changes in (*singles, *pairs):
        names = {change.flags for change in changes}
        if any(names > {change.flags for change in fits} for fits, _ in fitting):
            continue
        combined = _combined(config, [change.flags for change in changes])
        if combined is None:
            continue
        run = SmallerRun(change=combined, bytes=_largest_stage(combined.config, vocab_size))
        if run.bytes <= available:
            fitting.append((changes, run))
        else:
            others.append(run)
    if fitting:
        return sorted((run for _, run in fitting), key=lambda run: (round(run.change.cost, 3), run.bytes))[:most]
    return sorted(others, key=lambda run: run.bytes)[:most]


def _largest_stage(config: MegatronConfig, vocab_size: int) -> int:
    stages = predict_memory(config, padded_vocab_size=config.padded_vocab_size(vocab_size))
    return max(stage.total for stage in stages)


def _combined(config: MegatronConfig, flags: list[tuple[str, ...]]) -> Change | None:
    """The changes one after the other, as the second may depend on the first; None where they do not go together."""
    result = Change(flags=(), config=config, cost=0.0)
    for wanted in flags:
        step = next((change for change in _changes(result.config) if change.flags == wanted), None)
        if step is None:
            return None
        result = result.then(step)
    return None if result.config.problems(check_files=False) else result


def _changes(config: MegatronConfig) -> Iterator[Change]:
    """Single changes that make a run smaller, possible or not."""
    model, parallel, training = config.model, config.parallel, config.training
    tensor, stages, replicas = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        config.data_parallel_size,
    )
    if tensor > 1 and not parallel.sequence_parallel:
        yield _change(config, ("--sequence-parallel",), 0.0, parallel={"sequence_parallel": True})
    if replicas > 1 and not config.data_parallel.use_distributed_optimizer:
        sharded = {"use_distributed_optimizer": True}
        yield _change(config, ("--use-distributed-optimizer",), 0.0, data_parallel=sharded)
    if training.micro_batch_size % 2 == 0:
        size = training.micro_batch_size // 2
        batch = config.global_batch_size
        yield _change(
            config,
            (f"--micro-batch-size {size}", *(() if training.global_batch_size else (f"--global-batch-size {batch}",))),
            _HALF_MICRO_BATCH,
            training={"micro_batch_size": size, "global_batch_size": batch},
        )
    if model.recompute_granularity is None:
        selective = {"recompute_granularity": "selective"}
        yield _change(config, ("--recompute-activations",), _core_share(config), model=selective)
    if model.recompute_granularity != "full":
        full = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "recompute_modules": None,
        }
        flags = ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",)
        yield _change(config, flags, 1 / 3, model=full)  # one forward more beside a forward and a backward of twice it
    if replicas % 2 == 0:
        batch = config.global_batch_size
        yield _change(
            config,
            (f"--tensor-model-parallel-size {2 * tensor}",),
            _TWICE_TENSOR,
            parallel={"tensor_model_parallel_size": 2 * tensor},
            training={"global_batch_size": batch},
        )
        deeper = _change(
            config,
            (f"--pipeline-model-parallel-size {2 * stages}",),
            0.0,
            parallel={"pipeline_model_parallel_size": 2 * stages},
            training={"global_batch_size": batch},
        )
        if not deeper.config.problems(check_files=False):
            yield replace(deeper, cost=_bubble(deeper.config) - _bubble(config))


def _change(config: MegatronConfig, flags: tuple[str, ...], cost: float, **sections: Mapping[str, object]) -> Change:
    changed = {name: replace(getattr(config, name), **values) for name, values in sections.items()}
    return Change(flags=flags, config=replace(config, **changed), cost=cost)


def _core_share(config: MegatronConfig) -> float:
    """The core of attention once more, as a share of the three passes of a layer."""
    model, length = config.model, config.data.seq_length
    core = 2 * model.query_size * length
    return core / (3 * (core + model.attention_weights + model.mlp_weights))


def _bubble(config: MegatronConfig) -> float:
    layout = pipeline_layout(config.model, config.parallel, config.padded_vocab_size(config.tokenizer.vocab_size or 1))
    return simulate(plans_of_step(config, layout), num_chunks=layout.num_chunks).bubble_fraction
