"""Models written as Megatron-LM loads them, against its own files, and read back."""

from __future__ import annotations

import argparse
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.problems import UserError
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.megatron_lm.torch_files import TensorToCome, TorchWriter
from megatron.conversion.megatron_lm.writer import write_megatron
from megatron.conversion.portable import ConversionError, LazyTensor, PortableModel, global_shapes
from tests.conversion.megatron_files import CHECKPOINTS, FILE, contents, read_all
from tests.helpers.numerics import assert_bitwise
from tests.model.tiny import ARCHITECTURES, tiny_config

TP2_PP2 = {"tensor": 2, "pipeline": 2}
FLAGS = {
    "RANKS": "--target-tensor-parallel-size",
    "STAGES": "--target-pipeline-parallel-size",
    "CHUNKS": "--target-virtual-pipeline-parallel-size",
    "ROWS": "--target-make-vocab-size-divisible-by",
}


def tiny_model(vocab_size: int = 61, dtype: torch.dtype = torch.float32, **settings: Any) -> PortableModel:
    config = tiny_config(**{"num_layers": 4, **settings})
    generator = torch.Generator().manual_seed(0)

    def lazy(shape: tuple[int, ...]) -> LazyTensor:
        tensor = torch.randn(shape, generator=generator).to(dtype)
        return LazyTensor(shape=shape, dtype=dtype, read=tensor.clone)

    shapes = global_shapes(config, None, vocab_size)
    tensors = {f"model.{name}": lazy(shape) for name, shape in shapes.items()}
    return PortableModel(config=config, vocab_size=vocab_size, seq_length=24, tensors=tensors)


