"""What is asked of a model: nothing but to be a module, and what it may say of itself besides."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partialmethod
from pathlib import Path

import pytest
from torch import nn

from megatron.config.arguments import parse_arguments
from megatron.config.pipeline_layout import StageLayout
from megatron.config.problems import UserError
from megatron.core.shard import shard_of
from megatron.training.gpt import gpt_datasets, gpt_model
from megatron.training.initialize import MegatronContext
from megatron.training.metrics import StepReport
from megatron.training.pretrain import build_run, train
from megatron.training.run import Hook, Run
from megatron.training.setup import Vocabulary
from pretrain_gpt import forward_step
from tests.helpers.distributed import run_distributed
from tests.helpers.numerics import PARITY_FP32
from tests.helpers.tiny import context_of_rank, tiny_config
from tests.parity.layouts import DATA_PARALLELISM
from tests.training.pretrain_mine import MyModel, my_arguments, my_datasets, my_forward_step
from tests.training.runs import trained

ARGUMENTS = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "1", "--seq-length", "8"),
    *("--max-position-embeddings", "8", "--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "1"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "11", "--mock-data", "--eval-iters", "0", "--lr", "1e-2"),
    *("--num-workers", "0", "--log-interval", "1"),
]
BUILT = 11 * 16 + (16 * 16 + 16) + (11 * 16 + 11)


class ToldModel(MyModel):
    """A model that says all of itself."""

    parameters_implied: int | None = BUILT

    def layers_to_compile(self) -> Iterable[nn.Module]:
        return [self.hidden]

    def implied_parameter_count(self) -> int | None:
        return self.parameters_implied

    def flops_per_sample(self, sequence_length: int) -> float | None:
        return 1e12 * sequence_length


class LosingModel(ToldModel):
    parameters_implied = BUILT + 1


class UncertainModel(ToldModel):
    parameters_implied = None


def run_of(model: type[MyModel], *arguments: str, rank: int = 0, world_size: int = 1) -> Run:
    config, extra = parse_arguments(
        ARGUMENTS + list(arguments), world_size=world_size, extra_args_provider=my_arguments
    )
    context = context_of_rank(config, rank, world_size)
    vars(context.extra).update(vars(extra))
    return build_run(
        context, my_datasets, lambda context, stage, vocabulary: model(vocabulary.size, 16), my_forward_step
    )


def test_muon_needs_a_matrix_that_is_marked() -> None:
    with pytest.raises(UserError, match=r"--optimizer muon: MyModel marks no trainable parameter .* set_matrices\(\)"):
        run_of(MyModel, "--optimizer", "muon")


def test_muon_needs_a_matrix_that_is_trained() -> None:
    def frozen(context: MegatronContext, stage: StageLayout, vocabulary: Vocabulary) -> nn.Module:
        model = gpt_model(context, stage, vocabulary)
        for parameter in model.parameters():
            parameter.requires_grad_(not shard_of(parameter).matrices)
        return model

    context = context_of_rank(tiny_config("--optimizer", "muon"), 0, 1)
    with pytest.raises(UserError, match=r"--optimizer muon: GPTModel marks no trainable parameter"):
        build_run(context, gpt_datasets, frozen, forward_step)


def test_a_plain_module_trains_and_what_is_left_out_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = run_of(MyModel, "--tensorboard-dir", str(tmp_path))
    train(run)
    said = capsys.readouterr().out
    assert f"{BUILT:,} parameters" in said
    assert "note: MyModel gives no implied_parameter_count(): the number of parameters is not checked" in said
    assert "note: MyModel gives no flops_per_sample(): no TFLOP/s is logged" in said
    assert "consumed samples:" in said
    assert "TFLOP/s/GPU" not in said


def test_a_model_that_knows_its_operations_has_a_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(ToldModel)
    reports: list[StepReport] = []

    class Keep(Hook):
        def after_step(self, run: Run, report: StepReport) -> None:
            reports.append(report)

    run.hooks = [Keep(), *run.hooks]
    train(run)
    said = capsys.readouterr().out
    assert "note: ToldModel" not in said
    assert "TFLOP/s/GPU" in said
    assert run.teraflops_per_second(8, reports[0].seconds) == pytest.approx(8 * 8 / reports[0].seconds)


def test_parameters_that_were_lost_are_noticed() -> None:
    with pytest.raises(RuntimeError, match=f"built {BUILT:,} parameters, but the configuration implies {BUILT + 1:,}"):
        run_of(LosingModel)


def test_a_model_may_say_that_it_does_not_know_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    run_of(UncertainModel)
    assert "note: UncertainModel gives no implied_parameter_count()" in capsys.readouterr().out


def test_a_model_that_names_no_layers_is_not_compiled() -> None:
    with pytest.raises(ValueError, match=r"--torch-compile: MyModel does not say .* method layers_to_compile\(\)"):
        run_of(MyModel, "--torch-compile")


def test_the_layers_that_a_model_names_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **settings: compiled.append(module))
    run = run_of(ToldModel, "--torch-compile")
    model = run.chunks[0].module
    assert isinstance(model, ToldModel)
    assert compiled == [model.hidden]


def compiled_on_ranks(rank: int, world_size: int, *arguments: str) -> list[float]:
    compile_module = nn.Module.compile
    nn.Module.compile = partialmethod(compile_module, backend="eager")  # type: ignore[assignment,method-assign]
    run = run_of(ToldModel, "--train-iters", "3", *arguments, rank=rank, world_size=world_size)
    losses: list[float] = []

    class Keep(Hook):
        def after_step(self, run: Run, report: StepReport) -> None:
            losses.extend(report.losses.values())

    run.hooks = [Keep(), *run.hooks]
    train(run)
    return losses


def test_compiled_layers_wait_for_their_parameters() -> None:
    arguments = ("--clip-grad", "0")
    plain = run_distributed(compiled_on_ranks, 2, *arguments)
    compiled = run_distributed(compiled_on_ranks, 2, *arguments, "--torch-compile", *DATA_PARALLELISM["zero-overlap"])
    assert len(plain[0]) == 3
    for losses, expected in zip(compiled, plain):
        assert losses == pytest.approx(expected, rel=PARITY_FP32)


def compiled_without_giving_up(rank: int, world_size: int) -> None:
    nn.Module.compile = partialmethod(nn.Module.compile, backend="eager")  # type: ignore[assignment,method-assign]
    import torch._dynamo.config as dynamo  # takes seconds

    dynamo.fail_on_recompile_limit_hit = True
    evaluation = ("--eval-iters", "1", "--eval-interval", "1")
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    layout = ("--tensor-model-parallel-size", "2", "--torch-compile")
    trained(*layout, *dropout, *evaluation, "--train-iters", "1", rank=rank, world_size=world_size)


def test_all_that_breaks_the_graph_is_compiled_for_each_of_its_uses() -> None:
    run_distributed(compiled_without_giving_up, 2)
