"""Every precision: main parameters, overflow, skipped steps, and what a checkpoint holds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.kernels.float_halves import Halves
from megatron.core.main_grad import main_grad_of
from megatron.optimizer.adam import AdamW
from megatron.optimizer.build import build_optimizer
from megatron.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.optimizer.optimizer import MegatronOptimizer
from megatron.optimizer.sgd import SGD
from tests.helpers.dtypes import DtypesSeen
from tests.helpers.numerics import assert_bitwise, rounded
from tests.optimizer.toy import data_parallel, loss_sum, optimizer_of, toy_batch, toy_model

LOW = [torch.bfloat16, torch.float16]


def fill_gradients(chunk: DistributedDataParallel, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in chunk.trainable_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        main_grad_of(parameter).copy_(values * scale)


def main_parameters(optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    return {named.key.removeprefix("model."): named.tensor for named in optimizer.named_main_parameters()}


def snapshot(chunk: DistributedDataParallel, optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    tensors = {named.key: named.tensor.clone() for named in optimizer.named_state()}
    tensors |= {f"main.{name}": tensor.clone() for name, tensor in main_parameters(optimizer).items()}
    return tensors | {name: parameter.detach().clone() for name, parameter in chunk.module.named_parameters()}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rule", [AdamW(), SGD()], ids=str)
def test_main_parameters_follow_a_float32_run_and_the_model_is_their_rounding(dtype: torch.dtype, rule: Any) -> None:
    low = toy_model(dtype)
    single = toy_model(dtype).float()  # the same first values
    chunks = [data_parallel(low), data_parallel(single)]
    optimizers = [optimizer_of([chunk], rule, clip_grad=1.0) for chunk in chunks]
    for step in range(20):
        for chunk, optimizer in zip(chunks, optimizers):
            fill_gradients(chunk, step)
            optimizer.set_schedule(1e-4, 0.1)
            optimizer.step()
    main = main_parameters(optimizers[0])
    for (name, parameter), other in zip(low.named_parameters(), single.parameters()):
        assert_bitwise(main[name], other.data, name)
        assert_bitwise(parameter.data, rounded(other.data, dtype), name)


def test_updates_smaller_than_a_bfloat16_step_are_not_lost() -> None:
    model = toy_model(torch.bfloat16)
    model.layernorm.weight.data.fill_(1.0)
    chunk = data_parallel(model)
    optimizer = optimizer_of([chunk])
    optimizer.set_schedule(1e-4, 0.0)  # the next bfloat16 above 1 is 1.0078
    for _ in range(100):
        main_grad_of(model.layernorm.weight).fill_(-1.0)
        optimizer.step()
    assert bool((model.layernorm.weight > 1.0).all())


def test_float16_overflow_skips_the_step_halves_the_scale_and_touches_nothing_else() -> None:
    chunk = data_parallel(toy_model(torch.float16))
    scaler = DynamicGradScaler(initial_scale=2.0**16, min_scale=1.0, growth_interval=3, hysteresis=1)
    optimizer = optimizer_of([chunk], scaler=scaler, clip_grad=1.0)
    optimizer.set_schedule(0.01, 0.1)
    fill_gradients(chunk, 0, scale=optimizer.loss_scale)
    assert optimizer.step().applied
    before = snapshot(chunk, optimizer)
    for bad in (math.inf, -math.inf, math.nan):
        scale = optimizer.loss_scale
        fill_gradients(chunk, 1)
        main_grad_of(chunk.module.linear_fc1.weight)[3, 2] = bad
        report = optimizer.step()
        assert not report.applied
        assert not math.isfinite(report.grad_norm)
        assert optimizer.loss_scale == scale / 2
        for name, tensor in snapshot(chunk, optimizer).items():
            assert_bitwise(tensor, before[name], name)
    assert optimizer.state_dict()["num_updates"] == 1
    fill_gradients(chunk, 2, scale=optimizer.loss_scale)
    assert optimizer.step().applied
    assert optimizer.state_dict()["num_updates"] == 2
    changed = snapshot(chunk, optimizer)
    assert all(not torch.equal(changed[name], before[name]) for name in before if name.startswith("main."))


def test_an_overflow_in_the_backward_pass_of_a_float16_model_is_seen() -> None:
    """From the loss, through autograd and the hooks, to the report, until the scale fits."""
    chunk = data_parallel(toy_model(torch.float16))
    scaler = DynamicGradScaler(initial_scale=2.0**24, min_scale=1.0, growth_interval=1000, hysteresis=2)
    optimizer = optimizer_of([chunk], scaler=scaler, clip_grad=1.0)
    optimizer.set_schedule(0.01, 0.1)
    tokens, targets = toy_batch(0)
    scales, applied = [], []
    for _ in range(25):
        chunk.zero_grad_buffer()
        scales.append(optimizer.loss_scale)
        (optimizer.loss_scale * loss_sum(chunk, tokens, targets.float()) / 12).backward()
        applied.append(optimizer.step().applied)
    assert scales[:4] == [2.0**24, 2.0**24, 2.0**23, 2.0**22], "hysteresis 2 tolerates one overflow"
    first = applied.index(True)
    assert first > 3
    assert all(applied[first:])
    assert scales[-1] == scales[first]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_without_a_loss_scale_a_bad_gradient_is_reported_and_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    chunk = data_parallel(toy_model(dtype))
    optimizer = optimizer_of([chunk], clip_grad=1.0)
    optimizer.set_schedule(0.01, 0.1)
    before = snapshot(chunk, optimizer)
    fill_gradients(chunk, 1)
    main_grad_of(chunk.module.linear_fc2.bias)[0] = bad
    report = optimizer.step()
    assert not report.applied
    assert math.isnan(report.grad_norm) if math.isnan(bad) else report.grad_norm == math.inf
    assert optimizer.loss_scale == 1.0
    for name, tensor in snapshot(chunk, optimizer).items():
        assert_bitwise(tensor, before[name], name)


def test_clipping_sees_unscaled_gradients() -> None:
    """Loss scale 1024, norm 2, at most 1: the norm 2 is reported, gradients of norm 1 are applied."""
    chunk = data_parallel(toy_model(torch.float16))
    optimizer = optimizer_of([chunk], AdamW(beta1=0.9), scaler=ConstantGradScaler(1024.0), clip_grad=1.0)
    optimizer.set_schedule(0.01, 0.0)
    fill_gradients(chunk, 0)
    (buffer,) = chunk.grad_buffers
    buffer.gradients.mul_(2.0 * 1024.0 / buffer.gradients.norm())
    assert optimizer.step().grad_norm == pytest.approx(2.0, rel=1e-6)
    moments = [named.tensor for named in optimizer.named_state() if ".exp_avg." in named.key]
    applied = torch.cat([moment.reshape(-1) for moment in moments]).norm() / (1 - 0.9)
    assert float(applied) == pytest.approx(1.0, rel=1e-5)


def test_gradients_whose_squares_overflow_float32_are_clipped_and_not_called_infinite() -> None:
    chunk = data_parallel(toy_model(torch.float32))
    optimizer = optimizer_of([chunk], clip_grad=1.0)
    optimizer.set_schedule(0.01, 0.0)
    main_grad_of(chunk.module.linear_fc1.weight).fill_(1e30)
    report = optimizer.step()
    assert report.applied
    assert report.grad_norm == pytest.approx(1e30 * math.sqrt(7 * 13), rel=1e-6)


def test_a_step_with_nothing_to_learn_from_changes_nothing_not_even_the_scale() -> None:
    chunk = data_parallel(toy_model(torch.float16))
    scaler = DynamicGradScaler(initial_scale=8.0, min_scale=1.0, growth_interval=1, hysteresis=1)
    optimizer = optimizer_of([chunk], scaler=scaler)
    before = snapshot(chunk, optimizer)
    report = optimizer.skip_step()
    assert not report.applied
    assert optimizer.loss_scale == 8.0
    for name, tensor in snapshot(chunk, optimizer).items():
        assert_bitwise(tensor, before[name], name)


def test_a_model_that_is_all_frozen_has_a_norm_of_zero() -> None:
    model = toy_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    optimizer = optimizer_of([data_parallel(model)], clip_grad=1.0, count_zeros=True)
    optimizer.set_schedule(0.01, 0.1)
    report = optimizer.step()
    assert report.applied
    assert (report.grad_norm, report.num_zeros) == (0.0, 0)


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_float64_training_makes_no_tensor_of_another_floating_point_type(rule: str) -> None:
    model = toy_model(torch.float64)
    config = OptimizerConfig(lr=0.01, precision="fp64", optimizer=rule, clip_grad=0.1)
    single = CommGroup.single()
    with DtypesSeen(torch.float64) as seen:
        chunk = DistributedDataParallel(model, data_group=single, grad_dtype=config.main_dtype)
        optimizer = build_optimizer([chunk], config, model_group=single, device=torch.device("cpu"), count_zeros=True)
        tokens, targets = toy_batch(0)
        for _ in range(2):
            chunk.zero_grad_buffer()
            loss_sum(chunk, tokens, targets).backward()
            finalize_model_grads([chunk], tensor=single, embedding=None)
            optimizer.set_schedule(0.01, 0.1)
            assert optimizer.step().applied
    assert seen.expected
    assert not seen.others


def tensors_of(chunk: DistributedDataParallel, optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    """What a checkpoint keeps."""
    return main_parameters(optimizer) | {named.key: named.tensor for named in optimizer.named_state()}


def trained(model: nn.Module, steps: range, saved: tuple[dict[str, Any], dict[str, Tensor]] | None = None) -> Any:
    """Optionally resume from (scalars, main parameters and state), then train; returns (chunk, optimizer)."""
    chunk = data_parallel(model)
    scaler = DynamicGradScaler(initial_scale=64.0, min_scale=1.0, growth_interval=2, hysteresis=2)
    optimizer = optimizer_of([chunk], scaler=scaler, clip_grad=1.0)
    if saved is not None:
        scalars, tensors = saved
        optimizer.load_state_dict(json.loads(json.dumps(scalars)))
        for name, tensor in tensors_of(chunk, optimizer).items():
            tensor.data.copy_(tensors[name])
        optimizer.after_load()
    for step in steps:
        fill_gradients(chunk, step, scale=optimizer.loss_scale)
        optimizer.set_schedule(0.01, 0.1)
        optimizer.step()
    return chunk, optimizer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(dtype: torch.dtype) -> None:
    chunk, optimizer = trained(toy_model(dtype), range(5))
    saved = (optimizer.state_dict(), {name: tensor.clone() for name, tensor in tensors_of(chunk, optimizer).items()})
    main = torch.float64 if dtype == torch.float64 else torch.float32
    assert {tensor.dtype for tensor in saved[1].values()} == {main}
    resumed = trained(toy_model(dtype, seed=9), range(5, 10), saved)
    straight = trained(toy_model(dtype), range(10))
    assert resumed[1].state_dict() == straight[1].state_dict()
    assert straight[1].loss_scale == 64.0 * 2**5, "the scale has grown on both sides of the resume"
    for name, tensor in snapshot(*straight).items():
        assert_bitwise(snapshot(*resumed)[name], tensor, name)


@pytest.mark.parametrize("dtype", LOW)
def test_the_model_is_the_rounding_of_the_main_parameters_as_soon_as_those_are_loaded(
    dtype: torch.dtype,
) -> None:
    model = toy_model(dtype)
    chunk = data_parallel(model)
    optimizer = optimizer_of([chunk])
    main = main_parameters(optimizer)
    for tensor in main.values():
        tensor.normal_(generator=torch.Generator().manual_seed(4))
    optimizer.after_load()
    for name, parameter in model.named_parameters():
        assert_bitwise(parameter.data, rounded(main[name], dtype), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_narrower_model_the_main_parameters_are_the_models_own(dtype: torch.dtype) -> None:
    model = toy_model(dtype)
    chunk = data_parallel(model)
    for name, tensor in main_parameters(optimizer_of([chunk])).items():
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()


def test_the_state_of_another_rule_is_refused() -> None:
    adam = optimizer_of([data_parallel(toy_model())], AdamW())
    sgd = optimizer_of([data_parallel(toy_model())], SGD())
    with pytest.raises(ValueError, match=r"--optimizer sgd: .* --optimizer adam goes on .*--finetune"):
        sgd.load_state_dict(adam.state_dict())
    with pytest.raises(ValueError, match=r"--optimizer adam: .* --optimizer sgd goes on"):
        adam.load_state_dict(sgd.state_dict())
    plain = optimizer_of([data_parallel(toy_model())], SGD(momentum=0.0))
    with pytest.raises(ValueError, match=r"--sgd-momentum: it was saved with momentum, this run is without"):
        plain.load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match=r"--sgd-momentum: it was saved without momentum, this run is with"):
        sgd.load_state_dict(plain.state_dict())


def test_state_is_named_after_global_parameters_and_kinds() -> None:
    model = toy_model(torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    for rule, kinds in (
        (AdamW(), ("exp_avg", "exp_avg_sq")),
        (SGD(), ("momentum",)),
        (SGD(momentum=0.0), ()),
    ):
        optimizer = optimizer_of([data_parallel(toy_model(torch.bfloat16))], rule)
        keys = {named.key for named in optimizer.named_state()}
        assert keys == {f"optimizer.{kind}.{name}" for kind in kinds for name in names}


@pytest.mark.parametrize(
    "config, scale, moves",
    [
        ({"precision": "fp16"}, 2.0**32, True),
        ({"precision": "fp16", "loss_scale": 128.0}, 128.0, False),
        ({"precision": "bf16"}, 1.0, False),
        ({"precision": "fp32"}, 1.0, False),
        ({"precision": "fp64"}, 1.0, False),
    ],
)
def test_the_loss_scale_that_a_configuration_asks_for(config: dict[str, Any], scale: float, moves: bool) -> None:
    settings = OptimizerConfig(lr=0.1, hysteresis=1, **config)
    model = toy_model(settings.params_dtype)
    chunk = DistributedDataParallel(model, data_group=CommGroup.single(), grad_dtype=settings.main_dtype)
    optimizer = build_optimizer([chunk], settings, model_group=CommGroup.single(), device=torch.device("cpu"))
    assert optimizer.loss_scale == scale
    main_grad_of(model.linear_fc1.bias)[0] = math.inf
    optimizer.set_schedule(0.1, 0.1)
    optimizer.step()
    assert optimizer.loss_scale == (scale / 2 if moves else scale)


def test_only_bfloat16_is_kept_in_halves() -> None:
    """A parameter of a user's own in float16 has a copy."""
    model = toy_model(torch.bfloat16)
    model.layernorm.weight.data = model.layernorm.weight.data.half()
    settings = OptimizerConfig(lr=0.1, precision="bf16", use_precision_aware_optimizer=True)
    single = CommGroup.single()
    chunk = DistributedDataParallel(model, data_group=single, grad_dtype=settings.grad_dtype)
    optimizer = build_optimizer([chunk], settings, model_group=single, device=torch.device("cpu"))
    main = {named.key.removeprefix("model."): named.tensor for named in optimizer.named_main_parameters()}
    assert {name for name, tensor in main.items() if not isinstance(tensor, Halves)} == {"layernorm.weight"}
    before = model.layernorm.weight.detach().clone()
    main_grad_of(model.layernorm.weight).fill_(1.0)
    optimizer.set_schedule(0.1, 0.0)
    assert optimizer.step().applied
    assert_bitwise(model.layernorm.weight.detach(), main["layernorm.weight"].half())
    assert float((model.layernorm.weight.detach() - before + 0.1).abs().max()) < 2**-9
