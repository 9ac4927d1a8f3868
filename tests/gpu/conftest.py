"""These tests need a GPU. They run in this process or in programs that it starts, and never in a fork of it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail(
            "this test needs a GPU, and torch sees none: `make test-gpu` runs it on a machine with one (without `-m "
            "gpu` the tests see no GPU); `make test` leaves it out",
            pytrace=False,
        )
