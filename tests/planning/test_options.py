"""What would make a run smaller: flags that a user can give as they stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.megatron_config import MegatronConfig
from megatron.planning.options import changes, cheapest_that_fit
from tests.helpers.tiny import tiny_config

VOCAB = 251


def config_of(*flags: str, implied_batch: bool) -> MegatronConfig:
    """With the batch that one micro-batch a rank makes, or with a given one; flags may give one, too."""
    arguments = ("--micro-batch-size", "2", "--attention-dropout", "0.1", "--tensor-model-parallel-size", "2")
    config = tiny_config(*arguments, *flags, world_size=8)
    if implied_batch and "--global-batch-size" not in flags:
        return replace(config, training=replace(config.training, global_batch_size=None))
    return config


@pytest.mark.parametrize("implied_batch", [True, False])
def test_the_flags_of_a_change_give_the_configuration_that_it_reckons_with(implied_batch: bool) -> None:
    config = config_of(implied_batch=implied_batch)
    found = list(changes(config))
    assert len(found) == 7
    for change in found:
        given = config_of(*change.flags, implied_batch=implied_batch)
        assert given.global_batch_size == config.global_batch_size, change.names
        for section in ("model", "parallel", "data_parallel", "training"):
            assert getattr(given, section) == getattr(change.config, section), (change.names, section)


def test_two_changes_go_together_where_the_flags_of_one_depend_on_the_other() -> None:
    """Each of them alone has to name the global batch."""
    smaller = cheapest_that_fit(config_of(implied_batch=True), vocab_size=VOCAB, available=0, most=100)
    pair = {"half the micro-batch", "twice the tensor ranks"}
    (both,) = (run.change for run in smaller if run.change.names == pair)
    assert both.flags.count("--global-batch-size") == 1
    given = config_of(*both.flags, implied_batch=True)
    assert (given.training, given.parallel) == (both.config.training, both.config.parallel)
