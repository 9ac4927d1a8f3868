"""What follows a prompt: how the next token is drawn, and that neither cache, batch nor layout changes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import pipeline_layout
from megatron.config.problems import UserError
from megatron.config.transformer import TransformerConfig
from megatron.core.parallel_state import build_parallel_state, grid_of_world
from megatron.inference.generation import Sampling, choose_token, generate
from megatron.inference.stages import ModelInput, ModelRanks, StagedModel
from tests.helpers.distributed import run_distributed
from tests.model.tiny import ARCHITECTURES, VOCAB, build, jitter, tiny_config

LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
CONTEXT = 16
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4], [3, 3, 8]]


def drawn(sampling: Sampling, draws: int = 400) -> list[float]:
    """The share of each token among the drawn ones."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([choose_token(LOGITS, sampling, generator) for _ in range(draws)])
    return [float(share) for share in torch.bincount(tokens, minlength=4) / draws]


def test_tokens_are_drawn_by_their_probability() -> None:
    # Four standard deviations of a share of 400 draws are at most 0.1.
    assert drawn(Sampling()) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=1e-310),
        Sampling(top_k=1),
        Sampling(top_p=0.4),
    ],
)
def test_the_most_likely_token_can_be_taken_always(sampling: Sampling) -> None:
    assert drawn(sampling, 50) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.7), Sampling(top_k=2, top_p=0.9)])
def test_unlikely_tokens_can_be_left_out(sampling: Sampling) -> None:
    assert drawn(sampling) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.1)
    assert drawn(sampling)[2:] == [0.0, 0.0]


def test_more_tokens_than_there_are_leave_out_none() -> None:
    assert drawn(Sampling(top_k=9)) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.1)


def single(config: TransformerConfig, dtype: torch.dtype = torch.float64) -> StagedModel:
    model = build(config, dtype=dtype)
    jitter(model)
    return StagedModel(model, ModelRanks.single())


def texts(
    model: StagedModel, prompts: Sequence[Sequence[int]], num_tokens: int, end_token: int = VOCAB, **how: Any
) -> list[list[int]]:
    """What follows each prompt; the first draws with seed 0, the second with 1, and so on."""
    found: list[list[int]] = [[] for _ in prompts]
    steps = generate(
        model,
        prompts,
        num_tokens=num_tokens,
        context_length=CONTEXT,
        end_token=end_token,
        sampling=Sampling(**how),
        generators=[torch.Generator().manual_seed(number) for number in range(len(prompts))],
    )
    for step in steps:
        for text, token in zip(found, step, strict=True):
            if token is not None:
                text.append(token)
    return found


def without_cache(model: StagedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The most likely tokens, each of which the whole text so far is read for."""
    text = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([text[-CONTEXT:]])
        positions = torch.arange(window.shape[1])[None]
        text.append(int(model.part(window, positions)[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("num_tokens", [5, 30])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_the_most_likely_text_is_that_of_a_model_without_memory(architecture: str, num_tokens: int) -> None:
    model = single(tiny_config(**ARCHITECTURES[architecture]))
    expected = [without_cache(model, prompt, num_tokens) for prompt in PROMPTS]
    assert texts(model, PROMPTS, num_tokens, temperature=0.0) == expected
    assert len({tuple(text) for text in expected}) > 1, "the prompts make no difference"


def test_each_token_costs_one_token_until_the_context_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    model = single(tiny_config())
    lengths = []
    run = model.run

    def counted(inputs: Sequence[ModelInput], **settings: Any) -> list[torch.Tensor]:
        lengths.append(inputs[0].tokens.shape[1])
        return run(inputs, **settings)

    monkeypatch.setattr(model, "run", counted)
    texts(model, PROMPTS[:2], 12)
    assert lengths == [7] + [1] * (CONTEXT - 7) + [CONTEXT] * 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_is_followed_by_the_same_text_in_any_batch(architecture: str) -> None:
    model = single(tiny_config(**ARCHITECTURES[architecture]))
    together = texts(model, PROMPTS, 30)
    for number in range(1, len(PROMPTS) + 1):
        assert texts(model, PROMPTS[:number], 30) == together[:number]


def test_a_text_ends_where_the_document_does_and_the_others_go_on() -> None:
    model = single(tiny_config())
    free = texts(model, PROMPTS, 12)
    end = free[1][3]
    ended = texts(model, PROMPTS, 12, end_token=end)
    assert ended == [text[: text.index(end)] if end in text else text for text in free]
    assert len({len(text) for text in ended}) > 1


def test_nothing_more_is_computed_when_all_texts_have_ended() -> None:
    model = single(tiny_config())
    end = texts(model, PROMPTS[:1], 1)[0][0]
    assert texts(model, PROMPTS[:1], 10**9, end_token=end) == [[]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(temperature: float, wrong: float) -> None:
    model = single(tiny_config(untie_embeddings_and_output_weights=True))
    assert model.part.output_layer is not None
    model.part.output_layer.weight.data[5, 5] = wrong
    with pytest.raises(UserError, match=r"not finite.*--ckpt-step"):
        texts(model, PROMPTS, 3, temperature=temperature)


def generate_on_ranks(
    rank: int, world_size: int, tensor: int, settings: dict[str, Any], nan: bool = False
) -> list[list[int]]:
    config = tiny_config(num_layers=4, **settings)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=world_size // tensor, world_size=world_size
    )
    state = build_parallel_state(grid_of_world(world_size, tensor=tensor, pipeline=world_size // tensor), rank=rank)
    (stage,) = pipeline_layout(config, parallel, VOCAB).stage(state.pipeline.rank)
    model = build(config, group=state.tensor, stage=stage)
    if nan and state.pipeline.is_last:
        assert model.decoder.final_layernorm is not None
        model.decoder.final_layernorm.weight.data[0] = math.nan
    ranks = ModelRanks(tensor=state.tensor, pipeline=state.pipeline, channels=state.channels, world=state.world)
    return texts(StagedModel(model, ranks), PROMPTS, 20)


@pytest.mark.parametrize(
    "architecture, tensor, pipeline",
    [("gpt2", 2, 2), ("gpt2", 1, 3), ("llama", 4, 1), ("llama", 1, 2), ("alibi", 2, 1), ("window", 1, 4)],
)
def test_every_layout_of_ranks_writes_the_same_text(architecture: str, tensor: int, pipeline: int) -> None:
    settings = ARCHITECTURES[architecture]
    model = build(tiny_config(num_layers=4, **settings))
    expected = texts(StagedModel(model, ModelRanks.single()), PROMPTS, 20)
    found = run_distributed(generate_on_ranks, tensor * pipeline, tensor, settings)
    assert found == [expected] * (tensor * pipeline)


def refused_on_ranks(rank: int, world_size: int) -> str:
    with pytest.raises(UserError) as refused:
        generate_on_ranks(rank, world_size, 2, {}, nan=True)
    return str(refused.value)


def test_all_ranks_hear_that_scores_are_not_finite() -> None:
    assert len(set(run_distributed(refused_on_ranks, 4))) == 1
