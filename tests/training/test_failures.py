"""How a program ends for a reason that its user can mend: a message in place of a traceback, exit code 2."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.config.problems import UserError
from megatron.training import initialize, pretrain
from megatron.training.failures import exiting
from megatron.training.initialize import MegatronContext, initialize_megatron
from tests.helpers.launch import launch, pretrain_gpt, pretrain_tiny
from tests.helpers.tiny import CORPUS, TINY_GPT, context_of_rank, tiny_config


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_corpus_is_said_without_a_traceback(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "bad.bin").write_bytes(CORPUS.with_suffix(".bin").read_bytes())
    (tmp_path / "bad.idx").write_bytes(CORPUS.with_suffix(".idx").read_bytes()[:20])
    outcome = pretrain_tiny(tmp_path, "--data-path", str(tmp_path / "bad"), ranks=ranks)
    assert outcome.codes == [2] * ranks
    assert any("bad.idx" in text for text in outcome.err)
    assert not any("Traceback" in text for text in outcome.err)


def test_a_tokenizer_file_of_an_interrupted_copy_is_said_without_a_traceback(tmp_path: Path) -> None:
    model = tmp_path / "tokenizer.model"
    model.touch()
    outcome = pretrain_tiny(tmp_path, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model))
    assert outcome.codes == [2]
    assert f"--tokenizer-model {model} is not a SentencePiece model (it is empty)" in outcome.err[0]
    assert "Traceback" not in outcome.err[0]


def context_with_store() -> MegatronContext:
    context = context_of_rank(tiny_config(), 0, 1)
    store = torch.distributed.HashStore()
    return MegatronContext(
        config=context.config, state=context.state, device=context.device, extra=argparse.Namespace(), store=store
    )


def test_the_same_reason_is_said_once_and_another_one_too(capsys: pytest.CaptureFixture[str]) -> None:
    context = context_with_store()
    for reason in ("the disk is full", "the disk is full", "the file is damaged"):
        with pytest.raises(SystemExit, match="2"), context.exiting():
            raise UserError(reason)
    said = capsys.readouterr().err
    assert said.count("the disk is full") == 1
    assert said.count("the file is damaged") == 1


def damaged_on_some(ranks: tuple[int, ...]) -> None:
    context = initialize_megatron(TINY_GPT)
    with context.exiting():
        if context.state.rank in ranks:
            raise UserError("the file is damaged")
    time.sleep(3)  # rank 0 hosts what the others ask


def damaged_on_all() -> None:
    initialize._TIME_TO_ASK = 60.0  # both have the reason, so nobody waits so long, but a busy machine may need it
    damaged_on_some((0, 1))


def damaged_on_rank_1() -> None:
    damaged_on_some((1,))


@pytest.mark.parametrize(
    "program, ranks, said_by",
    [(damaged_on_all, 1, ""), (damaged_on_all, 2, ""), (damaged_on_rank_1, 2, "(rank 1)\n")],
)
def test_the_rank_is_named_where_the_others_would_not_say_the_same(
    program: Callable[[], None], ranks: int, said_by: str, tmp_path: Path
) -> None:
    outcome = launch(program, [], ranks=ranks, folder=tmp_path).wait()
    assert "".join(outcome.err) == f"pretrain_gpt.py: error: the file is damaged\n{said_by}"


@pytest.mark.parametrize("kind", [ValueError, FloatingPointError])
def test_a_bug_keeps_its_traceback(kind: type[Exception]) -> None:
    """Such as an overflow that numpy or a user's own code raises."""
    with pytest.raises(kind, match="a bug"), context_with_store().exiting():
        raise kind("a bug")


LOST = "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete"


@pytest.mark.parametrize(
    "ended, error, raised, said",
    [
        (True, LOST, "1", ""),
        (False, LOST, "1", "rank 0 has lost another rank, which has not said why: "),
        (True, LATE, "Timed out", ""),
        (False, LATE, "Timed out", ""),
        (True, "a bug", "a bug", ""),
    ],
)
def test_a_lost_connection_is_silent_where_another_rank_says_why_and_nothing_else_is(
    ended: bool, error: str, raised: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialize, "_TIME_TO_SPEAK", 0.1)
    monkeypatch.setattr(initialize, "_TIME_TO_ASK", 0.1)
    context = context_with_store()
    if ended:
        with pytest.raises(SystemExit, match="2"), context.exiting():
            raise UserError("the disk is full")
        capsys.readouterr()
    with pytest.raises(SystemExit if raised == "1" else RuntimeError, match=raised), context.exiting():
        raise RuntimeError(error)
    assert capsys.readouterr().err[: len(said) or None] == said


