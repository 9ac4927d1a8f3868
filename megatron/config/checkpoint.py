"""What is saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.config.options import flag
from megatron.config.problems import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where checkpoints are, when they are written and which parts of them are read."""

    save: str | None = field(default=None, metadata=flag("Folder to save checkpoints in.", metavar="DIR"))
    save_interval: int | None = field(
        default=None,
        metadata=flag(
            "Iterations between checkpoints; only at the end when not given.",
            aliases=("--persistent-save-interval",),
            at_least=1,
        ),
    )
    save_retain_interval: int | None = field(
        default=None,
        metadata=flag(
            "Keep the newest checkpoint, and each whose iteration is a multiple of this; delete the others.",
            at_least=1,
        ),
    )
    keep_last: int | None = field(
        default=None,
        metadata=flag(
            "Keep so many of the newest checkpoints, and those that --save-retain-interval keeps; delete the others.",
            at_least=1,
        ),
    )
    async_save: bool = field(
        default=False,
        metadata=flag("Write checkpoints in the background, from a copy in memory that lasts as long as the run."),
    )
    load: str | None = field(
        default=None, metadata=flag("Folder to resume from; an error when it has none.", metavar="DIR")
    )
    load_if_exists: bool = field(default=False, metadata=flag("Start anew when --load has no checkpoint yet."))
    ckpt_step: int | None = field(
        default=None, metadata=flag("Iteration to load; the latest when not given.", at_least=0)
    )
    save_optim: bool = field(
        default=True, metadata=flag("Save the optimizer.", off_help="Leave the optimizer out of checkpoints.")
    )
    load_optim: bool = field(
        default=True,
        metadata=flag("Load the optimizer.", off_help="Start with a fresh optimizer after --load.", affects="training"),
    )
    save_tokenizer_assets: bool = field(
        default=True,
        metadata=flag(
            "Keep copies of the tokenizer's files in --save.",
            off_help="Keep no copies of the tokenizer's files in --save.",
            constants={"--disable-save-tokenizer-assets": False},
        ),
    )
    load_partial: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "Tensors that --load may find missing, surplus or of another shape, as 'model.output_layer.*': they keep "
            "their first values.",
            words="+",
            metavar="GLOB",
            affects="training",
        ),
    )
    finetune: bool = field(
        default=False,
        metadata=flag("Load only the weights; start at iteration 0 with new data.", affects="training"),
    )
    use_checkpoint_args: bool = field(
        default=False,
        metadata=flag(
            "Take model, tokenizer and --seq-length of --load's checkpoint, where neither flags nor --config give them."
        ),
    )
    use_tokenizer_model_from_checkpoint_args: bool = field(
        default=True,
        metadata=flag(
            "With --use-checkpoint-args, take the tokenizer's files too, from the checkpoint where it keeps them.",
            off_help="With --use-checkpoint-args, do not take the tokenizer's files.",
        ),
    )
    override_opt_param_scheduler: bool = field(
        default=False,
        metadata=flag(
            "On a resume, use the schedules given now.",
            name="--override-opt_param-scheduler",
            aliases=("--override-lr-scheduler",),
        ),
    )
    use_checkpoint_opt_param_scheduler: bool = field(
        default=False,
        metadata=flag(
            "On a resume, use the schedules of the checkpoint.",
            name="--use-checkpoint-opt_param-scheduler",
            aliases=("--use-checkpoint-lr-scheduler",),
        ),
    )

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section."""
        if self.save_interval is not None and self.save is None:
            yield Problem(
                flags=("--save-interval", "--save"),
                value=self.save_interval,
                rule="there is no folder to save in",
                works="--save DIR; or leave out --save-interval",
            )
        needs_save = {
            "--keep-last": self.keep_last,
            "--save-retain-interval": self.save_retain_interval,
            "--async-save": self.async_save or None,
        }
        for name, value in needs_save.items():
            if value is not None and self.save is None:
                yield Problem(
                    flags=(name, "--save"),
                    value=None if value is True else value,
                    rule="says how to save, and there is no folder to save in",
                    works=f"--save DIR; or leave out {name}",
                )
        if self.save_retain_interval is not None and self.save_retain_interval % (self.save_interval or 1):
            assert self.save_interval is not None
            nearest = max(1, round(self.save_retain_interval / self.save_interval)) * self.save_interval
            yield Problem(
                flags=("--save-retain-interval", "--save-interval"),
                value=self.save_retain_interval,
                rule=f"must be a multiple of --save-interval ({self.save_interval})",
                works=f"--save-retain-interval {nearest}",
            )
        needs_load = {
            "--load-if-exists": self.load_if_exists,
            "--ckpt-step": self.ckpt_step is not None,
            "--finetune": self.finetune,
            "--no-load-optim": not self.load_optim,
            "--load-partial": bool(self.load_partial),
            "--use-checkpoint-args": self.use_checkpoint_args,
        }
        for name in (name for name, given in needs_load.items() if given and self.load is None):
            yield Problem(
                flags=(name, "--load"),
                value=self.ckpt_step if name == "--ckpt-step" else None,
                rule="says how to load, and --load is not given",
                works=f"--load DIR; or leave out {name}",
            )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield Problem(
                flags=("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"),
                rule="and --use-checkpoint-opt_param-scheduler ask for opposite things",
                works="one of the two",
            )
