"""The optimizer that a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.optimizer.adam import AdamW
from megatron.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, GradScaler
from megatron.optimizer.muon import Muon
from megatron.optimizer.optimizer import MegatronOptimizer
from megatron.optimizer.sgd import SGD
from megatron.optimizer.update_rule import UpdateRule


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    *,
    model_group: CommGroup,
    device: torch.device,
    count_zeros: bool = False,
) -> MegatronOptimizer:
    """One optimizer for all trainable parameters of the chunks.

    Build it after the first values are set: low-precision parameters are copied into the main ones here.

    Args:
        model_group: all ranks that together hold one copy of the model. With the distributed optimizer each of the
            data-parallel ranks updates a part of it, so that these are all ranks.
        device: of the parameters, of which a rank may have none.
        count_zeros: report the number of zero gradient elements (`--log-num-zeros-in-grad`).
    """
    return MegatronOptimizer(
        [bucket for chunk in chunks for bucket in reversed(chunk.buckets)],
        build_update_rule(config),
        scaler=build_grad_scaler(config),
        clip_grad=config.clip_grad,
        model_group=model_group,
        device=device,
        count_zeros=count_zeros,
        matrix_rule=build_matrix_rule(config),
        main_in_halves=config.main_in_halves,
    )


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    if config.optimizer == "sgd":
        return SGD(momentum=config.sgd_momentum)
    return AdamW(
        beta1=config.adam_beta1, beta2=config.adam_beta2, eps=config.adam_eps, narrow_states=config.narrow_states
    )


def build_matrix_rule(config: OptimizerConfig) -> UpdateRule | None:
    """The rule of the matrices inside layers, where it is one of their own."""
    if not config.updates_matrices_apart:
        return None
    return Muon(
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        num_steps=config.muon_num_ns_steps,
        coefficients=config.muon_coefficient_type,
        split_qkv=config.muon_split_qkv,
        half_precision=config.muon_fp32_matmul_prec == "medium",
    )


def build_grad_scaler(config: OptimizerConfig) -> GradScaler:
    """A constant scale when `--loss-scale` gives one, a dynamic one for float16, else 1."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if config.precision == "fp16":
        return DynamicGradScaler(
            initial_scale=config.initial_loss_scale,
            min_scale=config.min_loss_scale,
            growth_interval=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )
    return ConstantGradScaler()
