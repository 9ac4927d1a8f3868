"""Start of every rank: read the launch environment, parse and check the arguments, build the process groups.

The only file that reads the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from megatron.config.arguments import ExtraArgsProvider, parse_arguments
from megatron.config.megatron_config import MegatronConfig, Task
from megatron.config.problems import ConfigError, Problem, UserError
from megatron.config.training import TrainingConfig
from megatron.core import device as devices
from megatron.core import parallel_state
from megatron.core.allocator import allocator_library, keep_freed_memory
from megatron.core.collectives import all_reduce_
from megatron.core.fp32_matmul import LARGEST_ERROR, error_of_fast_products, use_fast_products
from megatron.core.kernels.choice import KernelChoice, device_type, set_kernel_choice
from megatron.core.kernels.extension import describe_kernels, kernel_problems
from megatron.core.open_files import allow_open_files
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel.placement import Placement
from megatron.core.tensor_parallel.random import RngStateTracker, model_parallel_rng_tracker
from megatron.planning.memory import memory_table, predict_memory
from megatron.tokenizer.build import build_tokenizer
from megatron.training.failures import OutOfMemory, RankGone, exiting, topic
from megatron.training.wanted_checkpoint import saved_config

# A launcher ends all ranks when the first one leaves: seconds that a silent rank leaves to the one that says why.
_TIME_TO_SPEAK = 5.0
# The rank that has spoken waits so many seconds to hear whether the others would have said the same. Rank 0 may hold
# the store that it asks, so it waits as long for the one that asks.
_TIME_TO_ASK = 2.0
# Of the reason why a rank has ended, in the report of its launcher: enough for the first of several problems.
_LINES_OF_RECORD = 3
# Where ranks count those that have ended for a reason that they say, and those that have lost one without a reason.
_ENDED, _LOST = "ended", "lost"
# Where rank 0 says whose store it is, outside of all prefixes, and in the roll call what it was started with.
_JOB_OF_RANK_0, _OPTIONS_OF_RANK_0 = "job of rank 0", "options of rank 0"
# Ranks of a node that `--print-parallel-groups --world-size N` assumes when nothing was launched.
DEFAULT_RANKS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class MegatronContext:
    """What a started rank knows.

    Attributes:
        extra: the values of the user's own arguments.
        store: what all ranks can write to and read from; None in a world of one.
        started: when the program started, a reading of `time.monotonic`.
        launcher: the process that started this one and watches over it; None where none does.
        neighbours: the processes of the ranks of this node, as far as this one can see them, by rank.
    """

    config: MegatronConfig
    state: ParallelState
    device: torch.device
    extra: argparse.Namespace
    store: Store | None = None
    neighbours: Mapping[int, int] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    launcher: int | None = None

    @cached_property
    def rng_tracker(self) -> RngStateTracker:
        """The field's generator states, for a user's own layers. Ours need none: their masks are functions."""
        return model_parallel_rng_tracker(
            self.config.training.seed,
            tp_rank=self.state.tensor.rank,
            pp_rank=self.state.pipeline.rank,
            device=self.device,
        )

    @property
    def placement(self) -> Placement:
        """How the configuration spreads a model chunk over this rank's tensor-parallel group."""
        return Placement(
            group=self.state.tensor,
            sequence_parallel=self.config.parallel.sequence_parallel,
            dtype=self.config.optimizer.params_dtype,
            device=self.device,
        )

    @property
    def reports(self) -> bool:
        """Whether this rank speaks for the run: the last one, which holds the output and so the losses."""
        return self.state.rank == self.state.world.size - 1

    def say(self, text: str) -> None:
        """Print on the rank that speaks for the run."""
        if self.reports:
            print(text, flush=True)

    @contextmanager
    def exiting(self, interrupted: str = "interrupted", *, after_loss: str = "") -> Iterator[None]:
        """Ends the program as `failures.exiting` does, each reason being said once, however many ranks have it.

        The others lose a rank that ends while they wait for it, and end without a traceback: it says why.

        Args:
            after_loss: what to do once a rank is lost that says nothing; "" where there is nothing to add.
        """
        with exiting(self._speaks, said_by=self._said_by, records=_record_for_launcher, interrupted=interrupted):
            try:
                yield
            except RuntimeError as error:
                if self.store is None or not _is_lost_connection(error):
                    raise
                raise self._gone(self.store, after_loss) from error

    def _gone(self, store: Store, after_loss: str) -> RankGone:
        """What a lost connection means: another rank has ended, and says why or could not."""
        rank = self.state.rank
        advice = f"; {after_loss}" if after_loss else ""
        try:
            if not _reaches(store, _ENDED, 1, within=_TIME_TO_SPEAK):
                speaks = store.add(_LOST, 1) == 1
                if rank == 0:
                    _reaches(store, _LOST, self.state.world.size - 1)
                return RankGone(
                    f"rank {rank} has lost another rank, which has not said why: where its output has no error either, "
                    f"it was killed, or its node or the network failed{advice}",
                    speaks=speaks,
                )
            store.add(_ENDED, 1)
            if rank == 0:  # it may hold the store, which the others ask too
                _reaches(store, _ENDED, self.state.world.size)
            return RankGone(f"rank {rank} has lost another rank, which says why it has ended", speaks=False)
        except dist.DistError:
            return self._gone_with_store(advice)

    def _gone_with_store(self, advice: str) -> RankGone:
        """The same where ranks cannot ask each other any more: the first that is left of a node speaks for it."""
        time.sleep(_TIME_TO_ASK / 2)  # what was killed together does not end at one moment
        rank = self.state.rank
        ended = [other for other, process in self.neighbours.items() if not _lives(process)]
        of_node = f" (of this node {' and '.join(f'rank {other}' for other in ended)})" if ended else ""
        return RankGone(
            f"rank {rank} has lost another rank{of_node}, and the store where they meet: what has ended, or has ended "
            f"it, says why, unless it was killed{advice}",
            speaks=rank == min(self.neighbours.keys() - {0, *ended}, default=rank),  # the store may end before rank 0
        )

    def _speaks(self, why: BaseException) -> bool:
        """The first rank that has a reason; rank 0 where all have the same one, and the store may be gone."""
        if isinstance(why, RankGone):
            return why.speaks
        if not isinstance(why, UserError):
            return self.state.rank == 0
        if self.store is None:
            return True
        try:
            self.store.add(_ENDED, 1)
            first = bool(self.store.add(_said(why), 1) == 1)
            if not first and self.state.rank == 0:
                _reaches(self.store, _asked(why), 1)
            return first
        except dist.DistError:  # the rank that holds the store is gone: better twice than never
            return True

    def _said_by(self, why: BaseException) -> str:
        """Which rank has spoken, where not all would have said the same, and it does not say so itself."""
        if isinstance(why, RankGone):
            time.sleep(_TIME_TO_ASK)  # the others of this node see whether it lives
            return ""
        if not isinstance(why, UserError) or self.store is None:
            return ""
        try:
            all_have = _reaches(self.store, _said(why), self.state.world.size)
            self.store.add(_asked(why), 1)
            return "" if all_have or isinstance(why, OutOfMemory) else f"(rank {self.state.rank})"
        except dist.DistError:  # the rank that holds the store has left, having waited as long as it does
            return ""


