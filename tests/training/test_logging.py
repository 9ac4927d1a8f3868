"""What a run reports: the field's log line, JSON lines, TensorBoard, timers, throughput."""

from __future__ import annotations

import json
import math
import re
import resource
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard.writer import SummaryWriter

from megatron.config.problems import ConfigError
from megatron.training.metrics import Interval, StepReport, format_duration, log_line
from megatron.training.timers import format_timers
from tests.helpers.distributed import run_distributed
from tests.helpers.launch import launch, pretrain_gpt, pretrain_tiny, rows_of
from tests.helpers.tiny import TINY_GPT, tiny_config
from tests.training.runs import trained

# As parsers of Megatron-LM's logs read it: fields in this order, anything may stand between them.
MEGATRON_LINE = re.compile(
    r" (\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6})\] )?iteration +(?P<iteration>\d+)/ *(?P<iterations>\d+) \|"
    r" consumed samples: +(?P<samples>\d+) \|.*"
    r" elapsed time per iteration \(ms\): (?P<ms>\d+\.\d) \|"
    r"( throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>\d+\.\d+) \|)?.*"
    r" learning rate: (?P<lr>\d\.\d{6}E[+-]\d\d) \|"
    r" global batch size: +(?P<batch>\d+) \|"
    r" lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d|NAN|INF) \|.*"
    r" loss scale: (?P<scale>\d+\.\d) \|"
    r"( grad norm: (?P<norm>\d+\.\d{3}|nan|inf) \|)?"
    r"( num zeros: (?P<zeros>\d+) \|)?"
    r"( params norm: (?P<params>\d+\.\d{3}) \|)?.*"
    r" number of skipped iterations: +(?P<skipped>\d+) \|"
    r" number of nan iterations: +(?P<nan>\d+) \|"
)

REPORT = StepReport(
    iteration=20,
    losses={"lm loss": 2.5},
    applied=True,
    nan=False,
    faults=(),
    grad_norm=1.25,
    num_zeros=None,
    params_norm=None,
    loss_scale=1.0,
    learning_rate=1e-3,
    next_learning_rate=9e-4,
    weight_decay=0.1,
    global_batch_size=8,
    consumed_samples=160,
    tokens=8 * 24,
    seconds=0.5,
)


def line_of(*reports: StepReport, tflops: float | None = 123.45) -> str:
    return log_line(
        Interval(list(reports)),
        train_iters=100,
        now=datetime(2026, 1, 2, 3, 4, 5, 678901),
        tflops_per_second=tflops,
        remaining=90061.0,
    )


# ---- the line ----


def test_the_line_to_the_letter() -> None:
    assert line_of(REPORT) == (
        " [2026-01-02 03:04:05.678901] iteration       20/     100 | consumed samples:          160 |"
        " elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 123.5 |"
        " learning rate: 9.000000E-04 | global batch size:     8 | lm loss: 2.500000E+00 | loss scale: 1.0 |"
        " grad norm: 1.250 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s: 384 | ETA: 1d 1:01:01 |"
    )


def test_a_line_means_over_its_interval_and_leaves_out_skipped_steps() -> None:
    skipped = replace(REPORT, iteration=19, losses={"lm loss": 100.0}, applied=False, grad_norm=math.inf)
    first = replace(REPORT, iteration=18, losses={"lm loss": 3.5}, seconds=1.5)
    found = MEGATRON_LINE.match(line_of(first, skipped, REPORT))
    assert found is not None
    assert (found["loss"], found["skipped"], found["nan"], found["ms"]) == ("3.000000E+00", "1", "0", "833.3")


def test_a_loss_that_is_not_a_number_is_printed() -> None:
    bad = replace(REPORT, losses={"lm loss": math.nan}, applied=False, nan=True, grad_norm=math.nan)
    found = MEGATRON_LINE.match(line_of(REPORT, bad))
    assert found is not None
    assert (found["loss"], found["norm"], found["nan"]) == ("NAN", "nan", "1")


