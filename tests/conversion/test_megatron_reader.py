"""Checkpoints of Megatron-LM, read without it: each layout, each spelling, and what is refused."""

from __future__ import annotations

import argparse
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.conversion.megatron_lm import shards
from megatron.conversion.megatron_lm.flat_buffers import bucket_limit, flat_buckets
from megatron.conversion.megatron_lm.names import flat_names
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.portable import ConversionError, PortableModel, not_finite
from tests.conversion.megatron_files import (
    CHECKPOINTS,
    FILE,
    OUTPUTS,
    arrays,
    changed,
    contents,
    rank_file,
    read_all,
    weights,
)
from tests.helpers.numerics import PARITY_FP64, assert_bitwise
from tests.model.tiny import build

# Megatron-LM's tanh GELU has the constant 0.79788456, 1e-9 from torch's sqrt(2/pi); layers add it up.
TANH_GELU = 5e-9
FP32 = 1e-5


def assert_same_tensors(one: PortableModel, other: PortableModel) -> None:
    mine, theirs = read_all(one), read_all(other)
    assert list(mine) == list(theirs) or sorted(mine) == sorted(theirs)
    for key, tensor in theirs.items():
        assert_bitwise(mine[key], tensor, key)


def logits_of(model: PortableModel, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    chunk = build(model.config, vocab_size=model.vocab_size, padded_vocab_size=model.vocab_size, dtype=dtype)
    chunk.load_state_dict(weights(model))
    with torch.no_grad():
        logits = chunk(tokens.long(), torch.arange(tokens.shape[1]).expand_as(tokens))
    assert isinstance(logits, Tensor)
    return logits


EXACT = {
    "gpt2_learned/tp1pp1": TANH_GELU,
    "gpt2_learned/tp2pp2": TANH_GELU,
    "llama_gqa/tp1pp1": PARITY_FP64,
    "llama_gqa/tp2pp1": PARITY_FP64,
    "llama_gqa/tp2pp2": PARITY_FP64,
    "llama_gqa/tp1pp2vpp2": PARITY_FP64,
    "llama_gqa/torch_dist": PARITY_FP64,
    "qk_layernorm/tp2pp1": PARITY_FP64,
    "rope_interleaved_half/tp2pp1": PARITY_FP64,
}


@pytest.mark.parametrize("name", EXACT)
def test_logits_in_float64_are_those_that_megatron_computed(name: str) -> None:
    expected = arrays(OUTPUTS / name.partition("/")[0] / "outputs_fp64.npz")
    logits = logits_of(read_megatron(CHECKPOINTS / name), expected["tokens"], torch.float64)
    difference = float((logits - expected["logits"]).abs().max())
    assert difference <= EXACT[name] * float(expected["logits"].abs().max()), difference


@pytest.mark.parametrize("name", ["gpt2_learned/tp1pp1", "llama_gqa/tp1pp1", "before_core_gpt/tp1pp1"])
def test_logits_in_float32_are_those_that_megatron_computed(name: str) -> None:
    expected = arrays(CHECKPOINTS / name.partition("/")[0] / "outputs_tp1pp1.npz")
    logits = logits_of(read_megatron(CHECKPOINTS / name), expected["tokens"], torch.float32)
    difference = float((logits - expected["logits"]).abs().max())
    assert difference <= FP32 * float(expected["logits"].abs().max()), difference


def test_losses_before_core_over_a_vocabulary_with_more_padding_are_those_that_megatron_computed() -> None:
    """Its padding took part in the softmax, so its rows are kept: 264 at tensor-parallel size 2."""
    tokens = arrays(CHECKPOINTS / "before_core_gpt/outputs_tp1pp1.npz")
    expected = arrays(CHECKPOINTS / "before_core_gpt/outputs_tp2pp1.npz")["per_token_loss"]
    model = read_megatron(CHECKPOINTS / "before_core_gpt/tp2pp1")
    assert model.vocab_size == 264
    logits = logits_of(model, tokens["tokens"], torch.float32)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens["labels"].long().flatten(), reduction="none"
    )
    assert float((losses.view_as(expected) - expected).abs().max()) <= FP32 * float(expected.abs().max())