def _is_lost_connection(error: RuntimeError) -> bool:
    """NCCL has an exception of its own; gloo names the file where it was noticed.

    Where a rank lives and does not come, the traceback says which collective it keeps waiting: that stays.
    """
    text = str(error)
    late = "timed out" in text.lower() or "timeout" in text.lower()
    return (isinstance(error, dist.DistError) or "gloo/transport" in text) and not late


def _record_for_launcher(text: str) -> None:
    """Write why this process ends where `torchrun` looks for it: its report, which comes last, then names the reason.

    It lists all ranks that have failed, and so has the beginning only.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        lines = text.splitlines()
        beginning = "\n".join(lines[:_LINES_OF_RECORD] + ["..."] * (len(lines) > _LINES_OF_RECORD))
        record = {"message": beginning, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # the disk may be full, and that may be the reason: it is printed all the same
            Path(file).write_text(json.dumps({"message": record}), encoding="utf-8")


def _lives(process: int) -> bool:
    """Whether it has not ended. One that was killed is there until its parent has asked for it."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _reaches(store: Store, key: str, count: int, within: float | None = None) -> bool:
    """Whether ranks have counted so far in time, which is `_TIME_TO_ASK` where nothing else is given."""
    deadline = time.monotonic() + (_TIME_TO_ASK if within is None else within)
    while store.add(key, 0) < count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _said(why: UserError) -> str:
    """Where ranks count those that have a reason."""
    return "said-" + hashlib.sha256(topic(why).encode()).hexdigest()


