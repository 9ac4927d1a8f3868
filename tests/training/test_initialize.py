"""The start of a rank: what the launcher says, who is missing, what the arguments break, which groups there are."""

from __future__ import annotations

import argparse
import ast
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.config.problems import ConfigError
from megatron.core import parallel_state
from megatron.core.collectives import barrier
from megatron.core.rank_grid import RankGrid
from megatron.planning.memory import memory_table, predict_memory
from megatron.training import initialize
from megatron.training.initialize import (
    LaunchEnvironment,
    LaunchError,
    initialize_megatron,
    launch_line,
    read_launch_environment,
)
from tests.checkpointing.processes import _CONTEXT
from tests.core.test_parallel_state import groups_of, seconds_of
from tests.helpers.launch import launch, launch_tiny, pretrain_tiny
from tests.helpers.tiny import TINY_GPT, tiny_config

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS_PER_NODE": "8",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def _no_groups_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    yield
    parallel_state.destroy_model_parallel()


# ---- what the launcher says ----


def test_a_process_that_nobody_launched_is_a_world_of_one() -> None:
    assert read_launch_environment({}) == LaunchEnvironment()


def test_variables_of_torchrun() -> None:
    launch = read_launch_environment(TORCHRUN)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (5, 16, 1, 4)
    assert (launch.master_addr, launch.master_port, launch.launched, launch.slurm) == ("node-a", 29500, True, False)
    assert not launch.hosts_store
    assert not launch.watched
    assert read_launch_environment({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).watched
    assert launch.node == f"{socket.gethostname()}#1"


def test_rank_0_hosts_the_store_where_no_agent_does() -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_USE_AGENT_STORE"}
    assert [read_launch_environment({**variables, "RANK": rank}).hosts_store for rank in ("0", "1")] == [True, False]


def test_variables_of_slurm() -> None:
    launch = read_launch_environment(SLURM)
    assert not launch.gpu_per_task
    assert read_launch_environment({**SLURM, "SLURM_GPUS_PER_TASK": "1"}).gpu_per_task
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (0, 16, 0, 8)
    assert launch.launched
    assert launch.slurm
    assert launch.hosts_store
    assert launch.node == socket.gethostname()


def test_torchrun_inside_a_slurm_job_counts() -> None:
    assert read_launch_environment({**SLURM, **TORCHRUN}).rank == 5


def test_one_slurm_task_is_a_world_of_one_and_needs_no_address() -> None:
    """As in an interactive job, where nothing but Slurm has set variables."""
    assert read_launch_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == LaunchEnvironment()


def test_what_the_launcher_calls_the_run() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}
    renamed = {**SLURM, **step, "RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}
    assert read_launch_environment({**SLURM, **step}).job == "Slurm job 7 step 2"
    assert read_launch_environment(renamed).job == "Slurm job 7 step 2"
    assert read_launch_environment({**renamed, "TORCHELASTIC_RUN_ID": "mine"}).job == "torchrun mine"
    assert read_launch_environment({**TORCHRUN, **step}).job == "", "it may be of another step than its peers"
    assert read_launch_environment(TORCHRUN).job == ""


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_refused_with_the_launch_line(missing: str) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(LaunchError, match=f"lacks {missing} .*\n  torchrun --nproc-per-node 2 ") as failure:
        read_launch_environment(variables)
    assert failure.value.speaks


def test_slurm_without_an_address_is_told_how_to_find_one() -> None:
    variables = {name: value for name, value in SLURM.items() if not name.startswith("MASTER")}
    with pytest.raises(LaunchError, match=r"lacks MASTER_ADDR, MASTER_PORT .*\n  export MASTER_ADDR=.*scontrol.*srun"):
        read_launch_environment(variables)


@pytest.mark.parametrize("name, value", [("RANK", "one"), ("WORLD_SIZE", "-4"), ("MASTER_PORT", "")])
def test_variables_that_are_no_numbers_are_refused(name: str, value: str) -> None:
    with pytest.raises(LaunchError, match=f"has {name}={value}, which must be whole numbers"):
        read_launch_environment({**TORCHRUN, name: value})


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"RANK=16 is not in 0 … 15 \(WORLD_SIZE=16\).*\n  torchrun --nnodes 4 "):
        read_launch_environment({**TORCHRUN, "RANK": "16"})


def test_launch_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/pretrain_gpt.py"])
    assert launch_line(8) == "torchrun --nproc-per-node 8 pretrain_gpt.py …"
    assert launch_line(20) == (
        "torchrun --nnodes 3 --nproc-per-node 8 --node-rank <0 … 2> --master-addr <host of node 0> "
        "--master-port 29500 pretrain_gpt.py …"
    )
    assert launch_line(16, 8, slurm=True).endswith("srun --ntasks 16 --ntasks-per-node 8 python pretrain_gpt.py …")


