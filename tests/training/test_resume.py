"""A run that was killed and resumed is the run that was not: byte for byte, and on other layouts to rounding."""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.checkpointing import CheckpointError, NoCheckpointError, list_checkpoints, load_checkpoint, storage
from megatron.checkpointing.index import DTYPE_NAMES
from megatron.core.comm_group import CommGroup
from megatron.training import checkpoints
from megatron.training.checkpoints import open_checkpoint
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.pretrain import build_run, train
from megatron.training.run import Run
from pretrain_gpt import forward_step
from tests.data.corpora import numbered_corpus
from tests.helpers.distributed import run_distributed
from tests.helpers.launch import Launched, launch_tiny, pretrain_tiny, rows_of
from tests.helpers.numerics import PARITY_FP32, PARITY_FP64, assert_bitwise, assert_parity, rounded
from tests.helpers.tiny import context_of_rank, tiny_config
from tests.parity.layouts import DATA_PARALLELISM
from tests.training.runs import Recorder, build, counting_corpus, rows_on_ranks, trained
from tests.training.test_train_step import microbatches_of, state_of

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def saved_progress(folder: Path) -> dict[str, Any]:
    return dict(load_checkpoint(folder, world=CommGroup.single("world")).metadata["progress"])


def timeless(recorder: Recorder) -> list[dict[str, object]]:
    return [{**step.as_json(), "seconds": 0, "tokens_per_second": 0} for step in recorder.steps]


# ---- killed ----

LENGTH = 8
KILLED_RUN = [
    *DROPOUT,
    *("--train-iters", str(LENGTH), "--num-workers", "2", "--eval-iters", "1", "--eval-interval", "3"),
    *("--save", "saved", "--save-interval", "2", "--load", "saved", "--load-if-exists", "--log-json", "log.json"),
]


def wait_for(condition: Callable[[], bool], run: Launched) -> None:
    """Until something is so; at once when the run has ended."""
    while not condition() and all(process.is_alive() for process in run.processes):
        time.sleep(0.0005)


def kill_at_a_random_moment(run: Launched, folder: Path) -> None:
    iteration = random.choice((2, 4))
    wait_for(lambda: storage.iteration_folder(folder / "saved", iteration).exists(), run)
    time.sleep(random.uniform(0.0, 0.05))
    run.kill()


def kill_while_it_saves(run: Launched, folder: Path) -> None:
    wait_for(lambda: storage.temporary_folder(folder / "saved", 4).exists(), run)
    run.kill()


LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp2": ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    "dp2": ("--bf16",),
    "zero2": ("--bf16", *DATA_PARALLELISM["zero-overlap"]),
}
KILLS = {"any-moment": kill_at_a_random_moment, "saving": kill_while_it_saves}


@pytest.mark.parametrize(
    "layout, kill",
    [
        ("tp2", "saving"),
        ("pp2", "any-moment"),
        ("zero2", "saving"),
        pytest.param("dp2", "saving", marks=pytest.mark.full),
        pytest.param("zero2", "any-moment", marks=pytest.mark.full),
        pytest.param("tp2", "any-moment", marks=pytest.mark.full),
        pytest.param("pp2", "saving", marks=pytest.mark.full),
        pytest.param("dp2", "any-moment", marks=pytest.mark.full),
    ],
)
def test_a_killed_run_ends_with_the_bytes_of_an_uninterrupted_one(layout: str, kill: str, tmp_path: Path) -> None:
    """Every file of the last checkpoint is the same: none holds a time, a path of this run or a random state."""
    arguments = [*KILLED_RUN, *LAYOUTS[layout]]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    pretrain_tiny(straight, *arguments, ranks=2).check()

    run = launch_tiny(killed, *arguments, ranks=2)
    KILLS[kill](run, killed)
    assert [process.exitcode for process in run.processes] == [-signal.SIGKILL] * 2, "it ended before it was killed"
    assert list_checkpoints(killed / "saved")
    pretrain_tiny(killed, *arguments, ranks=2).check()

    last = f"iter_{LENGTH:07d}"
    expected = checksums(straight / "saved" / last)
    assert len(expected) >= 4
    assert checksums(killed / "saved" / last) == expected
    # losses too, of training and validation; what the killed process did after its last checkpoint was done again
    for folder in (straight, killed):
        assert {row["iteration"] for row in rows_of(folder / "log.json")} == set(range(1, LENGTH + 1))
    results = [
        {(row["iteration"], name): row[name] for row in rows_of(folder / "log.json") for name in row if "loss" in name}
        for folder in (straight, killed)
    ]
    assert results[0] == results[1]


