"""The CPU allocator: big buffers come and go at every layer, and giving them back each time costs page faults."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let this process keep freed memory for the next layer, on huge pages where the system allows.

    Acts on the whole process, once; only glibc has the calls, elsewhere nothing changes. The huge-page variable is read
    by torch at its first large allocation.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