# ---- who is missing ----


def _join(  # type: ignore[no-untyped-def]
    rank: int, world_size: int, port: int, seconds: float, options: Mapping[str, object], job: str, sender
) -> None:
    """Join a world over TCP; tell what went wrong, and whether this rank should print it."""
    launch = LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launched=True,
        master_addr="127.0.0.1",
        master_port=port,
        hosts_store=rank == 0,
        job=job,
    )
    try:
        initialize._join_world(launch, "gloo", torch.device("cpu"), timedelta(seconds=seconds), options)
        sender.send(("", False))
    except LaunchError as error:
        sender.send((str(error), error.speaks))
        if rank == 0:
            time.sleep(5)  # the error holds the store, which the others still ask


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def joining(
    rank: int, world_size: int, port: int, seconds: float, options: Mapping[str, object] = {}, job: str = ""
) -> Callable[[], tuple[str, bool]]:
    """Start a rank; waits, when called, for what it says and whether it speaks."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    arguments = (rank, world_size, port, seconds, options, job, sender)
    _CONTEXT.Process(target=_join, args=arguments, daemon=True).start()

    def outcome() -> tuple[str, bool]:
        assert receiver.poll(30), "a rank waits on"
        text, speaks = receiver.recv()
        return text, speaks

    return outcome


def joined(
    present: list[int], world_size: int, seconds: float = 1.5, odd: Mapping[int, dict[str, object]] = {}
) -> list[tuple[str, bool]]:
    """What each rank present says, and whether it speaks. odd: options of ranks that have not those of the others."""
    port, usual = free_port(), {"--lr": 0.1, "--bf16": True}
    outcomes = [joining(rank, world_size, port, seconds, odd.get(rank, usual)) for rank in present]
    return [outcome() for outcome in outcomes]


def test_ranks_that_were_started_with_other_options_are_refused_on_all_ranks() -> None:
    """They would train together, and end with weights that no command line stands for."""
    other = {"--lr": 0.2, "--bf16": True, "--new": "x"}
    outcomes = joined([0, 1, 2], 3, seconds=20, odd={1: other, 2: other})
    assert [speaks for _, speaks in outcomes] == [False, True, False]
    assert "ranks 1, 2 were started with other options than rank 0: " in outcomes[1][0]
    assert "--lr 0.2 (on rank 0 0.1), --new x (on rank 0 None); start all" in outcomes[1][0]


def test_two_runs_that_meet_at_one_port_do_not_mix_their_ranks() -> None:
    """The first has the port; the second, whose rank 0 finds it taken, would lend it a rank."""
    first, second, port = "Slurm job 7 step 0", "Slurm job 8 step 0", free_port()
    rank_0 = joining(0, 2, port, 20, job=first)
    text, _ = joining(1, 2, port, 20, job=second)()
    assert f"rank 1 of {second} met the ranks of another run, {first}, at 127.0.0.1:{port}" in text
    assert "give each run a MASTER_PORT of its own" in text
    rank_1 = joining(1, 2, port, 20, job=first)
    assert (rank_0(), rank_1()) == (("", False), ("", False))


def test_ranks_meet_where_the_system_shows_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, or in a sandbox: that it is not known which other processes live makes only a message poorer."""

    def refused(path: str) -> str:
        raise PermissionError(f"no access to {path}")

    monkeypatch.setattr("megatron.training.initialize.os", SimpleNamespace(readlink=refused, getpid=os.getpid))
    launch = LaunchEnvironment(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        launched=True,
        master_addr="127.0.0.1",
        master_port=free_port(),
        hosts_store=True,
    )
    _, neighbours, _ = initialize._join_world(launch, "gloo", torch.device("cpu"), timedelta(seconds=20), {})
    dist.destroy_process_group()
    assert neighbours == {}


def test_a_port_that_another_run_holds_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        text, speaks = joining(0, 2, port, 1.5)()
    assert f"rank 0 could not open MASTER_PORT {port} on {socket.gethostname()}, which another run may hold: " in text
    assert speaks


def test_what_all_ranks_need_alike_leaves_out_what_is_a_nodes_own() -> None:
    """A node may hold its copy of the corpus, and its index files, anywhere."""
    config = tiny_config()

    def values(prefix: str, **own: str) -> dict[str, object]:
        data = replace(config.data, data_path=(prefix,), data_cache_path=own.get("cache"))
        logs = replace(config.logging, log_json=own.get("log"), tensorboard_dir=own.get("board"))
        return replace(config, data=data, logging=logs).values_of_all_ranks()

    assert values("/here/alpha", cache="/a", log="/a/log") == values("/there/alpha", cache="/b", board="/b")
    assert values("/here/alpha") != values("/here/beta")


