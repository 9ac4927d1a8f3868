"""The model of a checkpoint as it is used."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.core.shard import shard_of
from megatron.inference.load import open_model
from megatron.inference.stages import ModelRanks
from tests.helpers.numerics import assert_bitwise
from tests.training.runs import trained
from tests.training.test_train_step import state_of


def test_a_training_in_16_bits_is_used_with_all_bits_of_its_weights(tmp_path: Path) -> None:
    training, _ = trained("--bf16", "--save", str(tmp_path))
    model = open_model(tmp_path).load_gpt(ModelRanks.single(), torch.device("cpu")).part
    weights = state_of(training)
    for name, parameter in model.named_parameters():
        rows = shard_of(parameter).global_shape[0]  # those of the vocabulary's padding have no values
        assert_bitwise(parameter.data[:rows], weights[f"main.{name}"][:rows], name)


def test_what_only_a_training_asks_for_is_left_out(tmp_path: Path) -> None:
    asked = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    trained(*asked, "--bf16", "--use-precision-aware-optimizer", "--train-iters", "1", "--save", str(tmp_path))
    opened = open_model(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert opened.config.model.recompute_granularity is None
    assert opened.config.model.num_layers == 4
    assert opened.config.optimizer.params_dtype == torch.float32
