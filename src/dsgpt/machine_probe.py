"""What offload needs of a machine besides Python: a compiler, asynchronous I/O, direct I/O, memory that may be locked.

Each probe does in small what DeepSpeed would do later, and answers with what stands in the way; DeepSpeed itself would
stop in the middle of a compilation or of a write, in words that do not say what to do.
"""

import ctypes
import mmap
import os
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

DIRECT_IO_BYTES = 1024
"""DeepSpeed pads what it swaps to multiples of this (``swap_tensor/utils.py``, ``AIO_ALIGNED_BYTES``)."""
_USES_LIBAIO = """
#include <libaio.h>
int main() { io_context_t context = 0; return io_setup(1, &context) < 0; }
"""
_MLOCK_ONFAULT = 1


def compiler() -> str | None:
    """The C++ compiler that PyTorch would call; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def libaio_problem(compiler: str) -> str:
    """Why asynchronous I/O by libaio cannot be compiled or does not work here; empty where it does.

    Compiles, links and runs a program of two lines, as the build of DeepSpeed's swapping would: header, library and
    the system call in one.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "probe"
        built = subprocess.run(
            [compiler, "-x", "c++", "-", "-o", str(program), "-laio"],
            input=_USES_LIBAIO,
            capture_output=True,
            text=True,
            check=False,
        )
        if built.returncode:
            return "finds no libaio with its header: install it (Debian: apt-get install libaio-dev)"
        if subprocess.run([program], check=False).returncode:
            return "may not use asynchronous I/O: the system refuses io_setup (see /proc/sys/fs/aio-max-nr)"
    return ""


def direct_io_problem(folder: Path) -> str:
    """Why files in ``folder``, which exists, cannot be written past the page cache; empty where they can."""
    block = memoryview(mmap.mmap(-1, mmap.PAGESIZE))[:DIRECT_IO_BYTES]  # aligned, as direct I/O wants it
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
    """Whether this process may keep ``size`` bytes in memory for good; asks the system without taking the memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or size <= limit:
        return True
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # not even addresses for so much
        return False
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(region)))
    return ctypes.CDLL(None).mlock2(address, ctypes.c_size_t(size), _MLOCK_ONFAULT) == 0