@pytest.mark.parametrize("present, missing", [([0, 1, 3], [2]), ([0, 2], [1, 3])])
def test_the_roll_call_names_the_ranks_that_did_not_come(present: list[int], missing: list[int]) -> None:
    outcomes = joined(present, 4)
    texts = [text for text, _ in outcomes]
    assert f"rank(s) {missing} did not come; each node must run\n  torchrun --nproc-per-node 4 " in texts[0]
    for text in texts[1:]:  # rank 0, which hosts the store, may have left first
        assert f"rank(s) {missing} did not come" in text or "lost the rendezvous" in text
    assert [speaks for _, speaks in outcomes] == [True] + [False] * (len(present) - 1)


def test_without_rank_0_the_others_say_where_they_looked_for_it() -> None:
    ((text, speaks),) = joined([1], 2)
    assert "rank 1 could not reach the rendezvous at 127.0.0.1:" in text
    assert "start rank 0 there first, or correct MASTER_ADDR and MASTER_PORT" in text
    assert not speaks  # local rank 1: local rank 0 of its node says it


# ---- arguments ----


def test_a_wrong_argument_is_printed_by_rank_0_alone_and_ends_all_ranks_with_code_2(tmp_path: Path) -> None:
    outcome = pretrain_tiny(tmp_path, "--lr", "-1", "--learning-rat", "1", ranks=2)
    assert outcome.codes == [2, 2]
    assert outcome.err[0].startswith("pretrain_gpt.py: error: ")
    assert "--lr" in outcome.err[0]
    assert "--learning-rat" in outcome.err[0]
    assert "Traceback" not in outcome.err[0]
    assert outcome.err[1] == outcome.out[1] == ""