def _asked(why: UserError) -> str:
    """Where the rank that has spoken says that it needs the store no more."""
    return _said(why).replace("said", "asked", 1)


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Where a launcher has put this process. A process that nobody launched is a world of one.

    Attributes:
        node: the name of the node; two agents of `torchrun` on one machine count as the two nodes that they play.
        hosts_store: rank 0 must start the rendezvous store itself, as no `torchrun` agent did.
        slurm: `srun` has started this process, not `torchrun`.
        job: what the launcher calls the run, the same on all its ranks and in all its attempts; "" where it has no
            name. Ranks of another job that come to the same port are not ours.
        attempt: which restart this is, so that keys of an earlier attempt are not mistaken for ours.
        watched: an agent of `torchrun` has started this process, and ends it when another one fails.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    node: str = "node0"
    master_addr: str = ""
    master_port: int = 0
    hosts_store: bool = False
    job: str = ""
    attempt: str = "0"
    slurm: bool = False
    gpu_per_task: bool = False
    watched: bool = False


class LaunchError(UserError):
    """The processes of a run were not started as the configuration needs; the text holds the right launch line.

    Args:
        speaks: this rank should print it; False where another rank says the same.
    """

    def __init__(self, message: str, *, speaks: bool = True) -> None:
        super().__init__(message)
        self.speaks = speaks


