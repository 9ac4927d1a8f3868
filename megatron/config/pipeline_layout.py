"""Which layers live on which pipeline stage.

Pure arithmetic, and part of the configuration, so that a layout that cannot be is reported together with
everything else that is wrong, before any process exists.

With p stages of v chunks the model is cut into p v pieces; piece i, in the order of the model, is chunk i //
p of stage i % p. So layer numbers run over the stages first and over the chunks second, as in Megatron-LM.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from megatron.config.problems import ConfigError, Problem, divisors, multiples, near, words_or

if TYPE_CHECKING:
    from megatron.config.parallel import ParallelConfig
    from megatron.config.transformer import TransformerConfig

_SIZE = "--pipeline-model-parallel-size"
_LAYERS = "--num-layers"
_FIRST = "--decoder-first-pipeline-num-layers"
_LAST = "--decoder-last-pipeline-num-layers"
_LAYOUT = "--pipeline-model-parallel-layout"
_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_SCHEDULE = "--pipeline-schedule"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"

# Symbols in a layout string: far above any model, far below what a mistyped repeat could take of memory.
_LONGEST = 100_000


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """One model chunk of one stage. `layers` are global layer numbers, possibly none."""

    stage: int
    chunk: int
    layers: range
    has_embedding: bool
    has_output: bool


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """The chunks of all stages, `chunks[stage][chunk]`, with the costs of both ends in units of a layer."""

    num_stages: int
    num_chunks: int
    chunks: tuple[tuple[StageLayout, ...], ...]
    embedding_cost: float = 0.0
    output_cost: float = 0.0

    def stage(self, stage: int) -> tuple[StageLayout, ...]:
        """The chunks of one stage."""
        return self.chunks[stage]

    def cost(self, chunk: StageLayout) -> float:
        """Time of one chunk for a micro-batch, in units of a transformer layer."""
        ends = self.embedding_cost * chunk.has_embedding + self.output_cost * chunk.has_output
        return len(chunk.layers) + ends

    def stage_cost(self, stage: int) -> float:
        """Time of all chunks of a stage for a micro-batch, in units of a transformer layer."""
        return sum(map(self.cost, self.chunks[stage]))

    def describe(self) -> str:
        """A table of what each stage holds and what it costs."""
        rows = [("stage", "chunk", "layers", "besides", "cost")]
        for stage in self.chunks:
            for chunk in stage:
                ends = ["embedding"] * chunk.has_embedding + ["output"] * chunk.has_output
                layers = f"{chunk.layers.start}-{chunk.layers.stop - 1}" if chunk.layers else "-"
                name = str(chunk.stage) if chunk.chunk == 0 else ""
                rows.append((name, str(chunk.chunk), layers, " ".join(ends), f"{self.cost(chunk):.2f}"))
            if self.num_chunks > 1:
                rows.append(("", "all", "", "", f"{self.stage_cost(stage[0].stage):.2f}"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        costs = [self.stage_cost(stage) for stage in range(self.num_stages)]
        mean = sum(costs) / len(costs)
        lines.append(
            f"cost in transformer layers; the largest stage has {max(costs):.2f}, the mean is {mean:.2f}: "
            f"stages wait {1 - mean / max(costs):.1%} of the time for it"
        )
        return "\n".join(lines)


def pipeline_layout(model: TransformerConfig, parallel: ParallelConfig, vocab_size: int) -> PipelineLayout:
    """The layout that the configuration asks for.

    Equal stages when pipeline stages x chunks divide the layers; otherwise the stages for which no size is
    given get layers such that the costliest stage is as cheap as can be, the embedding and the output layer
    counted. Expects sections that are free of problems of their own.

    Raises:
        ConfigError (a ValueError): the layout cannot be; says what works.
    """
    costs = end_costs(model, vocab_size)
    text = parallel.pipeline_model_parallel_layout
    if text is not None:
        counts = _counts_from_string(model, parallel, text)
    else:
        counts = _counts_from_sizes(model, parallel, _num_chunks(model, parallel), *costs)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and len(counts[0]) == 1:
        raise ConfigError([not_interleaved(group)])
    return _assemble(counts, *costs)


def not_interleaved(group: int) -> Problem:
    """A size of groups where each stage has one chunk."""
    return Problem(
        flags=(_GROUP, _CHUNKS, _PER_CHUNK, _LAYOUT),
        value=group,
        rule="belongs to the interleaved schedule, and each stage has one model chunk",
        works=f"{_CHUNKS} 2, or a {_LAYOUT} of several parts a stage; or leave out {_GROUP}",
    )


def end_costs(model: TransformerConfig, vocab_size: int) -> tuple[float, float]:
    """The costs of the embedding and of the output layer in units of a transformer layer.

    Multiplications per token with the weights of each. Attention scores are left out, as the sequence length
    is not the model's; the embedding multiplies nothing and counts one addition for each column.
    """
    layer = model.attention_weights + model.mlp_weights
    return model.hidden_size / layer, model.hidden_size * vocab_size / layer


def spread_layers(num_layers: int, extra_costs: Sequence[float], minimum: int) -> list[int]:
    """Layers for each of several places, so that the largest cost (layers + extra) is as small as possible.

    All layers cost the same, so giving each one to the place that is cheapest so far is exact: no dynamic
    program does better. Among equals the last place gets it: later stages keep fewer micro-batches alive,
    and later chunks keep theirs for a shorter time.
    """
    counts = [minimum] * len(extra_costs)
    cheapest_first = [(minimum + extra, -place) for place, extra in enumerate(extra_costs)]
    heapq.heapify(cheapest_first)
    for _ in range(num_layers - sum(counts)):
        place = -cheapest_first[0][1]
        counts[place] += 1
        heapq.heapreplace(cheapest_first, (counts[place] + extra_costs[place], -place))
    return counts


def _assemble(counts: Sequence[Sequence[int]], embedding_cost: float, output_cost: float) -> PipelineLayout:
    """Numbers the layers; counts[stage][chunk]."""
    num_stages, num_chunks = len(counts), len(counts[0])
    chunks: list[list[StageLayout]] = [[] for _ in counts]
    start = 0
    for position in range(num_stages * num_chunks):
        chunk, stage = divmod(position, num_stages)
        stop = start + counts[stage][chunk]
        chunks[stage].append(
            StageLayout(
                stage=stage,
                chunk=chunk,
                layers=range(start, stop),
                has_embedding=position == 0,
                has_output=position == num_stages * num_chunks - 1,
            )
        )
        start = stop
    return PipelineLayout(
        num_stages=num_stages,
        num_chunks=num_chunks,
        chunks=tuple(map(tuple, chunks)),
        embedding_cost=embedding_cost,
        output_cost=output_cost,
    )


def _counts_from_sizes(
    model: TransformerConfig,
    parallel: ParallelConfig,
    num_chunks: int,
    embedding_cost: float,
    output_cost: float,
) -> list[list[int]]:
    """Layers of [stage][chunk], without a layout string."""
    stages = parallel.pipeline_model_parallel_size
    fixed = _fixed_stages(model, parallel, num_chunks)
    free = [stage for stage in range(stages) if stage not in fixed]
    layers = model.num_layers - sum(fixed.values())
    if layers < len(free) * num_chunks:
        _refuse_few_layers(model, parallel, num_chunks, fixed, len(free))
    extra = [[0.0] * num_chunks for _ in range(stages)]
    extra[0][0] += embedding_cost
    extra[-1][-1] += output_cost
    even = not free or layers % (len(free) * num_chunks) == 0
    if even:
        shares = [layers // len(free) for _ in free]
    else:
        shares = spread_layers(layers, [sum(extra[stage]) for stage in free], minimum=num_chunks)
    sizes = fixed | dict(zip(free, shares))
    return [
        [sizes[stage] // num_chunks] * num_chunks
        if (even or stage in fixed) and sizes[stage] % num_chunks == 0
        else spread_layers(sizes[stage], extra[stage], minimum=1)
        for stage in range(stages)
    ]


def _fixed_stages(model: TransformerConfig, parallel: ParallelConfig, num_chunks: int) -> dict[int, int]:
    """Layers of the stages whose size is given: {stage: layers}."""
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    fixed: dict[int, int] = {}
    for flag, stage, layers in ((_FIRST, 0, first), (_LAST, stages - 1, last)):
        if layers is None:
            continue
        if layers < num_chunks:
            rule = f"must be at least 1 for each of the {num_chunks} chunks of a stage"
            _refuse((flag, _CHUNKS), layers, rule, f"{flag} {num_chunks} or more; {_CHUNKS} {layers}")
        fixed[stage] = layers
    if len(fixed) == stages and sum(fixed.values()) != model.num_layers:
        rule = f"and {_LAST} {last} are all the stages, and do not add up to {_LAYERS} {model.num_layers}"
        _refuse((_FIRST, _LAST, _LAYERS, _SIZE), first, rule, "one of the two: the other stage gets the rest")
    return fixed


def _refuse_few_layers(
    model: TransformerConfig, parallel: ParallelConfig, num_chunks: int, fixed: dict[int, int], free: int
) -> NoReturn:
    stages = parallel.pipeline_model_parallel_size
    needed = free * num_chunks + sum(fixed.values())
    taken = "".join(f" beside {(_FIRST, _LAST)[stage > 0]} {layers}" for stage, layers in fixed.items())
    chunks = "" if num_chunks == 1 else f" x {num_chunks} chunks"
    works = [f"{_LAYERS} {needed} or more"]
    if not fixed and model.num_layers >= num_chunks:
        works.append(f"{_SIZE} {_at_most(model.num_layers // num_chunks)}")
    if not fixed and num_chunks > 1 and model.num_layers >= stages:
        works.append(f"{_CHUNKS} {_at_most(model.num_layers // stages)}")
    works.append(f"{_LAYOUT}, which may leave a chunk without layers")
    rule = f"gives less than one layer to {'a stage' if free == 1 else f'each of {free} stages'}{chunks}{taken}"
    _refuse((_LAYERS, _SIZE, _CHUNKS, _FIRST, _LAST), model.num_layers, rule, "; ".join(works))


def _num_chunks(model: TransformerConfig, parallel: ParallelConfig) -> int:
    """Model chunks on each stage (virtual stages)."""
    stages, layers = parallel.pipeline_model_parallel_size, model.num_layers
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return parallel.num_virtual_stages_per_pipeline_rank or 1
    for flag, size in (
        (_FIRST, parallel.decoder_first_pipeline_num_layers),
        (_LAST, parallel.decoder_last_pipeline_num_layers),
    ):
        if size is not None:
            rule = f"makes all chunks equal, and {flag} {size} makes stages unequal"
            _refuse((_PER_CHUNK, flag), per_chunk, rule, f"{_CHUNKS}, which says only how many chunks there are")
    if layers % (stages * per_chunk):
        equal = f"{_PER_CHUNK} {near(divisors(layers // stages), per_chunk)}; " if layers % stages == 0 else ""
        rule = f"x {_SIZE} {stages} must divide {_LAYERS} {layers}"
        _refuse(
            (_PER_CHUNK, _LAYERS, _SIZE),
            per_chunk,
            rule,
            f"{equal}{_CHUNKS}, which spreads what is left over",
        )
    return layers // (stages * per_chunk)


def _counts_from_string(model: TransformerConfig, parallel: ParallelConfig, text: str) -> list[list[int]]:
    """Layers of [stage][chunk] from a layout string such as "Et*3|(tt|)*29,L".

    E is the embedding, t a layer, L the output layer with the loss; | ends a chunk; x*3 and (x)*3 repeat;
    commas and blanks are for the eye. Chunks come in the order of the model.
    """
    stages = parallel.pipeline_model_parallel_size
    pieces = _expand(text).split("|")
    _check_pieces(pieces, text, model.num_layers, stages)
    num_chunks = len(pieces) // stages
    if num_chunks > 1 and stages == 1:
        rule = f"has {num_chunks} chunks for one stage: chunks shorten the waiting between stages"
        _refuse((_LAYOUT, _SIZE), text, rule, f"{_SIZE} {words_or(divisors(num_chunks)[1:])}; no |")
    if num_chunks > 1 and parallel.pipeline_schedule == "gpipe":
        rule = f"has {num_chunks} chunks for each stage, and {_SCHEDULE} gpipe does not interleave"
        _refuse((_LAYOUT, _SCHEDULE), text, rule, f"{_SCHEDULE} 1f1b; a layout of {stages} chunks")
    return [[piece.count("t") for piece in pieces[stage::stages]] for stage in range(stages)]


def _expand(text: str) -> str:
    """The layout string with commas, blanks, groups and repeats resolved: only E, t, m, L and | are left."""
    expanded = re.sub(r"[\s,]", "", text)
    repeat = re.compile(r"(?:\(([EtmL|]*)\)|([EtmL|]))\*(\d+)|\(([EtmL|]*)\)(?!\*)")
    while (match := repeat.search(expanded)) is not None:
        body = match[1] or match[2] or match[4] or ""
        digits = match[3] or "1"
        times = int(digits) if len(digits) <= len(str(_LONGEST)) else _LONGEST + 1
        if times == 0:
            _refuse((_LAYOUT,), text, f"repeats {body} 0 times", f"leave out {match[0]}")
        if len(body) * times > _LONGEST:
            works = "at most as many t as layers, and as many | as chunks"
            _refuse((_LAYOUT,), text, f"repeats {body} too often: {digits[:12]} times", works)
        expanded = expanded[: match.start()] + body * times + expanded[match.end() :]
    unknown = re.sub(r"[EtmL|]", "", expanded)
    if unknown:
        works = "E (embedding), t (layer), L (output), | (next chunk), t*3 and (tt|)*3 (repeats)"
        _refuse((_LAYOUT,), text, f"has {unknown[0]!r} where it has no meaning", works)
    return expanded


def _check_pieces(pieces: Sequence[str], text: str, num_layers: int, num_stages: int) -> None:
    symbols = "".join(pieces)
    if "t" not in symbols:
        works = f"one for each layer, such as Et*{num_layers}L for a single stage"
        _refuse((_LAYOUT,), repr(text), "has no layer (t)", works)
    if "m" in symbols:
        _refuse((_LAYOUT,), text, "has m: multi-token prediction is not offered", "leave out m")
    if symbols.count("E") != 1 or not pieces[0].startswith("E"):
        _refuse((_LAYOUT,), text, "must have one E, the embedding, at its very start", f"E{text.replace('E', '')}")
    if symbols.count("L") != 1 or not pieces[-1].endswith("L"):
        _refuse(
            (_LAYOUT,),
            text,
            "must have one L, the output layer, at its very end",
            f"{text.replace('L', '')}L",
        )
    if symbols.count("t") != num_layers:
        rule = f"has {symbols.count('t')} layers (t), {_LAYERS} is {num_layers}"
        _refuse((_LAYOUT, _LAYERS), text, rule, f"{_LAYERS} {symbols.count('t')}; or as many t as layers")
    if len(pieces) % num_stages:
        rule = f"has {len(pieces)} chunks, which {_SIZE} {num_stages} does not divide"
        works = f"{_SIZE} {words_or(divisors(len(pieces))[1:] or [1])}; a layout of"
        _refuse((_LAYOUT, _SIZE), text, rule, f"{works} {words_or(multiples(len(pieces), num_stages))} chunks")
    for stage in range(num_stages):
        if not any(pieces[stage::num_stages]):
            rule = f"leaves stage {stage} with nothing to compute"
            _refuse((_LAYOUT, _SIZE), text, rule, "a layer, E or L for each stage")


def _at_most(number: int) -> str:
    return "1" if number == 1 else f"{number} or less"


def _refuse(flags: tuple[str, ...], value: object, rule: str, works: str) -> NoReturn:
    raise ConfigError([Problem(flags=flags, value=value, rule=rule, works=works)])
