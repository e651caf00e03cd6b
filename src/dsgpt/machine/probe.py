"""Properties of this machine: compilers, asynchronous I/O, direct I/O, locked memory, free CPUs.

What offload needs from a machine besides Python: compilers, asynchronous I/O, direct I/O, locked memory. Each probe
tries on a small scale what DeepSpeed would do later, and returns what is missing. DeepSpeed itself would fail during a
compilation or a write, with messages that do not say what to do.

How this process gets memory from the system. A training step on a CPU allocates and frees the same large tensors again
and again. By default glibc returns large blocks to the system when they are freed, and the system fills the next ones
with zeros, page by page.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from dsgpt.machine.launcher import waiting_processes

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
    path = shutil.which("nvcc", path=f"{home or '/usr/local/cuda'}/bin")
    return bool(path or (not home and shutil.which("nvcc")))


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
    result: int = ctypes.CDLL(None).mlock2(address, ctypes.c_size_t(size), _MLOCK_ONFAULT)
    return result == 0


# How busy other processes keep the CPUs while something is measured.

SHORTEST_SEC = 20.0
"""Below this duration the share is recorded as null: the kernel counts CPU time in ticks of 10 ms, and processes that
just ended distort it."""
_USER, _NICE, _SYSTEM, _STEAL = 1, 2, 3, 8
"""Columns of ``/proc/stat`` (proc_stat(5)). Interrupts are left out: they may be ours."""
_HIDDEN = (AttributeError, OSError, psutil.Error)
"""No CPU affinity and no ``/proc/stat`` (macOS), or a ``/proc`` that hides processes of other users (hidepid)."""


class LoadOfOthers:
    """The CPU time that others use on the CPUs of this process, from the start of this object.

    Own are this process and its descendants; with ``ranks``, those of the launcher, which has the other ranks too.
    """

    def __init__(self, *, ranks: bool = False) -> None:
        self._root = [psutil.Process(), *(waiting_processes() if ranks else [])][-1]
        self._started = time.monotonic()
        self._load_before: float | None = None
        self._counted: tuple[float, float] | None = None
        with contextlib.suppress(*_HIDDEN):
            self._load_before = os.getloadavg()[0]
            self._cpus = {f"cpu{number}" for number in self._root.cpu_affinity()}
            self._counted = self.busy_seconds(), self.own_seconds()

    def figures(self) -> dict[str, float | None]:
        """Figures for a record: processes that ran or waited in the minute before, and others' share of the CPUs since.

        None for what the system hides.
        """
        seconds, share = time.monotonic() - self._started, None
        if seconds >= SHORTEST_SEC and self._counted:
            with contextlib.suppress(*_HIDDEN):
                busy, own = self.busy_seconds() - self._counted[0], self.own_seconds() - self._counted[1]
                if busy > 0 and self._root.is_running():
                    share = min(1.0, max(0.0, (busy - own) / (seconds * len(self._cpus))))
        return {"load_average_before": self._load_before, "cpu_share_of_others": share}

    def busy_seconds(self) -> float:
        """CPU time of all processes, and what the hypervisor gave to other machines; 0 where the system hides it."""
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        ticks = [int(line[column]) for line in lines if line[0] in self._cpus
                 for column in (_USER, _NICE, _SYSTEM, _STEAL)]  # fmt: skip
        return sum(ticks) / os.sysconf("SC_CLK_TCK")

    def own_seconds(self) -> float:
        """CPU time of own processes, also of those that ended and were waited for."""
        seconds = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    seconds += sum(process.cpu_times()[:4])
        return seconds


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
