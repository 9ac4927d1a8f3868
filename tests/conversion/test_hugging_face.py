"""Models of Hugging Face become ours and come back: the same function, and the same bits."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.config.transformer import TransformerConfig
from megatron.conversion import hugging_face
from megatron.conversion.hugging_face import read_hugging_face, write_hugging_face
from megatron.conversion.portable import ConversionError, in_dtype, not_finite
from megatron.conversion.transforms import IN_HALVES, QUERY_KEY_VALUE
from tests.conversion.models import FAMILIES, batch, built, in_float64, logits_of, made, save, save_tensors
from tests.helpers.numerics import assert_all_reference, assert_bitwise, assert_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_the_other_program(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = made(family, dtype)
    folder = save(reference, tmp_path / "theirs")
    model = built(read_hugging_face(folder), dtype)
    if dtype == torch.float64:
        reference = in_float64(reference)

    tokens, positions, labels = batch()
    expected = logits_of(reference, tokens)
    assert_reference(model(tokens, positions), expected, "logits")

    F.cross_entropy(expected.transpose(1, 2), labels).backward()
    model(tokens, positions, labels=labels).mean().backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    gradients = read_hugging_face(save_tensors(theirs, folder, tmp_path / "gradients")).tensors
    ours = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    assert_all_reference(ours, {key: lazy.read() for key, lazy in gradients.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_and_writing_gives_the_same_bits_and_settings(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = save(made(family, dtype), tmp_path / "theirs")
    write_hugging_face(read_hugging_face(theirs), tmp_path / "again")
    expected, found = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "again"))
    assert sorted(found) == sorted(expected)
    for name in expected:
        assert_bitwise(found[name], expected[name], name)
    settings, written = (json.loads((folder / "config.json").read_text()) for folder in (theirs, tmp_path / "again"))
    assert written["architectures"] == settings["architectures"]
    write_hugging_face(read_hugging_face(tmp_path / "again"), tmp_path / "third")
    assert (tmp_path / "third" / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "baichuan2"])
def test_transformers_reads_what_is_written(family: str, tmp_path: Path) -> None:
    reference = made(family)
    write_hugging_face(read_hugging_face(save(reference, tmp_path / "theirs")), tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(reference)
    expected = reference.state_dict()
    for name, tensor in again.state_dict().items():
        assert_bitwise(tensor, expected[name], name)
    tokens, _, _ = batch()
    assert_bitwise(logits_of(again.eval(), tokens), logits_of(reference.eval(), tokens), "logits")
    assert again.generation_config.eos_token_id == 2


@pytest.mark.parametrize("family", ["llama 3.2", "llama with biases", "qwen2", "qwen3"])
def test_neighbours_that_turn_together_are_put_into_halves(family: str, tmp_path: Path) -> None:
    """With --rotary-interleaved the same weights are another model, which theirs computes with its rows in order."""
    model = read_hugging_face(save(made(family, torch.float64), tmp_path / "theirs"))
    model = replace(model, config=replace(model.config, rotary_interleaved=True))
    write_hugging_face(model, tmp_path / "ours")
    tokens, positions, _ = batch()
    reference = in_float64(AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval())
    expected = built(model, torch.float64)(tokens, positions)
    assert_reference(logits_of(reference, tokens), expected, "logits")
    again = read_hugging_face(tmp_path / "ours")
    assert again.config == replace(model.config, rotary_interleaved=False)
    assert_reference(built(again, torch.float64)(tokens, positions), expected, "logits")


def test_rows_of_neighbours_are_put_into_halves_and_back_bit_for_bit(tmp_path: Path) -> None:
    """2 heads of width 6, of which 4 channels turn, over 1 group."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=12,
        num_attention_heads=2,
        group_query_attention=True,
        position_embedding_type="rope",
        rotary_percent=0.7,
        rotary_interleaved=True,
    )
    order = torch.tensor([0, 2, 1, 3, 4, 5])
    rows = torch.arange(4 * 6)
    for ours in (rows, rows[:, None].expand(-1, 3)):
        theirs = QUERY_KEY_VALUE.split(ours, config)
        for part, expected in zip(theirs, (torch.cat((order, 6 + order)), 12 + order, 18 + torch.arange(6))):
            assert_bitwise(part if part.dim() == 1 else part[:, 0].contiguous(), expected)
        assert_bitwise(QUERY_KEY_VALUE.join(theirs, config), ours.contiguous())
    (norm,) = IN_HALVES.split(rows[:6], config)
    assert_bitwise(norm, order)
    assert_bitwise(IN_HALVES.join([norm], config), rows[:6])


