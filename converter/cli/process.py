"""Settings of the whole process: made by a command, for a library has no right to them."""

from __future__ import annotations

import ctypes
import os

_BEFORE_TORCH = {
    # A thread that waits for the others of its sum sleeps. By default it spins for milliseconds, and beside programs
    # that keep the cores busy it spins away the time that the others need. With this a conversion beside two such
    # programs on two cores took 1.5 times its idle time, for no more CPU seconds (`benchmarks/busy.py`). The first is
    # for GNU's OpenMP, the second for LLVM's and Intel's.
    "OMP_WAIT_POLICY": "passive",
    "KMP_BLOCKTIME": "0",
    # A conversion lays out each large tensor in fresh memory. In huge pages, where the system leaves them to programs
    # ("madvise"), it takes 30 % less time in all. torch reads this once, at its first allocation.
    "THP_MEM_ALLOC_ENABLE": "1",
}
#: Of glibc's malloc.h.
_M_MMAP_THRESHOLD = -3


def before_torch() -> None:
    """Settings that are read when torch is loaded; those of the user stand."""
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)


def large_blocks_apart() -> None:
    """Have glibc map each large block by itself, and give it back when it is freed.

    Otherwise it takes all up to 32 MB from one heap that only grows: a fit left holes of hundreds of megabytes there.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting:
        setting(_M_MMAP_THRESHOLD, 1 << 20)
