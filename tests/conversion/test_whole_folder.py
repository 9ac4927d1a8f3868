"""What a conversion writes is whole, and on the disk, or it is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.conversion.hugging_face import read_hugging_face
from megatron.conversion.megatron_lm.writer import write_megatron
from megatron.conversion.native import write_native
from megatron.conversion.portable import ConversionError
from megatron.conversion.whole_folder import refuse_existing, whole_folder
from tests.conversion.models import made, save
from tests.helpers.tools import names


def write_into(folder: Path) -> None:
    with whole_folder(folder) as inside:
        (inside / "file").write_text("whole")


@pytest.mark.parametrize("name", ["new", "new/below", "empty", "link", "."])
def test_a_folder_that_is_new_or_empty_gets_what_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("empty", "linked", "here"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to("linked")
    monkeypatch.chdir(tmp_path / "here")
    given = Path(name) if name == "." else tmp_path / name
    made_at = given.resolve()
    write_into(given)
    assert (made_at / "file").read_text() == "whole"
    assert not list(tmp_path.rglob(".tmp-*"))
    assert (tmp_path / "link").is_symlink()


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "link").symlink_to("full")
    for name in ("full", "link"):
        with pytest.raises(ConversionError, match="exists and is not empty"):
            write_into(tmp_path / name)
    assert names(tmp_path) == ["full", "link"]
    assert names(tmp_path / "full") == ["mine"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "/file is no folder; give a new folder"),
        ("file/below/it", "/file is no folder; give a new folder"),
        ("astray", "/astray is a link to nowhere, which is not there; give a new folder"),
        ("astray/below", "/astray is a link to nowhere, which is not there; give a new folder"),
    ],
)
def test_what_cannot_be_a_folder_is_said_before_it_is_written(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "astray").symlink_to("nowhere")
    with pytest.raises(ConversionError, match=f"/{name} cannot be written: .*{message}"):
        refuse_existing(tmp_path / name)
    assert names(tmp_path) == ["astray", "file"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_folder(tmp_path / "new") as inside:
            (inside / "file").touch()
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert names(tmp_path) == []


def test_of_two_conversions_into_one_folder_the_first_to_end_has_it(tmp_path: Path) -> None:
    (tmp_path / ".tmp-new").mkdir()
    (tmp_path / ".tmp-new" / "mine").touch()

    def twice() -> None:
        with whole_folder(tmp_path / "new") as inside:
            write_into(tmp_path / "new")
            (inside / "other").touch()

    with pytest.raises(ConversionError, match="exists and is not empty"):
        twice()
    assert names(tmp_path / "new") == ["file"]
    assert names(tmp_path) == [".tmp-new", "new"]
    assert names(tmp_path / ".tmp-new") == ["mine"]


@pytest.mark.parametrize("form", ["native", "megatron"])
def test_all_files_and_names_are_on_the_disk_before_the_folder_has_its_own(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power then has the whole model or none."""
    folder = save(made("llama 2"), tmp_path / "theirs")
    model = read_hugging_face(folder)
    synced, at_the_rename = set(), set()
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        at_the_rename.update(synced)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    if form == "native":
        write_native(model, tmp_path / "made")
    else:
        write_megatron(model, tmp_path / "made", pipeline=2)
    written = [tmp_path / "made", *(tmp_path / "made").rglob("*")]
    assert {path for path in written if path.stat().st_ino not in at_the_rename} == set()
