"""What the C library does with memory that is freed: give it back to the system, or keep it for the next step.

glibc gives a large block back at once, and the next one of its size comes page by page, zeroed, from the kernel. A
training step on a CPU frees and asks for the same blocks each time, and spends up to half of its time on these pages.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

# From malloc.h of glibc. See mallopt(3) for the values: no block is a mapping of its own; the heap is never trimmed;
# each block from 1 MiB on is a mapping of its own.
_M_MMAP_MAX, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -4, -1, -3
_NO_MAPPINGS, _NEVER, _LARGE = 0, -1, 2**20
_GLIBC = "libc.so.6"


class _DlInfo(ctypes.Structure):
    """What dladdr(3) fills in."""

    _fields_ = [
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    ]


def allocator_library() -> str:
    """The file that `malloc` of this process comes from: `libc.so.6`, or that of an allocator preloaded over it."""
    process = ctypes.CDLL(None)
    info = _DlInfo()
    address = ctypes.cast(process.malloc, ctypes.c_void_p)
    found = process.dladdr(address, ctypes.byref(info))
    return Path((info.file_name or b"").decode(errors="replace")).name if found else ""


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on; what it has freed before is not touched.

    Blocks are reused, so a process holds the pages of its largest moment, and those of holes between blocks in use that
    fit nothing that is asked for. The holes grow in the first steps only; in training to half as much again.

    Returns:
        False where `malloc` is not that of glibc, whose setting this is: nothing is done then.
    """
    if allocator_library() != _GLIBC:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, _NO_MAPPINGS) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def give_freed_memory_back() -> bool:
    """Give each large block that is freed back to the system from now on.

    By itself glibc keeps blocks of up to 32 MiB in its heap once one of that size was freed; a program that goes
    through many tensors of different sizes ends with a heap of holes, some times as large as what it needs.

    Returns:
        False where `malloc` is not that of glibc, whose setting this is: nothing is done then.
    """
    if allocator_library() != _GLIBC:
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE))
