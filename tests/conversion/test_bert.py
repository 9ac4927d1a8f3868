"""BERT between Hugging Face, checkpoints of ours and those of Megatron-LM: the same function, and the same bits."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, BertForPreTraining

from megatron.config import parse_arguments
from megatron.config.bert import BertConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.problems import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.conversion.families import family_of_file
from megatron.conversion.hugging_face import read_hugging_face, write_hugging_face
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.megatron_lm.writer import write_megatron
from megatron.conversion.native import read_native, write_native
from megatron.conversion.portable import ConversionError, PortableModel, build_chunk
from megatron.conversion.self_check import SAME_WEIGHTS, Side, compare, fixed_tokens, layerwise_logits, logits_of
from megatron.conversion.tokenizer_files import settings_of
from megatron.model.init import initialize_weights
from megatron.training.wanted_checkpoint import saved_config
from tests.conversion.bert_models import batch, computed, our_bert, saved_bert, their_bert
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
from tests.conversion.ranks import through_ranks
from tests.conversion.test_megatron_reader import (
    FP32,
    TANH_GELU,
    assert_same_tensors,
    optimizer_that_keeps,
    set_argument,
)
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import assert_bitwise, assert_reference
from tests.helpers.tools import run
from tests.model.bert import BertInput

LAYOUTS = ("bert/tp1pp1", "bert/tp1pp2", "bert/tp2pp1")


def assert_same_files(one: Path, other: Path) -> None:
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert sorted(found) == sorted(expected)
    for name in expected:
        assert_bitwise(found[name], expected[name], name)


# ---- Hugging Face ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_at_real_tokens_and_of_pairs_are_those_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    reference, given = their_bert(dtype=dtype), batch()
    reference.save_pretrained(tmp_path / "theirs")
    found = computed(read_hugging_face(tmp_path / "theirs"), given, dtype)
    with torch.no_grad():
        expected = reference(given.tokens, given.is_real.long(), given.token_types)
    assert found.pairs is not None
    assert_reference(found.tokens[given.is_real], expected.prediction_logits[given.is_real], "logits")
    assert_reference(found.pairs, expected.seq_relationship_logits, "logits of pairs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reading_and_writing_gives_the_same_bits_and_transformers_reads_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = saved_bert(tmp_path / "theirs", dtype=dtype)
    model = read_hugging_face(theirs)
    assert model.notes == ()
    write_hugging_face(model, tmp_path / "ours")
    assert_same_files(theirs, tmp_path / "ours")
    again, loading = AutoModelForPreTraining.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(again) is BertForPreTraining
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    settings, written = (json.loads((folder / "config.json").read_text()) for folder in (theirs, tmp_path / "ours"))
    assert {key: written[key] for key in settings if key in written} == {
        key: value for key, value in settings.items() if key in written
    }
    assert not (tmp_path / "ours" / "generation_config.json").exists()


def test_to_two_by_two_ranks_and_back_gives_the_same_bits(tmp_path: Path) -> None:
    """Over a vocabulary of 61 tokens, which two ranks pad."""
    theirs = saved_bert(tmp_path / "theirs")
    write_native(read_hugging_face(theirs), tmp_path / "native")
    run_distributed(through_ranks, 4, tmp_path / "native", tmp_path / "saved")
    write_hugging_face(read_native(tmp_path / "saved"), tmp_path / "ours")
    assert_same_files(theirs, tmp_path / "ours")


def test_the_names_of_the_first_files_are_read(tmp_path: Path) -> None:
    """Norms of `gamma` and `beta`, copies of what is tied, and whole numbers that are no weights."""
    folder = saved_bert(tmp_path / "theirs")
    expected = read_all(read_hugging_face(folder))
    tensors = load_file(folder / "model.safetensors")
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for now, before in ends.items():
        tensors = {name.replace(now, before): tensor for name, tensor in tensors.items()}
    copies = {"decoder.weight": "bert.embeddings.word_embeddings.weight", "decoder.bias": "cls.predictions.bias"}
    tensors |= {f"cls.predictions.{copy}": tensors[original].clone() for copy, original in copies.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(tensors, folder / "model.safetensors")
    found = read_all(read_hugging_face(folder))
    assert sorted(found) == sorted(expected)
    for key, tensor in expected.items():
        assert_bitwise(found[key], tensor, key)
    save_file(tensors | {"cls.predictions.decoder.bias": torch.zeros(61)}, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"cls\.predictions\.decoder\.bias differs from cls\.predictions\.bias"):
        read_hugging_face(folder)


@pytest.mark.parametrize(
    ("architecture", "lacking", "drawn"),
    [
        ("BertForMaskedLM", ["the first token (pooler)", "pairs of segments"], ("pooler.", "binary_head.")),
        ("BertModel", ["masked tokens", "pairs of segments"], ("lm_head.", "output_layer.", "binary_head.")),
    ],
)
def test_a_head_that_the_files_lack_is_that_of_a_new_training(
    architecture: str, lacking: list[str], drawn: tuple[str, ...], tmp_path: Path
) -> None:
    model = read_hugging_face(saved_bert(tmp_path / "theirs", architecture))
    assert [note.partition("no head for ")[2].partition(":")[0] for note in model.notes] == lacking
    assert model.bert == BertConfig(binary_head=True)
    new = build_chunk(model.config, model.bert, model.vocab_size, range(2), device="cpu")
    initialize_weights(new, 1234)
    whole = read_hugging_face(saved_bert(tmp_path / "whole"))
    given = read_all(whole)
    begun = dict(new.named_parameters())
    for name, tensor in weights(model).items():
        if name.startswith(drawn):
            assert_bitwise(tensor, begun[name].detach(), name)
        else:
            assert tensor.shape == given[f"model.{name}"].shape and not torch.equal(tensor, begun[name])


def test_a_head_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    folder = saved_bert(tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    del tensors["cls.predictions.transform.dense.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"cls\.predictions\.transform\.dense\.bias \[48\] is missing"):
        read_hugging_face(folder)


def test_a_head_for_pairs_without_the_pooler_that_it_is_built_on_is_refused(tmp_path: Path) -> None:
    folder = saved_bert(tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "pooler" not in name}, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"bert\.pooler\.dense\.weight \[48, 48\] is missing"):
        read_hugging_face(folder)


def post_norm(*, binary_head: bool, **settings: Any) -> PortableModel:
    how = {"layernorm_placement": "post", "activation": "gelu", "norm_epsilon": 1e-12}
    return our_bert(binary_head=binary_head, **(how | settings))


def test_a_model_without_pairs_has_one_token_type_of_zeros_there(tmp_path: Path) -> None:
    model, given = post_norm(binary_head=False), batch()
    write_hugging_face(model, tmp_path / "ours")
    reference, loading = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    with torch.no_grad():
        expected = reference.eval()(given.tokens, given.is_real.long()).logits
    found = computed(model, given, torch.float64)
    assert found.pairs is None
    assert_reference(found.tokens[given.is_real], expected[given.is_real], "logits")
    again = read_hugging_face(tmp_path / "ours")
    assert again.bert == model.bert and again.notes == ()
    assert_same_tensors(again, model)

    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    tensors["bert.embeddings.token_type_embeddings.weight"][0, 3] = 1.0
    save_file(tensors, tmp_path / "ours" / "model.safetensors")
    with pytest.raises(ConversionError, match=r"token_type_embeddings\.weight is added to every token"):
        read_hugging_face(tmp_path / "ours")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layernorm_placement": "pre"}, "the nearest is bert, which differs:\n  --layernorm-placement: pre, and post"),
        ({"activation": "gelu_tanh"}, "--activation: gelu_tanh, and gelu in bert"),
        ({"position_embedding_type": "rope"}, "--position-embedding-type: rope, and learned_absolute in bert"),
        ({"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights: True, and False in"),
    ],
)
def test_what_is_no_bert_of_theirs_is_refused_with_what_differs(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match=message):
        write_hugging_face(post_norm(binary_head=True, **settings), tmp_path / "ours")
    assert not list(tmp_path.iterdir())


def test_a_gpt_is_no_bert_and_a_bert_is_no_gpt(tmp_path: Path) -> None:
    with pytest.raises(
        ConversionError, match="the model is no gpt2, which differs: the model is a BERT, and gpt2 is a"
    ):
        write_hugging_face(post_norm(binary_head=True), tmp_path / "ours", family_name="gpt2")
    gpt = replace(post_norm(binary_head=False), bert=None)
    with pytest.raises(ConversionError, match="the model is no bert, which differs: the model is a GPT, and bert is a"):
        write_hugging_face(gpt, tmp_path / "ours", family_name="bert")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu_new"}, 'hidden_act "gelu_new" is not supported for this family; "gelu" is'),
        ({"is_decoder": True}, "is_decoder true is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention true is not supported"),
        ({"position_embedding_type": "relative_key"}, 'position_embedding_type "relative_key" is not supported'),
        ({"tie_word_embeddings": False}, "tie_word_embeddings false is not supported"),
        ({"type_vocab_size": 3}, "type_vocab_size 3 is not supported; 2 is, for pairs of segments, or 1, for none"),
        ({"embedding_size": 128}, "embedding_size 128 is a setting that this program does not know"),
    ],
)
def test_settings_that_make_another_model_are_refused(changes: dict[str, Any], message: str) -> None:
    values = their_bert().config.to_dict() | {"architectures": ["BertForPreTraining"]} | changes
    with pytest.raises(UserError, match=message):
        family_of_file(values, "config.json").read(values, "config.json")


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c"]


def test_a_vocabulary_of_words_goes_along(tmp_path: Path) -> None:
    theirs = saved_bert(tmp_path / "theirs")
    (theirs / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (theirs / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    config = write_native(read_hugging_face(theirs), tmp_path / "native")
    assert (config.tokenizer.tokenizer_type, config.tokenizer.padded_vocab_size) == ("BertWordPieceCase", 61)
    assert config.tokenizer.vocab_file == str(tmp_path / "native" / "tokenizer" / "vocab.txt")
    config.validate(purpose="model")
    write_hugging_face(read_native(tmp_path / "native"), tmp_path / "ours")
    for name in ("vocab.txt", "tokenizer_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (theirs / name).read_bytes()
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["pad_token_id"] == 0


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_a_vocabulary_alone_is_written_with_what_it_is_used_as(kind: str, tmp_path: Path) -> None:
    """As a training keeps it, whose flag says whether it is of small letters alone."""
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    config = TokenizerConfig(tokenizer_type=cast(Any, kind), vocab_file=str(tmp_path / "vocab.txt"))
    model = post_norm(binary_head=True)
    settings = settings_of(config)
    files = {"vocab.txt": tmp_path / "vocab.txt"}
    write_hugging_face(replace(model, tokenizer_files=files, tokenizer_settings=settings), tmp_path / "ours")
    lower_case = AutoTokenizer.from_pretrained(tmp_path / "ours").tokenize("a B") == ["a", "b"]
    assert lower_case == (kind == "BertWordPieceLowerCase")
    assert write_native(read_hugging_face(tmp_path / "ours"), tmp_path / "native").tokenizer.tokenizer_type == kind
    assert read_native(tmp_path / "native").tokenizer_settings == {}  # its file goes along now


# ---- checkpoints of Megatron-LM ----


def input_of(expected: dict[str, Tensor]) -> BertInput:
    """What Megatron-LM was given. Its labels are -1 where there is no loss."""
    return BertInput(
        tokens=expected["tokens"],
        token_types=expected["types"],
        is_real=expected["padding_mask"].bool(),
        labels=expected["labels"].clamp(min=0),
        sentence_labels=expected["is_random"],
        loss_mask=expected["loss_mask"].bool(),
    )


def assert_within(found: Tensor, expected: Tensor, bound: float) -> None:
    difference = float((found - expected).abs().max())
    assert difference <= bound * float(expected.abs().max()), difference


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_in_float64_are_those_that_megatron_computed(name: str) -> None:
    """At tensor-parallel size 2 there are 8 more rows of padding, which have logits of their own."""
    expected = arrays(OUTPUTS / "bert" / "outputs_fp64.npz")
    given = input_of(expected)
    found = computed(read_megatron(CHECKPOINTS / name), given, torch.float64)
    assert found.pairs is not None
    assert_within(found.tokens[given.is_real][:, :184], expected["logits"][given.is_real], TANH_GELU)
    assert_within(found.pairs, expected["binary_logits"], TANH_GELU)


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_losses_are_those_that_megatron_computed(name: str) -> None:
    """Each layout over the rows that it has saved, which took part in its softmax."""
    inputs = arrays(OUTPUTS / "bert" / "outputs_fp64.npz")
    exact = name == "bert/tp1pp1"
    expected = inputs if exact else arrays(CHECKPOINTS / "bert" / f"outputs_{name.partition('/')[2]}.npz")
    given, bound = input_of(inputs), TANH_GELU if exact else FP32
    labels = {"labels": given.labels, "sentence_labels": given.sentence_labels}
    dtype = torch.float64 if exact else torch.float32
    found = computed(read_megatron(CHECKPOINTS / name), given, dtype, **labels)
    assert found.pairs is not None
    assert_within(found.tokens[given.loss_mask], expected["per_token_loss"][given.loss_mask], bound)
    assert_within(found.pairs.mean(), expected["sop_loss"], bound)
    assert_within(found.tokens[given.loss_mask].mean() + found.pairs.mean(), expected["loss"], bound)


def test_logits_before_core_are_those_that_megatron_computed() -> None:
    expected = arrays(OUTPUTS.with_name("models_v2.6") / "bert" / "outputs_tp1pp1.npz")
    real, none = expected["padding_mask"].bool(), torch.zeros(0)
    given = BertInput(expected["tokens"], expected["types"], real, none, none, none)
    model = read_megatron(CHECKPOINTS / "before_core_bert/tp1pp1")
    assert (model.vocab_size, model.seq_length, model.bert) == (168, 28, BertConfig())
    found = computed(model, given, torch.float32)
    assert found.pairs is not None
    assert_within(found.tokens[real], expected["logits"][real], 2 * FP32)
    assert_within(found.pairs, expected["binary_logits"], 2 * FP32)


def test_every_layout_has_the_same_weights() -> None:
    one = read_megatron(CHECKPOINTS / LAYOUTS[0], true_vocab_size=180)
    for name in LAYOUTS[1:]:
        found = read_megatron(CHECKPOINTS / name, true_vocab_size=180)
        assert (found.config, found.bert) == (one.config, one.bert)
        assert_same_tensors(found, one)
    assert one.tensors["model.output_layer.bias"].shape == (180,)


@pytest.mark.parametrize(
    "name, written, sizes",
    [
        ("bert/tp1pp2", "bert/tp1pp1", {}),
        ("bert/tp1pp1", "bert/tp1pp2", {"pipeline": 2}),
        ("bert/tp2pp1", "bert/tp2pp1", {"tensor": 2}),
        ("before_core_bert/tp1pp1", None, {"tensor": 2, "pipeline": 2}),
    ],
)
def test_what_is_written_is_what_megatron_wrote(
    name: str, written: str | None, sizes: dict[str, int], tmp_path: Path
) -> None:
    """The same files, in each the same tensors in the same order, with the same bits."""
    model = read_megatron(CHECKPOINTS / name)
    write_megatron(model, tmp_path / "out", make_vocab_size_divisible_by=8, transformer_impl="local", **sizes)
    assert_same_tensors(read_megatron(tmp_path / "out", true_vocab_size=model.vocab_size), model)
    if written is None:
        return
    (theirs,) = (CHECKPOINTS / written).glob("iter_*")
    files = sorted(path.relative_to(theirs) for path in theirs.glob(f"*/{FILE}"))
    ours = tmp_path / "out" / "release"
    assert sorted(path.relative_to(ours) for path in ours.glob("*/*")) == files
    for file in files:
        mine, expected = contents(ours / file), contents(theirs / file)
        assert list(mine["model"]) == list(expected["model"])
        for key, tensor in expected["model"].items():
            if tensor is not None:
                assert_bitwise(mine["model"][key], tensor, key)
        for argument in ("num_layers", "padded_vocab_size", "bert_binary_head", "mask_prob", "short_seq_prob"):
            assert getattr(mine["args"], argument) == getattr(expected["args"], argument), argument


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2, "pipeline": 2, "virtual": 2}])
@pytest.mark.parametrize("settings", [{}, {"position_embedding_type": "rope", "normalization": "RMSNorm"}])
@pytest.mark.parametrize("binary_head", [True, False])
def test_what_is_written_reads_back_bit_for_bit(
    binary_head: bool, settings: dict[str, Any], sizes: dict[str, int], tmp_path: Path
) -> None:
    untied = {"untie_embeddings_and_output_weights": bool(settings)}
    model = our_bert(binary_head=binary_head, **settings, **untied)
    write_megatron(model, tmp_path / "out", **sizes)
    found = read_megatron(tmp_path / "out", true_vocab_size=61)
    assert found.bert == model.bert
    assert_same_tensors(found, model)
    names = contents(next((tmp_path / "out").glob(f"release/*/{FILE}")))
    chunk = names["model" if "model" in names else "model0"]
    assert "encoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in chunk


def test_the_states_of_an_optimizer_are_at_their_parameters(tmp_path: Path) -> None:
    """Moments and main weights that are the weights themselves, numbered as Megatron-LM numbers them."""

    def change(_: str, state: Any) -> None:
        state["optimizer"] = optimizer_that_keeps(state["model"])

    for name in ("bert/tp2pp1", "before_core_bert/tp1pp1"):
        model = read_megatron(changed(name, tmp_path / name, change))
        found, states = weights(model), read_all(model)
        assert model.training is not None and model.training.optimizer["num_updates"] == 3
        for key, weight in found.items():
            assert_bitwise(states[f"optimizer.exp_avg_sq.{key}"], weight, key)
    config = write_native(model, tmp_path / "native")
    assert config.bert == model.bert
    assert config.tokenizer.vocab_file == "bert_vocab.txt"


def test_names_of_the_last_years_before_core_are_read(tmp_path: Path) -> None:
    def change(_: str, state: Any) -> None:
        head = state["model"]["lm_head"]
        state["model"]["lm_head"] = OrderedDict(
            (name.replace("layernorm", "norm"), tensor) for name, tensor in head.items()
        )

    copy = changed("before_core_bert/tp1pp1", tmp_path, change)
    assert_same_tensors(read_megatron(copy), read_megatron(CHECKPOINTS / "before_core_bert/tp1pp1"))


def test_residuals_after_norms_are_those_of_the_time_before_core(tmp_path: Path) -> None:
    flag = "apply_residual_connection_post_layernorm"
    model = read_megatron(changed("before_core_bert/tp1pp1", tmp_path / "old", set_argument(**{flag: True})))
    assert model.config.apply_residual_connection_post_layernorm
    message = "--apply-residual-connection-post-layernorm: the layers of Megatron core add"
    with pytest.raises(ConversionError, match=message):
        write_megatron(model, tmp_path / "out")
    with pytest.raises(ConversionError, match=message):
        read_megatron(changed("bert/tp1pp1", tmp_path / "new", set_argument(**{flag: True})))


def test_norms_after_are_not_for_megatron(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="--layernorm-placement post: Megatron-LM has norms before attention"):
        write_megatron(post_norm(binary_head=True), tmp_path / "out")


@pytest.mark.parametrize(
    "values, text",
    [
        ({"mask_prob": 2.0}, r"make no BERT:\n  --mask-prob 2\.0"),
        ({"bert_binary_head": False}, r"embedding\.tokentype_embeddings\.weight \[2, 32\] is none of it"),
    ],
)
def test_arguments_that_make_no_bert_are_refused_by_name(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=text):
        read_megatron(changed("bert/tp1pp1", tmp_path, set_argument(**values)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stacked_layers_are_read_like_numbered_ones(tmp_path: Path) -> None:
    """The `torch_dist` layout, written by torch itself from a model in the layout `torch`."""
    state = contents(rank_file("bert/tp1pp1"))
    names = [name for name, tensor in state["model"].items() if tensor is not None]
    stacks: dict[str, list[Tensor]] = {re.sub(r"layers\.\d+\.", "layers.", name): [] for name in names}
    for name in names:
        stacks[re.sub(r"layers\.\d+\.", "layers.", name)].append(state["model"][name])
    tensors = {name: torch.stack(parts) if ".layers." in name else parts[0] for name, parts in stacks.items()}

    def saved(folder: Path, **copy: Tensor) -> PortableModel:
        writer = torch.distributed.checkpoint.FileSystemWriter(folder)
        torch.distributed.checkpoint.save(tensors | copy, storage_writer=writer, no_dist=True)
        torch.save({"args": state["args"], "iteration": 1}, folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        return read_megatron(folder)

    found, one = saved(tmp_path / "plain"), read_megatron(CHECKPOINTS / "bert/tp1pp1")
    assert (found.config, found.bert) == (one.config, one.bert)
    assert_same_tensors(found, one)
    words = tensors["embedding.word_embeddings.weight"]
    assert_same_tensors(saved(tmp_path / "copied", **{"output_layer.weight": words}), one)
    other = saved(tmp_path / "other", **{"output_layer.weight": words + 1.0})
    with pytest.raises(ConversionError, match=r"output_layer\.weight differs from .*word_embeddings\.weight"):
        read_all(other)


# ---- the check at the end ----


def test_both_sides_of_the_check_compute_the_same_of_segments_and_padding(tmp_path: Path) -> None:
    theirs = saved_bert(tmp_path / "theirs")
    model = read_hugging_face(theirs)
    write_native(model, tmp_path / "native")
    sides = (Side(form="hf", folder=theirs, options={}), Side(form="native", folder=tmp_path / "native", options={}))
    (expected, program), (found, _) = (logits_of(side, fixed_tokens(61, 40)) for side in sides)
    assert program == "transformers"
    assert {what: tuple(values.shape) for what, values in expected.items()} == {
        "logits": (70, 61),
        "logits of pairs": (2, 2),
    }
    for what, values in expected.items():
        comparison = compare(values, found[what], SAME_WEIGHTS, what)
        assert comparison.agrees and f"of {what} up to" in str(comparison)

    pooler = model.tensors["model.pooler.dense.weight"]
    rolled = {"model.pooler.dense.weight": replace(pooler, read=lambda: pooler.read().roll(1, 0))}
    wrong = layerwise_logits(replace(model, tensors={**model.tensors, **rolled}), fixed_tokens(61, 40))
    assert compare(expected["logits"], wrong["logits"], SAME_WEIGHTS).agrees
    assert not compare(expected["logits of pairs"], wrong["logits of pairs"], SAME_WEIGHTS).agrees


@pytest.mark.parametrize(
    ("architecture", "what", "program"),
    [
        ("BertForMaskedLM", ["logits"], "transformers"),
        ("BertModel", ["logits", "logits of pairs"], "this program, since the files have no head"),
    ],
)
def test_a_head_that_the_files_lack_is_not_computed_by_transformers(
    architecture: str, what: list[str], program: str, tmp_path: Path
) -> None:
    side = Side(form="hf", folder=saved_bert(tmp_path / "theirs", architecture), options={})
    logits, by = logits_of(side, fixed_tokens(61, 40))
    assert (list(logits), by) == (what, program)


# ---- the checkpoint, for other programs ----


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a post-norm model without pairs."""
    folder = tmp_path_factory.mktemp("bert") / "native"
    write_native(post_norm(binary_head=False), folder)
    return folder


