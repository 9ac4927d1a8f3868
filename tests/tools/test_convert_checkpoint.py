"""The converter as a user starts it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from inspect import signature
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.conversion.forms import FORMS, refuse_other_form
from megatron.conversion.hugging_face import read_hugging_face
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.native import read_native, write_native
from megatron.conversion.portable import ConversionError, in_dtype
from megatron.conversion.self_check import (
    SAME_WEIGHTS,
    Side,
    bound_of,
    compare,
    fixed_tokens,
    layerwise_logits,
    logits_of,
)
from tests.conversion.models import batch, built, made, save, save_tensors
from tests.conversion.models import logits_of as hugging_face_logits
from tests.helpers.numerics import assert_bitwise, assert_parity, assert_reference
from tests.helpers.tools import names, names_of_tool, run

CONVERTER = "convert_checkpoint"


def test_from_hugging_face_and_back_with_a_check_of_both(tmp_path: Path) -> None:
    theirs = save(made("qwen2 tied with windows"), tmp_path / "theirs")
    said = run(CONVERTER, "--from", "hf", "--to", "native", theirs, tmp_path / "native")
    assert "parameters in float32: 2 layers, hidden 48, 4 heads (2 of keys and values)" in said
    assert f"{theirs} computed by transformers" in said
    assert f"{tmp_path / 'native'} computed by this program" in said
    assert "self-check: largest difference" in said

    back = ("--from", "native", "--to", "hf", "--dtype", "bfloat16", "--no-self-check")
    assert "self-check" not in run(CONVERTER, *back, tmp_path / "native", tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    found = load_file(tmp_path / "ours" / "model.safetensors")
    for name, tensor in load_file(theirs / "model.safetensors").items():
        assert_bitwise(found[name], tensor.bfloat16(), name)


def test_what_transformers_lacks_is_computed_by_this_program(tmp_path: Path) -> None:
    reference = made("baichuan2")
    theirs = save(reference, tmp_path / "theirs")
    tokens = fixed_tokens(61, 40)
    logits, program = logits_of(Side(form="hf", folder=theirs, options={}), tokens)
    assert program == "this program, since transformers has no baichuan"
    assert_reference(logits["logits"], hugging_face_logits(reference, tokens).detach(), "logits")


def test_a_model_that_computes_something_else_is_found_out(tmp_path: Path) -> None:
    """As when queries, keys and values were stacked in another order: the same numbers in other rows."""
    theirs = save(made("llama 2"), tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    rolled = tensors | {name: tensors[name].roll(12, dims=0)}
    write_native(read_hugging_face(save_tensors(rolled, theirs, tmp_path / "wrong")), tmp_path / "native")
    sides = (Side(form="hf", folder=theirs, options={}), Side(form="native", folder=tmp_path / "native", options={}))
    expected, found = (logits_of(side, fixed_tokens(61, 40))[0]["logits"] for side in sides)
    comparison = compare(expected, found, SAME_WEIGHTS)
    assert not comparison.agrees
    assert comparison.divergence > 1e-4
    assert compare(expected, expected, SAME_WEIGHTS).agrees


def test_weights_that_were_rounded_may_differ_by_that(tmp_path: Path) -> None:
    model = read_hugging_face(save(made("llama 2"), tmp_path / "theirs"))
    assert bound_of(model, model) == bound_of(model, in_dtype(model, torch.float64)) == SAME_WEIGHTS
    assert bound_of(model, in_dtype(model, torch.bfloat16)) == 16 * 2**-7
    assert bound_of(model, in_dtype(model, torch.float16)) == 16 * 2**-10


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_number_that_the_dtype_does_not_reach_is_refused(stored: torch.dtype, tmp_path: Path) -> None:
    theirs = save(made("llama 2", stored), tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors")
    tensors["model.norm.weight"][3] = -70000.0
    large = save_tensors(tensors, theirs, tmp_path / "large")
    how = ("--from", "hf", "--to", "native", "--no-self-check", "--dtype")
    said = run(CONVERTER, *how, "float16", large, tmp_path / "native", status=2)
    assert "model.decoder.final_layernorm.weight has numbers beyond 65504, the largest of float16" in said
    assert names(tmp_path) == ["large", "theirs"]
    run(CONVERTER, *how, "bfloat16", large, tmp_path / "native")


def test_logits_layer_by_layer_are_those_of_the_whole_model(tmp_path: Path) -> None:
    for family in ("gpt2", "llama 3.2", "baichuan2"):
        model = read_hugging_face(save(made(family), tmp_path / family))
        tokens, positions, _ = batch()
        assert_parity(layerwise_logits(model, tokens)["logits"], built(model, torch.float32)(tokens, positions), family)


def test_numbers_that_are_none_do_not_agree() -> None:
    good, bad = torch.zeros(1, 2, 5), torch.full((1, 2, 7), float("nan"))
    assert compare(good, good, 1e-4).agrees
    assert not compare(good, bad, 1e-4).agrees
    assert not compare(bad, good, 1e-4).agrees


def test_what_is_no_finite_number_on_both_sides_is_no_difference() -> None:
    one = torch.tensor([[1.0, float("nan"), float("inf")], [2.0, 3.0, 4.0]])
    same = compare(one, one.clone(), 1e-4)
    assert same.agrees and (same.difference, same.scale) == (0.0, 4.0)
    assert str(same).endswith("; 2 of 6 are no finite numbers in both")
    for place, value in (((0, 0), float("nan")), ((0, 1), 0.0), ((0, 2), float("-inf")), ((1, 0), 2.1)):
        other = one.clone()
        other[place] = value
        assert not compare(one, other, 1e-4).agrees, place
    nothing = compare(one[:, 1:2][:1], one[:, 1:2][:1], 1e-4)
    assert not nothing.agrees and not nothing.is_conclusive
    assert str(nothing) == "none of the 1 logits of either is a finite number, and nothing is compared"


def test_numbers_that_are_not_finite_are_counted_by_tensor_and_place(tmp_path: Path) -> None:
    theirs = save(made("gpt2"), tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors")
    tensors["transformer.wte.weight"][60, :2] = float("nan")
    tensors["transformer.ln_f.bias"][7] = float("inf")
    folder = save_tensors(tensors, theirs, tmp_path / "wrong")
    said = run(CONVERTER, "--from", "hf", "--to", "native", "--no-self-check", folder, tmp_path / "native")
    assert f"{folder} holds numbers that are not finite, and so does {tmp_path / 'native'}:\n" in said
    for ours, count, name in (
        ("embedding.word_embeddings.weight", "2 NaN", "transformer.wte.weight"),
        ("decoder.final_layernorm.bias", "1 infinite", "transformer.ln_f.bias"),
    ):
        assert f"  model.{ours} holds {count}, read from {name} of {folder / 'model.safetensors'}\n" in said


def test_a_tensor_on_its_way_says_where_it_is_from(tmp_path: Path) -> None:
    model = read_hugging_face(save(made("gpt2"), tmp_path / "theirs"))
    sources = {key: lazy.source for key, lazy in model.tensors.items()}
    assert all(sources.values())
    watched = names_of_tool(CONVERTER)["watched"](model, None, [])  # no tensor is read, so that no bar moves
    for each in (watched, in_dtype(model, torch.bfloat16)):
        assert {key: lazy.source for key, lazy in each.tensors.items()} == sources


# The tokens are a pipe: the process that computes a side waits for them, until somebody writes.
_WAITING_CHECK = """
import os, sys
from pathlib import Path
import torch
from megatron.conversion import self_check
self_check.np.save = lambda path, values: os.mkfifo(path)
side = self_check.Side(form="hf", folder=Path("theirs"), options={})
self_check.self_check(side, side, torch.zeros(1, 1), 1.0, print)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_converter_that_is_ended_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _WAITING_CHECK], env={**os.environ, "TMPDIR": str(tmp_path)})
    while not (pipes := list(tmp_path.glob("*/tokens.npy"))):
        assert parent.poll() is None
        time.sleep(0.05)
    writer = os.open(pipes[0], os.O_WRONLY)  # waits for the child to read
    try:
        parent.send_signal(number)
        parent.wait()
        poll = select.poll()
        poll.register(writer, 0)
        assert poll.poll(20_000) == [(writer, select.POLLERR)]  # nobody reads any more
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "hf", "--to", "native", "--true-vocab-size", "9"), "--true-vocab-size belongs to --from megatron"),
        (("--from", "hf", "--to", "native", "--ckpt-step", "0"), "--ckpt-step belongs to --from native or megatron"),
        (
            ("--from", "hf", "--to", "native", "--hf-family", "gpt2"),
            "--hf-family belongs to --to hf, and",
        ),
        (("--from", "hf", "--to", "hf", "--target-tensor-parallel-size", "2"), "belongs to --to megatron"),
        (
            ("--from", "hf", "--to", "megatron", "--target-tensor-parallel-size", "0"),
            "-size: must be at least 1, not 0",
        ),
        (("--from", "hf", "--to", "hf", "--dtype", "int8"), "--dtype"),
        (("--from", "hf", "--to", "hf", "--dtpye", "float32"), "--dtype"),
        (("--from", "hf", "--to", "hf", "--hf-family", "mistral"), "the model is no mistral"),
        (("--from", "native", "--to", "hf"), "looks like a model of Hugging Face, --from hf"),
        (("--from", "megatron", "--to", "hf"), "looks like a model of Hugging Face, --from hf"),
    ],
)
def test_errors_are_one_line_with_what_to_do(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    theirs = save(made("gpt2"), tmp_path / "theirs")
    assert message in run(CONVERTER, *arguments, theirs, tmp_path / "ours", status=2)
    assert names(tmp_path) == ["theirs"]


def test_a_wrong_form_is_told_what_the_folder_looks_like(tmp_path: Path) -> None:
    model = read_hugging_face(save(made("llama 2"), tmp_path / "hf"))
    for name, form in FORMS.items():
        if name != "hf":
            form.write(model, tmp_path / name)
    ours = next((tmp_path / "native").glob("iter_*"))
    theirs = next((tmp_path / "megatron").glob("*/mp_rank_*")).parent
    for folder, name in ((ours, "native"), (theirs, "megatron"), *((tmp_path / name, name) for name in FORMS)):
        refuse_other_form(FORMS[name], folder)
        for other in FORMS.keys() - {name}:
            with pytest.raises(ConversionError, match=rf"{FORMS[name].means}, --from {name}$"):
                refuse_other_form(FORMS[other], folder)


def test_a_folder_of_no_form_is_left_to_its_reader(tmp_path: Path) -> None:
    for form in FORMS.values():
        refuse_other_form(form, tmp_path)
        refuse_other_form(form, tmp_path / "nowhere")


def test_a_form_is_told_what_its_reader_and_its_writer_take() -> None:
    for form in FORMS.values():
        for function, keywords in ((form.read, form.reading), (form.write, form.writing)):
            assert set(keywords.values()) <= set(signature(function).parameters), form.name


def test_nothing_is_written_over(tmp_path: Path) -> None:
    theirs = save(made("gpt2"), tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    assert "exists and is not empty" in run(CONVERTER, "--from", "hf", "--to", "hf", theirs, theirs, status=2)
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before


def test_through_megatron_lm_and_back(tmp_path: Path) -> None:
    """Cut over 2 x 2 ranks; the weights come back bit by bit, without the rows that are only padding."""
    model = read_hugging_face(save(made("llama 2"), tmp_path / "theirs"))
    write_native(model, tmp_path / "native")
    sizes = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")
    padding = ("--target-make-vocab-size-divisible-by", "8", "--target-transformer-impl", "local")
    there = ("--from", "native", "--to", "megatron", *sizes, *padding, "--no-self-check")
    run(CONVERTER, *there, tmp_path / "native", tmp_path / "megatron")
    assert read_megatron(tmp_path / "megatron").vocab_size == 64
    back = ("--from", "megatron", "--to", "native", "--true-vocab-size", "61", "--no-self-check")
    run(CONVERTER, *back, tmp_path / "megatron", tmp_path / "again")
    again = read_native(tmp_path / "again")
    assert again.vocab_size == 61
    for key, lazy in model.tensors.items():
        assert_bitwise(again.tensors[key].read(), lazy.read(), key)