@pytest.mark.parametrize(
    "name, others",
    [
        ("gpt2_learned/tp1pp1", ["gpt2_learned/tp2pp2"]),
        ("llama_gqa/tp1pp1", ["llama_gqa/tp2pp2", "llama_gqa/tp1pp2vpp2"]),
        ("before_core_gpt/tp1pp1", ["before_core_gpt/tp1pp2"]),
    ],
)
def test_every_layout_of_a_model_has_the_same_weights(name: str, others: list[str]) -> None:
    one = read_megatron(CHECKPOINTS / name, weights_only=True)
    for other in others:
        found = read_megatron(CHECKPOINTS / other)
        assert found.config == one.config and found.vocab_size == one.vocab_size
        assert_same_tensors(found, one)


NUMBERED = "distributed_optimizer_dp2/torch_plain"
BY_PLACE = (
    "distributed_optimizer_dp2/torch_distributed_optimizer",
    "distributed_optimizer_dp2/torch_dist_distributed_optimizer",
)


@pytest.mark.parametrize(
    "name, other",
    [
        ("llama_gqa/tp1pp1", "llama_gqa/tp2pp1"),
        ("llama_gqa/tp1pp1", "llama_gqa/torch_dist"),  # one has numbers for its states, the other names
        BY_PLACE,
    ],
)
def test_every_layout_of_a_training_has_the_same_moments_at_the_same_parameters(name: str, other: str) -> None:
    one, found = read_megatron(CHECKPOINTS / name), read_megatron(CHECKPOINTS / other)
    kinds = {key.removesuffix(".embedding.word_embeddings.weight") for key in one.tensors if "word_embeddings" in key}
    assert kinds == {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    assert_same_tensors(found, one)
    assert one.training is not None and found.training is not None
    for field in ("iteration", "consumed_samples", "scheduler", "optimizer"):
        assert getattr(found.training, field) == getattr(one.training, field), field


@pytest.mark.parametrize("name", BY_PLACE)
def test_flat_buffers_have_the_moments_of_the_same_training_that_numbered_them(name: str) -> None:
    """That training added its gradients in another order, so they are equal but for the rounding of float32."""
    numbered, by_place = read_all(read_megatron(CHECKPOINTS / NUMBERED)), read_all(read_megatron(CHECKPOINTS / name))
    assert sorted(numbered) == sorted(by_place)
    for key in (key for key in numbered if key.startswith("optimizer.")):
        difference = float((numbered[key] - by_place[key]).abs().max())
        assert 0 < difference <= 1e-6 * float(numbered[key].abs().max()), key


def test_the_main_weights_in_a_flat_buffer_are_those_of_the_model() -> None:
    found = weights(read_megatron(CHECKPOINTS / BY_PLACE[0]))
    for name, tensor in contents(rank_file(BY_PLACE[0]))["model"].items():
        if tensor is not None:
            assert_bitwise(found[name], tensor, name)


def test_main_weights_of_a_bf16_training_take_the_place_of_those_that_it_computed_with() -> None:
    model = read_megatron(CHECKPOINTS / "bf16_dp1/torch_bf16")
    found = weights(model)
    rounded = contents(rank_file("bf16_dp1/torch_bf16"))["model"]
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    for name, tensor in found.items():
        assert rounded[name].dtype == torch.bfloat16
        assert_bitwise(tensor.bfloat16(), rounded[name], name)
    assert any(not torch.equal(tensor, rounded[name].float()) for name, tensor in found.items())


def test_main_weights_that_are_not_at_their_place_are_refused_when_they_are_read(tmp_path: Path) -> None:
    """As moments would be, which nothing can be compared with."""

    def change(_: str, state: Any) -> None:
        (vectors,) = (group for group in state["optimizer"]["fp32_from_fp16_params"] if group[0].dim() == 1)
        vectors[0], vectors[1] = vectors[1], vectors[0]

    model = read_megatron(changed("bf16_dp1/torch_bf16", tmp_path, change))
    with pytest.raises(ConversionError, match="the weight that the optimizer keeps is not that of the model"):
        read_all(model)


def test_main_weights_that_are_nan_where_the_model_is_are_its_own(tmp_path: Path) -> None:
    def change(_: str, state: Any) -> None:
        groups = state["optimizer"]["fp32_from_fp16_params"]
        words = state["model"]["embedding.word_embeddings.weight"]
        (main,) = (tensor for tensor in groups[0] + groups[1] if torch.equal(tensor.bfloat16(), words))
        words[0, 0] = main[0, 0] = float("nan")
        words[0, 1] = main[0, 1] = float("inf")

    found = weights(read_megatron(changed("bf16_dp1/torch_bf16", tmp_path, change)))
    assert not_finite(found["embedding.word_embeddings.weight"]) == "1 NaN and 1 infinite"


def test_weights_alone_are_those_that_the_model_computed_with() -> None:
    model = read_megatron(CHECKPOINTS / "bf16_dp1/torch_bf16", weights_only=True)
    assert model.training is None
    assert {key.partition(".")[0] for key in model.tensors} == {"model"}
    assert {lazy.dtype for lazy in model.tensors.values()} == {torch.bfloat16}


def test_a_training_comes_with_its_position_and_its_schedule() -> None:
    training = read_megatron(CHECKPOINTS / "bf16_dp1/torch_bf16").training
    assert training is not None
    assert (training.iteration, training.consumed_samples) == (5, 40)
    assert training.optimizer == {
        "rule": "adam",
        "state_names": ["exp_avg", "exp_avg_sq"],
        "num_updates": 5,
        "grad_scaler": {},
    }
    assert training.scheduler["num_steps"] == 40 and training.scheduler["max_lr"] == 4e-3
    expected = {"precision": "bf16", "lr": 4e-3, "seed": 44, "global_batch_size": 8, "seq_length": 16}
    assert training.flags.items() >= expected.items()


def test_a_model_without_an_optimizer_has_no_training() -> None:
    assert read_megatron(CHECKPOINTS / "gpt2_learned/tp1pp1").training is None


def test_the_state_of_a_loss_scale_is_numbers(tmp_path: Path) -> None:
    def change(_: str, state: Any) -> None:
        state["optimizer"]["grad_scaler"] = {
            "scale": torch.tensor([2.0**16]),
            "growth_tracker": 7,
            "hysteresis_tracker": torch.tensor([2], dtype=torch.int32),
        }

    training = read_megatron(changed("bf16_dp1/torch_bf16", tmp_path, change)).training
    assert training is not None
    scaler = {"scale": 2.0**16, "growth_tracker": 7, "hysteresis_tracker": 2}
    assert training.optimizer["grad_scaler"] == scaler


# ---- spellings ----


def respelled(state: Any, *spellings: tuple[str, str]) -> None:
    """Rename the tensors of a model before core."""
    language_model = state["model"]["language_model"]
    encoder = language_model.pop("encoder")
    renamed = OrderedDict()
    for name, tensor in encoder.items():
        for ours, theirs in spellings:
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    language_model["transformer" if ("encoder", "transformer") in spellings else "encoder"] = renamed


@pytest.mark.parametrize(
    "spellings",
    [
        (("encoder", "transformer"), (".self_attention.", ".attention.")),
        (
            ("input_layernorm", "input_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("final_layernorm", "final_norm"),
        ),
    ],
)
def test_older_and_newer_names_before_core_are_the_same(spellings: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    copy = changed("before_core_gpt/tp1pp2", tmp_path, lambda _, state: respelled(state, *spellings))
    assert_same_tensors(read_megatron(copy), read_megatron(CHECKPOINTS / "before_core_gpt/tp1pp2"))


def optimizer_that_keeps(model: Any) -> dict[str, Any]:
    """The state of an optimizer whose moments and main weights are the weights themselves."""
    every = [tensor for _, tensor in flat_names(model) if isinstance(tensor, Tensor)]
    groups = [[tensor for tensor in every if (tensor.dim() == 1) == vectors] for vectors in (False, True)]
    numbers = iter(range(len(every)))
    params = [[next(numbers) for _ in group] for group in groups]
    state = {n: {"exp_avg": tensor, "exp_avg_sq": tensor} for n, tensor in enumerate(groups[0] + groups[1])}
    return {
        "optimizer": {"param_groups": [{"params": each, "step": 3} for each in params], "state": state},
        "fp32_from_fp16_params": groups,
    }


@pytest.mark.parametrize("version", [0, 1.0, 2.0, None])
def test_rows_of_queries_keys_and_values_are_ordered_by_the_version(version: float | None, tmp_path: Path) -> None:
    """Each row is given its number, and written in the order that the version had; what the optimizer keeps too."""
    heads, width, tensor = 4, 6, 2

    def change(rank: str, state: Any) -> None:
        mine = heads // tensor
        rows = torch.arange(3 * mine * width).view(mine, 3, width) + 1000 * int(rank[-2:])  # [head, q k v, width]
        if version in (0, None):
            rows = rows.transpose(0, 1)
        elif version == 1.0:
            rows = rows.transpose(1, 2)
        for name, value in state["model"]["language_model"]["encoder"].items():
            if "query_key_value" in name:
                numbers = rows.reshape(-1).float()
                value.copy_(numbers if value.dim() == 1 else numbers[:, None].expand_as(value))
        if version is None:
            del state["checkpoint_version"]
        else:
            state["checkpoint_version"] = version
        state["optimizer"] = optimizer_that_keeps(state["model"])

    model = read_megatron(changed("before_core_gpt/tp2pp1", tmp_path, change))
    found, states = weights(model), read_all(model)
    for name, weight in found.items():
        assert_bitwise(states[f"optimizer.exp_avg.{name}"], weight, name)
    rows = torch.arange(3 * heads * width // tensor).float()
    expected = torch.cat([rows, rows + 1000])
    for layer in range(4):
        for kind in ("weight", "bias"):
            tensor_ = found[f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}"]
            assert_bitwise(tensor_ if kind == "bias" else tensor_[:, 0].contiguous(), expected, kind)


def test_files_of_the_torch_of_those_years_are_read(tmp_path: Path) -> None:
    copy = changed("before_core_gpt/tp1pp1", tmp_path, lambda _, state: None)
    path = copy / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(contents(path), path, _use_new_zipfile_serialization=False)
    assert_same_tensors(read_megatron(copy), read_megatron(CHECKPOINTS / "before_core_gpt/tp1pp1"))


def test_arguments_of_many_years_make_the_same_model(tmp_path: Path) -> None:
    def change(_: str, state: Any) -> None:
        arguments = vars(state["args"])
        for name in ("position_embedding_type", "normalization", "swiglu", "group_query_attention", "rotary_base"):
            arguments.pop(name, None)
        arguments["model_parallel_size"] = arguments.pop("tensor_model_parallel_size")
        arguments["untie_embeddings_and_output_weights"] = None

    found = read_megatron(changed("gpt2_learned/tp1pp1", tmp_path, change))
    assert found.config == read_megatron(CHECKPOINTS / "gpt2_learned/tp1pp1").config


def test_numbers_are_read_as_their_fields_have_them(tmp_path: Path) -> None:
    def change(_: str, state: Any) -> None:
        vars(state["args"]).update(window_size=[8.0, 0], num_layers=4.0, hidden_dropout=0, rotary_base=20_000.0)

    config = read_megatron(changed("llama_gqa/tp1pp1", tmp_path, change)).config
    assert (config.window_size, config.num_layers, config.hidden_dropout, config.rotary_base) == ((8, 0), 4, 0, 20_000)
    assert all(type(number) is int for number in (*config.window_size, config.num_layers))  # type: ignore[misc]


@pytest.mark.parametrize(
    "values, activation",
    [
        ({}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_tanh"),
        # What Megatron-LM's own converter writes of any model.
        ({"bias_gelu_fusion": False, "perform_initialization": False}, "gelu_tanh"),
    ],
)
def test_the_fusion_of_gelu_and_bias_decides_which_gelu_it_is(
    values: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    copy = changed("gpt2_learned/tp1pp1", tmp_path, set_argument(**values))
    assert read_megatron(copy).config.activation == activation


# ---- vocabulary ----


def test_rows_of_the_vocabulary_are_kept_or_trimmed_as_asked(tmp_path: Path) -> None:
    folder = CHECKPOINTS / "llama_gqa/tp2pp1"
    kept, trimmed = read_megatron(folder), read_megatron(folder, true_vocab_size=153)
    assert (kept.vocab_size, trimmed.vocab_size) == (160, 153)
    whole = read_all(kept)
    for key, tensor in read_all(trimmed).items():
        vocabulary = key.endswith(("word_embeddings.weight", "output_layer.weight"))
        assert_bitwise(tensor, whole[key][:153] if vocabulary else whole[key], key)
    for rows in (0, 161):
        with pytest.raises(ConversionError, match=f"--true-vocab-size {rows}: must be from 1 to 160"):
            read_megatron(folder, true_vocab_size=rows)


# ---- which checkpoint ----


def test_a_checkpoint_is_found_by_the_tracker_by_its_iteration_and_by_its_folder() -> None:
    root = CHECKPOINTS / "llama_gqa/tp1pp1"
    one = read_megatron(root)
    assert_same_tensors(read_megatron(root, 6), one)
    assert_same_tensors(read_megatron(root / "iter_0000006"), one)


def test_a_folder_without_the_checkpoint_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no such folder"):
        read_megatron(tmp_path / "nothing")
    with pytest.raises(ConversionError, match=r"has no latest_checkpointed_iteration\.txt, .*; --ckpt-step names one"):
        read_megatron(tmp_path)
    with pytest.raises(ConversionError, match="has no checkpoint iter_0000007; there are iter_0000006"):
        read_megatron(CHECKPOINTS / "llama_gqa/tp1pp1", 7)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../secrets")
    with pytest.raises(ConversionError, match=r"names '../../secrets', which is neither an iteration nor 'release'"):
        read_megatron(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(ConversionError, match=r"has neither metadata\.json"):
        read_megatron(tmp_path)


# ---- what is refused ----


def copy_of(name: str, target: Path) -> Path:
    shutil.copytree(CHECKPOINTS / name, target)
    (checkpoint,) = target.glob("iter_*")
    return checkpoint


def test_a_missing_rank_and_one_too_many_are_named(tmp_path: Path) -> None:
    checkpoint = copy_of("llama_gqa/tp2pp2", tmp_path / "missing")
    shutil.rmtree(checkpoint / "mp_rank_01_000")
    with pytest.raises(
        ConversionError, match=r"mp_rank_01_000 is missing; .* tensor-parallel size 2 and pipeline-parallel size 2"
    ):
        read_megatron(checkpoint)
    checkpoint = copy_of("llama_gqa/tp2pp2", tmp_path / "more")
    shutil.copytree(checkpoint / "mp_rank_01_000", checkpoint / "mp_rank_02_000")
    with pytest.raises(ConversionError, match="mp_rank_02_000 is one too many"):
        read_megatron(checkpoint)
    checkpoint = copy_of("llama_gqa/tp2pp2", tmp_path / "file")
    (checkpoint / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(ConversionError, match=r"mp_rank_01_001/model_optim_rng\.pt is missing"):
        read_megatron(checkpoint)
    checkpoint = copy_of("distributed_optimizer_dp2/torch_distributed_optimizer", tmp_path / "buffers")
    (checkpoint / "mp_rank_00" / "distrib_optim.pt").unlink()
    with pytest.raises(ConversionError, match=r"distrib_optim\.pt is missing"):
        read_megatron(checkpoint)
    assert read_megatron(checkpoint, weights_only=True).training is None


def test_files_of_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    def change(rank: str, state: Any) -> None:
        if rank == "mp_rank_01":
            state["iteration"] = 7

    with pytest.raises(ConversionError, match=r"mp_rank_01/model_optim_rng\.pt: its iteration is another than that of"):
        read_megatron(changed("llama_gqa/tp2pp1", tmp_path, change))


def word_embeddings_of_the_last_stage(state: Any) -> Tensor:
    """The copy that is tied to those of the first stage."""
    model = dict(flat_names(state["model"]))
    return model.get("word_embeddings_for_head.weight", model.get("output_layer.weight"))  # type: ignore[return-value]


# The rank whose copy is changed, and those that have the original.
TIED = {
    "bert/tp1pp2": ("mp_rank_00_001", "mp_rank_00_000"),
    "before_core_gpt/tp1pp2": ("mp_rank_00_001", "mp_rank_00_000"),
    "gpt2_learned/tp2pp2": ("mp_rank_01_001", "mp_rank_00_000", "mp_rank_01_000"),
}


@pytest.mark.parametrize(("value", "apart"), [(1.0, "1"), (float("nan"), "inf")])
@pytest.mark.parametrize("name", TIED)
def test_a_copy_of_the_tied_word_embeddings_that_differs_is_refused(
    name: str, value: float, apart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last row of one rank, which is not in memory together with the others."""
    monkeypatch.setattr(shards, "AT_ONCE", 100)
    last, *first = TIED[name]

    def change(rank: str, state: Any) -> None:
        if rank == last:
            word_embeddings_of_the_last_stage(state)[-1, -1] += value

    model = read_megatron(changed(name, tmp_path, change))
    of_last, of_first = f"{tmp_path}/{last}/{FILE}", " and ".join(f"{tmp_path}/{rank}/{FILE}" for rank in first)
    text = (
        f"model.output_layer.weight of {of_last} differs from model.embedding.word_embeddings.weight of {of_first}, "
        f"by up to {apart}, and is tied to it"
    )
    with pytest.raises(ConversionError, match=f"^{re.escape(text)}"):
        read_all(model)


@pytest.mark.parametrize("tensor", ["embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc2.weight"])
def test_a_tensor_in_parts_names_the_files_of_all(tensor: str) -> None:
    files = [rank_file("llama_gqa/tp2pp1", f"mp_rank_{rank:02d}") for rank in range(2)]
    lazy = read_megatron(CHECKPOINTS / "llama_gqa/tp2pp1").tensors[f"model.{tensor}"]
    assert lazy.source == " and ".join(map(str, files))


def test_copies_are_the_same_with_nan_at_the_same_places(tmp_path: Path) -> None:
    def change(rank: str, state: Any) -> None:
        if rank.endswith("_001"):
            word_embeddings_of_the_last_stage(state)[-1, -1] = float("nan")
        else:
            dict(flat_names(state["model"]))["language_model.embedding.word_embeddings.weight"][-1, -1] = float("nan")

    found = weights(read_megatron(changed("before_core_gpt/tp1pp2", tmp_path, change)))
    assert not_finite(found["embedding.word_embeddings.weight"]) == "1 NaN"


def test_moments_of_the_tied_word_embeddings_that_differ_are_refused_with_what_leaves_them_out(tmp_path: Path) -> None:
    def change(rank: str, state: Any) -> None:
        state["optimizer"] = optimizer_that_keeps(state["model"])
        if rank.endswith("_001"):
            copy = word_embeddings_of_the_last_stage(state)
            for moments in state["optimizer"]["optimizer"]["state"].values():
                if moments["exp_avg"].shape == copy.shape:
                    moments["exp_avg"] = copy + 1.0

    copy = changed("before_core_gpt/tp1pp2", tmp_path, change)
    text = r"^optimizer\.exp_avg\.output_layer\.weight .*_001/.* differs .*; --weights-only leaves the optimizer out$"
    with pytest.raises(ConversionError, match=text):
        read_all(read_megatron(copy))
    read_all(read_megatron(copy, weights_only=True))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("bert/tp2pp1", "lm_head.dense.weight"),
        ("bert/tp2pp1", "binary_head.weight"),
        ("llama_gqa/tp2pp1", "decoder.final_layernorm.weight"),
    ],
)
def test_a_tensor_that_ranks_have_whole_must_be_the_same_on_all(name: str, tensor: str, tmp_path: Path) -> None:
    def change(rank: str, state: Any) -> None:
        if rank == "mp_rank_01":
            state["model"][tensor][-1] += 1.0

    model = read_megatron(changed(name, tmp_path, change))
    folder = re.escape(str(tmp_path))
    text = rf"{folder}/mp_rank_01/{FILE} differs from that of {folder}/mp_rank_00/{FILE}, by up to 1\b"
    with pytest.raises(ConversionError, match=rf"^model\.{re.escape(tensor)} of {text}"):
        read_all(model)


def test_a_weight_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    copy = changed("bert/tp1pp1", tmp_path, lambda _, state: state["model"].update({"output_layer.bias": "zeros"}))
    with pytest.raises(
        ConversionError, match=rf"mp_rank_00/{FILE}: output_layer\.bias is no tensor, but of the type str$"
    ):
        read_megatron(copy)


def set_argument(**values: Any) -> Callable[[str, Any], None]:
    return lambda _, state: vars(state["args"]).update(values)


@pytest.mark.parametrize(
    "values, text",
    [
        ({"num_experts": 8}, "--num-experts 8: mixture of experts is not available"),
        ({"apply_layernorm_1p": True}, "--apply-layernorm-1p: this form of the layer is not available"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p: this form of the layer"),
        ({"multi_latent_attention": True}, "--multi-latent-attention: multi-head latent attention"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable: this form of attention"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        ({"quick_geglu": True}, "--quick-geglu: this activation"),
        ({"position_embedding_type": "yarn"}, "--position-embedding-type yarn is no value of it"),
        ({"normalization": "BatchNorm"}, "--normalization BatchNorm is no value"),
        ({"num_layers": -3}, "--num-layers -3 is no value"),
        ({"num_layers": 10**9}, "--num-layers 1000000000 is no value"),
        ({"hidden_size": "wide"}, "--hidden-size wide is no value"),
        ({"window_size": [1, 2, 3]}, "--window-size of type list is no value"),
        ({"window_size": [True, 0]}, "--window-size of type list is no value"),
        ({"window_size": [1.5, 0]}, "--window-size of type list is no value"),
        ({"window_size": ["1", "0"]}, "--window-size of type list is no value"),
        ({"num_layers": 2**1100}, r"--num-layers \d{80} is no value"),
        (
            {"num_attention_heads": 7, "kv_channels": None},
            "--hidden-size 32: must be divisible by --num-attention-heads 7",
        ),
        ({"num_layers": 3}, "decoder.layers.3.input_layernorm.weight"),
        ({"ffn_hidden_size": 60}, r"linear_fc1.weight is \[104, 32\], and should be \[120, 32\]"),
        ({"add_bias_linear": True}, r"linear_qkv.bias \[64\] is missing"),
        ({"tensor_model_parallel_size": 2}, "mp_rank_01 is missing"),
    ],
)
def test_arguments_that_make_no_model_of_ours_are_refused_by_name(
    values: dict[str, Any], text: str, tmp_path: Path
) -> None:
    copy = changed("llama_gqa/tp1pp1", tmp_path, set_argument(**values))
    with pytest.raises(ConversionError, match=text):
        read_megatron(copy, weights_only=True)


STATES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "a moment of another shape": (
        "llama_gqa/tp1pp1",
        lambda state: state["optimizer"]["state"][3].update(exp_avg=torch.zeros(2, 2)),
        "that are not the",
    ),
    "too few states": (
        "llama_gqa/tp1pp1",
        lambda state: state["optimizer"]["param_groups"][0]["params"].pop(),
        "18 matrices that are not the 18 of the model|17 matrices that are not the 18",
    ),
    "states of an optimizer that is not known": (
        "llama_gqa/tp1pp1",
        lambda state: vars(state["args"]).update(optimizer="lion"),
        "--optimizer lion: its state is not known here",
    ),
    "no groups": ("llama_gqa/tp1pp1", lambda state: state["optimizer"].pop("param_groups"), "a form that is not known"),
    "several optimizers": (
        "llama_gqa/tp1pp1",
        lambda state: state.update(optimizer=[state["optimizer"]] * 2),
        "a form that is not known",
    ),
    "too few main weights": (
        "bf16_dp1/torch_bf16",
        lambda state: state["optimizer"]["fp32_from_fp16_params"][1].pop(),
        "has not a main weight for each state",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_not_of_these_weights_is_refused(name: str, tmp_path: Path) -> None:
    folder, change, text = STATES[name]
    copy = changed(folder, tmp_path, lambda _, state: change(state))
    with pytest.raises(ConversionError, match=text):
        read_megatron(copy)
    assert read_megatron(copy, weights_only=True).training is None


def test_a_value_that_would_fill_the_memory_is_not_shown(tmp_path: Path) -> None:
    """A list of a list twice, and so on: a few bytes in the file, and 2^60 words in a message."""
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    state = {"args": argparse.Namespace(num_layers=2, hidden_size=nested), "model": {}}
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(state, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(ConversionError, match="--hidden-size of type list is no value of it"):
        read_megatron(tmp_path)


def test_content_of_another_form_is_refused_and_the_file_named(tmp_path: Path) -> None:
    def change(_: str, state: Any) -> None:
        state["iteration"] = {"a": 1}

    with pytest.raises(ConversionError, match=f"^{re.escape(str(tmp_path))}: what is in it has not the form"):
        read_megatron(changed("llama_gqa/tp1pp1", tmp_path, change))


def test_an_error_names_its_source_once(tmp_path: Path) -> None:
    checkpoint = copy_of("llama_gqa/tp1pp1", tmp_path / "copy")
    path = checkpoint / "mp_rank_00" / FILE
    path.write_bytes(b"weights")
    with pytest.raises(ConversionError, match=f"^{re.escape(str(path))}: is no file of torch.save"):
        read_megatron(checkpoint)
    name = "decoder.final_layernorm.weight"
    copy = changed("gpt2_learned/tp1pp1", tmp_path / "other", lambda _, state: state["model"].pop(name))
    with pytest.raises(ConversionError) as caught:
        read_megatron(copy)
    assert str(caught.value).startswith(f"{copy}: its tensors are") and f"model.{name} [24] is miss" in str(
        caught.value
    )
    assert str(caught.value).count(str(copy)) == 1


def holding_itself(depth: int) -> dict[str, Any]:
    """A dictionary that holds itself; or, of a depth, what is in it in each other one two times."""
    nested: dict[str, Any] = {}
    nested["again"] = nested
    if depth:
        nested = {}
        for _ in range(depth):
            nested = {"one": nested, "two": nested}
    return nested


STRANGE: dict[str, Callable[[Any], object]] = {
    "an iteration without end": lambda state: state.update(iteration=float("inf")),
    "more layers than a float can be": lambda state: vars(state["args"]).update(num_layers=2**1100),
    "more digits than a page": lambda state: vars(state["args"]).update(hidden_dropout=2**1100),
    "dictionaries that hold themselves": lambda state: state["model"].update(model=holding_itself(0)),
    "dictionaries that hold each other twice": lambda state: state["model"].update(model=holding_itself(30)),
    "dictionaries in each other without end": lambda state: state["model"].update(model=holding_itself(200)),
    "a tensor named by a number": lambda state: state["model"].update({7: torch.zeros(1)}),
    "main weights that are none": lambda state: state["optimizer"].update(fp32_from_fp16_params=[[1] * 18]),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_nobody_saved_is_refused_in_words_and_soon(what: str, tmp_path: Path) -> None:
    (path,) = (CHECKPOINTS / "llama_gqa/tp1pp1").glob(f"iter_*/mp_rank_00/{FILE}")
    state = contents(path)
    STRANGE[what](state)
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(state, tmp_path / "mp_rank_00" / FILE)
    with pytest.raises(ConversionError, match=f"^{re.escape(str(tmp_path))}.*: ") as caught:
        read_megatron(tmp_path)
    assert len(str(caught.value)) < 1000


# ---- flat buffers ----


def test_parameters_lie_in_reverse_order_from_multiples_of_64_on() -> None:
    shapes = {"a": (10, 10), "b": (3,), "c": (64,), "d": (65,)}
    (bucket,) = flat_buckets(shapes, limit=None, shared_embedding=False)
    assert bucket.places == {"d": (0, (65,)), "c": (128, (64,)), "b": (192, (3,)), "a": (256, (10, 10))}
    assert bucket.length == 356


def test_a_bucket_is_closed_when_it_is_large_enough() -> None:
    shapes = {"a": (100,), "b": (30,), "c": (64,), "d": (65,)}
    first, second = flat_buckets(shapes, limit=128, shared_embedding=False)
    assert (first.places, first.length) == ({"d": (0, (65,)), "c": (128, (64,))}, 192)
    assert (second.places, second.length) == ({"b": (0, (30,)), "a": (64, (100,))}, 164)


def test_an_embedding_that_two_stages_share_has_a_bucket_of_its_own() -> None:
    shapes = {"embedding.word_embeddings.weight": (4, 4), "a": (3,), "b": (5,)}
    first, second = flat_buckets(shapes, limit=None, shared_embedding=True)
    assert first.places == {"b": (0, (5,)), "a": (64, (3,))} and first.length == 128  # up to the next parameter's start
    assert second.places == {"embedding.word_embeddings.weight": (0, (4, 4))}
    first, second = flat_buckets({"a": (3,), "output_layer.weight": (4, 4)}, limit=None, shared_embedding=True)
    assert list(first.places) == ["output_layer.weight"] and list(second.places) == ["a"]


def test_buckets_are_as_large_as_the_arguments_say() -> None:
    assert bucket_limit({"data_parallel_size": 4}, 0) is None
    overlapped = {"overlap_grad_reduce": True, "data_parallel_size": 4, "ddp_bucket_size": None}
    assert bucket_limit(overlapped, 0) == 40_000_000
    assert bucket_limit(overlapped | {"data_parallel_size": 64}, 0) == 64_000_000
    assert bucket_limit(overlapped | {"ddp_bucket_size": 100}, 0) == 100
    assert bucket_limit(overlapped, 1) is None


@pytest.mark.parametrize("name", ["llama_gqa/tp2pp1", "before_core_gpt/tp1pp2", "gpt2_learned/tp2pp2"])
@pytest.mark.parametrize("how", ["exchanged", "copied"])
def test_files_of_ranks_in_wrong_folders_are_refused(name: str, how: str, tmp_path: Path) -> None:
    """The last of these was cut by a tool, which says rank 0 for all: there only what a stage holds can tell."""
    (source,) = (CHECKPOINTS / name).glob("iter_*")
    shutil.copytree(source, tmp_path / "iter_0000001")
    files = sorted((tmp_path / "iter_0000001").glob(f"*/{FILE}"))
    if how == "exchanged" and name == "gpt2_learned/tp2pp2":
        pairs = [(files[0], files[1]), (files[2], files[3])]  # both stages of each tensor-parallel rank
    else:
        pairs = [(files[0], files[1])]
    for one, other in pairs:
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        if how == "exchanged":
            other.write_bytes(kept)
    with pytest.raises(ConversionError, match=r"(not in the folders in which they were saved|ranks have it)"):
        read_megatron(tmp_path / "iter_0000001")
