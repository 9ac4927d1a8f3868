"""What a run reports, where, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron.config.options import flag, flag_name
from megatron.config.problems import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """The log line, its JSON form, TensorBoard and timers."""

    log_interval: int = field(default=100, metadata=flag("Iterations between log lines.", at_least=1))
    log_json: str | None = field(
        default=None,
        metadata=flag("File of one JSON object a step, in full precision.", metavar="FILE", node_local=True),
    )
    log_throughput: bool = field(
        default=True,
        metadata=flag("Report TFLOP/s.", off_help="Leave TFLOP/s out of the log line; tokens/s stay in it."),
    )
    log_params_norm: bool = field(default=False, metadata=flag("Report the norm of the parameters."))
    log_memory: bool = field(
        default=False,
        metadata=flag(
            "Report the memory of each pipeline stage: predicted, and measured in the second iteration; with "
            "--print-config predicted, after the configuration."
        ),
    )
    log_num_zeros_in_grad: bool = field(default=False, metadata=flag("Report zeros in the gradient."))
    timing_log_level: int = field(
        default=0,
        metadata=flag(
            "Table of timers under a log line: 0 none, 1 the parts of an iteration, 2 also computing and waiting.",
            at_least=0,
            at_most=2,
        ),
    )
    timing_log_option: Literal["max", "minmax", "all"] = field(
        default="minmax", metadata=flag("Which ranks' times are reported.")
    )
    tensorboard_dir: str | None = field(
        default=None,
        metadata=flag("Folder of the TensorBoard log; none is written when not given.", metavar="DIR", node_local=True),
    )
    tensorboard_log_interval: int = field(
        default=1, metadata=flag("Iterations between TensorBoard points.", at_least=1)
    )
    tensorboard_queue_size: int = field(default=1000, metadata=flag("Points kept before they are written.", at_least=1))
    log_timers_to_tensorboard: bool = field(
        default=False, metadata=flag("The timers of --timing-log-level to TensorBoard.")
    )
    log_validation_ppl_to_tensorboard: bool = field(
        default=False, metadata=flag("Validation perplexity to TensorBoard.")
    )
    log_world_size_to_tensorboard: bool = field(default=False, metadata=flag("World size to TensorBoard."))
    log_loss_scale_to_tensorboard: bool = field(
        default=True, metadata=flag("Loss scale to TensorBoard.", off_help="No loss scale to TensorBoard.")
    )

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section."""
        if self.log_json is not None and Path(self.log_json).is_dir():
            yield Problem(
                flags=("--log-json",),
                value=self.log_json,
                rule="is a folder, a file is needed",
                works=f"--log-json {Path(self.log_json) / 'log.json'}",
            )
        if self.tensorboard_dir is not None and Path(self.tensorboard_dir).is_file():
            yield Problem(
                flags=("--tensorboard-dir",),
                value=self.tensorboard_dir,
                rule="is a file, a folder is needed",
                works=f"--tensorboard-dir {Path(self.tensorboard_dir).parent / 'tensorboard'}",
            )
        if self.tensorboard_dir is None:
            for name in (
                "log_timers_to_tensorboard",
                "log_validation_ppl_to_tensorboard",
                "log_world_size_to_tensorboard",
            ):
                if getattr(self, name):
                    switch = flag_name(name)
                    yield Problem(
                        flags=(switch, "--tensorboard-dir"),
                        rule="there is no TensorBoard log to write to",
                        works=f"--tensorboard-dir DIR; or leave out {switch}",
                    )