@pytest.mark.parametrize("local_rank, waits", [("0", []), ("1", [initialize._TIME_TO_SPEAK])])
def test_a_rank_that_says_nothing_lets_the_one_that_speaks_leave_first(
    local_rank: str, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher ends all ranks when the first one leaves, which must not be before the reason is said."""
    waited: list[float] = []
    monkeypatch.setattr(initialize.time, "sleep", waited.append)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *TINY_GPT, "--lr", "-1"])
    for name, value in {**TORCHRUN, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        initialize_megatron()
    assert waited == waits
    assert ("--lr -1" in capsys.readouterr().err) == (not waits)


def test_a_world_that_the_layout_does_not_divide_is_refused(tmp_path: Path) -> None:
    outcome = pretrain_tiny(tmp_path, "--tensor-model-parallel-size", "2", ranks=3)
    assert outcome.codes == [2, 2, 2]
    assert "do not divide the 3 started" in outcome.err[0]
    assert "start 2 or 4 processes" in outcome.err[0]


def test_a_world_size_that_was_not_started_is_refused() -> None:
    for arguments in ([*TINY_GPT, "--world-size", "4"], tiny_config(world_size=4)):
        with pytest.raises(ConfigError, match=r"--world-size 4.*the launcher has started, 1"):
            initialize_megatron(arguments)


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--distributed-backend nccl: needs a GPU.*\n.*--distributed-backend gloo"):
        initialize_megatron([*TINY_GPT, "--distributed-backend", "nccl"])


@pytest.mark.parametrize(
    "sizes, world_size, expected",
    [
        (
            ("--tensor-model-parallel-size", "8"),
            1536,
            ["1536 ranks on 192 node(s)", "tensor 8", "data 192", "rank 1535 on node191"],
        ),
        (
            ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"),
            512,
            ["512 ranks on 64 node(s)", "tensor 2", "pipeline 4", "data 64", "pipeline [0, 128, 256, 384]"],
        ),
    ],
)
def test_the_map_of_another_world_is_printed_by_one_process(
    sizes: tuple[str, ...], world_size: int, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        initialize_megatron(["--print-parallel-groups", "--world-size", str(world_size), *sizes])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in expected), printed[:400]
    assert printed.count("\nrank ") == world_size


# ---- the three ways to start ----


def test_arguments_a_configuration_and_the_command_line_start_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [initialize_megatron(TINY_GPT)]
    parallel_state.destroy_model_parallel()
    contexts.append(initialize_megatron(contexts[0].config))
    parallel_state.destroy_model_parallel()
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *TINY_GPT])
    contexts.append(initialize_megatron())
    assert contexts[0].config == contexts[1].config == contexts[2].config
    assert {context.state.world.size for context in contexts} == {1}
    assert parallel_state.get_tensor_model_parallel_world_size() == 1


def test_a_programs_own_arguments() -> None:
    def provider(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--my-data-root")

    context = initialize_megatron([*TINY_GPT, "--my-data-root", "here"], provider)
    assert context.extra.my_data_root == "here"


def test_a_second_start_is_refused() -> None:
    initialize_megatron(TINY_GPT)
    with pytest.raises(RuntimeError, match=r"groups exist already; call destroy_model_parallel"):
        initialize_megatron(TINY_GPT)


def test_a_configuration_is_checked_before_the_start() -> None:
    config = tiny_config()
    wrong = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match="do not divide the 1 started"):
        initialize_megatron(wrong)


# ---- the map of a started world ----


def print_timeouts() -> None:
    """The program of a rank: the time-outs of its groups and channels."""
    state = initialize_megatron().state
    print({name: seconds_of(group) for name, group in groups_of(state).items()}, flush=True)
    barrier(state.world)  # rank 0 hosts what the others start with


def test_the_time_out_holds_for_all_groups_and_channels(tmp_path: Path) -> None:
    arguments = [*TINY_GPT, "--distributed-timeout-minutes", "3"]
    sizes = ["--pipeline-model-parallel-size", "2"]
    outcome = launch(print_timeouts, [*arguments, *sizes], ranks=4, folder=tmp_path).wait().check()
    for text in outcome.out:
        found = ast.literal_eval(text.splitlines()[-1])
        assert set(found.values()) == {None, 180.0}
        assert {name for name, seconds in found.items() if seconds is None} == {"tensor", "context"}
        assert {"world", "channel 0 to 1", "channel 1 to 0"} <= found.keys()


def test_a_tensor_parallel_group_that_spans_nodes_gets_a_warning_that_says_what_it_costs(tmp_path: Path) -> None:
    """Two agents on one machine count as two nodes."""
    outcome = launch_tiny(
        tmp_path,
        *("--tensor-model-parallel-size", "4", "--train-iters", "1", "--print-parallel-groups"),
        ranks=4,
        environment=lambda rank: {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"},
    ).wait()
    outcome.check()
    assert "warning: 1 tensor-parallel group(s) span nodes, the first being ranks [0, 1, 2, 3]" in outcome.out[3]
    assert "--tensor-model-parallel-size 2 or a divisor of it" in outcome.out[3]
    assert f"rank 2 on {socket.gethostname()}#1: " in outcome.out[3]
    assert not any("warning" in text for text in outcome.out[:3])


@pytest.mark.parametrize("flags, all_reduces", [((), 4), (("--sequence-parallel",), 5)], ids=["tensor", "sequence"])
def test_what_a_group_that_spans_nodes_costs(flags: tuple[str, ...], all_reduces: int) -> None:
    """In all-reduces of a float32 activation of 1024 × 8 × 48; as many bytes as one has an all-gather with a
    reduce-scatter, and with sequence parallelism the backward gathers the inputs of two products again."""
    sizes = ["--seq-length", "1024", "--max-position-embeddings", "1024", "--micro-batch-size", "8"]
    config = tiny_config(*sizes, "--tensor-model-parallel-size", "4", *flags, world_size=4)
    state = replace(parallel_state.ParallelState.single(), grid=RankGrid(tp=4), nodes=("a", "a", "b", "b"))
    (warning,) = initialize._node_warnings(state, config)
    assert f"reduces {all_reduces * 1024 * 8 * 48 * 4 / 1e6:.1f} MB per micro-batch over the network" in warning


@pytest.mark.parametrize("backend, said", [((), 1), (("--distributed-backend", "gloo"), 0)])
def test_a_start_without_a_gpu_says_so_unless_it_was_asked_for(
    backend: tuple[str, ...], said: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster whose driver is broken would train on, at the speed of its CPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    initialize_megatron([*TINY_GPT, *backend])
    printed = capsys.readouterr().out
    line = "no GPU is visible: 1 rank computes on a CPU, the default then; --distributed-backend nccl makes it an error"
    assert printed.splitlines().count(line) == said


def printed_configuration(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        initialize_megatron([*TINY_GPT, "--print-config", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize("ranks, given", [(2, ()), (8, ("--world-size", "8"))], ids=["one replica", "a world"])
def test_the_printed_configuration_has_the_account_of_memory_that_is_asked_for_as_comments(
    ranks: int, given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer")
    printed = printed_configuration(capsys, *layout, *given, "--log-memory")
    config, comments = printed.split("\n# ", 1)
    stages = predict_memory(tiny_config(*layout, world_size=ranks), padded_vocab_size=256)
    title = f"memory of a rank of each stage, predicted for --world-size {ranks} (MB):"
    assert f"# {comments}".splitlines() == [f"# {line}" for line in [title, *memory_table(stages).splitlines()]]
    without = printed_configuration(capsys, *layout, *given)
    assert "# memory" not in without
    assert [line for line in config.splitlines() if "log_memory" not in line] == [
        line for line in without.splitlines() if "log_memory" not in line
    ]


def test_no_account_of_memory_is_printed_of_a_batch_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--micro-batch-size", "3")
    printed_configuration(capsys, *wrong)
    with pytest.raises(ConfigError, match="--global-batch-size 8: must be divisible"):
        printed_configuration(capsys, *wrong, "--log-memory")
