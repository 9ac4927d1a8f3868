"""What Megatron-LM's optimizer keeps, at the parameters that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.slices import Box
from megatron.conversion.megatron_lm.arguments import training_flags
from megatron.conversion.megatron_lm.contents import ADVICE, STATES
from megatron.conversion.megatron_lm.flat_buffers import IN_BUFFERS, bucket_limit, flat_buckets
from megatron.conversion.megatron_lm.pickles import StridedTensor
from megatron.conversion.megatron_lm.shards import ChunkTensors
from megatron.conversion.portable import ConversionError, LazyTensor, TrainingState

_RULES = {"adam": ["exp_avg", "exp_avg_sq"], "sgd": ["momentum"]}
# Old names of the schedule's state.
_SCHEDULE = {"warmup_steps": "lr_warmup_steps", "decay_steps": "lr_decay_steps", "decay_style": "lr_decay_style"}


@dataclass(frozen=True, kw_only=True)
class SavedOptimizer:
    """What an optimizer has saved, its own state or that of torch's optimizer in it.

    Attributes:
        groups: of parameters.
        states: what is kept of each parameter, by its number, where it is kept so.
        main: main weights, a list for each group, where they are apart from the model's.
        scaler: state of the loss scale, where it moves.
    """

    groups: Sequence[Mapping[str, Any]]
    states: Mapping[Any, Any]
    main: Sequence[Sequence[Any]]
    scaler: Mapping[str, Any] | None

    @classmethod
    def of(cls, value: Any) -> SavedOptimizer:
        """
        Raises:
            ConversionError: it is of a form that is not known here.
        """
        inner = value.get("optimizer", value) if isinstance(value, Mapping) else value
        groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            raise ConversionError(f"the state of its optimizer has a form that is not known here; {ADVICE}")
        return cls(
            groups=groups,
            states=inner.get("state", {}),
            main=value.get("fp32_from_fp16_params", []),
            scaler=value.get("grad_scaler"),
        )

    @property
    def updates(self) -> int:
        """Updates done: kept once for a group, or for each parameter, which are all the same; 0 where none is."""
        kept = [group["step"] for group in self.groups if "step" in group]
        kept += [state["step"] for state in self.states.values() if isinstance(state, Mapping) and "step" in state]
        return int(_as_number(kept[0] if kept else self.states.get("common_step", 0)))


def states_by_parameter(
    optimizer: SavedOptimizer, models: Sequence[Mapping[str, LazyTensor]]
) -> list[dict[str, dict[str, LazyTensor]]]:
    """Moments and main weights of a rank without the distributed optimizer, by kind and name, for each model chunk.

    States are numbered over the groups, one with all matrices and one with all vectors, which have no weight decay;
    within each in the order of registration, over the chunks.

    Args:
        models: the weights of each chunk, in that order.

    Raises:
        ConversionError: the states are not those of these weights.
    """
    parameters = [(chunk, name, tensor.shape) for chunk, model in enumerate(models) for name, tensor in model.items()]
    chunks: list[dict[str, dict[str, LazyTensor]]] = [{} for _ in models]
    for number, group in enumerate(optimizer.groups):
        entries = [dict(_kinds(optimizer.states.get(index, {}))) for index in group.get("params", [])]
        if number < len(optimizer.main):
            weights = [weight for weight in optimizer.main[number] if isinstance(weight, LazyTensor)]
            if not len(weights) == len(optimizer.main[number]) == len(entries):
                raise ConversionError(f"group {number} of the optimizer has not a main weight for each state")
            for entry, weight in zip(entries, weights):
                entry["main"] = weight
        shapes = [next((tensor.shape for tensor in entry.values()), None) for entry in entries]
        if not any(entries):
            continue
        vectors = all(shape is not None and len(shape) == 1 for shape in shapes)
        places = [place for place in parameters if (len(place[2]) == 1) == vectors]
        if [place[2] for place in places] != shapes:
            raise ConversionError(
                f"group {number} of the optimizer holds {len(shapes)} {'vectors' if vectors else 'matrices'} "
                f"that are not the {len(places)} of the model, in shape or in number; {ADVICE}"
            )
        for (chunk, name, _), entry in zip(places, entries):
            for kind, tensor in entry.items():
                chunks[chunk].setdefault(kind, {})[name] = tensor
    return chunks


def _kinds(state: Mapping[str, Any]) -> Iterator[tuple[str, LazyTensor]]:
    return ((STATES[name], value) for name, value in state.items() if name in STATES and isinstance(value, LazyTensor))


def states_in_buffers(
    content: Any,
    models: Sequence[Mapping[str, LazyTensor]],
    arguments: Mapping[str, Any],
) -> list[ChunkTensors]:
    """The same of the distributed optimizer, from `distrib_optim.pt`, whose buffers hold all ranks' slices.

    Raises:
        ConversionError: the buffers are not those of these weights.
    """
    if not isinstance(content, Mapping) or not content.get("buckets_coalesced"):
        raise ConversionError(f"holds buckets apart, as old versions of Megatron-LM did; {ADVICE}")
    shared = int(arguments["pipeline_model_parallel_size"]) > 1 and not arguments.get(
        "untie_embeddings_and_output_weights", False
    )
    chunks: list[ChunkTensors] = []
    for number, model in enumerate(models):
        buffers = list(content.get(number, {}).values())
        if len(buffers) != 1:
            raise ConversionError(f"model chunk {number} has {len(buffers)} buffers, and one is known; {ADVICE}")
        shapes = {name: tensor.shape for name, tensor in model.items()}
        buckets = flat_buckets(shapes, limit=bucket_limit(arguments, number), shared_embedding=shared)
        tensors: dict[str, dict[str, LazyTensor]] = {}
        for state in IN_BUFFERS:
            flat = buffers[0].get(state)
            length = sum(bucket.length for bucket in buckets)
            if not isinstance(flat, StridedTensor) or (flat.shape, flat.strides) != ((length,), (1,)):
                found = list(flat.shape) if isinstance(flat, LazyTensor) else "nothing"
                raise ConversionError(f"{state} should be {length} elements in a row, and is {found}; {ADVICE}")
            before = 0
            for bucket in buckets:
                for name, (first, shape) in bucket.places.items():
                    box = Box(offset=(before + first,), shape=(math.prod(shape),))
                    tensors.setdefault(STATES[state], {})[name] = flat.part(box).viewed(shape)
                before += bucket.length
        chunks.append(tensors)
    return chunks


def training_state(
    content: Mapping[str, Any], arguments: Mapping[str, Any], optimizer: SavedOptimizer
) -> TrainingState:
    """What else a training that goes on needs.

    Args:
        content: what a rank has saved beside tensors: the iteration and the schedule, by the names of any version.
    """
    rule = arguments.get("optimizer", "adam")
    if rule not in _RULES:
        raise ConversionError(f"--optimizer {rule}: its state is not known here; {ADVICE}")
    names = _RULES[rule] if rule != "sgd" or arguments.get("sgd_momentum", 0.9) else []
    schedule, scaler = content.get("opt_param_scheduler", content.get("lr_scheduler", {})), optimizer.scaler
    return TrainingState(
        iteration=int(content.get("iteration", content.get("total_iters", 0))),
        consumed_samples=int(arguments.get("consumed_train_samples") or 0),
        scheduler={_SCHEDULE.get(name, name): value for name, value in schedule.items()},
        optimizer={
            "rule": rule,
            "state_names": names,
            "num_updates": optimizer.updates,
            "grad_scaler": {
                "scale": _as_number(scaler["scale"]),
                "growth_tracker": int(_as_number(scaler["growth_tracker"])),
                "hysteresis_tracker": int(_as_number(scaler["hysteresis_tracker"])),
            }
            if scaler
            else {},
        },
        flags=training_flags(arguments),
    )


def _as_number(value: Any) -> float:
    """A number that may be kept as a tensor of one element."""
    return float(value.read().reshape(()).item()) if isinstance(value, LazyTensor) else float(value)
