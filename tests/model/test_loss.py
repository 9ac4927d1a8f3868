"""The loss of a model, and who may keep its logits."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from tests.helpers.numerics import assert_bitwise
from tests.model.tiny import batch, build, tiny_config


@pytest.mark.parametrize("of_all", [False, True], ids=["its own", "of all modules"])
def test_logits_that_a_hook_keeps_are_never_written_over(of_all: bool) -> None:
    model, tiny = build(tiny_config(untie_embeddings_and_output_weights=True)), batch()
    assert model.output_layer is not None
    gradients = []
    for watched in (False, True):
        kept: list[Tensor] = []

        def keep(layer: object, inputs: object, output: Tensor, kept: list[Tensor] = kept) -> None:
            if layer is model.output_layer:
                kept.append(output)

        register = register_module_forward_hook if of_all else model.output_layer.register_forward_hook
        hook = register(keep) if watched else None
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
        if hook is not None:
            hook.remove()
    assert_bitwise(gradients[1], gradients[0])
