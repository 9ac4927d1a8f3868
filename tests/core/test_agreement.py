"""Ranks go on together, or end with one text where the user can mend it, and with the bug's traceback where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.config.problems import UserError
from megatron.core.agreement import agree
from megatron.core.parallel_state import ParallelState, build_parallel_state, grid_of_world
from tests.helpers.distributed import run_distributed


class DiskError(UserError):
    pass


class NothingThere(DiskError):
    pass


def outcome(rank: int, world_size: int, fails: Callable[[int], Exception | None]) -> tuple[type, str] | list[int]:
    """What `agree` returns or raises on this rank, whose action raises what `fails` says."""

    def action() -> int:
        if (error := fails(rank)) is not None:
            raise error
        return 10 * rank

    state = ParallelState.single()
    if world_size > 1:
        state = build_parallel_state(grid_of_world(world_size, tensor=1, pipeline=1), rank=rank)
    try:
        return agree(state.world, "tidying up", action, raises=DiskError)
    except Exception as error:
        return type(error), str(error)


def nobody(rank: int) -> Exception | None:
    return None


def one_rank_by_the_disk(rank: int) -> Exception | None:
    return OSError(28, "No space left on device") if rank == 1 else None


def all_alike(rank: int) -> Exception | None:
    return NothingThere("no such folder")


def each_in_its_way(rank: int) -> Exception | None:
    return [NothingThere("no such folder"), DiskError("damaged"), UserError("not known")][rank]


def one_rank_by_a_bug(rank: int) -> Exception | None:
    return [None, TypeError("int + str"), DiskError("damaged")][rank]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_results_of_all_ranks_are_known_to_each(world_size: int) -> None:
    expected = [10 * rank for rank in range(world_size)]
    assert run_distributed(outcome, world_size, nobody) == [expected] * world_size


def test_the_failure_of_one_rank_is_the_same_error_on_all() -> None:
    first, *others = run_distributed(outcome, 3, one_rank_by_the_disk)
    assert others == [first] * 2
    kind, text = first
    assert kind is DiskError
    assert text.startswith("tidying up failed on 1 of 3 ranks:\n  rank 1 on ")
    assert text.endswith(": OSError: [Errno 28] No space left on device")


def test_what_all_ranks_say_is_said_once_and_keeps_its_class() -> None:
    said = (NothingThere, "tidying up failed on all 2 ranks: no such folder")
    assert run_distributed(outcome, 2, all_alike) == [said] * 2


def test_errors_of_several_classes_are_of_the_class_that_was_asked_for() -> None:
    kinds, texts = zip(*run_distributed(outcome, 3, each_in_its_way), strict=True)
    assert set(kinds) == {DiskError}
    assert all(reason in texts[0] for reason in ("no such folder", "damaged", "not known"))


def test_a_bug_keeps_its_class_on_its_rank_and_no_other_rank_waits_for_it() -> None:
    (first, said), own, (last, _) = run_distributed(outcome, 3, one_rank_by_a_bug)
    assert own == (TypeError, "int + str")
    assert first is last is RuntimeError
    assert "rank 1 on " in said
    assert "TypeError: int + str" in said


@pytest.mark.parametrize("error", [NothingThere("none"), TypeError("int + str"), KeyError("x")])
def test_a_process_alone_keeps_its_own_error(error: Exception) -> None:
    assert outcome(0, 1, lambda _: error) == (type(error), str(error))