def read_launch_environment(environment: Mapping[str, str]) -> LaunchEnvironment:
    """The variables of `torchrun`, or those of `srun` where `torchrun` has set none.

    Raises:
        LaunchError: some of the variables are set and others are missing or out of range.
    """
    slurm = False
    names = {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_world_size": "LOCAL_WORLD_SIZE",
    }
    if not any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        if "SLURM_PROCID" not in environment or environment.get("SLURM_NTASKS", "1") == "1":
            return LaunchEnvironment()
        slurm = True
        names = {
            "rank": "SLURM_PROCID",
            "world_size": "SLURM_NTASKS",
            "local_rank": "SLURM_LOCALID",
            "local_world_size": "SLURM_NTASKS_PER_NODE",
        }
    required = [names["rank"], names["world_size"], names["local_rank"], "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in required if name not in environment]
    if missing:
        raise LaunchError(
            f"the launch environment lacks {', '.join(missing)} (it has "
            f"{', '.join(name for name in required if name in environment)}); start the ranks with\n  "
            f"{launch_line(2, slurm=slurm)}"
        )
    numbers = [*(name for name in names.values() if name in environment), "MASTER_PORT"]
    wrong = [f"{name}={environment[name]}" for name in numbers if not environment[name].isdecimal()]
    if wrong:
        raise LaunchError(
            f"the launch environment has {', '.join(wrong)}, which must be whole numbers; start the ranks with\n  "
            f"{launch_line(2, slurm=slurm)}"
        )
    values = {field: int(environment[name]) for field, name in names.items() if name in environment}
    launch = LaunchEnvironment(
        **values,
        launched=True,
        slurm=slurm,
        gpu_per_task=slurm and environment.get("SLURM_GPUS_PER_TASK") == "1",
        node=socket.gethostname() + (f"#{environment['GROUP_RANK']}" if "GROUP_RANK" in environment else ""),
        master_addr=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        hosts_store=values["rank"] == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        job=_job(environment, values["rank"], values["world_size"]),
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        watched="TORCHELASTIC_RUN_ID" in environment,
    )
    if not 0 <= launch.rank < launch.world_size:
        raise LaunchError(
            f"{names['rank']}={launch.rank} is not in 0 … {launch.world_size - 1} ({names['world_size']}="
            f"{launch.world_size}); start the ranks with\n  "
            f"{launch_line(launch.world_size, launch.local_world_size, slurm=slurm)}"
        )
    return launch


def _job(environment: Mapping[str, str], rank: int, world_size: int) -> str:
    if "TORCHELASTIC_RUN_ID" in environment:
        return f"torchrun {environment['TORCHELASTIC_RUN_ID']}"
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")
    # Also where a script has given the numbers of Slurm other names. Ranks that something else has started inside of a
    # job may be of several steps, and some of them may not know of Slurm.
    numbers = (environment.get("SLURM_PROCID"), environment.get("SLURM_NTASKS"))
    if job is None or step is None or numbers != (str(rank), str(world_size)):
        return ""
    return f"Slurm job {job} step {step}"


def launch_line(world_size: int, ranks_per_node: int = DEFAULT_RANKS_PER_NODE, *, slurm: bool = False) -> str:
    """The command that starts `world_size` ranks of this program with `torchrun` or, in a batch script, with `srun`."""
    script = Path(sys.argv[0]).name or "pretrain_gpt.py"
    if slurm:
        return (
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500; '
            f"srun --ntasks {world_size} --ntasks-per-node {min(world_size, ranks_per_node)} python {script} …"
        )
    if world_size <= ranks_per_node:
        return f"torchrun --nproc-per-node {world_size} {script} …"
    nodes = -(-world_size // ranks_per_node)
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {ranks_per_node} --node-rank <0 … {nodes - 1}> "
        f"--master-addr <host of node 0> --master-port 29500 {script} …"
    )


class _Line(logging.Formatter):
    """The message alone, and that it is a warning where it is one."""

    def format(self, record: logging.LogRecord) -> str:
        return ("warning: " if record.levelno == logging.WARNING else "") + super().format(record)


def initialize_megatron(
    argv_or_config: Sequence[str] | MegatronConfig | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    *,
    task: Task = "gpt",
) -> MegatronContext:
    """Parse and check the arguments, then create the process groups.

    Args:
        argv_or_config: the arguments, or a ready configuration; None takes the command line, and then a wrong argument
            ends the program with exit code 2 and the list of all that is wrong, printed by one rank of each node.
        extra_args_provider: adds the user's own arguments to the parser; their values are in `context.extra`.
        task: what is trained, which decides the options that there are; a ready configuration says it itself.

    Raises:
        ConfigError: the arguments break rules (all of them are listed).
        LaunchError: ranks are missing or too many, or the launch environment is incomplete.
    """
    if argv_or_config is None:
        with exiting_at_the_start():
            return _initialize(sys.argv[1:], extra_args_provider, task)
    return _initialize(argv_or_config, extra_args_provider, task)


def exiting_at_the_start() -> AbstractContextManager[None]:
    """Ends the program as `exiting` does, before the ranks have met: one of each node says why."""
    return exiting(_speaks_at_the_start, records=_record_for_launcher)


def _speaks_at_the_start(why: BaseException) -> bool:
    """One rank of each node, as a file that is missing on one node is an error there alone."""
    first = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    speaks = why.speaks if isinstance(why, LaunchError) else first
    if isinstance(why, UserError) and not speaks:
        time.sleep(_TIME_TO_SPEAK)
    return speaks


def _initialize(
    argv_or_config: Sequence[str] | MegatronConfig, extra_args_provider: ExtraArgsProvider | None, task: Task
) -> MegatronContext:
    started, parent = time.monotonic(), os.getppid()
    allow_open_files()
    launch = read_launch_environment(os.environ)
    extra = argparse.Namespace()
    if isinstance(argv_or_config, MegatronConfig):
        config = argv_or_config.on(launch.world_size)
        if problems := [*config.problems(), *_machine_problems(config)]:
            raise ConfigError(problems)
    else:
        config, extra = parse_arguments(
            argv_or_config,
            extra_args_provider,
            task=task,
            world_size=launch.world_size,
            launched=launch.launched,
            machine_problems=_machine_problems,
            saved_config=partial(saved_config, task=task),
            comment=_planned_memory,
            say=partial(print, flush=True) if launch.rank == 0 else lambda text: None,
        )
    # What the rooms below say (an index is built, waited for, damaged): one voice a node. The others are silent, short
    # of an error, as they see the same files and would say the same.
    lines = logging.StreamHandler()
    lines.setFormatter(_Line())
    logging.basicConfig(handlers=[lines])
    logging.getLogger("megatron").setLevel(logging.INFO if launch.local_rank == 0 else logging.ERROR)
    parallel = config.parallel
    world_size = parallel.world_size
    assert world_size is not None
    grid = parallel_state.grid_of_world(
        world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        order=parallel.rank_order,
    )
    if world_size != launch.world_size:  # the map of another world is asked for, and nothing else
        nodes = [f"node{rank // DEFAULT_RANKS_PER_NODE}" for rank in range(world_size)]
        print(parallel_state.describe_groups(grid, nodes), flush=True)
        sys.exit(0)
    set_kernel_choice(_kernel_choice(config.training))
    context = _join(config, launch, extra, started, parent)
    state, device = context.state, context.device
    if parallel.print_parallel_groups:
        context.say(str(state))
    if device.type == "cpu" and parallel.distributed_backend is None:
        here = "1 rank computes on a CPU" if world_size == 1 else f"{world_size} ranks compute on CPUs"
        context.say(f"no GPU is visible: {here}, the default then; --distributed-backend nccl makes it an error")
    context.say(f"kernels: {describe_kernels(device_type(device))}")
    if device.type == "cpu":
        _set_up_cpu(context)
    for warning in _node_warnings(state, config):
        context.say(f"warning: {warning}")
    return context


def join_ranks(config: MegatronConfig) -> MegatronContext:
    """The groups and the device of a program that uses a model and trains none; it says nothing.

    Args:
        config: its layout takes as many ranks as its world has.

    Raises:
        LaunchError: other than so many processes were started, or the launch environment is incomplete.
    """
    started, parent = time.monotonic(), os.getppid()
    launch, parallel = read_launch_environment(os.environ), config.parallel
    assert parallel.world_size == parallel.model_parallel_size
    if launch.world_size != parallel.world_size:
        raise LaunchError(
            f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} with --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size} is for {parallel.world_size} rank(s), and {launch.world_size} "
            f"started: {launch_line(parallel.world_size, slurm=launch.slurm)}",
            speaks=launch.local_rank == 0,
        )
    return _join(config, launch, argparse.Namespace(), started, parent)


