"""How long a run trains, with which batches, and when it stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron.config.options import LARGEST_BATCH, MOST_SAMPLES, flag
from megatron.config.problems import Problem, divisors, near


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Batches, horizon, evaluation and exit."""

    micro_batch_size: int = field(
        metadata=flag(
            "Samples of one forward pass on one model replica.",
            aliases=("--batch-size",),
            at_least=1,
            at_most=LARGEST_BATCH,
        )
    )
    global_batch_size: int | None = field(
        default=None,
        metadata=flag(
            "Samples of one step; micro-batch x data parallel when not given.",
            affects="training",
            at_least=1,
            at_most=LARGEST_BATCH,
        ),
    )
    rampup_batch_size: tuple[int, int, int] | None = field(
        default=None,
        metadata=flag(
            "Grow the global batch from START by INCREMENT over SAMPLES samples.",
            words=3,
            metavar="START INCREMENT SAMPLES",
            affects="training",
            at_least=1,
            at_most=MOST_SAMPLES,
        ),
    )
    train_iters: int | None = field(
        default=None,
        metadata=flag("Length of the run in iterations.", affects="training", at_least=1, at_most=MOST_SAMPLES),
    )
    train_samples: int | None = field(
        default=None,
        metadata=flag("Length of the run in samples.", affects="training", at_least=1, at_most=MOST_SAMPLES),
    )
    seed: int = field(
        default=1234,
        metadata=flag("Seed of weights, data order and dropout.", affects="data", at_least=0, at_most=2**63 - 1),
    )
    eval_iters: int = field(
        default=100,
        metadata=flag(
            "Global batches of an evaluation; 0 or -1: none, also at the end.", at_least=-1, at_most=MOST_SAMPLES
        ),
    )
    eval_interval: int | None = field(
        default=None,
        metadata=flag(
            "Iterations between evaluations on the validation data; only at the end, then on the test data too, "
            "when not given.",
            at_least=1,
        ),
    )
    full_validation: bool = field(
        default=False,
        metadata=flag(
            "Each evaluation on validation data reads all of it, from its start, in place of --eval-iters batches."
        ),
    )
    skip_train: bool = field(
        default=False,
        metadata=flag("Do not train; evaluate on the validation and test data, the only ones that are then needed."),
    )
    exit_interval: int | None = field(
        default=None, metadata=flag("Stop at the next iteration divisible by this; save before.", at_least=1)
    )
    exit_duration_in_mins: int | None = field(
        default=None, metadata=flag("Stop after so many minutes; save before.", at_least=1)
    )
    exit_signal_handler: bool = field(default=False, metadata=flag("On --exit-signal save and stop."))
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = field(
        default="SIGTERM", metadata=flag("The signal of --exit-signal-handler.")
    )
    check_for_nan_in_loss_and_grad: bool = field(
        default=True,
        metadata=flag(
            "Stop when a loss or the gradient norm is not finite.",
            off_help="Train on when a loss or the gradient norm is not finite.",
        ),
    )
    torch_compile: bool = field(
        default=False,
        metadata=flag(
            "Compile each transformer layer: its norms, attention and activations. Linear layers and dropout run as "
            "they are and break the graph."
        ),
    )
    fp32_matmul: Literal["auto", "exact"] = field(
        default="auto",
        metadata=flag(
            "Products of fp32 matrices on CPUs. auto: torch's faster path, if products at start show that it is as "
            "exact on all ranks. exact: the default path."
        ),
    )
    keep_freed_memory: bool = field(
        default=True,
        metadata=flag(
            "On CPUs keep freed memory in the process, for the next step.",
            off_help="Give freed memory back to the system, on CPUs: a peak up to a third lower, and slower steps.",
        ),
    )
    kernels: Literal["auto", "native", "apex", "torch"] = field(
        default="auto",
        metadata=flag(
            "Implementation of operations with kernels of their own. auto: those of the compiled module where it has "
            "them, else torch's. native: refuse to start without them. apex: NVIDIA Apex's Adam and norms, on GPUs. "
            "torch: only the references. tools/doctor.py shows what runs."
        ),
    )
    gradient_accumulation_fusion: bool = field(
        default=True,
        metadata=flag(
            "Add weight gradients to their wide sum within the product, where torch can.",
            off="--no-gradient-accumulation-fusion",
            off_help="Compute each weight gradient by itself, rounded to the precision of the layer, and add it.",
        ),
    )
    bias_swiglu_fusion: bool = field(
        default=True,
        metadata=flag(
            "Compute SwiGLU in a kernel, where there is one.",
            off="--no-bias-swiglu-fusion",
            off_help="Compute SwiGLU by its reference in torch, whatever --kernels says.",
        ),
    )

    def evaluations(self, train_iters: int) -> int:
        """How often a run of so many iterations is evaluated on the validation data."""
        return 1 if self.eval_interval is None else train_iters // self.eval_interval + 1

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section."""
        if self.exit_signal != "SIGTERM" and not self.exit_signal_handler:
            yield Problem(
                flags=("--exit-signal", "--exit-signal-handler"),
                value=self.exit_signal,
                rule="is heeded only with --exit-signal-handler",
                works=f"--exit-signal-handler --exit-signal {self.exit_signal}",
            )
        if self.full_validation and self.eval_iters < 1:
            yield Problem(
                flags=("--full-validation", "--eval-iters"),
                rule=f"reads all validation data, and with --eval-iters {self.eval_iters} nothing is evaluated",
                works="--eval-iters 1 or more, which is then for the test data",
            )
        if self.skip_train and self.eval_iters < 1:
            yield Problem(
                flags=("--eval-iters", "--skip-train"),
                value=self.eval_iters,
                rule="leaves nothing to do: --skip-train only evaluates, and this is no evaluation",
                works="--eval-iters 100",
            )
        if self.rampup_batch_size is not None:
            yield from self._rampup_problems(*self.rampup_batch_size)

    def horizon_problems(self) -> Iterator[Problem]:
        """Whether the length of a training run is given, and once."""
        if self.train_iters is None and self.train_samples is None:
            yield Problem(
                flags=("--train-iters", "--train-samples"),
                rule="the length of the run is not given",
                works="--train-iters N or --train-samples N",
            )
        if self.train_iters is not None and self.train_samples is not None:
            yield Problem(
                flags=("--train-iters", "--train-samples"),
                value=self.train_iters,
                rule=f"and --train-samples {self.train_samples} both give the length of the run",
                works="one of the two"
                if self.rampup_batch_size is None
                else "--train-samples, in which --rampup-batch-size counts",
            )

    def _rampup_problems(self, start: int, increment: int, samples: int) -> Iterator[Problem]:
        name, shown = "--rampup-batch-size", f"{start} {increment} {samples}"
        if self.global_batch_size is None:
            yield Problem(
                flags=(name, "--global-batch-size"),
                value=shown,
                rule="leads to --global-batch-size, which is not given",
                works="--global-batch-size N",
            )
        elif start >= self.global_batch_size:
            yield Problem(
                flags=(name, "--global-batch-size"),
                value=shown,
                rule=f"START {start} must be less than --global-batch-size {self.global_batch_size}: "
                "there is nothing to grow",
                works=f"leave out {name}",
            )
        elif (self.global_batch_size - start) % increment:
            growth = self.global_batch_size - start
            yield Problem(
                flags=(name, "--global-batch-size"),
                value=shown,
                rule=f"the growth from {start} to --global-batch-size {self.global_batch_size} is {growth}, "
                f"which INCREMENT {increment} does not divide",
                works=f"{name} {start} {near(divisors(growth), increment, 1)} {samples}, "
                f"or --global-batch-size {start + growth // increment * increment} "
                f"or {start + (growth // increment + 1) * increment}",
            )
        if self.train_iters is not None and self.train_samples is None:
            works = f"{name} {shown} --train-samples N in place of --train-iters"
            if self.global_batch_size is not None:
                works = (
                    f"--train-samples {self.train_iters * self.global_batch_size} in place of --train-iters "
                    f"{self.train_iters}, and learning rate lengths in samples"
                )
            yield Problem(
                flags=(name, "--train-iters"),
                value=shown,
                rule="counts samples, so the length of the run must be given in samples too",
                works=works,
            )
