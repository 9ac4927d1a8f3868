"""The whole update beside torch's own gradients, `clip_grad_norm_` and `torch.optim`, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megatron.core.main_grad import main_grad_of
from megatron.optimizer.adam import AdamW
from megatron.optimizer.sgd import SGD
from megatron.optimizer.update_rule import UpdateRule
from tests.helpers.numerics import assert_parity
from tests.optimizer.toy import data_parallel, loss_sum, optimizer_of, toy_batch, toy_model

LR, DECAY = 0.05, 0.3


def torch_groups(model: nn.Module) -> list[dict[str, object]]:
    """Decay on the matrices only, said independently of the code under test."""
    matrices = [model.embedding.weight, model.linear_fc1.weight, model.linear_fc2.weight]
    vectors = [model.layernorm.weight, model.layernorm.bias, model.linear_fc1.bias, model.linear_fc2.bias]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]


def torch_optimizer(rule: UpdateRule, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(rule, AdamW):
        return torch.optim.AdamW(torch_groups(model), lr=LR, betas=(rule.beta1, rule.beta2), eps=rule.eps)
    assert isinstance(rule, SGD)
    return torch.optim.SGD(torch_groups(model), lr=LR, momentum=rule.momentum)


RULES = [AdamW(), AdamW(beta1=0.8, beta2=0.95, eps=1e-3), SGD(momentum=0.9), SGD(momentum=0.0)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("clip_grad", [0.0, 0.7, 1e6])
def test_five_steps_are_those_of_torch(rule: UpdateRule, clip_grad: float) -> None:
    model = toy_model()
    reference = copy.deepcopy(model)
    chunk = data_parallel(model)
    ours, theirs = optimizer_of([chunk], rule, clip_grad=clip_grad), torch_optimizer(rule, reference)
    ours.set_schedule(LR, DECAY)
    for step in range(5):
        tokens, targets = toy_batch(step)
        chunk.zero_grad_buffer()
        for micro in (slice(0, 5), slice(5, 6), slice(6, 12)):  # accumulated over uneven micro-batches
            (loss_sum(chunk, tokens[micro], targets[micro]) / 12).backward()
        report = ours.step()

        theirs.zero_grad()
        (loss_sum(reference, tokens, targets) / 12).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), clip_grad if clip_grad else float("inf"))
        theirs.step()

        assert report.applied
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-12)
        for (name, mine), other in zip(model.named_parameters(), reference.parameters()):
            assert_parity(mine.data, other.data, f"{name} after step {step}")


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_learning_rate_and_decay_of_each_step_are_the_ones_that_were_set(rule: UpdateRule) -> None:
    model = toy_model()
    reference = copy.deepcopy(model)
    chunk = data_parallel(model)
    ours, theirs = optimizer_of([chunk], rule), torch_optimizer(rule, reference)
    for step, (lr, decay) in enumerate([(0.1, 0.0), (0.0, 0.5), (0.01, 1.0)]):
        tokens, targets = toy_batch(step)
        chunk.zero_grad_buffer()
        loss_sum(chunk, tokens, targets).backward()
        ours.set_schedule(lr, decay)
        ours.step()
        theirs.zero_grad()
        loss_sum(reference, tokens, targets).backward()
        for group in theirs.param_groups:
            group["lr"] = lr
            group["weight_decay"] = decay if group["weight_decay"] or group["params"][0].ndim > 1 else 0.0
        theirs.step()
        for (name, mine), other in zip(model.named_parameters(), reference.parameters()):
            assert_parity(mine.data, other.data, f"{name} after step {step}")


def test_a_step_before_any_schedule_is_refused() -> None:
    optimizer = optimizer_of([data_parallel(toy_model())])
    with pytest.raises(AssertionError, match="set_schedule"):
        optimizer.step()


def test_weight_decay_is_on_every_matrix_and_on_no_vector() -> None:
    """With gradients of zero, decay alone moves a parameter."""
    model = toy_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    chunk = data_parallel(model)
    optimizer = optimizer_of([chunk])
    optimizer.set_schedule(0.1, 0.5)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.ndim > 1 else 1.0
        assert_parity(parameter.data, before[name] * factor, name)


def test_every_trainable_parameter_is_updated_once_and_a_tied_one_too() -> None:
    model = toy_model()
    model.linear_fc1.bias.requires_grad_(False)
    model.copy_of_embedding = model.embedding
    chunk = data_parallel(model)
    covered = [entry.parameter for buffer in chunk.grad_buffers for entry in buffer.entries]
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(covered) == len(trainable)
    assert {id(parameter) for parameter in covered} == trainable


def test_zeros_are_counted_in_the_parameters_and_not_in_the_gaps_between_them() -> None:
    model = toy_model()
    chunk = data_parallel(model)
    for buffer in chunk.grad_buffers:
        for entry in buffer.entries:
            main_grad_of(entry.parameter).fill_(1.0)
    main_grad_of(model.embedding.weight)[3] = 0.0
    main_grad_of(model.linear_fc2.bias)[1] = 0.0
    optimizer = optimizer_of([chunk], count_zeros=True)
    optimizer.set_schedule(0.1, 0.0)
    assert optimizer.step().num_zeros == 7 + 1