def _join(
    config: MegatronConfig, launch: LaunchEnvironment, extra: argparse.Namespace, started: float, parent: int
) -> MegatronContext:
    """Meet the other ranks, and make the groups."""
    parallel = config.parallel
    backend = devices.choose_backend(parallel.distributed_backend)
    try:
        device = devices.choose_device(backend, launch.local_rank, gpu_per_task=launch.gpu_per_task)
    except ValueError as error:
        raise LaunchError(str(error), speaks=launch.local_rank == 0) from error
    nodes, neighbours, store = ["node0"], dict[int, int](), None
    if launch.launched:
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        nodes, neighbours, store = _join_world(launch, backend, device, timeout, config.values_of_all_ranks())
    state = parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        order=parallel.rank_order,
        nodes=nodes,
        timeout=timedelta(minutes=parallel.distributed_timeout_minutes),
    )
    return MegatronContext(
        config=config,
        state=state,
        device=device,
        extra=extra,
        store=store,
        neighbours=neighbours,
        started=started,
        launcher=parent if launch.watched else None,
    )


def _set_up_cpu(context: MegatronContext) -> None:
    """What makes steps on CPUs faster, the same on all ranks."""
    training = context.config.training
    if training.keep_freed_memory:
        if keep_freed_memory():
            context.say(
                "freed memory is kept for the next step: faster, and up to half more of it; --no-keep-freed-memory "
                "gives it back"
            )
        else:
            context.say(f"memory comes from {allocator_library() or 'an allocator'}, which is left as it is")
    if context.config.optimizer.precision == "fp32":
        context.say(f"fp32 products: {_choose_products(training, context.state)}")


