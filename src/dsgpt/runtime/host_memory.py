"""How this process gets memory from the system.

A training step on a CPU allocates and frees the same large tensors again and again. By default glibc returns large
blocks to the system when they are freed, and the system fills the next ones with zeros, page by page.
"""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Numbers of glibc's ``mallopt``; see its manual page, ``mallopt(3)``."""
TOP_PAD_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Let freed memory stay with this process, for its next allocations; returns whether it was done.

    The process takes no more memory than at its peak, but keeps it. Nothing is changed if the C library is not glibc,
    or if the user has chosen settings by environment variables (``MALLOC_TOP_PAD_``, ``GLIBC_TUNABLES`` and others).
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, TOP_PAD_BYTES))
    return all(mallopt(number, value) == 1 for number, value in settings)