def test_resumed_twice_is_as_never_stopped(tmp_path: Path) -> None:
    """State that is kept apart from what the checkpoint holds goes wrong at the second resume only."""
    arguments = [*DROPOUT, "--train-iters", "9", "--eval-iters", "1", "--eval-interval", "2", "--bf16"]
    run, straight = trained(*arguments)
    save = ["--save", str(tmp_path), "--load", str(tmp_path), "--load-if-exists", "--exit-interval", "3"]
    parts = [trained(*arguments, *save) for _ in range(3)]
    assert [len(recorder.steps) for _, recorder in parts] == [3, 3, 3]
    assert [row for _, recorder in parts for row in timeless(recorder)] == timeless(straight)
    assert [each for _, recorder in parts for each in recorder.evaluations] == straight.evaluations
    resumed = parts[-1][0]
    assert resumed.progress == run.progress
    assert resumed.scheduler.state_dict() == run.scheduler.state_dict()
    assert resumed.optimizer.state_dict() == run.optimizer.state_dict()
    for name, tensor in state_of(run).items():
        assert_bitwise(state_of(resumed)[name], tensor, name)


# ---- on another layout ----


@pytest.mark.parametrize("precision, bound", [("fp64", PARITY_FP64), ("fp32", PARITY_FP32)])
def test_resumed_on_other_layouts_the_losses_are_the_same_to_rounding(
    precision: str, bound: float, tmp_path: Path
) -> None:
    arguments = [*DROPOUT, "--precision", precision, "--train-iters", "8", "--save", str(tmp_path)]
    _, straight = trained(*arguments[:-2])
    go_on = [*arguments, "--load", str(tmp_path), "--exit-interval"]
    rows = timeless(trained(*arguments, "--exit-interval", "2")[1])
    for iteration, ranks, layout in (
        (3, 2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
        (4, 2, DATA_PARALLELISM["zero"]),
        (5, 4, ("--pipeline-model-parallel-size", "2")),
        (
            6,
            6,
            (*("--pipeline-model-parallel-size", "3", "--micro-batch-size", "2"), *DATA_PARALLELISM["zero-overlap"]),
        ),
        (7, 4, ("--tensor-model-parallel-size", "2", *DATA_PARALLELISM["zero-overlap"])),
        (8, 1, ("--micro-batch-size", "4")),
    ):
        rows += run_distributed(rows_on_ranks, ranks, *go_on, str(iteration), *layout)[-1]
    assert [row["iteration"] for row in rows] == list(range(1, 9))
    assert [row["lm loss"] for row in rows] == pytest.approx(straight.losses, rel=bound)


def vocabulary_rows(rank: int, world_size: int, *arguments: str) -> list[dict[str, torch.Tensor]]:
    """This rank's rows of the two tensors that have one for each token: after the load, and at the end."""
    run, _ = build(*arguments, rank=rank, world_size=world_size)
    names = ("model.embedding.word_embeddings.weight", "model.output_layer.weight")
    loaded = {name: state_of(run)[name] for name in names}
    train(run)
    return [loaded, {name: state_of(run)[name] for name in names}]


def test_padding_of_the_vocabulary_is_that_of_the_layout_and_holds_nothing(tmp_path: Path) -> None:
    """Of 251 rows TP 1 makes 300, TP 2 400 and TP 4 400, of which one rank has no token at all."""
    arguments = ["--untie-embeddings-and-output-weights", "--make-vocab-size-divisible-by", "100", "--train-iters", "4"]
    saved, _ = trained(*arguments, "--save", str(tmp_path), "--exit-interval", "2")
    expected = state_of(saved)
    straight = state_of(trained(*arguments)[0])
    stored = load_checkpoint(tmp_path, world=CommGroup.single("world")).tensors
    assert stored["model.output_layer.weight"].shape == (251, 48)
    for ranks in (1, 2, 4):
        go_on = (*arguments, "--load", str(tmp_path), "--tensor-model-parallel-size", str(ranks))
        parts = run_distributed(vocabulary_rows, ranks, *go_on)
        for name in parts[0][0]:
            loaded, trained_on = (torch.cat([part[moment][name] for part in parts]) for moment in (0, 1))
            assert loaded.shape[0] == {1: 300, 2: 400, 4: 400}[ranks]
            assert_bitwise(loaded[:251], expected[name][:251], name)
            assert_parity(trained_on[:251], straight[name][:251], name)
            assert not loaded[251:].any() and not trained_on[251:].any(), "no target, no gradient, no decay"


# ---- more iterations, or none ----


def test_more_iterations_keep_the_order_and_append_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*counting_corpus(tmp_path / "data"), "--lr-decay-style", "constant", "--save", str(tmp_path / "saved")]
    first, _ = trained(*arguments, "--train-iters", "3")
    read = [microbatches_of(first, consumed) for consumed in (0, 8, 16)]
    capsys.readouterr()
    more, recorder = trained(*arguments, "--train-iters", "5", "--load", str(tmp_path / "saved"))
    printed = capsys.readouterr().out
    assert "training data: 16 more samples are appended to the 24 of before, whose order stays" in printed
    assert [step.iteration for step in recorder.steps] == [4, 5]
    assert more.progress.train_blocks == [24, 16]
    for batches, consumed in zip(read, (0, 8, 16)):
        for batch, again in zip(batches, microbatches_of(more, consumed), strict=True):
            assert_bitwise(again.tokens, batch.tokens)
    assert saved_progress(tmp_path / "saved")["train_blocks"] == [24, 16]