def _choose_products(training: TrainingConfig, state: ParallelState) -> str:
    """Set the path of fp32 products, the same on all ranks; what it is, in words."""
    if training.fp32_matmul == "exact":
        use_fast_products(False)
        return "the default path, as --fp32-matmul exact asks for"
    worst = torch.tensor(error_of_fast_products())
    all_reduce_(worst, state.world, "max")
    exact = float(worst) < LARGEST_ERROR
    use_fast_products(exact)
    taken = "torch's fast path" if exact else "the default path, as torch's fast one is not exact here"
    return f"{taken} (error {float(worst):.1e}, limit {LARGEST_ERROR:.0e})"


def _planned_memory(config: MegatronConfig) -> str:
    """What `--log-memory` says of a configuration that is only printed; on one replica where no world is given."""
    if not config.logging.log_memory:
        return ""
    config = config.on(config.parallel.world_size or config.parallel.model_parallel_size)
    config.validate(check_files=False)
    stages = predict_memory(
        config, padded_vocab_size=config.padded_vocab_size(build_tokenizer(config.tokenizer).vocab_size)
    )
    title = f"memory of a rank of each stage, predicted for --world-size {config.parallel.world_size} (MB)"
    return f"{title}:\n{memory_table(stages)}"


def _machine_problems(config: MegatronConfig) -> Iterator[Problem]:
    """What this machine, or what is installed on it, lacks for a configuration."""
    requested = config.parallel.distributed_backend
    yield from devices.backend_problems(requested)
    on_gpus = devices.choose_backend(requested) == "nccl"
    yield from kernel_problems(config.training.kernels, "cuda" if on_gpus else "cpu")


def _kernel_choice(config: TrainingConfig) -> KernelChoice:
    references = {"swiglu": "--no-bias-swiglu-fusion"} if not config.bias_swiglu_fusion else {}
    return KernelChoice(
        kernels=config.kernels,
        references=references,
        weight_gradients_apart=not config.gradient_accumulation_fusion,
    )