def test_lines_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """After the first iteration, and then every --log-interval."""
    _, recorder = trained("--train-iters", "7", "--log-interval", "3", "--log-params-norm", "--log-num-zeros-in-grad")
    lines = [line for line in capsys.readouterr().out.splitlines() if " iteration " in line]
    found = [match for line in lines if (match := MEGATRON_LINE.fullmatch(re.sub(r" tokens/s.*", "", line)))]
    assert [match["iteration"] for match in found] == ["1", "3", "6"]
    assert all(match["iterations"] == "7" and match["batch"] == "8" for match in found)
    assert [match["samples"] for match in found] == ["8", "24", "48"]
    losses = recorder.losses
    means = [losses[0], sum(losses[1:3]) / 2, sum(losses[3:6]) / 3]
    assert [match["loss"] for match in found] == [f"{mean:.6E}" for mean in means]
    assert [match["lr"] for match in found] == [f"{recorder.steps[at].next_learning_rate:.6E}" for at in (0, 2, 5)]
    assert all(match["params"] and match["zeros"] and match["tflops"] for match in found)
    assert all(re.search(r" tokens/s: \d+ \| ETA: 0:00:\d\d \|$", line) for line in lines)


def test_the_line_comes_from_the_last_rank_alone(tmp_path: Path) -> None:
    arguments = ["--log-interval", "1", "--pipeline-model-parallel-size", "2", "--no-log-throughput"]
    outcome = pretrain_tiny(tmp_path, *arguments, ranks=2).check()
    assert "consumed samples" not in outcome.out[0]
    assert outcome.out[1].count("consumed samples") == 3
    assert "throughput" not in outcome.out[1]


def test_all_that_a_run_says_once_its_groups_exist_comes_from_one_rank(tmp_path: Path) -> None:
    arguments = ["--save", "saved", "--print-parallel-groups", "--tensor-model-parallel-size", "2"]
    pretrain_tiny(tmp_path, *arguments, "--train-iters", "1", ranks=2).check()
    more = ["--load", "saved", "--train-iters", "2", "--override-opt_param-scheduler"]
    nodes = {"environment": lambda rank: {"GROUP_RANK": str(rank)}}
    outcome = pretrain_tiny(tmp_path, *arguments, *more, ranks=2, **nodes).check()
    assert outcome.out[0] == ""
    for said in (
        "2 ranks on 2 node(s)",
        "warning: 1 tensor-parallel group(s) span nodes",
        "configuration that differs from saved/",
        "training data: 8 more samples are appended",
        "successfully loaded checkpoint",
        "parameters",
        "consumed samples",
        "successfully saved checkpoint",
    ):
        assert said in outcome.out[1], said


