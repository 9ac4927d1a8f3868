"""The loss of a model, and who may keep its logits."""

from __future__ import annotations

from torch import Tensor

from tests.helpers.numerics import assert_bitwise
from tests.model.tiny import batch, build, tiny_config


def test_logits_that_a_hook_keeps_are_never_written_over() -> None:
    model, tiny = build(tiny_config(untie_embeddings_and_output_weights=True)), batch()
    assert model.output_layer is not None
    gradients = []
    for watched in (False, True):
        kept: list[Tensor] = []
        if watched:
            model.output_layer.register_forward_hook(lambda layer, inputs, output, kept=kept: kept.append(output))
        losses = model(tiny.tokens, tiny.position_ids, labels=tiny.labels)
        before = [logits.detach().clone() for logits in kept]
        losses.sum().backward()
        for logits, as_they_were in zip(kept, before, strict=True):
            assert_bitwise(logits.detach(), as_they_were)
        assert len(kept) == watched
        weight = model.output_layer.weight
        assert weight.grad is not None
        gradients.append(weight.grad)
        model.zero_grad(set_to_none=True)
    assert_bitwise(gradients[1], gradients[0])
