"""Properties of this machine: compilers, asynchronous I/O, direct I/O, locked memory.

What offload needs from a machine besides Python: compilers, asynchronous I/O, direct I/O, locked memory. Each probe
tries on a small scale what DeepSpeed would do later, and returns what is missing. DeepSpeed itself would fail during a
compilation or a write, with messages that do not say what to do.

How this process gets memory from the system. A training step on a CPU allocates and frees the same large tensors again
and again. By default glibc returns large blocks to the system when they are freed, and the system fills the next ones
with zeros, page by page.
"""

import ctypes
import mmap
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DIRECT_IO_BYTES = 1024
"""DeepSpeed pads swapped tensors to multiples of this (``swap_tensor/utils.py``, ``AIO_ALIGNED_BYTES``)."""
_USES_LIBAIO = """
#include <libaio.h>
extern "C" int probe() { io_context_t context = 0; return io_setup(1, &context) < 0 || io_destroy(context) < 0; }
"""
_REFUSED = 3
_CALL = f"import ctypes, sys; sys.exit({_REFUSED} if ctypes.CDLL(sys.argv[1]).probe() else 0)"
_MLOCK_ONFAULT = 1


def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler, as words; empty if there is none.

    It is ``CXX`` if set (``ccache g++``), otherwise the first of ``c++`` (PyTorch's default), ``g++`` and ``clang++``.
    """
    if words := shlex.split(os.environ.get("CXX", "")):
        path = shutil.which(words[0])
        return (path, *words[1:]) if path else ()
    return next(((path,) for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), ())


def has_cuda_toolkit() -> bool:
    """Whether CUDA's compiler is where PyTorch, and so DeepSpeed, looks for it; a driver alone does not bring it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(shutil.which("nvcc", path=f"{home or '/usr/local/cuda'}/bin") or (not home and shutil.which("nvcc")))


def libaio_problem(compiler: Sequence[str]) -> str:
    """Why asynchronous I/O with libaio cannot be compiled or does not work here; empty if it does.

    Compiles and links a two-line library in the way DeepSpeed builds its swapping code, and calls it. This tests the
    header, the library and the system call together.

    Args:
        compiler: the command, as words.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        built = _output_of([*compiler, "-x", "c++", "-", "-shared", "-fPIC", "-o", str(library), "-laio"], _USES_LIBAIO)
        if built.returncode:
            return "finds no libaio with its header: install it (Debian: apt-get install libaio-dev)"
        # In a child process: a process cannot unload a library.
        called = _output_of([sys.executable, "-S", "-c", _CALL, str(library)])
    if called.returncode == _REFUSED:
        return "may not use asynchronous I/O: the system refuses io_setup (see /proc/sys/fs/aio-max-nr)"
    if called.returncode:
        reason = (called.stderr.strip().splitlines() or ["no reason given"])[-1]
        place = tempfile.gettempdir()
        return f"cannot load a library that was compiled in {place} ({reason}): set TMPDIR to another folder"
    return ""


def _output_of(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def direct_io_problem(folder: Path) -> str:
    """Why files in ``folder``, which exists, cannot be written with O_DIRECT; empty if they can."""
    block = memoryview(mmap.mmap(-1, mmap.PAGESIZE))[:DIRECT_IO_BYTES]  # aligned, as direct I/O requires
    try:
        with tempfile.NamedTemporaryFile(prefix=".direct-io-", dir=folder) as file:
            handle = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            try:
                os.write(handle, block)
            finally:
                os.close(handle)
    except OSError as error:
        return (
            f"files in {folder} cannot be written in blocks of {DIRECT_IO_BYTES} bytes with O_DIRECT ({error.strerror})"
        )
    return ""


def may_lock(size: int) -> bool:
    """Whether this process may lock ``size`` bytes in memory. Asks the system without using the memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or size <= limit:
        return True
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # not enough address space
        return False
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(region)))
    return bool(ctypes.CDLL(None).mlock2(address, ctypes.c_size_t(size), _MLOCK_ONFAULT) == 0)


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
