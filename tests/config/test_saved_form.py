"""The saved form of a configuration, and what a resume with another one would change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.config import MegatronConfig, difference
from megatron.config.problems import UserError
from tests.config.conftest import Parse


def test_a_saved_configuration_is_the_same_when_read(parse: Parse) -> None:
    config = parse(
        "--window-size 15 0 --bf16 --rampup-batch-size 8 4 100 --train-samples 999 --lr-warmup-fraction .01",
        without="--train-iters",
    )
    text = config.to_json()
    assert MegatronConfig.from_dict(json.loads(text)) == config
    assert json.loads(text) == config.to_dict()


def test_a_saved_configuration_without_a_later_field_takes_its_default(parse: Parse) -> None:
    saved = parse("--seed 7").to_dict()
    del saved["training"]["exit_signal"], saved["logging"]
    config = MegatronConfig.from_dict(saved)
    assert (config.training.exit_signal, config.training.seed) == ("SIGTERM", 7)


@pytest.mark.parametrize(
    "section, field, match",
    [
        ("model", "num_layer", "field of model 'num_layer', unknown to this version; nearest: num_layers"),
        ("modle", "num_layers", "section 'modle', unknown to this version; nearest: model"),
    ],
)
def test_a_saved_field_that_is_unknown_is_refused(parse: Parse, section: str, field: str, match: str) -> None:
    saved = parse().to_dict()
    saved.setdefault(section, {})[field] = 3
    with pytest.raises(ValueError, match=match):
        MegatronConfig.from_dict(saved)


def test_a_saved_configuration_without_a_required_field_is_refused(parse: Parse) -> None:
    saved = parse().to_dict()
    del saved["model"]["num_layers"]
    with pytest.raises(ValueError, match=r"lacks model\.num_layers"):
        MegatronConfig.from_dict(saved)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "num_layers", "4"),
        ("model", "hidden_size", True),
        ("model", "window_size", []),
        ("model", "window_size", [1, 2, 3]),
        ("training", "rampup_batch_size", [1]),
        ("data", "data_path", "alpha"),
    ],
)
def test_a_saved_value_that_no_field_can_have_is_refused(parse: Parse, section: str, field: str, value: Any) -> None:
    saved = parse().to_dict()
    saved[section][field] = value
    with pytest.raises(UserError, match=f"the saved configuration has {section}.{field} "):
        MegatronConfig.from_dict(saved)


def test_a_split_that_means_the_same_is_no_difference(parse: Parse) -> None:
    saved = parse("--data-path a", without="--mock-data").to_dict()
    present = MegatronConfig.from_dict(saved)
    for same in ("969, 30, 1", "969,30,1"):
        saved["data"]["split"] = same
        assert difference(MegatronConfig.from_dict(saved), present) == []


@pytest.mark.parametrize(
    "saved, present",
    [
        ("", "--ffn-hidden-size {ffn}"),
        ("", "--kv-channels {head}"),
        ("", "--group-query-attention --num-query-groups {heads}"),
        (
            "--group-query-attention --num-query-groups 1",
            "--group-query-attention",
        ),
        ("--position-embedding-type rope", "--position-embedding-type rope --max-position-embeddings 4096"),
    ],
)
def test_a_size_that_is_given_and_follows_from_the_others_too_is_no_difference(
    parse: Parse, saved: str, present: str
) -> None:
    model = parse().model
    present = present.format(ffn=model.ffn_size, head=model.head_dim, heads=model.num_attention_heads)
    assert difference(parse(saved), parse(present)) == []


@pytest.mark.parametrize(
    "saved, present, flag, affects",
    [
        ("", "--num-layers 4", "--num-layers", "tensors"),
        ("", "--position-embedding-type rope", "--position-embedding-type", "model"),
        ("", "--vocab-size 200", "--vocab-size", "tensors"),
        ("", "--seed 7", "--seed", "data"),
        ("", "--split 1", "--split", "data"),
        ("--split 969,30,1", "", "--split", "data"),  # mock data is divided evenly when it is not given
        ("", "--reset-attention-mask", "--reset-attention-mask", "input"),
        ("--data-path /a/x /a/y", "--data-path /b/x /b/y", "--data-path", "free"),
        ("--data-path /a/x /a/y", "--data-path /a/x /a/z", "--data-path", "data"),
        ("--data-path 1 /a/x 2 /a/y", "--data-path 1 /a/x 3 /a/y", "--data-path", "data"),
        ("", "--train-iters 200", "--train-iters", "training"),
        ("", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size", "free"),
        ("", "--lr 1e-4", "--lr", "training"),
        ("", "--adam-beta2 0.95", "--adam-beta2", "training"),
        ("", "--hidden-dropout 0.2", "--hidden-dropout", "training"),
        ("", "--global-batch-size 64", "--global-batch-size", "training"),
        ("", "--micro-batch-size 4", "--micro-batch-size", "free"),
        (
            "--no-calculate-per-token-loss",
            "--no-calculate-per-token-loss --micro-batch-size 4",
            "--micro-batch-size",
            "training",
        ),
        ("", "--log-interval 7", "--log-interval", "free"),
        ("", "--no-calculate-per-token-loss", "--calculate-per-token-loss", "training"),
        ("--load x", "--load x --no-load-optim", "--load-optim", "training"),
        ("--load x", "--load x --finetune", "--finetune", "training"),
    ],
)
def test_a_difference_says_what_it_changes(parse: Parse, saved: str, present: str, flag: str, affects: str) -> None:
    without = "--mock-data" if "--data-path" in present else ""
    (found,) = difference(parse(saved, without=without), parse(present, without=without))
    assert (found.flag, found.affects) == (flag, affects)
    assert str(found).startswith(f"{flag}: ")
    assert difference(parse(saved, without=without), parse(saved, without=without)) == []


@pytest.mark.parametrize(
    "present, world_size, batch",
    [
        ("", 8, 16),
        ("--tensor-model-parallel-size 2", 4, 4),
        ("--pipeline-model-parallel-size 4", 4, 2),
        ("--micro-batch-size 1", 4, 4),
        ("--micro-batch-size 1", 8, None),
        ("--tensor-model-parallel-size 2", 8, None),
        ("--global-batch-size 8", 2, None),
    ],
)
def test_a_global_batch_that_follows_from_other_sizes_is_compared(
    parse: Parse, present: str, world_size: int, batch: int | None
) -> None:
    """None: it is the same."""
    saved = MegatronConfig.from_dict(parse(without="--global-batch-size", world_size=4).to_dict())
    changes = difference(saved, parse(present, without="--global-batch-size", world_size=world_size))
    found = [(each.saved, each.present) for each in changes if each.affects != "free"]
    assert found == ([] if batch is None else [(8, batch)])
    unknown = parse(without="--global-batch-size")
    assert difference(unknown, unknown) == []
