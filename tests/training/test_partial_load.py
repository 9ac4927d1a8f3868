"""`--load-partial`: a checkpoint of a model that is nearly the one to train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.launch import pretrain_tiny
from tests.helpers.numerics import PARITY_FP64, assert_bitwise
from tests.parity.layouts import DATA_PARALLELISM
from tests.training.runs import build, rows_on_ranks, trained
from tests.training.test_train_step import state_of

HEAD = ("--untie-embeddings-and-output-weights", "--load-partial", "model.output_layer.*")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_missing_has_the_values_of_a_new_run_and_all_else_those_of_the_checkpoint(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--precision", precision, "--lr-warmup-iters", "1", "--train-iters", "4")
    saved, _ = trained(*common, "--save", str(tmp_path), "--exit-interval", "2")
    capsys.readouterr()
    run, _ = build(*common, "--load", str(tmp_path), *HEAD)
    printed = capsys.readouterr().out
    assert "--untie-embeddings-and-output-weights: False -> True" in printed
    for key in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        assert f"\n  {key}.output_layer.weight (251, 48): not in the checkpoint\n" in printed
    new, _ = build(*common, HEAD[0])
    before, fresh = state_of(saved), state_of(new)
    for name, tensor in state_of(run).items():
        assert_bitwise(tensor, (fresh if "output_layer" in name else before)[name], name)
    assert (run.progress.iteration, run.scheduler.num_steps) == (2, 16)


def test_layers_may_be_added_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, _ = trained("--save", str(tmp_path))
    for layers, glob, message in (
        ("6", "model.decoder.layers.[45].*", "model.decoder.layers.5.mlp.linear_fc2.bias (48,): not in the checkpoint"),
        ("2", "model.decoder.layers.*", "model.decoder.layers.3.mlp.linear_fc2.bias (48,): in the checkpoint only"),
    ):
        run, _ = build("--num-layers", layers, "--load", str(tmp_path), "--finetune", "--load-partial", glob)
        assert message in capsys.readouterr().out
        before = state_of(saved)
        for name, tensor in state_of(run).items():
            if name.startswith("model.") and name in before:
                assert_bitwise(tensor, before[name], name)


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (2, ("--tensor-model-parallel-size", "2")),
        (2, ("--pipeline-model-parallel-size", "2")),
        (2, DATA_PARALLELISM["zero-overlap"]),
    ],
    ids=["tp2", "pp2", "zero2"],
)
def test_ranks_that_hold_different_tensors_leave_the_same_out(
    ranks: int, layout: tuple[str, ...], tmp_path: Path
) -> None:
    common = ("--fp64", "--train-iters", "4", "--lr-warmup-iters", "1")
    trained(*common, "--save", str(tmp_path), "--exit-interval", "2")
    go_on = (*common, "--load", str(tmp_path), *HEAD)
    _, alone = trained(*go_on)
    rows = run_distributed(rows_on_ranks, ranks, *go_on, *layout)[-1]
    assert [row["lm loss"] for row in rows] == pytest.approx(alone.losses, rel=PARITY_FP64)


def test_a_run_that_is_started_again_with_its_flags_goes_on(tmp_path: Path) -> None:
    """The tensors that were missing at first are in its own checkpoints."""
    trained("--save", str(tmp_path / "first"))
    flags = ("--train-iters", "6", "--override-opt_param-scheduler", *HEAD, "--save", str(tmp_path / "second"))
    trained(*flags, "--load", str(tmp_path / "first"), "--exit-interval", "4")
    _, recorder = trained(*flags, "--load", str(tmp_path / "second"))
    assert [step.iteration for step in recorder.steps] == [5, 6]


def test_differences_that_no_glob_names_are_refused_with_all_of_them(tmp_path: Path) -> None:
    trained("--save", str(tmp_path / "saved"))
    load = ["--load", str(tmp_path / "saved")]
    outcome = pretrain_tiny(tmp_path, *load, *HEAD, "--normalization", "RMSNorm", "--add-qkv-bias", "--qk-layernorm")
    assert outcome.codes == [2]
    for line in (
        "model.decoder.layers.0.self_attention.q_layernorm.weight (4,): not in the checkpoint",
        "model.decoder.final_layernorm.bias (48,): in the checkpoint only",
    ):
        assert line in outcome.err[0]
    assert "model.output_layer.weight" not in outcome.err[0]

    outcome = pretrain_tiny(tmp_path, *load, *HEAD, "--activation", "gelu")
    assert outcome.codes == [2]
    assert "--activation: gelu_tanh -> gelu changes the model" in outcome.err[0]
    assert "--untie-embeddings-and-output-weights" not in outcome.err[0], "what the tensors show is compared there"


def test_a_glob_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    trained("--save", str(tmp_path / "saved"))
    outcome = pretrain_tiny(tmp_path, "--load", "saved", "--load-partial", "output_layer.*", ranks=2)
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert said.count("'output_layer.*' names no tensor of the model or of the checkpoint") == 1