@pytest.mark.parametrize(
    "name, written, sizes",
    [
        ("gpt2_learned/tp1pp1", "gpt2_learned/tp2pp2", TP2_PP2),
        ("gpt2_learned/tp2pp2", "gpt2_learned/tp1pp1", {}),
        ("llama_gqa/torch_dist", "llama_gqa/tp2pp2", TP2_PP2),
        ("llama_gqa/tp1pp1", "llama_gqa/tp2pp1", {"tensor": 2}),
        ("llama_gqa/tp2pp1", "llama_gqa/tp1pp2vpp2", {"pipeline": 2, "virtual": 2}),
        ("qk_layernorm/tp2pp1", "qk_layernorm/tp2pp1", {"tensor": 2}),
        ("rope_interleaved_half/tp2pp1", "rope_interleaved_half/tp2pp1", {"tensor": 2}),
    ],
)
def test_what_is_written_is_what_megatron_wrote(name: str, written: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """The same files, in each the same tensors in the same order, with the same bits."""
    model = read_megatron(CHECKPOINTS / name, weights_only=True)
    write_megatron(model, tmp_path / "out", make_vocab_size_divisible_by=8, transformer_impl="local", **sizes)
    (theirs,) = (CHECKPOINTS / written).glob("iter_*")
    files = sorted(path.relative_to(theirs) for path in theirs.glob(f"*/{FILE}"))
    ours = tmp_path / "out" / "release"
    assert sorted(path.relative_to(ours) for path in ours.glob("*/*")) == files
    for file in files:
        mine, expected = contents(ours / file), contents(theirs / file)
        chunks = [key for key in expected if key.startswith("model")]
        assert [key for key in mine if key.startswith("model")] == chunks
        for chunk in chunks:
            assert list(mine[chunk]) == list(expected[chunk])
            for key, tensor in expected[chunk].items():
                if tensor is None:
                    assert mine[chunk][key] is None
                else:
                    assert_bitwise(mine[chunk][key], tensor, key)
        for argument in ("num_layers", "hidden_size", "ffn_hidden_size", "padded_vocab_size", "kv_channels", "swiglu"):
            assert getattr(mine["args"], argument) == getattr(expected["args"], argument), argument


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 4}, {"tensor": 2, "pipeline": 2, "virtual": 2}])
@pytest.mark.parametrize("transformer_impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "window", "qk_norm"])
def test_what_is_written_reads_back_bit_for_bit(
    architecture: str, transformer_impl: Any, sizes: dict[str, int], tmp_path: Path
) -> None:
    settings = ARCHITECTURES[architecture]
    if architecture == "qk_norm":
        settings = settings | {"activation": "gelu"}
    model = tiny_model(**settings)
    write_megatron(model, tmp_path / "out", transformer_impl=transformer_impl, **sizes)
    found = read_megatron(tmp_path / "out", true_vocab_size=61)
    for field in ("num_layers", "ffn_size", "head_dim", "query_groups", "activation", "position_embedding_type"):
        assert getattr(found.config, field) == getattr(model.config, field), field
    for field in ("normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "window_size", "rotary_percent"):
        assert getattr(found.config, field) == getattr(model.config, field), field
    assert (found.vocab_size, found.seq_length) == (61, 24)
    mine, theirs = read_all(found), read_all(model)
    assert sorted(mine) == sorted(theirs)
    for key, tensor in theirs.items():
        assert_bitwise(mine[key], tensor, key)


def test_the_norms_have_the_names_of_the_implementation_that_loads_them(tmp_path: Path) -> None:
    model = tiny_model()
    write_megatron(model, tmp_path / "engine")
    write_megatron(model, tmp_path / "local", transformer_impl="local")
    names = {"engine": "self_attention.linear_qkv.layer_norm_weight", "local": "input_layernorm.weight"}
    for folder, name in names.items():
        state = contents(tmp_path / folder / "release" / "mp_rank_00" / FILE)
        assert f"decoder.layers.3.{name}" in state["model"]
        assert not any(other in key for other in names.values() if other != name for key in state["model"])
    assert state["args"].transformer_impl == "local"


def test_fewer_query_groups_than_ranks_are_cut_where_megatron_cuts_them(tmp_path: Path) -> None:
    model = tiny_model(group_query_attention=True, num_query_groups=2)
    write_megatron(model, tmp_path / "out", tensor=4)
    rows = read_all(model)["model.decoder.layers.0.self_attention.linear_qkv.weight"]
    for rank in range(4):
        state = contents(tmp_path / "out" / "release" / f"mp_rank_{rank:02d}" / FILE)["model"]
        part = state["decoder.layers.0.self_attention.linear_qkv.weight"]
        assert_bitwise(part, rows.chunk(4)[rank].contiguous())
    assert_bitwise(
        read_all(read_megatron(tmp_path / "out"))["model.decoder.layers.0.self_attention.linear_qkv.weight"], rows
    )


def test_the_vocabulary_is_padded_with_zeros_to_the_multiple(tmp_path: Path) -> None:
    model = tiny_model(untie_embeddings_and_output_weights=True)
    write_megatron(model, tmp_path / "out", tensor=2, make_vocab_size_divisible_by=16)
    found = read_all(read_megatron(tmp_path / "out"))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert found[f"model.{name}"].shape == (64, 24)
        assert not found[f"model.{name}"][61:].any()
    arguments = contents(tmp_path / "out" / "release" / "mp_rank_01" / FILE)["args"]
    assert (arguments.padded_vocab_size, arguments.vocab_size, arguments.make_vocab_size_divisible_by) == (64, 61, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_torch_loads_what_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    """As Megatron-LM does, which has nothing but a namespace of plain values to trust."""
    model = tiny_model(dtype=dtype)
    write_megatron(model, tmp_path / "out", pipeline=2)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(tmp_path / "out" / "release" / "mp_rank_00_001" / FILE, weights_only=True)
    mapped = torch.load(tmp_path / "out" / "release" / "mp_rank_00_001" / FILE, weights_only=False, mmap=True)
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 0)
    builtin = (int, float, bool, str, type(None), tuple)
    assert all(type(value) in builtin for value in vars(state["args"]).values())
    whole = read_all(model)
    for name in ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.0.self_attention.linear_proj.bias"):
        key = f"model.{name.replace('layers.1', 'layers.3').replace('layers.0', 'layers.2')}"
        assert_bitwise(state["model"][name], whole[key], name)
        assert_bitwise(mapped["model"][name], whole[key], name)


@pytest.mark.parametrize(
    "settings, sizes, text",
    [
        ({"position_embedding_type": "alibi"}, {}, "--position-embedding-type alibi: Megatron-LM has no ALiBi"),
        ({"normalize_output_weights": True}, {}, "--normalize-output-weights: Megatron-LM has no"),
        ({"add_bias_linear": False}, {}, "--disable-bias-linear: Megatron-LM has the tanh GELU fused with a bias only"),
        ({}, {"pipeline": 3}, "{STAGES} 3: must divide the 4 layers\n      Works: {STAGES} 1, 2 or 4$"),
        (
            {},
            {"pipeline": 10**10},
            "{STAGES} 10_000_000_000: must divide the 4 layers\n      Works: {STAGES} 1, 2 or 4$",
        ),
        (
            {},
            {"pipeline": 2, "virtual": 3},
            "{STAGES} 2 x {CHUNKS} 3: must .*\n      Works: .* 1, 2 or 4, and leave out",
        ),
        (
            {"num_layers": 12},
            {"pipeline": 5, "virtual": 3},
            "{STAGES} 5 x {CHUNKS} 3: must divide the 12 layers\n      Works: {STAGES} 2 or 4$",
        ),
        ({}, {"virtual": 2}, "{CHUNKS} 2: Megatron-LM has model chunks from {STAGES} 2 on\n      Works: {STAGES} 2 or"),
        ({}, {"tensor": 3}, "{RANKS} 3: must divide the 4 query heads\n      Works: {RANKS} 1, 2 or 4$"),
        (
            {},
            {"tensor": 10**10},
            "{RANKS} 10_000_000_000: must divide the 4 query heads\n      Works: {RANKS} 1, 2 or 4\n",
        ),
        (
            {
                "hidden_size": 24,
                "num_attention_heads": 12,
                "ffn_hidden_size": 48,
                "group_query_attention": True,
                "num_query_groups": 4,
            },
            {"tensor": 6},
            "{RANKS} 6: must divide the 4 query groups, or be a multiple of them\n      Works: {RANKS} 1, 2 or 4$",
        ),
        (
            {"num_attention_heads": 4, "kv_channels": 3, "group_query_attention": True, "num_query_groups": 1},
            {"tensor": 4},
            "{RANKS} 4: must divide the 18 rows of decoder.layers.0.self_attention.linear_qkv.*\n .* 1 or 2$",
        ),
        (
            {"ffn_hidden_size": 42},
            {"tensor": 4},
            "{RANKS} 4: must divide the 42 columns of the MLP\n      Works: {RANKS} 1 or 2$",
        ),
        (
            {},
            {"make_vocab_size_divisible_by": 10**10},
            "{ROWS} 10_000_000_000: must be at least 1 and at most 1_000_000\n      Works: {ROWS} 128$",
        ),
        (
            {"num_attention_heads": 200, "hidden_size": 400, "ffn_hidden_size": 400},
            {"make_vocab_size_divisible_by": 10**6, "tensor": 200},
            "{ROWS} 1_000_000: pads the vocabulary to 200_000_000 rows, and it has at most 100_000_000\n",
        ),
    ],
)
def test_what_megatron_can_not_hold_is_refused_and_nothing_written(
    settings: dict[str, Any], sizes: dict[str, int], text: str, tmp_path: Path
) -> None:
    model = tiny_model(**settings)

    def unread() -> torch.Tensor:
        raise AssertionError("a tensor was read")

    unreadable = {key: replace(lazy, read=unread) for key, lazy in model.tensors.items()}
    with pytest.raises(UserError, match=text.format(**FLAGS)):
        write_megatron(replace(model, tensors=unreadable), tmp_path / "out", **sizes)
    assert not list(tmp_path.iterdir())


def test_all_sizes_that_do_not_fit_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^3 problems in the configuration:\n  1\. --target-tensor.*\n.*\n  2\. --target-p"
    ):
        write_megatron(tiny_model(), tmp_path, tensor=3, pipeline=3, make_vocab_size_divisible_by=10**7)


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConversionError, match="exists and is not empty: give a new folder"):
        write_megatron(tiny_model(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    write_megatron(tiny_model(), tmp_path / "empty")
    assert (tmp_path / "empty" / "release").is_dir()


def test_a_tensor_that_can_not_be_read_leaves_no_folder(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise ConversionError("the source is gone")

    model = tiny_model()
    broken = dict(model.tensors)
    broken["model.decoder.final_layernorm.bias"] = replace(broken["model.decoder.final_layernorm.bias"], read=fail)
    with pytest.raises(ConversionError, match="the source is gone"):
        write_megatron(replace(model, tensors=broken), tmp_path / "out", tensor=2)
    assert not list(tmp_path.iterdir())


def test_each_tensor_is_read_once_for_all_tensor_parallel_ranks_and_kept_no_longer_than_it_is_written(
    tmp_path: Path,
) -> None:
    model = tiny_model(untie_embeddings_and_output_weights=True)
    read: list[str] = []

    def counting(key: str, lazy: LazyTensor) -> LazyTensor:
        def count() -> torch.Tensor:
            read.append(key)
            return lazy.read()

        return replace(lazy, read=count)

    counted = {key: counting(key, lazy) for key, lazy in model.tensors.items()}
    write_megatron(replace(model, tensors=counted), tmp_path / "out", tensor=2, pipeline=2)
    assert sorted(read) == sorted(model.tensors)


READ = """
import sys
from pathlib import Path
from megatron.conversion.megatron_lm.reader import read_megatron

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024

lazy = read_megatron(Path(sys.argv[1])).tensors["model.embedding.word_embeddings.weight"]
before = status("VmRSS")
size = lazy.read().nbytes
print(size, status("VmHWM") - before)
"""


def test_a_vocabulary_of_several_ranks_is_read_in_the_memory_of_one(tmp_path: Path) -> None:
    write_megatron(tiny_model(vocab_size=600_000, num_layers=1), tmp_path / "out", tensor=2)
    words = [sys.executable, "-c", READ, str(tmp_path / "out")]
    size, taken = map(int, subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())
    assert size > 50_000_000 and taken < 1.2 * size, (size, taken)


# ---- files ----


def test_a_view_is_written_as_the_numbers_that_it_shows(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    state = {
        "a": [TensorToCome(shape=(2, 6), dtype=torch.float32)],
        "b": TensorToCome(shape=(6, 4), dtype=torch.float32),
    }
    with TorchWriter(tmp_path / "state.pt", state) as writer:
        writer.write(whole[1:3])
        writer.write(whole.t())
    assert (tmp_path / "state.pt").stat().st_size < 5_000
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_bitwise(found["a"][0], whole[1:3].contiguous())
    assert_bitwise(found["b"], whole.t().contiguous())


def test_a_full_disk_is_an_error_that_the_process_survives(tmp_path: Path) -> None:
    """An archive that can not be ended would end the process when it is let go of."""
    state = {"a": TensorToCome(shape=(300_000,), dtype=torch.float32)}
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), TorchWriter(tmp_path / "state.pt", state) as writer:
            writer.write(torch.zeros(300_000))
        with pytest.raises(OSError, match="File too large"):
            TorchWriter(tmp_path / "other.pt", "x" * 300_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