def test_a_finished_run_that_is_started_again_ends_well_and_changes_nothing(tmp_path: Path) -> None:
    arguments = ["--save", "saved", "--load", "saved", "--load-if-exists", "--save-interval", "2"]
    pretrain_tiny(tmp_path, *arguments, ranks=2).check()
    before = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in (tmp_path / "saved").rglob("*")}
    again = pretrain_tiny(tmp_path, *arguments, "--eval-iters", "1", ranks=2).check()
    assert {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in (tmp_path / "saved").rglob("*")} == before
    assert " validation loss at iteration 3 | lm loss value: " in again.out[1]
    assert " iteration  " not in again.out[1]


def test_skip_train_evaluates_what_was_loaded_and_trains_nothing(tmp_path: Path) -> None:
    _, full = trained("--save", str(tmp_path), "--eval-iters", "2", "--split", "80,10,10")
    before = checksums(tmp_path)
    run, recorder = trained(
        *("--skip-train", "--load", str(tmp_path), "--save", str(tmp_path), "--train-iters", "100"),
        *("--eval-iters", "2", "--split", "80,10,10", "--lr-decay-iters", "3"),
    )
    assert recorder.steps == []
    assert recorder.evaluations == full.evaluations
    assert [split for split, _, _ in recorder.evaluations] == ["validation", "test"]
    assert checksums(tmp_path) == before
    assert run.progress.iteration == 3


def test_skip_train_reads_what_is_evaluated_alone_whatever_the_training_read(tmp_path: Path) -> None:
    for name in ("read", "other"):
        (tmp_path / name).mkdir()
    trained("--save", str(tmp_path / "saved"), *corpus(tmp_path / "read", [50] * 10))
    other = corpus(tmp_path / "other", [60] * 10, first=7)
    run, recorder = trained(
        *("--skip-train", "--load", str(tmp_path / "saved"), *other, "--split", "0,1,0", "--eval-iters", "1")
    )
    assert run.loaders.train is None
    assert run.progress.iteration == 3
    assert [split for split, _, _ in recorder.evaluations] == ["validation"]


# ---- what is taken over ----