def test_a_tied_head_is_not_written_and_counted_once(tmp_path: Path) -> None:
    theirs = save(made("llama 3.2"), tmp_path / "theirs")
    write_hugging_face(read_hugging_face(theirs), tmp_path / "ours")
    assert "lm_head.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["tie_word_embeddings"] is True
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.num_parameters() == sum(lazy.read().numel() for lazy in read_hugging_face(theirs).tensors.values())


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    folder = save(made("llama 3.2"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    copied = save_tensors(tensors | {"lm_head.weight": embedding.clone()}, folder, tmp_path / "copied")
    assert "model.output_layer.weight" not in read_hugging_face(copied).tensors
    other = save_tensors(tensors | {"lm_head.weight": embedding + 1}, folder, tmp_path / "other")
    with pytest.raises(ConversionError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        read_hugging_face(other)


def test_a_tied_head_with_the_same_nan_is_the_embedding(tmp_path: Path) -> None:
    folder = save(made("gpt2"), tmp_path / "theirs")
    words = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    words[3, 5] = float("nan")
    found = read_hugging_face(broken(folder, **{"transformer.wte.weight": words, "lm_head.weight": words.clone()}))
    lazy = found.tensors["model.embedding.word_embeddings.weight"]
    assert not_finite(lazy.read()) == "1 NaN"
    assert lazy.source == f"transformer.wte.weight of {folder / 'model.safetensors'}"


def test_rows_of_the_projection_go_by_query_group(tmp_path: Path) -> None:
    """4 heads of width 12 over 2 groups: q0 q1 k0 v0, q2 q3 k1 v1."""
    folder = save(made("qwen2"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    for part, first in (("q", 0), ("k", 100), ("v", 200)):
        name = f"model.layers.0.self_attn.{part}_proj"
        for kind in ("weight", "bias"):
            values = tensors[f"{name}.{kind}"]
            heads = torch.arange(values.shape[0]) // 12 + first
            tensors[f"{name}.{kind}"] = heads.float().view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    model = read_hugging_face(save_tensors(tensors, folder, tmp_path / "marked"))
    for kind in ("weight", "bias"):
        rows = model.tensors[f"model.decoder.layers.0.self_attention.linear_qkv.{kind}"].read()
        rows = rows[:, 0] if kind == "weight" else rows
        assert rows[::12].tolist() == [0, 1, 100, 200, 2, 3, 101, 201]


@pytest.mark.parametrize(
    ("gate", "up", "held"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16, torch.float64, torch.float64),
    ],
)
def test_what_becomes_one_tensor_is_of_the_dtype_that_holds_it_all(
    gate: torch.dtype, up: torch.dtype, held: torch.dtype, tmp_path: Path
) -> None:
    folder = save(made("llama 2"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    for name, dtype in (("gate", gate), ("up", up)):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"] = tensors[f"model.layers.1.mlp.{name}_proj.weight"].to(dtype)
    model = read_hugging_face(save_tensors(tensors, folder, tmp_path / "mixed"))
    key = "model.decoder.layers.1.mlp.linear_fc1.weight"
    assert model.tensors[key].dtype == held
    parts = [tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert_bitwise(model.tensors[key].read(), torch.cat([part.to(held) for part in parts]), key)
    single = in_dtype(model, torch.float32).tensors[key]
    assert_bitwise(single.read(), torch.cat([part.float() for part in parts]), key)


def test_a_model_without_its_head_and_tables_of_masks_are_read(tmp_path: Path) -> None:
    """The files of the first GPT-2: names without prefix, and a mask of [1, 1, positions, positions] in each layer."""
    folder = save(made("gpt2"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 40, 40).tril() for layer in range(2)}
    found = read_hugging_face(save_tensors(bare | masks, folder, tmp_path / "bare"))
    expected = read_hugging_face(folder)
    assert found.tensors.keys() == expected.tensors.keys()
    for key, lazy in expected.tensors.items():
        assert_bitwise(found.tensors[key].read(), lazy.read(), key)


def test_large_models_are_written_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = made("mistral")
    model = read_hugging_face(save(reference, tmp_path / "theirs"))
    monkeypatch.setattr(hugging_face, "MAX_SHARD_BYTES", 40_000)
    write_hugging_face(model, tmp_path / "ours")
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for file in files for name, tensor in load_file(tmp_path / "ours" / file).items()}
    assert sorted(index["weight_map"]) == sorted(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert all((tmp_path / "ours" / file).stat().st_size < 41_000 for file in files)
    again = read_hugging_face(tmp_path / "ours")
    for key, lazy in model.tensors.items():
        assert_bitwise(again.tensors[key].read(), lazy.read(), key)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, tensor in theirs.state_dict().items():
        assert_bitwise(tensor, reference.state_dict()[name], name)


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path) -> None:
    folder = save(made("mistral"), tmp_path / "theirs")
    model = read_hugging_face(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConversionError, match=r"model\.safetensors cannot be read"):
        write_hugging_face(model, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    model = read_hugging_face(save(made("mistral"), tmp_path / "theirs"))
    with pytest.raises(ConversionError, match="exists and is not empty"):
        write_hugging_face(model, tmp_path / "theirs")
    (tmp_path / "empty").mkdir()
    write_hugging_face(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def broken(folder: Path, **tensors: Any) -> Path:
    """The folder with some of its tensors in another form; None for none."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
    save_file(kept, file)
    return folder


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NORM: None}, r"model\.norm\.weight \[48\] is missing"),
        ({NORM: torch.ones(47)}, r"model\.norm\.weight is \[47\], and should be \[48\]"),
        ({"model.norm.bias": torch.ones(48)}, r"model\.norm\.bias \[48\] is none of it"),
        ({NORM: torch.ones(48, dtype=torch.int32)}, r"model\.norm\.weight is of I32; weights in F64, F32"),
        ({NORM: torch.ones(48).to(torch.float8_e4m3fn)}, r"model\.norm\.weight is of F8_E4M3"),
    ],
)
def test_tensors_that_are_not_those_of_the_model(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=message):
        read_hugging_face(broken(save(made("llama 2"), tmp_path / "theirs"), **tensors))


@pytest.mark.parametrize("file", ["../theirs/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", 7, "x.bin"])
def test_an_index_may_name_files_of_its_folder_only(file: object, tmp_path: Path) -> None:
    folder = save(made("llama 2"), tmp_path / "theirs")
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match="must be a plain name like model-00001-of-00002"):
        read_hugging_face(folder)


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    folder = save(made("llama 2"), tmp_path / "theirs")
    file = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / file)
    names = load_file(folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    assert read_hugging_face(folder).tensors
    for places, message in (
        (dict.fromkeys([*names, "more"], file), rf"{file} lacks more, which model\.safetensors\.index"),
        (dict.fromkeys([name for name in names if name != NORM], file), rf"{file} holds {NORM}, and model"),
        (dict.fromkeys(names, "other.safetensors"), r"other\.safetensors cannot be read: there is no such file"),
        ({}, "weight_map is no object with names of files"),
        ([], "weight_map is no object with names of files"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(ConversionError, match=message):
            read_hugging_face(folder)


def header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


ATTACKS = {
    "empty": b"",
    "a header that is longer than the file": (2**40).to_bytes(8, "little") + b"{}",
    "a header cut short": header({NORM: {"dtype": "F32", "shape": [48], "data_offsets": [0, 192]}})[:20],
    "no JSON": (4).to_bytes(8, "little") + b"oops",
    "an absurd shape": header({NORM: {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}) + b"abcd",
    "data beyond the file": header({NORM: {"dtype": "F32", "shape": [48], "data_offsets": [0, 192]}}) + b"abcd",
    "overlapping data": header(
        {
            NORM: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "other": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        }
    )
    + b"abcd",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_crafted_files_are_refused(attack: str, tmp_path: Path) -> None:
    folder = save(made("llama 2"), tmp_path / "theirs")
    (folder / "model.safetensors").write_bytes(ATTACKS[attack])
    with pytest.raises(ConversionError, match=r"model\.safetensors cannot be read"):
        read_hugging_face(folder)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = save(made("llama 2"), tmp_path / "theirs")
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "pipe.safetensors")}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(folder / "pipe.safetensors")
    with pytest.raises(ConversionError, match=r"pipe\.safetensors cannot be read: there is no such file"):
        read_hugging_face(folder)


def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = save(made("llama 2"), tmp_path / "theirs")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin, a pickle, .*save_pretrained"):
        read_hugging_face(folder)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is no folder: nothing is downloaded"):
        read_hugging_face(Path("meta-llama/Llama-3.2-1B"))
    with pytest.raises(ConversionError, match=r"config\.json: No such file"):
        read_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConversionError, match=r"config\.json is damaged: not JSON"):
        read_hugging_face(tmp_path)
