"""What makes steps on CPUs faster: freed memory is kept, and fp32 products take a faster path where it is exact."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from megatron.core import allocator, fp32_matmul
from megatron.core.allocator import allocator_library, keep_freed_memory
from megatron.core.fp32_matmul import LARGEST_ERROR, error_of_fast_products, use_fast_products
from megatron.core.parallel_state import destroy_model_parallel
from megatron.training import initialize
from megatron.training.initialize import initialize_megatron
from tests.helpers.distributed import run_distributed
from tests.helpers.tiny import TINY_GPT, context_of_rank, tiny_config

# Blocks too large for what glibc keeps by itself are taken and freed by turns, and page faults counted. In the first
# turns small blocks still settle between them, and each may push a large one to a new place.
PAGE_FAULTS = """
import resource, sys
import torch
from megatron.core.allocator import give_freed_memory_back, keep_freed_memory
if "keep" in sys.argv: assert keep_freed_memory()
if "give" in sys.argv: assert give_freed_memory_back()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def turn(): torch.ones(int(sys.argv[1]) << 18)
for _ in range(30): turn()
before = faults()
for _ in range(4): turn()
print(faults() - before)
"""


@pytest.fixture(autouse=True)
def _default_products() -> Iterator[None]:
    yield
    use_fast_products(False)


def start(*flags: str) -> None:
    initialize_megatron([*TINY_GPT, *flags])
    destroy_model_parallel()


def page_faults(mebibytes: int, *arguments: str) -> int:
    command = [sys.executable, "-c", PAGE_FAULTS, str(mebibytes), *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ)).stdout)


def test_freed_memory_comes_back_without_page_faults() -> None:
    assert page_faults(32, "keep") < page_faults(32) / 10


def test_freed_memory_goes_back_although_glibc_would_keep_blocks_of_its_size() -> None:
    assert page_faults(8) < page_faults(8, "give") / 10


def test_the_library_of_malloc_is_known() -> None:
    assert allocator_library() == "libc.so.6"
    assert keep_freed_memory()


def test_another_allocator_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(allocator, "allocator_library", lambda: "libjemalloc.so.2"):
        assert not keep_freed_memory()
        with patch.object(initialize, "allocator_library", lambda: "libjemalloc.so.2"):
            start()
    assert "memory comes from libjemalloc.so.2, which is left as it is" in capsys.readouterr().out


def test_the_start_says_what_happens_to_freed_memory(capsys: pytest.CaptureFixture[str]) -> None:
    start()
    assert "freed memory is kept" in capsys.readouterr().out
    start("--no-keep-freed-memory")
    assert "freed memory" not in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_looking_at_fast_products_leaves_the_setting_as_it_was(setting: str) -> None:
    torch.set_float32_matmul_precision(setting)
    assert error_of_fast_products() > 0
    assert torch.get_float32_matmul_precision() == setting


def test_default_products_are_within_the_limit_of_fast_ones() -> None:
    assert fp32_matmul._product_error() < LARGEST_ERROR


@pytest.mark.parametrize("error, precision", [(1e-7, "medium"), (3e-6, "highest"), (float("nan"), "highest")])
def test_fast_products_are_used_where_they_are_exact(error: float, precision: str) -> None:
    with patch.object(initialize, "error_of_fast_products", lambda: error):
        start()
    assert torch.get_float32_matmul_precision() == precision


def test_exact_products_are_the_default_ones_and_the_start_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    use_fast_products(True)
    with patch.object(initialize, "error_of_fast_products", lambda: 0.0):
        start("--fp32-matmul", "exact")
    assert torch.get_float32_matmul_precision() == "highest"
    assert "fp32 products: the default path, as --fp32-matmul exact asks for" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["highest", "high"])
@pytest.mark.parametrize("flags", [["--bf16"], ["--fp64"], ["--bf16", "--fp32-matmul", "exact"]], ids=" ".join)
def test_a_run_in_another_precision_leaves_the_setting_of_fp32_products(
    flags: list[str], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_float32_matmul_precision(setting)
    with patch.object(initialize, "error_of_fast_products", lambda: 0.0):
        start(*flags)
    assert torch.get_float32_matmul_precision() == setting
    assert "fp32 products" not in capsys.readouterr().out


def precision_of_rank(rank: int, world_size: int) -> str:
    with patch.object(initialize, "error_of_fast_products", lambda: 1e-7 if rank == 0 else 1e-3):
        initialize._set_up_cpu(context_of_rank(tiny_config(world_size=world_size), rank, world_size))
    return torch.get_float32_matmul_precision()


def test_one_rank_without_exact_fast_products_keeps_all_from_them() -> None:
    assert run_distributed(precision_of_rank, 2) == ["highest", "highest"]
