"""The optimizer, its schedules, and the precision of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megatron.config.options import flag
from megatron.config.problems import Problem

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
MuonScale = Literal["spectral", "unit_rms_norm", "shape_scaling"]
MuonCoefficients = Literal["quintic", "simple"]
StateType = Literal["fp32", "bf16"]
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
# The loss is multiplied by the scale and gradients by its reciprocal, in fp32: neither may lose bits or be infinite.
_LEAST_LOSS_SCALE, _LARGEST_LOSS_SCALE = 2.0**-126, 2.0**126


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """How weights are updated. Lengths end in iters or samples; a run counts in one of the two."""

    optimizer: Literal["adam", "sgd", "muon"] = field(
        default="adam",
        metadata=flag(
            "Update rule; adam decouples weight decay (AdamW); muon orthogonalizes the momentum of the matrices inside "
            "layers, and updates all else as adam.",
            later=("dist_muon", "lion", "soap", "adaptive_muon"),
        ),
    )
    precision: Precision = field(
        default="fp32",
        metadata=flag(
            "Precision of weights and activations; bf16 and fp16 keep fp32 main weights.",
            constants={"--bf16": "bf16", "--fp16": "fp16", "--fp64": "fp64"},
        ),
    )
    grad_reduce_in_bf16: bool = field(
        default=False,
        metadata=flag("Accumulate and reduce gradients in bf16 instead of fp32; with --bf16."),
    )
    lr: float = field(metadata=flag("Peak learning rate.", above=0, usual=1e-4))
    min_lr: float = field(default=0.0, metadata=flag("Learning rate at the end of the decay.", at_least=0))
    lr_decay_style: DecayStyle = field(default="linear", metadata=flag("Shape of the decay."))
    lr_decay_iters: int | None = field(
        default=None, metadata=flag("Iterations to the end of the decay; all when not given.", at_least=1)
    )
    lr_decay_samples: int | None = field(
        default=None, metadata=flag("Samples to the end of the decay; all when not given.", at_least=1)
    )
    lr_warmup_fraction: float | None = field(
        default=None,
        metadata=flag("Warm-up as a part of the decay length.", aliases=("--warmup",), at_least=0, below=1, usual=0.01),
    )
    lr_warmup_iters: int = field(default=0, metadata=flag("Warm-up in iterations.", at_least=0))
    lr_warmup_samples: int = field(default=0, metadata=flag("Warm-up in samples.", at_least=0))
    lr_warmup_init: float = field(default=0.0, metadata=flag("Learning rate at which the warm-up starts.", at_least=0))
    lr_wsd_decay_style: WsdDecayStyle = field(default="exponential", metadata=flag("Shape of the last part of WSD."))
    lr_wsd_decay_iters: int | None = field(
        default=None, metadata=flag("Length of the last part of WSD, in iterations.", at_least=1)
    )
    lr_wsd_decay_samples: int | None = field(
        default=None, metadata=flag("Length of the last part of WSD, in samples.", at_least=1)
    )
    weight_decay: float = field(default=0.01, metadata=flag("Weight decay; biases and norms have none.", at_least=0))
    start_weight_decay: float | None = field(
        default=None, metadata=flag("Weight decay at the start of its ramp.", at_least=0)
    )
    end_weight_decay: float | None = field(
        default=None, metadata=flag("Weight decay at the end of its ramp.", at_least=0)
    )
    weight_decay_incr_style: WeightDecayStyle = field(
        default="constant", metadata=flag("Shape of the weight decay ramp.")
    )
    clip_grad: float = field(default=1.0, metadata=flag("Largest global gradient norm; 0 does not clip.", at_least=0))
    adam_beta1: float = field(default=0.9, metadata=flag("Decay of the first moment.", at_least=0, below=1))
    adam_beta2: float = field(default=0.999, metadata=flag("Decay of the second moment.", at_least=0, below=1))
    adam_eps: float = field(default=1e-8, metadata=flag("Added to the root of the second moment.", above=0))
    sgd_momentum: float = field(default=0.9, metadata=flag("Momentum of sgd.", at_least=0, below=1))
    muon_momentum: float = field(default=0.9, metadata=flag("Momentum of muon.", at_least=0, below=1))
    muon_nesterov: bool = field(default=False, metadata=flag("Nesterov's momentum in muon."))
    muon_scale_mode: MuonScale = field(
        default="spectral",
        metadata=flag(
            "Size of muon's update of a matrix: the root of its longer side (spectral), of rows over columns "
            "(unit_rms_norm), or of these where more than 1 (shape_scaling, as torch.optim.Muon)."
        ),
    )
    muon_extra_scale_factor: float = field(
        default=1.0,
        metadata=flag("Factor of muon's updates; 0.2 with spectral gives them the size of AdamW's.", above=0),
    )
    muon_num_ns_steps: int = field(default=5, metadata=flag("Newton-Schulz steps of muon.", at_least=1, at_most=99))
    muon_coefficient_type: MuonCoefficients = field(
        default="quintic",
        metadata=flag(
            "Coefficients of the Newton-Schulz steps: another set for each of five, or always the first "
            "publication's (simple, as torch.optim.Muon).",
            later=("polar_express", "aol", "custom"),
        ),
    )
    muon_split_qkv: bool = field(
        default=True,
        metadata=flag(
            "Queries, keys and values are three matrices to muon.",
            off="--muon-no-split-qkv",
            off_help="Queries, keys and values are one matrix to muon.",
        ),
    )
    muon_fp32_matmul_prec: Literal["medium", "high"] = field(
        default="medium",
        metadata=flag("Newton-Schulz steps in bf16 (medium) or fp32 (high); with --fp64 in fp64.", later=("low",)),
    )
    use_precision_aware_optimizer: bool = field(
        default=False,
        metadata=flag(
            "Optimizer state of fewer bits, for --optimizer adam: with --bf16 the main weights are the model's and 16 "
            "bits beside each, without loss; the moments as --exp-avg-dtype and --exp-avg-sq-dtype say."
        ),
    )
    main_grads_dtype: StateType | None = field(
        default=None,
        metadata=flag(
            "Type of the gradients that are summed and reduced, with --use-precision-aware-optimizer; fp32 when not "
            "given, or as --grad-reduce-in-bf16 and --fp64 say.",
            meaning="grad_dtype",
        ),
    )
    exp_avg_dtype: StateType | None = field(
        default=None,
        metadata=flag(
            "Type of the first moment, with --use-precision-aware-optimizer; fp32 when not given, fp64 with --fp64.",
            later=("fp16", "fp8"),
            meaning="narrow_states",
        ),
    )
    exp_avg_sq_dtype: StateType | None = field(
        default=None,
        metadata=flag(
            "Type of the second moment, with --use-precision-aware-optimizer; fp32 when not given, fp64 with --fp64.",
            later=("fp16", "fp8"),
            meaning="narrow_states",
        ),
    )
    loss_scale: float | None = field(
        default=None, metadata=flag("Fixed loss scale with --fp16; dynamic when not given.", above=0, usual=4096.0)
    )
    initial_loss_scale: float = field(default=2.0**32, metadata=flag("First dynamic loss scale.", above=0))
    min_loss_scale: float = field(default=1.0, metadata=flag("Smallest dynamic loss scale.", above=0))
    loss_scale_window: int = field(
        default=1000, metadata=flag("Good steps before the loss scale is doubled.", at_least=1)
    )
    hysteresis: int = field(default=2, metadata=flag("Overflows before the loss scale is halved.", at_least=1))
    calculate_per_token_loss: bool = field(
        default=True,
        metadata=flag(
            "The loss is the mean over the tokens of the global batch.",
            off_help="Megatron-LM's gradient: of the mean of micro-batch means, not of the mean over the tokens of "
            "the global batch.",
        ),
    )

    @property
    def params_dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return _dtype(_DTYPES[self.precision])

    @property
    def main_dtype(self) -> torch.dtype:
        """The type in which weights are updated."""
        return _dtype("float64" if self.precision == "fp64" else "float32")

    @property
    def grad_dtype(self) -> torch.dtype:
        """The type in which gradients are summed."""
        narrow = self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16"
        return _dtype("bfloat16") if narrow else self.main_dtype

    @property
    def main_in_halves(self) -> bool:
        """Whether a main weight is the model's bfloat16 and the 16 bits that its rounding takes away."""
        return self.use_precision_aware_optimizer and self.precision == "bf16"

    @property
    def narrow_states(self) -> frozenset[str]:
        """The optimizer state that is kept in bfloat16."""
        types = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return frozenset(name for name, dtype in types.items() if dtype == "bf16")

    @property
    def updates_matrices_apart(self) -> bool:
        """Whether the matrices inside layers have an update rule of their own."""
        return self.optimizer == "muon"

    @property
    def bytes_per_parameter(self) -> int:
        """Of a weight with its gradient, what it is short of a main weight, and its optimizer state."""
        return self.params_dtype.itemsize + self.grad_dtype.itemsize + self.state_bytes_per_parameter

    @property
    def state_bytes_per_parameter(self) -> int:
        """Of main weight and optimizer state, which a distributed optimizer spreads over data-parallel ranks.

        With muon those of a matrix inside a layer.
        """
        states = {"adam": 2, "muon": 1, "sgd": int(self.sgd_momentum > 0)}[self.optimizer]
        return self.main_bytes_per_parameter + states * self.main_dtype.itemsize - 2 * len(self.narrow_states)

    @property
    def main_bytes_per_parameter(self) -> int:
        """Bytes beside a weight that make a main weight of it, or are one."""
        if self.main_in_halves:
            return 2
        return self.main_dtype.itemsize if self.params_dtype != self.main_dtype else 0

    @property
    def state_bytes_outside_layers(self) -> int:
        """The same of embeddings, output layer and vectors: to muon the moments of Adam in place of one momentum."""
        return self.state_bytes_per_parameter + (self.main_dtype.itemsize if self.optimizer == "muon" else 0)

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section."""
        yield from self._schedule_problems()
        yield from self._weight_decay_problems()
        yield from self._loss_scale_problems()
        if self.grad_reduce_in_bf16 and self.precision != "bf16":
            yield Problem(
                flags=("--grad-reduce-in-bf16", "--bf16"),
                rule=f"rounds gradients to bf16, and the precision is {self.precision}",
                works="--bf16 with it; or leave out --grad-reduce-in-bf16",
            )
        yield from self._state_problems()
        yield from self._muon_problems()

    def _state_problems(self) -> Iterator[Problem]:
        aware = "--use-precision-aware-optimizer"
        if self.use_precision_aware_optimizer and self.optimizer != "adam":
            yield Problem(
                flags=(aware, "--optimizer"),
                rule=f"is for the state of adam, and --optimizer is {self.optimizer}",
                works="--optimizer adam; or leave it out",
            )
        elif self.use_precision_aware_optimizer and self.precision == "fp64":
            yield Problem(
                flags=(aware, "--fp64"),
                rule="keeps less than fp64, which --fp64 asks for",
                works="--bf16; or leave it out",
            )
        types = {
            "--main-grads-dtype": self.main_grads_dtype,
            "--exp-avg-dtype": self.exp_avg_dtype,
            "--exp-avg-sq-dtype": self.exp_avg_sq_dtype,
        }
        for name, dtype in types.items():
            if dtype == "bf16" and not self.use_precision_aware_optimizer:
                yield Problem(
                    flags=(name, aware),
                    value=dtype,
                    rule=f"belongs to {aware}",
                    works=f"{aware} {name} {dtype}; or leave out {name}",
                )
            elif dtype == "fp32" and self.precision == "fp64":
                yield Problem(
                    flags=(name, "--fp64"),
                    value=dtype,
                    rule="is less than fp64, which --fp64 asks for",
                    works=f"leave out {name}; or --fp64",
                )
        if self.main_grads_dtype == "fp32" and self.grad_reduce_in_bf16:
            yield Problem(
                flags=("--main-grads-dtype", "--grad-reduce-in-bf16"),
                value="fp32",
                rule="and --grad-reduce-in-bf16 ask for opposite things",
                works="one of the two",
            )
        if self.main_grads_dtype == "bf16" and self.precision != "bf16":
            yield Problem(
                flags=("--main-grads-dtype", "--bf16"),
                value="bf16",
                rule=f"is the type of a model in bf16, and the precision is {self.precision}",
                works="--bf16; or leave out --main-grads-dtype",
            )

    def _muon_problems(self) -> Iterator[Problem]:
        given: dict[str, object] = {
            "--muon-momentum": None if self.muon_momentum == 0.9 else self.muon_momentum,
            "--muon-nesterov": self.muon_nesterov or None,
            "--muon-scale-mode": None if self.muon_scale_mode == "spectral" else self.muon_scale_mode,
            "--muon-extra-scale-factor": None if self.muon_extra_scale_factor == 1.0 else self.muon_extra_scale_factor,
            "--muon-num-ns-steps": None if self.muon_num_ns_steps == 5 else self.muon_num_ns_steps,
            "--muon-coefficient-type": None if self.muon_coefficient_type == "quintic" else self.muon_coefficient_type,
            "--muon-no-split-qkv": None if self.muon_split_qkv else True,
            "--muon-fp32-matmul-prec": None if self.muon_fp32_matmul_prec == "medium" else self.muon_fp32_matmul_prec,
        }
        for name, value in given.items():
            if value is not None and self.optimizer != "muon":
                yield Problem(
                    flags=(name, "--optimizer"),
                    value=None if value is True else value,
                    rule=f"belongs to --optimizer muon, and that is {self.optimizer}",
                    works=f"--optimizer muon; or leave out {name}",
                )
        if self.optimizer == "muon" and self.muon_fp32_matmul_prec == "high" and self.grad_reduce_in_bf16:
            yield Problem(
                flags=("--muon-fp32-matmul-prec", "--grad-reduce-in-bf16"),
                value="high",
                rule="orthogonalizes in fp32 what lies in the place of the gradients, and with --grad-reduce-in-bf16 "
                "these are bf16",
                works="--muon-fp32-matmul-prec medium; or leave out --grad-reduce-in-bf16",
            )
        if self.muon_coefficient_type == "quintic" and self.muon_num_ns_steps % 5:
            yield Problem(
                flags=("--muon-num-ns-steps", "--muon-coefficient-type"),
                value=self.muon_num_ns_steps,
                rule="must be a multiple of 5 with --muon-coefficient-type quintic, whose coefficients are those of "
                "five steps",
                works="--muon-num-ns-steps 5; --muon-coefficient-type simple",
            )

    def _schedule_problems(self) -> Iterator[Problem]:
        if self.min_lr > self.lr:
            yield Problem(
                flags=("--min-lr", "--lr"),
                value=self.min_lr,
                rule=f"must not be more than --lr {self.lr}",
                works=f"--min-lr {self.lr / 10:.3g}, or --lr {self.min_lr} or more",
            )
        if self.lr_warmup_init > self.lr:
            yield Problem(
                flags=("--lr-warmup-init", "--lr"),
                value=self.lr_warmup_init,
                rule=f"must not be more than --lr {self.lr}, to which the warm-up leads",
                works="--lr-warmup-init 0",
            )
        fraction = self.lr_warmup_fraction
        for name, value in {
            "--lr-warmup-iters": self.lr_warmup_iters,
            "--lr-warmup-samples": self.lr_warmup_samples,
        }.items():
            if fraction is not None and value:
                yield Problem(
                    flags=(name, "--lr-warmup-fraction"),
                    value=value,
                    rule=f"and --lr-warmup-fraction {fraction} both give the length of the warm-up",
                    works="one of the two",
                )
        last_part = {
            "--lr-wsd-decay-iters": self.lr_wsd_decay_iters,
            "--lr-wsd-decay-samples": self.lr_wsd_decay_samples,
        }
        given = [name for name, value in last_part.items() if value is not None]
        if self.lr_decay_style == "WSD" and not given:
            yield Problem(
                flags=("--lr-decay-style", *last_part),
                value="WSD",
                rule="stays constant and decays in the last part, whose length is not given",
                works="--lr-wsd-decay-iters N (or --lr-wsd-decay-samples N with --train-samples)",
            )
        elif self.lr_decay_style != "WSD":
            for name in given:
                yield Problem(
                    flags=(name, "--lr-decay-style"),
                    value=last_part[name],
                    rule=f"has an effect only with --lr-decay-style WSD, and that is {self.lr_decay_style}",
                    works=f"--lr-decay-style WSD; or leave out {name}",
                )

    def _weight_decay_problems(self) -> Iterator[Problem]:
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        ramp = {"--start-weight-decay": start, "--end-weight-decay": end}
        if style == "constant":
            for name, value in ramp.items():
                if value is not None:
                    yield Problem(
                        flags=(name, "--weight-decay-incr-style"),
                        value=value,
                        rule="is an end of a ramp, and --weight-decay-incr-style is constant",
                        works=f"--weight-decay-incr-style linear or cosine; or --weight-decay {value}",
                    )
        elif start is None or end is None:
            missing = [name for name, value in ramp.items() if value is None]
            yield Problem(
                flags=("--weight-decay-incr-style", *missing),
                value=style,
                rule=f"needs both ends of the ramp; not given: {' and '.join(missing)}",
                works="--start-weight-decay 0.01 --end-weight-decay 0.1",
            )
        elif start > end:
            yield Problem(
                flags=("--start-weight-decay", "--end-weight-decay"),
                value=start,
                rule=f"must be at most --end-weight-decay {end}",
                works=f"--start-weight-decay {end} or less",
            )

    def _loss_scale_problems(self) -> Iterator[Problem]:
        given: dict[str, float | None] = {
            "--loss-scale": self.loss_scale,
            "--initial-loss-scale": None if self.initial_loss_scale == 2.0**32 else self.initial_loss_scale,
            "--min-loss-scale": None if self.min_loss_scale == 1.0 else self.min_loss_scale,
            "--loss-scale-window": None if self.loss_scale_window == 1000 else self.loss_scale_window,
            "--hysteresis": None if self.hysteresis == 2 else self.hysteresis,
        }
        for name, value in given.items():
            if value is None:
                continue
            if self.precision != "fp16":
                yield Problem(
                    flags=(name, "--fp16"),
                    value=value,
                    rule=f"only fp16 needs a loss scale, and the precision is {self.precision}",
                    works=f"--fp16; or leave out {name}",
                )
            elif name != "--loss-scale" and self.loss_scale is not None:
                yield Problem(
                    flags=(name, "--loss-scale"),
                    value=value,
                    rule=f"belongs to the dynamic loss scale, and --loss-scale {self.loss_scale} fixes it",
                    works=f"one of --loss-scale and {name}",
                )
        scales = {name: given[name] for name in ("--loss-scale", "--initial-loss-scale", "--min-loss-scale")}
        unfit = [name for name, scale in scales.items() if scale is not None and not _is_loss_scale(scale)]
        if self.precision == "fp16":
            for name in unfit:
                yield Problem(
                    flags=(name,),
                    value=scales[name],
                    rule="it and its reciprocal must be normal numbers of fp32: from 2^-126 = "
                    f"{_LEAST_LOSS_SCALE:.3g} to 2^126 = {_LARGEST_LOSS_SCALE:.3g}",
                    works=f"{name} 4096; or leave it out",
                )
        if not unfit and self.initial_loss_scale < self.min_loss_scale:
            yield Problem(
                flags=("--initial-loss-scale", "--min-loss-scale"),
                value=self.initial_loss_scale,
                rule=f"must not be less than --min-loss-scale {self.min_loss_scale}",
                works=f"--initial-loss-scale {self.min_loss_scale} or more",
            )


def _is_loss_scale(scale: float) -> bool:
    return _LEAST_LOSS_SCALE <= scale <= _LARGEST_LOSS_SCALE


def _dtype(name: str) -> torch.dtype:
    # Here, not above: the text tools read their flags through this package, and torch takes seconds to import.
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