def _join_world(
    launch: LaunchEnvironment,
    backend: devices.Backend,
    device: torch.device,
    timeout: timedelta,
    options: Mapping[str, object],
) -> tuple[list[str], dict[int, int], Store]:
    """Meet the other ranks and initialise `torch.distributed`.

    A roll call comes before the communicators, whose own time-out would not say who is missing. In it each rank says
    what it was started with, too: ranks with other options would train together without a word, and wrongly.

    Args:
        options: what has to be the same on all ranks.

    Returns:
        The node of each rank, the processes of this node by rank, and the store that all have met at.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, world_size = launch.rank, launch.world_size
    try:
        tcp_store = TCPStore(
            launch.master_addr,
            launch.master_port,
            is_master=launch.hosts_store,
            timeout=timeout,
            wait_for_workers=False,
        )
    except dist.DistError as error:
        if launch.hosts_store:
            raise LaunchError(
                f"rank 0 could not open MASTER_PORT {launch.master_port} on {socket.gethostname()}, which another run "
                f"may hold: {error}; give each run a MASTER_PORT of its own"
            ) from error
        raise LaunchError(
            f"rank {rank} could not reach the rendezvous at {launch.master_addr}:{launch.master_port}: {error}; start "
            f"rank 0 there first, or correct MASTER_ADDR and MASTER_PORT",
            speaks=launch.local_rank == 0,
        ) from error
    # The job is in the prefix, so that a rank of another one is never taken for ours.
    store = PrefixStore(f"{launch.job} attempt-{launch.attempt}", tcp_store)
    roll = PrefixStore("roll-call", store)
    words = json.dumps(options, sort_keys=True)
    if rank == 0:
        tcp_store.set(_JOB_OF_RANK_0, launch.job)
        roll.set(_OPTIONS_OF_RANK_0, words)
    place = [launch.node, _visible_processes()]
    roll.set(str(rank), json.dumps([place, os.getpid(), hashlib.sha256(words.encode()).hexdigest()]))
    try:
        host = tcp_store.get(_JOB_OF_RANK_0).decode()
        if host != launch.job:
            raise LaunchError(
                f"rank {rank} of {launch.job or 'a run without a name'} met the ranks of another run, "
                f"{host or 'one without a name'}, at {launch.master_addr}:{launch.master_port}; give each run a "
                "MASTER_PORT of its own",
                speaks=launch.local_rank == 0,
            )
        roll.wait([str(other) for other in range(world_size)], timeout)
    except dist.DistError as error:
        try:
            missing = [other for other in range(world_size) if not roll.check([str(other)])]
        except dist.DistError:
            raise LaunchError(
                f"rank {rank} lost the rendezvous at {launch.master_addr}:{launch.master_port} while it waited for a "
                f"world of {world_size}: the process that hosts it has ended, and says why",
                speaks=launch.local_rank == 0,
            ) from error
        raise LaunchError(
            f"rank {rank} waited {timeout.total_seconds():.0f} s for a world of {world_size}, and rank(s) "
            f"{missing} did not come; each node must run\n  "
            f"{launch_line(world_size, launch.local_world_size, slurm=launch.slurm)}",
            speaks=rank == min(set(range(world_size)) - set(missing)),
        ) from error
    answers = [json.loads(answer) for answer in roll.multi_get([str(other) for other in range(world_size)])]
    odd = [other for other, (*_, digest) in enumerate(answers) if digest != answers[0][-1]]
    if odd:
        raise LaunchError(
            f"{_ranks(odd)} started with other options than rank 0: "
            f"{_changes(json.loads(roll.get(_OPTIONS_OF_RANK_0)), json.loads(words))}; "
            "start all ranks with the same command line and files",
            speaks=rank == odd[0],
        )
    nodes = [node for (node, _), *_ in answers]
    neighbours = {other: process for other, (there, process, _) in enumerate(answers) if there == place and place[1]}
    dist.init_process_group(
        backend,
        store=PrefixStore("megatron", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return nodes, neighbours, store


def _visible_processes() -> str:
    """Names the processes that this one can see, which are not all of a node with containers; "" where none are."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # without /proc, or in a sandbox
        return ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} was"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} were"


def _changes(first: Mapping[str, object], mine: Mapping[str, object]) -> str:
    """The options of this rank that are not those of rank 0."""
    flags = [flag for flag in mine.keys() | first.keys() if mine.get(flag) != first.get(flag)]
    return ", ".join(f"{flag} {mine.get(flag)} (on rank 0 {first.get(flag)})" for flag in sorted(flags))


def _node_warnings(state: ParallelState, config: MegatronConfig) -> list[str]:
    """What the layout costs on these nodes."""
    split = [group for group in state.grid.groups("tp") if len({state.nodes[rank] for rank in group}) > 1]
    if not split:
        return []
    # Per layer and micro-batch: the table of docs/PARALLELISM.md, in all-reduces, as which two of the others count.
    all_reduces = 5 if config.parallel.sequence_parallel else 4
    activation = config.data.seq_length * config.training.micro_batch_size * config.model.hidden_size
    megabytes = all_reduces * activation * config.optimizer.params_dtype.itemsize / 1e6
    per_node = max(state.nodes.count(node) for node in set(state.nodes))
    return [
        f"{len(split)} tensor-parallel group(s) span nodes, the first being ranks {list(split[0])}: each layer then "
        f"reduces {megabytes:.1f} MB per micro-batch over the network, which is several times slower than the links "
        f"inside a node; --tensor-model-parallel-size {per_node} or a divisor of it stays inside one"
    ]