@pytest.mark.parametrize("precision", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_finetune_takes_the_weights_alone_in_all_their_bits(precision: tuple[str, ...], tmp_path: Path) -> None:
    saved, _ = trained("--save", str(tmp_path / "saved"), *precision)
    new_data = counting_corpus(tmp_path / "data")
    settings = ["--train-iters", "5", "--lr", "1e-3", *precision]
    run, _ = build("--load", str(tmp_path / "saved"), "--finetune", *new_data, *settings)
    assert run.progress.iteration == run.progress.consumed_train_samples == 0
    assert run.progress.train_blocks == [40]
    assert run.scheduler.num_steps == run.optimizer.state_dict()["num_updates"] == 0
    for name, tensor in state_of(run).items():
        if name.startswith(("model.", "main.")):
            assert_bitwise(tensor, state_of(saved)[name], name)
        else:
            assert not tensor.any(), name


@pytest.mark.parametrize("precision, kept", [("fp32", "F32"), ("bf16", "F32"), ("fp16", "F32"), ("fp64", "F64")])
def test_a_checkpoint_holds_each_weight_once_in_all_its_bits(precision: str, kept: str, tmp_path: Path) -> None:
    run, _ = trained("--precision", precision, "--lr-warmup-iters", "1", "--save", str(tmp_path))
    stored = load_checkpoint(tmp_path, world=CommGroup.single("world")).tensors
    names = {name.removeprefix("model.") for name in state_of(run) if name.startswith("model.")}
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    assert stored.keys() == {f"{kind}.{name}" for kind in kinds for name in names}
    assert {DTYPE_NAMES[tensor.dtype] for tensor in stored.values()} == {kept}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("saved, present", [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16"), ("fp16", "bf16")])
def test_another_precision_goes_on_from_the_same_weights_and_state(
    saved: str, present: str, optimizer: str, tmp_path: Path
) -> None:
    scale = ("--initial-loss-scale", "256")
    common = ["--optimizer", optimizer, "--train-iters", "4", "--lr-warmup-iters", "1", "--precision"]
    first, _ = trained(*common, saved, *scale * (saved == "fp16"), "--save", str(tmp_path), "--exit-interval", "2")
    run, recorder = build(*common, present, *scale * (present == "fp16"), "--load", str(tmp_path))
    before, after = state_of(first), state_of(run)
    low = run.config.optimizer.params_dtype
    for name, tensor in after.items():  # main weights and state are float32 in each of them, so not a bit changes
        if name.startswith("model."):
            assert_bitwise(tensor, rounded(after["main." + name.removeprefix("model.")], low), name)
        else:
            assert_bitwise(tensor, before[name], name)
    assert run.optimizer.state_dict()["num_updates"] == 2
    train(run)
    assert [step.iteration for step in recorder.steps] == [3, 4]
    assert all(step.applied for step in recorder.steps)


@pytest.mark.parametrize("saved, present", [("fp32", "fp64"), ("fp64", "fp32"), ("fp64", "bf16"), ("bf16", "fp64")])
def test_to_fp64_and_back_weights_and_state_are_converted_and_a_line_says_so(
    saved: str, present: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = trained("--precision", saved, "--save", str(tmp_path), "--train-iters", "4", "--exit-interval", "2")
    capsys.readouterr()
    run, _ = build("--precision", present, "--load", str(tmp_path), "--train-iters", "4")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "converted" in line]
    main = run.config.optimizer.main_dtype
    assert line.endswith(f" tensors: {first.config.optimizer.main_dtype} in the checkpoint, converted to {main}")
    before = state_of(first)
    for name, tensor in state_of(run).items():
        if not name.startswith("model."):
            assert_bitwise(tensor, before[name].to(main), name)


@pytest.mark.parametrize("saved, present", [("adam", "sgd"), ("sgd", "adam"), ("adam", "muon")])
def test_another_optimizer_is_refused_in_one_sentence(saved: str, present: str, tmp_path: Path) -> None:
    trained("--optimizer", saved, "--save", str(tmp_path))
    go_on = ["--optimizer", present, "--load", str(tmp_path), "--train-iters", "4", "--override-opt_param-scheduler"]
    outcome = pretrain_tiny(tmp_path, *go_on, ranks=2)
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert said.count(f"--optimizer {present}: it was saved with --optimizer {saved}, whose state is another") == 1
    assert f"--optimizer {saved} goes on with it, --no-load-optim starts the optimizer anew, --finetune" in said
    assert "exp_avg" not in said
    for works in ("--no-load-optim", "--finetune"):
        build(*go_on, works)


def test_no_load_optim_goes_on_in_data_and_learning_rate_with_a_fresh_optimizer(tmp_path: Path) -> None:
    saved, recorder = trained("--train-iters", "6", "--exit-interval", "3", "--save", str(tmp_path))
    run, _ = build("--train-iters", "6", "--load", str(tmp_path), "--no-load-optim")
    assert run.progress == saved.progress
    assert run.scheduler.num_steps == 24
    assert run.scheduler.lr == recorder.steps[-1].next_learning_rate
    assert run.optimizer.state_dict()["num_updates"] == 0
    assert not any(tensor.any() for name, tensor in state_of(run).items() if name.startswith("optimizer."))


def test_the_checkpoint_s_schedule_goes_on_without_its_optimizer(tmp_path: Path) -> None:
    _, recorder = trained("--train-iters", "6", "--exit-interval", "3", "--save", str(tmp_path))
    go_on = ["--train-iters", "6", "--load", str(tmp_path), "--no-load-optim", "--lr", "5e-3"]
    run, resumed = trained(*go_on, "--use-checkpoint-opt_param-scheduler")
    assert run.scheduler.learning_rate_schedule.max_lr == 1e-2
    assert resumed.steps[0].learning_rate == recorder.steps[-1].next_learning_rate > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("data", ["plain", "zero-overlap"])
def test_after_a_load_moments_and_main_weights_have_the_bits_and_the_type_that_were_saved(
    precision: str, data: str, tmp_path: Path
) -> None:
    arguments = ["--precision", precision, "--lr-warmup-iters", "1", "--train-iters", "4", *DATA_PARALLELISM[data]]
    arguments += ["--initial-loss-scale", "256"] if precision == "fp16" else []
    saved = run_distributed(_kept, 2, *arguments, "--save", str(tmp_path), "--exit-interval", "2")
    loaded = run_distributed(_kept, 2, *arguments, "--load", str(tmp_path))
    wide = torch.float64 if precision == "fp64" else torch.float32
    for rank, expected in zip(loaded, saved, strict=True):
        assert rank.keys() == expected.keys()
        assert {kind.split(".")[1] for kind in rank if kind.startswith("optimizer.")} == {"exp_avg", "exp_avg_sq"}
        for name, tensor in rank.items():
            assert_bitwise(tensor, expected[name], name)
            assert name.startswith("model.") or tensor.dtype == wide, name


def _kept(rank: int, world_size: int, *arguments: str) -> dict[str, torch.Tensor]:
    """By a run that saves at its end, or right after it has loaded."""
    begin = build if "--load" in arguments else trained
    return state_of(begin(*arguments, rank=rank, world_size=world_size)[0])


def test_a_checkpoint_without_the_optimizer_is_taken_only_when_that_is_said(tmp_path: Path) -> None:
    saved, _ = trained("--save", str(tmp_path), "--no-save-optim", "--bf16")
    outcome = pretrain_tiny(tmp_path, "--bf16", "--load", str(tmp_path), ranks=2)
    assert outcome.codes == [2, 2]
    assert "".join(outcome.err).count("(--no-save-optim): --no-load-optim starts it anew") == 1
    run, _ = build("--bf16", "--load", str(tmp_path), "--no-load-optim")
    for name, tensor in state_of(run).items():
        if not name.startswith("optimizer."):  # the weights in all their bits
            assert_bitwise(tensor, state_of(saved)[name], name)


def test_ckpt_step_chooses_an_earlier_checkpoint(tmp_path: Path) -> None:
    _, straight = trained("--train-iters", "4", "--save", str(tmp_path), "--save-interval", "1")
    _, again = trained("--train-iters", "4", "--load", str(tmp_path), "--ckpt-step", "2")
    assert timeless(again) == timeless(straight)[2:]


def test_load_without_a_checkpoint_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    outcome = pretrain_tiny(tmp_path, "--load", "nothing", ranks=2)
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert said.count("pretrain_gpt.py: error: --load: ") == 1
    assert said.count("no checkpoint in nothing: there is no such folder") == 1, "once, and not for each rank"
    assert "--load-if-exists starts a new run where there is none" in said
    assert "Traceback" not in outcome.err[0] + outcome.err[1]
    run, _ = build("--load", str(tmp_path / "nothing"), "--load-if-exists")
    assert run.progress.iteration == 0


def test_a_new_run_is_not_offered_where_another_folder_seems_to_be_meant(tmp_path: Path) -> None:
    trained("--save", str(tmp_path / "run" / "checkpoints"))
    load = ["--load", str(tmp_path / "run")]
    with pytest.raises(NoCheckpointError, match=r"--load: .*/run/checkpoints has one$"):
        build(*load)
    run, _ = build(*load, "--load-if-exists")
    assert run.progress.iteration == 0

    for name in ("config.json", "model.safetensors"):
        (tmp_path / "run" / name).touch()
    with pytest.raises(CheckpointError, match="--from hf --to native"):
        build(*load, "--load-if-exists")


def test_another_model_or_other_data_is_refused_with_a_listing(tmp_path: Path) -> None:
    trained("--save", str(tmp_path / "saved"))
    arguments = ["--load", str(tmp_path / "saved"), "--seed", "5", "--num-layers", "2", "--normalization", "RMSNorm"]
    arguments += counting_corpus(tmp_path / "data")
    outcome = pretrain_tiny(tmp_path, *arguments)
    assert outcome.codes == [2]
    for line in (
        "--num-layers: 4 -> 2 changes the model",
        "--normalization: LayerNorm -> RMSNorm changes the model",
        "--seed: 1234 -> 5 changes the data",
        "changes the data",
        "--finetune takes only the weights",
    ):
        assert line in outcome.err[0]
    assert "--load: None -> " in outcome.out[0]  # free to change, and told
    assert "--load: None" not in outcome.err[0]


CHANGES = [
    ("model", "--activation", "--activation gelu"),
    ("model", "--num-attention-heads", "--num-attention-heads 12 --kv-channels 8"),
    ("model", "--norm-epsilon", "--norm-epsilon 1e-6"),
    ("model", "--window-size", "--window-size 8 0"),
    ("model", "--position-embedding-type", "--position-embedding-type rope"),
    ("model", "--qk-layernorm", "--qk-layernorm"),
    ("model", "--padded-vocab-size", "--padded-vocab-size 300"),
    ("data", "--seq-length", "--seq-length 12"),
    ("data", "--split", "--split 80,20,0"),
    ("data", "--reset-position-ids", "--no-reset-position-ids"),
    ("data", "--eod-mask-loss", "--no-eod-mask-loss"),
    ("data", "--null-tokenizer-eod-id", "--null-tokenizer-eod-id 3"),
    ("data", "--seed", "--seed 7"),
    ("nothing", "--micro-batch-size", "--micro-batch-size 2"),
    ("nothing", "--precision", "--bf16"),
    ("nothing", "--hidden-dropout", "--hidden-dropout 0.1"),
    ("nothing", "--recompute-granularity", "--recompute-activations"),
    ("nothing", "--lr", "--lr 1e-3"),
]


@pytest.mark.parametrize("finetune", [False, True], ids=["resume", "finetune"])
def test_what_changes_the_model_or_the_data_is_refused_and_all_else_is_printed(
    finetune: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("--save", str(tmp_path))
    load = ["--load", str(tmp_path)] + ["--finetune"] * finetune
    for what, flag, line in CHANGES:
        context = context_of_rank(tiny_config(*line.split(), *load), 0, 1)
        capsys.readouterr()
        if what == "model" or (what == "data" and not finetune):
            with pytest.raises(CheckpointError, match=rf"{flag}: .* -> .* changes the {what}"):
                open_checkpoint(context)
        else:
            assert open_checkpoint(context) is not None, line
        assert f"\n  {flag}: " in capsys.readouterr().out, line


@pytest.mark.parametrize(
    "line",
    [
        "--reset-position-ids",
        "--reset-attention-mask",
        "--null-tokenizer-eod-id 3",
        "--tokenizer-type ByteTokenizer",
        "--tokenizer-hf-no-include-special-tokens",
    ],
)
def test_an_evaluation_reads_its_data_as_the_training_did(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other data is evaluated on; what an id means, and what the model sees of a document, stays."""
    plain = ("--no-reset-position-ids", "--no-reset-attention-mask", "--no-eod-mask-loss")
    saved = SimpleNamespace(config=tiny_config(*plain), folder="saved", metadata={"progress": {}})
    monkeypatch.setattr(checkpoints, "find_checkpoint", lambda *arguments, **settings: saved)
    evaluate = (*plain, "--skip-train", "--eval-iters", "1", "--load", "saved")
    for other in ("--seq-length 12", "--split 0,1,0", "--seed 7"):
        assert open_checkpoint(context_of_rank(tiny_config(*evaluate, *other.split()), 0, 1)) is saved
    config = tiny_config(*evaluate, *line.split())
    with pytest.raises(CheckpointError, match="changes the data"):
        open_checkpoint(context_of_rank(config, 0, 1))
    finetuned = replace(config, checkpoint=replace(config.checkpoint, finetune=True))
    assert open_checkpoint(context_of_rank(finetuned, 0, 1)) is saved


def test_a_difference_in_what_is_learned_stands_apart_from_those_that_do_not_matter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SimpleNamespace(config=tiny_config(), folder="saved/iter_0000003", metadata={"progress": {}})
    monkeypatch.setattr(checkpoints, "find_checkpoint", lambda *arguments, **settings: saved)
    flags = ("--log-interval", "7", "--adam-beta2", "0.9", "--eval-interval", "3", "--clip-grad", "2")
    open_checkpoint(context_of_rank(tiny_config(*flags, "--load", "saved"), 0, 1))
    assert capsys.readouterr().out.splitlines() == [
        "configuration that differs from saved/iter_0000003:",
        " which changes what is learned:",
        "  --clip-grad: 0.5 -> 2.0",
        "  --adam-beta2: 0.999 -> 0.9",
        " which changes nothing that is learned:",
        "  --eval-interval: None -> 3",
        "  --load: None -> saved",
        "  --log-interval: 100 -> 7",
    ]


def corpus(folder: Path, lengths: list[int], *, first: int = 1) -> list[str]:
    """Arguments for a corpus of documents of these lengths, in place of one that is there."""
    prefix = numbered_corpus(folder / "corpus", lengths, first=first)
    return ["--data-path", str(prefix), "--data-cache-path", str(folder / "cache"), "--vocab-size", "2000"]


def test_data_that_was_replaced_under_its_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    arguments = ["--load", str(tmp_path / "saved"), "--train-iters", "4", "--lr-warmup-iters", "1"]
    run, _ = trained(
        *corpus(tmp_path / "data", [9] * 100), *arguments[2:], "--save", str(tmp_path / "saved"), "--exit-interval", "2"
    )
    replaced = corpus(tmp_path / "data", [9] * 50 + [8, 10] * 25)  # as many documents and tokens
    outcome = pretrain_tiny(tmp_path, *replaced, *arguments, ranks=2)
    assert outcome.codes == [2, 2]
    (source,) = run.loaders.sources
    said = "".join(outcome.err)
    assert said.count(f"{tmp_path}/data/corpus: {source.fingerprint}, {source.content} in the checkpoint, ") == 1
    assert "100 sequences, 900 tokens" in source.fingerprint
    assert "Put the data of the training back; --finetune takes only the weights" in said
    build(*replaced, *arguments, "--finetune")

    other_ids = corpus(tmp_path / "data", [9] * 100, first=2)
    with pytest.raises(CheckpointError, match=rf"{source.content} in the checkpoint, .* lengths \w+, sampled ids"):
        build(*other_ids, *arguments)

    (tmp_path / "moved").mkdir()
    moved = corpus(tmp_path / "moved", [9] * 100)
    again, _ = build(*moved, *arguments)
    assert again.progress == run.progress


def test_a_training_goes_on_with_other_validation_data(tmp_path: Path) -> None:
    """It is not what the model was trained with, and no position in the training depends on it."""

    def run_on(train: str, valid: tuple[str, ...], *arguments: str) -> Run:
        config = tiny_config("--eval-iters", "1", "--vocab-size", "2000", *arguments)
        data = replace(config.data, data_path=(), split=None, train_data_path=(train,), valid_data_path=valid)
        context = context_of_rank(replace(config, data=data), 0, 1)
        return build_run(context, gpt_datasets, gpt_model, forward_step)

    a, b, c = (str(numbered_corpus(tmp_path / name, [9] * length)) for name, length in zip("abc", (100, 50, 60)))
    train(run_on(a, (b,), "--save", str(tmp_path / "saved"), "--exit-interval", "2"))
    load = ("--load", str(tmp_path / "saved"))
    for other in ((), (c,), (b, c)):
        assert run_on(a, other, *load).progress.iteration == 2
    numbered_corpus(tmp_path / "a", [9] * 99)
    with pytest.raises(CheckpointError, match="data that is not what it was trained with"):
        run_on(a, (b,), *load)


def test_a_checkpoint_that_lists_the_data_of_all_splits_is_compared_in_that_of_the_training() -> None:
    """As older versions list it: what was trained on first."""

    def check(*sources: str) -> None:
        present = [SimpleNamespace(prefix=name, fingerprint=f"of {name}", content=name) for name in sources]
        run = SimpleNamespace(loaders=SimpleNamespace(sources=present))
        checkpoints._check_data(run, saved)  # type: ignore[arg-type]

    listed = [{"prefix": name, "fingerprint": f"of {name}", "content": name} for name in ("learnt", "held-out")]
    saved: Any = SimpleNamespace(folder="saved", metadata={"data": listed})
    check("learnt")
    for others in (["held-out"], ["learnt", "held-out", "more"]):
        with pytest.raises(CheckpointError, match="data that is not what it was trained with"):
            check(*others)


def test_another_schedule_is_refused_until_it_is_said_which_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("--save", str(tmp_path), "--exit-interval", "2")
    go_on = ["--load", str(tmp_path), "--lr", "5e-3"]
    outcome = pretrain_tiny(tmp_path, *go_on)
    assert outcome.codes == [2]
    assert "max_lr (--lr): 0.01 in the checkpoint, 0.005 in this run" in outcome.err[0]
    assert "--lr: 0.01 -> 0.005" in outcome.out[0]
    run, _ = build(*go_on, "--override-opt_param-scheduler")
    assert run.scheduler.learning_rate_schedule.max_lr == 5e-3
    assert "--lr: 0.01 -> 0.005" in capsys.readouterr().out
    run, _ = build(*go_on, "--use-checkpoint-opt_param-scheduler")
    said = capsys.readouterr().out
    assert "--load: None -> " in said and "--lr: " not in said, "what differs, but the schedule that is not used"
    assert run.scheduler.learning_rate_schedule.max_lr == 1e-2
    assert run.scheduler.num_steps == 16
    context = context_of_rank(tiny_config(*go_on, "--use-checkpoint-opt_param-scheduler", "--finetune"), 0, 1)
    open_checkpoint(context)
    assert "--lr: 0.01 -> 0.005" in capsys.readouterr().out, "a new training has its own schedule"


def test_a_longer_run_is_told_the_lengths_of_both_in_iterations(tmp_path: Path) -> None:
    trained("--save", str(tmp_path), "--exit-interval", "2", "--train-iters", "3")
    with pytest.raises(CheckpointError, match=r"24 samples \(3 iterations\) in the .* 40 samples \(5 iterations\)"):
        build("--load", str(tmp_path), "--train-iters", "5")


# ---- evaluation ----


def test_an_evaluation_changes_nothing_in_the_training_that_follows() -> None:
    dropout = ("--hidden-dropout", "0.5", "--attention-dropout", "0.5")
    _, without = trained(*dropout, "--train-iters", "4")
    _, with_evaluations = trained(*dropout, "--train-iters", "4", "--eval-iters", "1", "--eval-interval", "1")
    assert len(with_evaluations.evaluations) == 4
    assert timeless(with_evaluations) == timeless(without)


def test_each_validation_reads_on_and_a_resume_too(tmp_path: Path) -> None:
    arguments = ["--train-iters", "10", "--global-batch-size", "4", "--eval-iters", "3", "--eval-interval", "5"]
    save = ["--save", str(tmp_path), "--load", str(tmp_path), "--load-if-exists", "--exit-interval", "5"]
    run, straight = trained(*arguments)
    assert run.progress.consumed_valid_samples == 24
    assert straight.evaluations[0][2] != straight.evaluations[1][2]
    stopped, first = trained(*arguments, *save)
    assert stopped.progress.consumed_valid_samples == 12
    resumed, second = trained(*arguments, *save)
    assert resumed.progress.consumed_valid_samples == 24
    assert first.evaluations + second.evaluations == straight.evaluations


def test_the_validation_at_the_end_does_not_count_for_a_run_that_goes_on(tmp_path: Path) -> None:
    """Which then validates on the samples of a run that had all its iterations from the start."""
    arguments = ["--eval-iters", "2", "--eval-interval", "2", "--lr-decay-style", "constant", "--save", str(tmp_path)]
    run, recorder = trained(*arguments, "--train-iters", "3")
    assert [iteration for _, iteration, _ in recorder.evaluations] == [2, 3]
    assert run.progress.consumed_valid_samples == 16
    assert saved_progress(tmp_path)["consumed_valid_samples"] == 16


# ---- the log of a resumed run ----


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    return {tag: [(point.step, point.value) for point in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


@pytest.mark.parametrize("step", [5, 10], ids=["killed-after-its-checkpoint", "stopped"])
def test_tensorboard_shows_each_step_once_after_a_resume(step: int, tmp_path: Path) -> None:
    common = [
        *("--train-iters", "12", "--tensorboard-dir", str(tmp_path / "log"), "--save-interval", "5"),
        *("--eval-interval", "5", "--eval-iters", "1"),
    ]
    saved = str(tmp_path / "saved")
    trained(*common, "--save", saved, "--exit-interval", "10")
    time.sleep(
        1.1
    )  # TensorBoard reads the files in the order of their names, which begin with the second of their start
    trained(*common, "--load", saved, "--ckpt-step", str(step), "--save", str(tmp_path / "saved again"))
    seen = points(tmp_path / "log")
    assert [at for at, _ in seen["lm loss"]] == list(range(1, 13))
    assert [at for at, _ in seen["lm loss vs samples"]] == list(range(8, 97, 8))
    assert [value for _, value in seen["lm loss"]] == [value for _, value in seen["lm loss vs samples"]]
    assert [at for at, _ in seen["lm loss validation"]] == [5, 10, 12]
    assert [at for at, _ in seen["lm loss validation vs samples"]] == [40, 80, 96]