class GoneStore:
    """Where ranks have met, and nobody is any more."""

    def add(self, key: str, amount: int) -> int:
        raise torch.distributed.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize(
    "gone, rank, said",
    [
        ((0, 1), 2, "rank 2 has lost another rank (of this node rank 0 and rank 1), and the store where they meet: "),
        ((0, 1), 3, ""),
        ((0,), 1, "rank 1 has lost another rank (of this node rank 0), and the store where they meet: "),
        ((0,), 3, ""),
        ((), 1, "rank 1 has lost another rank, and the store where they meet: "),
        ((0, 1, 2), 3, "rank 3 has lost another rank (of this node rank 0 and rank 1 and rank 2), and the store "),
    ],
)
def test_the_first_rank_that_is_left_says_which_ones_of_its_node_are_gone_with_the_store(
    gone: tuple[int, ...], rank: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialize, "_TIME_TO_ASK", 0.01)
    killed = [subprocess.Popen(["sleep", "60"]) for _ in gone]
    for process in killed:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is there still, as its parent has not asked
    neighbours = dict.fromkeys(range(4), os.getpid()) | {n: process.pid for n, process in zip(gone, killed)}
    context = replace(
        context_with_store(),
        state=SimpleNamespace(rank=rank),  # type: ignore[arg-type]
        store=GoneStore(),  # type: ignore[arg-type]
        neighbours=neighbours,
    )
    with pytest.raises(SystemExit, match="1"), context.exiting():
        raise RuntimeError(LOST)
    for process in killed:
        process.wait()
    assert capsys.readouterr().err[: len(said) or None] == said


@pytest.mark.parametrize("store", [torch.distributed.HashStore, GoneStore])
def test_what_to_do_after_a_loss_is_said_where_something_goes_on(
    store: Callable[[], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing does after a tool has lost a rank, nor where nothing was saved."""
    monkeypatch.setattr(initialize, "_TIME_TO_SPEAK", 0.01)
    monkeypatch.setattr(initialize, "_TIME_TO_ASK", 0.01)
    said = []
    for after_loss in ("", "--load saved goes on"):
        context = replace(context_with_store(), store=store())
        with pytest.raises(SystemExit, match="1"), context.exiting(after_loss=after_loss):
            raise RuntimeError(LOST)
        said.append(capsys.readouterr().err)
    assert "--load" not in said[0]
    assert said[1] == said[0].rstrip() + "; --load saved goes on\n"


@pytest.mark.parametrize(
    "flags, advice",
    [
        ((), ""),
        (("--save", "saved"), "; --load saved goes on from the last checkpoint"),
        (("--save", "saved", "--skip-train", "--eval-iters", "1", "--split", "50,50"), ""),
    ],
)
def test_a_training_that_saves_is_gone_on_with_after_a_loss(
    flags: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*arguments: object) -> None:
        raise RuntimeError(LOST)

    monkeypatch.setattr(initialize, "_TIME_TO_SPEAK", 0.01)
    monkeypatch.setattr(initialize, "_TIME_TO_ASK", 0.01)
    context = replace(context_with_store(), config=tiny_config(*flags))
    monkeypatch.setattr(pretrain, "initialize_megatron", lambda **given: context)
    monkeypatch.setattr(pretrain, "_pretrain", lose)
    with pytest.raises(SystemExit, match="1"):
        pretrain.pretrain(lose, lose, lose)  # type: ignore[arg-type]
    assert capsys.readouterr().err.endswith(f"or its node or the network failed{advice}\n")


def test_the_launcher_finds_the_reason_where_it_looks_for_one(tmp_path: Path) -> None:
    """Its report of all that failed comes after what the ranks have said, and buries it."""
    file = tmp_path / "error.json"
    wrong = ["--lr", "0", "--seed", "-1", "--load", str(tmp_path / "nothing")]
    for arguments, reason in (
        (wrong[:4], "2 problems in the configuration: 1. --lr 0.0: must be more than 0 Works: --lr 0.0001 ... ==="),
        (wrong[4:], "--load: no checkpoint in "),
    ):
        pretrain_tiny(tmp_path, *arguments, environment=lambda rank: {"TORCHELASTIC_ERROR_FILE": str(file)})
        failed = ChildFailedError("", {0: ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))})
        said = str(failed).partition("traceback : ")[2]
        assert " ".join(said.split()).startswith(reason)
        assert abs(failed.failures[0].timestamp - time.time()) < 60
        file.unlink()


# ---- output that nobody reads ----


def pretrain_before_head() -> None:
    """As a process that nobody launched, and whose output goes to a `head` that has seen enough."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(reading)
    pretrain_gpt()


MAP = ["--print-parallel-groups", "--world-size", "2048"]


@pytest.mark.parametrize("arguments", [["--help"], [*TINY_GPT, "--print-config"], MAP, TINY_GPT])
def test_a_reader_that_has_seen_enough_ends_the_program_quietly(arguments: Sequence[str], tmp_path: Path) -> None:
    outcome = launch(pretrain_before_head, arguments, ranks=1, folder=tmp_path).wait()
    assert outcome.codes == [141]
    assert "Broken" not in outcome.err[0]


def broken_inside() -> None:
    with exiting():
        raise BrokenPipeError("of a socket")


def test_another_broken_pipe_than_that_of_the_output_keeps_its_traceback(tmp_path: Path) -> None:
    outcome = launch(broken_inside, [], ranks=1, folder=tmp_path).wait()
    assert outcome.codes == [1]
    assert "BrokenPipeError: of a socket" in outcome.err[0]