def test_a_validation_block(capsys: pytest.CaptureFixture[str]) -> None:
    _, recorder = trained("--train-iters", "1", "--eval-iters", "1")
    ((_, _, losses),) = recorder.evaluations
    rule, line, below = capsys.readouterr().out.splitlines()[-3:]
    loss = losses["lm loss"]
    expected = f" validation loss at iteration 1 | lm loss value: {loss:.6E} | lm loss PPL: {math.exp(loss):.6E} | "
    assert line == expected
    assert rule == below == "-" * len(line)


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (86400 * 3, "3d 0:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# ---- throughput ----

FLOPS = json.loads((Path(__file__).parents[1] / "fixtures" / "tables" / "flops.json").read_text())


def test_throughput_is_flops_by_seconds_and_ranks(tmp_path: Path) -> None:
    run, recorder = trained("--train-iters", "1", "--tensorboard-dir", str(tmp_path))
    (step,) = recorder.steps
    # 6 B s [L (h f 2 + h (q + k + v) + q h) + h V] + 6 B s^2 L q
    per_token = 4 * (48 * 96 * 2 + 48 * 3 * 96 + 96 * 48) + 48 * 256
    flops = 6 * 8 * 24 * per_token + 6 * 8 * 24**2 * 4 * 96
    assert run.flops_per_sample * 8 == flops
    assert run.teraflops_per_second(8, step.seconds) == pytest.approx(flops / step.seconds / 1e12)
    assert points(tmp_path)["throughput"] == pytest.approx([run.teraflops_per_second(8, step.seconds)])


# ---- JSON lines ----


def test_json_lines_hold_every_number_in_full(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "run.json"
    _, recorder = trained(
        *("--fp64", "--log-json", str(file), "--eval-iters", "1", "--eval-interval", "2", "--train-iters", "2")
    )
    rows = rows_of(file)
    assert [row["iteration"] for row in rows] == [1, 2, 2]
    assert rows[:2] == [step.as_json() for step in recorder.steps]
    assert rows[0]["lm loss"] == recorder.losses[0]
    assert rows[2] == {"iteration": 2, "lm loss validation": recorder.evaluations[0][2]["lm loss"]}


def test_json_lines_are_json_when_a_number_is_not_one() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    row = replace(REPORT, losses={"lm loss": math.nan}, grad_norm=math.inf, params_norm=math.nan).as_json()
    read = json.loads(json.dumps(row), parse_constant=refuse)
    assert (read["lm loss"], read["grad_norm"], read["params_norm"]) == ("nan", "inf", "nan")


# ---- TensorBoard ----


def points(folder: Path) -> dict[str, list[float]]:
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    return {tag: [point.value for point in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


AGAINST_SAMPLES = ["learning-rate", "batch-size", "lm loss", "grad-norm", "loss-scale"]


def test_tensorboard_tags(tmp_path: Path) -> None:
    _, recorder = trained("--tensorboard-dir", str(tmp_path))
    seen = points(tmp_path)
    tags = [*AGAINST_SAMPLES, *(f"{tag} vs samples" for tag in AGAINST_SAMPLES), "iteration-time", "throughput"]
    assert sorted(seen) == sorted(tags)
    assert seen["lm loss"] == pytest.approx(recorder.losses)
    assert seen["batch-size"] == [8, 8, 8]
    assert seen["learning-rate"] == pytest.approx([step.next_learning_rate for step in recorder.steps])


def test_further_tensorboard_tags_when_asked_for(tmp_path: Path) -> None:
    _, recorder = trained(
        *("--tensorboard-dir", str(tmp_path), "--log-params-norm", "--log-num-zeros-in-grad", "--eval-iters", "1"),
        *("--log-validation-ppl-to-tensorboard", "--log-world-size-to-tensorboard", "--no-log-throughput"),
        *("--no-log-loss-scale-to-tensorboard", "--tensorboard-log-interval", "2", "--train-iters", "4"),
    )
    seen = points(tmp_path)
    for tag in ("num-zeros", "params-norm", "world-size", "lm loss validation", "lm loss validation ppl"):
        assert {tag, f"{tag} vs samples"} <= seen.keys()
    assert not {"loss-scale", "throughput"} & seen.keys()
    assert seen["lm loss"] == pytest.approx([recorder.losses[1], recorder.losses[3]])
    assert seen["world-size"] == [1, 1]
    assert seen["params-norm"] == pytest.approx([recorder.steps[1].params_norm, recorder.steps[3].params_norm])


def test_the_configuration_is_text_in_tensorboard(tmp_path: Path) -> None:
    run, _ = trained("--tensorboard-dir", str(tmp_path), "--train-iters", "1")
    log = EventAccumulator(str(tmp_path)).Reload()
    (tag,) = log.Tags()["tensors"]
    assert tag == "config/text_summary"
    (text,) = log.Tensors(tag)[0].tensor_proto.string_val
    assert run.config.to_json() in text.decode()


# ---- logs that can not be written ----


@pytest.mark.parametrize("flag", ["--log-json", "--tensorboard-dir"])
def test_a_log_that_can_not_be_written_is_refused_by_all_ranks_and_said_once(flag: str, tmp_path: Path) -> None:
    outcome = pretrain_tiny(tmp_path, flag, "/proc/no/log", "--tensor-model-parallel-size", "2", ranks=2)
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert f"error: opening {flag} /proc/no/log failed on 1 of 2 ranks:\n  rank 1 on " in said
    assert said.count("No such file or directory") == 1
    assert "Traceback" not in said
    assert "consumed samples" not in "".join(outcome.out)


def test_a_folder_for_a_file_and_a_file_for_a_folder_are_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--log-json .*: is a folder, a file is needed\n *Works: .*log\.json"):
        tiny_config("--log-json", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--tensorboard-dir .*file: is a file, a folder is needed\n *Works: "):
        tiny_config("--tensorboard-dir", str(tmp_path / "file"))


def test_a_run_goes_on_without_a_tensorboard_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []

    def failing(writer: SummaryWriter, tag: str, *_: object, **__: object) -> None:
        written.append(tag)
        if len(written) > 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", failing)
    run, _ = trained("--tensorboard-dir", str(tmp_path), "--eval-iters", "1", "--timing-log-level", "1")
    assert run.progress.iteration == 3
    assert len(written) == 4
    assert capsys.readouterr().out.count("the run goes on without it") == 1


def pretrain_with_small_files() -> None:
    """No file of this process may have more than 16 kB, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
    pretrain_gpt()


@pytest.mark.parametrize("flag", ["--log-json", "--tensorboard-dir"])
def test_a_full_disk_under_a_log_does_not_end_a_run(flag: str, tmp_path: Path) -> None:
    arguments = [*TINY_GPT, "--num-layers", "1", "--train-iters", "60", "--tensorboard-queue-size", "1"]
    outcome = launch(pretrain_with_small_files, [*arguments, flag, "log"], ranks=1, folder=tmp_path).wait().check()
    assert outcome.out[0].count(f"warning: {flag} log can not be written any more") == 1
    assert "Traceback" not in outcome.err[0]


def test_a_line_that_was_cut_off_costs_no_other_line(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    trained("--log-json", str(file), "--train-iters", "1")
    file.write_text(file.read_text() + '{"iteration": 2, "cons')
    trained("--log-json", str(file), "--train-iters", "2")
    lines = file.read_text().splitlines()
    assert [json.loads(lines[number])["iteration"] for number in (0, 2, 3)] == [1, 1, 2]


# ---- long evaluations ----


def test_a_long_evaluation_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10_000, 10))
    monkeypatch.setattr("megatron.training.reports.time.monotonic", lambda: float(next(seconds)))
    trained("--train-iters", "1", "--eval-iters", "10")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(" evaluation on")] == [
        " evaluation on validation data | iteration        4/      10 | ETA: 0:01:00",
        " evaluation on validation data | iteration        7/      10 | ETA: 0:00:30",
    ]


# ---- timers ----

PARTS = {"batch-generator", "forward-backward", "grads-reduce", "optimizer"}
MICRO_BATCH_PARTS = {"forward-compute", "backward-compute"}


def test_no_timers_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, recorder = trained("--log-interval", "1")
    assert recorder.tables == []
    assert "time across ranks" not in capsys.readouterr().out


@pytest.mark.parametrize("level, names", [(1, PARTS), (2, PARTS | MICRO_BATCH_PARTS)])
def test_timers_by_level(level: int, names: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, recorder = trained("--log-interval", "1", "--timing-log-level", str(level))
    assert len(recorder.tables) == 3
    assert all(table.keys() == names for table in recorder.tables)
    for table, step in zip(recorder.tables, recorder.steps):
        assert sum(table[name][0] for name in PARTS) <= 1000 * step.seconds
        if level == 2:
            assert sum(table[name][0] for name in MICRO_BATCH_PARTS) <= table["forward-backward"][0]
    printed = capsys.readouterr().out
    assert "\n(min, max) time across ranks (ms):\n" in printed
    assert re.search(r"\n    optimizer \.{38}: \(\d+\.\d\d, \d+\.\d\d\)\n", printed)


def _tables_of_rank(rank: int, world_size: int, *arguments: str) -> list[dict[str, list[float]]]:
    return trained(*arguments, rank=rank, world_size=world_size)[1].tables


def test_timers_of_all_ranks_meet_in_one_table() -> None:
    arguments = ["--train-iters", "1", "--log-interval", "1", "--timing-log-level", "2"]
    tables = run_distributed(_tables_of_rank, 2, *arguments, "--pipeline-model-parallel-size", "2")
    assert tables[0] == tables[1]
    assert tables[0][0].keys() == PARTS | MICRO_BATCH_PARTS | {"pipeline-wait"}
    assert all(len(times) == 2 for times in tables[0][0].values())


def test_timers_in_tensorboard(tmp_path: Path) -> None:
    _, recorder = trained(
        *("--log-interval", "1", "--timing-log-level", "1", "--tensorboard-dir", str(tmp_path)),
        "--log-timers-to-tensorboard",
    )
    seen = points(tmp_path)
    assert {f"{name}-time" for name in PARTS} <= seen.keys()
    assert seen["optimizer-time"] == pytest.approx([table["optimizer"][0] / 1000 for table in recorder.tables])


@pytest.mark.parametrize(
    "option, expected",
    [
        ("max", ["max time across ranks (ms):", f"    optimizer {'.' * 38}: 2.50"]),
        ("minmax", ["(min, max) time across ranks (ms):", f"    optimizer {'.' * 38}: (1.00, 2.50)"]),
        ("all", ["times across ranks (ms):", f"    optimizer {'.' * 38}:", "     rank  0: 1.00", "     rank  1: 2.50"]),
    ],
)
def test_forms_of_the_table(option: Any, expected: list[str]) -> None:
    assert format_timers({"optimizer": [1.0, 2.5]}, option).splitlines() == expected
