"""What would make a run smaller: flags that a user can give as they stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.megatron_config import MegatronConfig
from megatron.planning import options
from megatron.planning.memory import predict_memory
from megatron.planning.options import SmallerRun, changes, cheapest_that_fit
from tests.helpers.tiny import tiny_config

VOCAB = 251


def config_of(*flags: str, implied_batch: bool) -> MegatronConfig:
    """With the batch that one micro-batch a rank makes, or with a given one; flags may give one, too."""
    arguments = ("--micro-batch-size", "2", "--attention-dropout", "0.1", "--tensor-model-parallel-size", "2")
    config = tiny_config(*arguments, *flags, world_size=8)
    if implied_batch and "--global-batch-size" not in flags:
        return replace(config, training=replace(config.training, global_batch_size=None))
    return config


@pytest.mark.parametrize("implied_batch", [True, False])
def test_the_flags_of_a_change_give_the_configuration_that_it_reckons_with(implied_batch: bool) -> None:
    config = config_of("--bf16", implied_batch=implied_batch)
    found = list(changes(config))
    assert len(found) == 9
    for change in found:
        given = config_of("--bf16", *change.flags, implied_batch=implied_batch)
        assert given.global_batch_size == config.global_batch_size, change.names
        for section in ("model", "parallel", "data_parallel", "training", "optimizer"):
            assert getattr(given, section) == getattr(change.config, section), (change.names, section)


def test_two_changes_go_together_where_the_flags_of_one_depend_on_the_other() -> None:
    """Each of them alone has to name the global batch."""
    smaller = cheapest_that_fit(config_of(implied_batch=True), vocab_size=VOCAB, available=0, most=100)
    pair = {"half the micro-batch", "twice the tensor ranks"}
    (both,) = (run.change for run in smaller if run.change.names == pair)
    assert both.flags.count("--global-batch-size") == 1
    given = config_of(*both.flags, implied_batch=True)
    assert (given.training, given.parallel) == (both.config.training, both.config.parallel)


SELECTIVE = ("--recompute-activations", "--recompute-modules", "core_attn", "mlp")
GIVEN: list[tuple[str, ...]] = [
    (),
    ("--bf16",),
    SELECTIVE,
    ("--recompute-granularity", "selective"),
    ("--sequence-parallel",),
]


def without(given: tuple[str, ...], left_out: tuple[str, ...]) -> list[str]:
    """The words of a command line but for some flags and what follows them."""
    kept, taken = [], True
    for word in given:
        taken = word not in left_out if word.startswith("--") else taken
        kept += [word] if taken else []
    return kept


def all_runs(config: MegatronConfig) -> list[SmallerRun]:
    """Where none fits, and where all do."""
    return [
        run
        for available in (0, 10**12)
        for run in cheapest_that_fit(config, vocab_size=VOCAB, available=available, most=100)
    ]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: " ".join(given[:2]) or "plain")
def test_the_program_takes_the_flags_of_each_proposal_as_they_are_printed(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_LEAST_SPARED", -100.0)  # also those that are not worth their cost
    runs = all_runs(config_of(*given, implied_batch=False))
    assert len({run.change.names for run in runs}) > 12
    for run in runs:
        line = without(given, run.change.left_out)
        assert str(run).startswith(" ".join(run.change.flags))
        assert all(name in str(run) for name in run.change.left_out)
        parsed = config_of(*line, *run.change.flags, implied_batch=False)
        for section in ("model", "parallel", "data_parallel", "training", "optimizer"):
            assert getattr(parsed, section) == getattr(run.change.config, section), str(run)


def test_two_values_of_one_flag_are_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_LEAST_SPARED", -100.0)
    for run in all_runs(config_of(implied_batch=False)):
        assert not run.change.names >= {"selective recomputation", "full recomputation"}
        names = [word for word in run.change.flags if word.startswith("--")]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("available", [0, 10**12])
def test_a_proposal_spares_more_than_all_that_are_cheaper(available: int) -> None:
    config = config_of(implied_batch=False)
    runs = cheapest_that_fit(config, vocab_size=VOCAB, available=available, most=100)
    by_cost = sorted(runs, key=lambda run: run.change.cost)
    needed = [run.bytes for run in by_cost]
    assert len(runs) > 2
    assert needed == sorted(set(needed), reverse=True)


def test_what_a_proposal_needs_on_cpus_has_the_copy_that_is_written_in_the_background() -> None:
    """Ranks that share the optimizer copy less of it, too."""
    config = config_of("--bf16", "--async-save", "--save", "checkpoints", implied_batch=False)
    runs = cheapest_that_fit(config, vocab_size=VOCAB, available=10**12, on_cpu=True, most=100)
    assert runs
    for run in runs:
        changed = run.change.config
        stages = predict_memory(changed, padded_vocab_size=changed.padded_vocab_size(VOCAB))
        assert all(stage.staging for stage in stages)
        assert run.bytes == max(stage.total + stage.staging for stage in stages)


@pytest.mark.parametrize(
    ("name", "flags"), [("loss without logits", ("--vocab-size", "30000")), ("weights in halves", ("--bf16",))]
)
def test_what_needs_most_is_what_the_first_proposals_make_smaller(name: str, flags: tuple[str, ...]) -> None:
    """Logits of a large vocabulary; the optimizer of a bf16 run."""
    config = tiny_config("--micro-batch-size", "2", *flags)
    vocab_size = 30000 if "--vocab-size" in flags else VOCAB
    runs = cheapest_that_fit(config, vocab_size=vocab_size, available=0)
    assert any(name in run.change.names for run in runs)


@pytest.mark.parametrize(("dropout", "proposed"), [("0", False), ("0.1", True)])
def test_selective_recomputation_is_proposed_where_attention_weights_are_kept(dropout: str, proposed: bool) -> None:
    """Of a fused core it spares no more than the output of the kernel."""
    wide = ("--num-attention-heads", "12", "--kv-channels", "64", "--hidden-size", "768", "--ffn-hidden-size", "3072")
    long = ("--seq-length", "256", "--max-position-embeddings", "256", "--vocab-size", "30000")
    config = tiny_config(*wide, *long, "--attention-dropout", dropout)
    runs = cheapest_that_fit(config, vocab_size=30000, available=10**12)
    assert any("selective recomputation" in run.change.names for run in runs) == proposed
