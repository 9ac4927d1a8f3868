"""Set-up of every test: one thread a process, so that results and time do not depend on the machine's cores."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter

import pytest
import torch

from tests.helpers.session import SESSION_FOLDER

torch.set_num_threads(1)
# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
_session = tempfile.TemporaryDirectory(prefix="megatron-tests-")
os.environ[SESSION_FOLDER] = _session.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--product-slice",
        metavar="SEED:COUNT",
        default="any:10",
        help="draw COUNT cases of the whole product of layouts and models with SEED: other ones for each change",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Only the tests of GPUs see one: the others are the same on each machine, and start more ranks than GPUs."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After many files those that took longest, so that who adds to them sees what it costs."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    if len(seconds) > 10:
        terminalreporter.section("slowest files")
        for file, taken in seconds.most_common(10):
            terminalreporter.line(f"{taken:6.1f} s {100 * taken / seconds.total():3.0f} % {file}")
