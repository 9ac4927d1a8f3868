"""Old checkpoints are deleted as asked, whole or not at all, and nothing else ever is."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpointing import Retention, list_checkpoints, load_checkpoint, save_checkpoint, storage
from tests.checkpointing.layouts import ALONE, whole


def save(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        save_checkpoint(root, iteration, [whole("model.w", torch.full((3,), float(iteration)))], {}, world=ALONE)


def kept(present: list[int], newest: int, **settings: int) -> list[int]:
    return sorted(set(present) - set(Retention(**settings).obsolete(present, newest)))


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [10, 20, 30, 40, 50, 60, 70]),
        ({"keep_last": 1}, [70]),
        ({"keep_last": 3}, [50, 60, 70]),
        ({"keep_last": 100}, [10, 20, 30, 40, 50, 60, 70]),
        ({"retain_interval": 30}, [30, 60, 70]),
        ({"retain_interval": 30, "keep_last": 1}, [30, 60, 70]),
        ({"retain_interval": 30, "keep_last": 3}, [30, 50, 60, 70]),
    ],
)
def test_which_are_kept(settings: dict[str, int], expected: list[int]) -> None:
    assert kept([10, 20, 30, 40, 50, 60, 70], 70, **settings) == expected


@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.one_of(st.none(), st.integers(1, 5)),
    st.one_of(st.none(), st.integers(1, 7)),
    st.data(),
)
def test_the_newest_one_and_what_came_after_it_in_another_life_are_never_obsolete(
    present: set[int], keep_last: int | None, retain_interval: int | None, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(present)))
    obsolete = Retention(keep_last=keep_last, retain_interval=retain_interval).obsolete(present, newest)
    assert all(iteration < newest for iteration in obsolete)
    left = [iteration for iteration in present - set(obsolete) if iteration <= newest]
    assert len(left) >= min(keep_last or 1, len([iteration for iteration in present if iteration <= newest]))


def test_what_is_obsolete_goes_with_all_its_files_and_a_line_says_so(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    lines = list(Retention(keep_last=2).apply(tmp_path, 30))
    assert lines == [f"deleted checkpoint {tmp_path / 'iter_0000010'}"]
    assert sorted(os.listdir(tmp_path)) == ["iter_0000020", "iter_0000030", storage.TRACKER_FILE]
    assert list(Retention(keep_last=2).apply(tmp_path, 30)) == []


def test_nothing_but_complete_checkpoints_of_this_form_is_deleted(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", 1)
    root = tmp_path / "run"
    save(root, *range(2, 10))
    (root / "iter_0000001").symlink_to(tmp_path / "elsewhere" / "iter_0000001")  # another's
    (root / "iter_0000002" / "COMPLETE").unlink()  # damaged: not to be counted on, nor to be touched
    (root / "iter_0000003" / "notes.txt").write_text("precious")
    (root / "iter_0000004" / "tokenizer").mkdir()
    marker = root / "iter_0000005" / "COMPLETE"
    marker.write_text(marker.read_text().replace('"version":2', '"version":3'))  # of a later version of this program
    (root / "iter_0000006").rename(root / "iter_0000007_best")
    (root / "iter_0000007").rename(root / "iter_0000006")  # another's name
    (root / "mp_rank_00").mkdir()
    before = set(os.listdir(root))
    lines = list(Retention(keep_last=1).apply(root, 9))
    assert set(os.listdir(root)) == before - {"iter_0000008"}
    reasons = [
        "it is a link",
        "it holds notes.txt, which is no part of a checkpoint",
        "it holds tokenizer, which is no part of a checkpoint",
        "COMPLETE: this is format 3; this program reads 2",
        "it was saved under another name",
    ]
    assert lines[:-1] == [
        f"warning: {root / f'iter_{iteration:07d}'} is not deleted: {reason}"
        for iteration, reason in zip([1, 3, 4, 5, 6], reasons, strict=True)
    ]
    assert lines[-1] == f"deleted checkpoint {root / 'iter_0000008'}"
    assert load_checkpoint(tmp_path / "elsewhere", world=ALONE).iteration == 1


@pytest.mark.parametrize("after", range(8))
def test_a_deletion_that_dies_leaves_nothing_that_looks_whole(tmp_path: Path, after: int) -> None:
    """After the first rename, or some files more."""
    save(tmp_path, 10, 20)
    done = 0

    def dies(real: object, *arguments: object, **keywords: object) -> object:
        nonlocal done
        done += 1
        if done > after:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)  # type: ignore[operator]

    with ExitStack() as patches:
        for name in ("rename", "unlink", "rmdir", "fsync"):
            patches.enter_context(patch.object(os, name, partial(dies, getattr(os, name))))
        with suppress(KeyboardInterrupt):
            list(Retention(keep_last=1).apply(tmp_path, 20))
    assert list_checkpoints(tmp_path) == ((10, 20) if after == 0 else (20,))
    for iteration in list_checkpoints(tmp_path):
        checkpoint = load_checkpoint(tmp_path, step=iteration, world=ALONE)
        checkpoint.load_into([whole("model.w", torch.zeros(3))], world=ALONE)
    save(tmp_path, 30)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_folder_that_can_not_be_deleted_is_told_and_is_no_error(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    with patch.object(os, "rename", side_effect=PermissionError(13, "Permission denied")):
        (line,) = Retention(keep_last=1).apply(tmp_path, 20)
    assert line.endswith("iter_0000010 is not deleted: [Errno 13] Permission denied")
    shutil.rmtree(tmp_path / "iter_0000010")
    assert list(Retention(keep_last=1).apply(tmp_path, 20)) == []
