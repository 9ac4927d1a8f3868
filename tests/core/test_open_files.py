"""A rank and a tool may have as many files open as the system allows."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from importlib import import_module

import pytest

from megatron.config.problems import ConfigError
from megatron.training.initialize import initialize_megatron
from tests.helpers.tools import ROOT


@pytest.fixture
def most() -> Iterator[int]:
    """The hard limit, the soft one being lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_may_open_all_files_that_the_system_allows(most: int) -> None:
    with pytest.raises(ConfigError):
        initialize_megatron(["--num-layers", "0"])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)


def test_a_tool_may_open_all_files_that_the_system_allows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    seen: list[tuple[int, int]] = []
    import_module("command_line").run_tool(lambda: seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)))
    assert seen == [(most, most)]
