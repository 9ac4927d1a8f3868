"""What a conversion writes is whole, and on the disk, or it is not there."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from megatron.conversion import hugging_face
from megatron.conversion.forms import FORMS
from megatron.conversion.hugging_face import read_hugging_face
from megatron.conversion.megatron_lm.writer import write_megatron
from megatron.conversion.native import read_native, write_native
from megatron.conversion.portable import ConversionError
from megatron.conversion.whole_folder import refuse_existing, remove_leftovers, whole_folder
from megatron.core import file_lock
from megatron.core.file_lock import NoLocksError
from tests.conversion.models import made, save
from tests.helpers.tools import command, names, run, run_in_child


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


def test_of_two_conversions_into_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".tmp-new").mkdir()
    (tmp_path / ".tmp-new" / "mine").touch()
    with whole_folder(tmp_path / "new") as inside:
        for second in (write_into, remove_leftovers):
            with pytest.raises(ConversionError, match=rf"another conversion writes .*/new: process {os.getpid()} on "):
                second(tmp_path / "new")
        write_into(tmp_path / "other")
        (inside / "first").touch()
    assert names(tmp_path / "new") == ["first"]
    assert names(tmp_path) == [".tmp-new", "new", "other"]
    assert names(tmp_path / ".tmp-new") == ["mine"]


def test_without_locks_the_first_to_end_has_the_folder_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int) -> bool:
        raise NoLocksError

    monkeypatch.setattr(file_lock, "try_flock", no_locks)

    def twice() -> None:
        with whole_folder(tmp_path / "new"):
            write_into(tmp_path / "new")
            assert remove_leftovers(tmp_path / "new") == []

    with pytest.raises(ConversionError, match="exists and is not empty"):
        twice()
    assert names(tmp_path / "new") == ["file"]
    assert names(tmp_path) == ["new"]


def wait_at_the_third_tensor(sign: Path) -> None:
    """Has this process stop for good in the middle of a conversion, with a sign that it does."""
    reader, started = hugging_face._reader, []

    def waiting(path: Path, name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            started.append(name)
            if len(started) == 3:
                sign.touch()
                time.sleep(600)
            return reader(path, name)()

        return read

    hugging_face._reader = waiting


def ended_by(number: signal.Signals, form: str, folder: Path) -> tuple[int, str]:
    """End a conversion from `theirs` to `ours` when it has written something. Returns: its status, and what it said."""
    how = ("--from", "hf", "--to", form, "--no-self-check", folder / "theirs", folder / "ours")
    sign = folder / "waits"
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            wait_at_the_third_tensor(sign)
            run_in_child(command("convert_checkpoint", *how)[1:], said.fileno(), said.fileno())
        while not sign.exists():
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.02)
        (inside,) = folder.glob(".tmp-ours-*/")
        assert any(path.is_file() for path in inside.rglob("*"))
        os.kill(child, number)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        text = said.read()
    sign.unlink()
    return status, text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("number", "word"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_a_conversion_that_is_told_to_end_leaves_nothing(
    number: signal.Signals, word: str, form: str, tmp_path: Path
) -> None:
    save(made("llama 2"), tmp_path / "theirs")
    status, said = ended_by(number, form, tmp_path)
    assert status == 128 + number
    assert said.splitlines()[-1] == word and "Traceback" not in said
    assert names(tmp_path) == ["theirs"]


def test_what_a_killed_conversion_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    save(made("llama 2"), tmp_path / "theirs")
    assert ended_by(signal.SIGKILL, "native", tmp_path)[0] == -signal.SIGKILL
    (leftover,) = tmp_path.glob(".tmp-ours-*/")
    here = leftover.name.removeprefix(".tmp-ours-")
    others = [tmp_path / name for name in (f".tmp-our-{here}", f".tmp-ours-x-{here}", f".tmp-ours-other{here}")]
    for other in others:
        other.mkdir()
    how = ("--from", "hf", "--to", "native", "--no-self-check")
    said = run("convert_checkpoint", *how, tmp_path / "theirs", tmp_path / "ours")
    assert said.startswith(f"{leftover}: a conversion that was killed had left it, and it is removed\n")
    assert sorted(tmp_path.glob(".tmp-*")) == sorted(others)
    read_native(tmp_path / "ours")


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