def test_a_training_takes_the_flags_of_its_model_from_it(native: Path) -> None:
    line = ("--load", str(native), "--use-checkpoint-args", "--micro-batch-size", "1", "--train-iters", "1")
    config, _ = parse_arguments(
        [*line, "--lr", "1e-4", "--mock-data"],
        task="bert",
        saved_config=partial(saved_config, task="bert"),
        say=lambda text: None,
        check_files=False,
    )
    assert config.bert == BertConfig(binary_head=False)
    assert config.model == replace(post_norm(binary_head=False).config, init_method_std=0.02)
    with pytest.raises(UserError, match=r"pretrain_bert\.py"):
        saved_config(CheckpointConfig(load=str(native)), task="gpt")


def test_it_can_be_inspected(native: Path, tmp_path: Path) -> None:
    run("inspect_checkpoint", native, "--all", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert "model.lm_head.layernorm.weight" in json.dumps(found)


def test_a_model_is_converted_by_the_tool_with_a_check_of_both(tmp_path: Path) -> None:
    theirs = saved_bert(tmp_path / "theirs", "BertForMaskedLM")
    said = run("convert_checkpoint", "--from", "hf", "--to", "native", theirs, tmp_path / "native")
    assert f"{theirs}: BERT with pairs of segments, " in said
    assert f"{theirs} has no head for pairs of segments: it gets that of a new training with --seed 1234" in said
    assert said.count("self-check: largest difference") == 1
