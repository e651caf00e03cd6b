"""The probes name each thing that offload needs and the machine lacks."""

import errno
import os
import resource
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from messages import without_paths

from dsgpt.machine import probe as machine_probe
from dsgpt.machine.probe import compiler, direct_io_problem, has_cuda_toolkit, libaio_problem, may_lock


def a_compiler(path: Path, script: str) -> str:
    """Write a shell script to use as a compiler; returns its path."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_compiler_is_the_one_that_pytorch_would_call(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compiler() == ()
    for name in ("clang++", "g++", "c++"):
        found = a_compiler(tmp_path / name, "exit 0")
        assert compiler() == (found,)
    other = a_compiler(tmp_path / "mine", "exit 0")
    monkeypatch.setenv("CXX", "mine")
    assert compiler() == (other,)
    monkeypatch.setenv("CXX", "mine g++ '-isystem /with blanks'")
    assert compiler() == (other, "g++", "-isystem /with blanks")
    monkeypatch.setenv("CXX", "nobodys g++")
    assert compiler() == ()


def test_a_driver_alone_is_no_cuda_toolkit(tmp_path, monkeypatch):
    """A script stands for CUDA's compiler. Without ``CUDA_HOME`` it is looked for in ``PATH``, too."""
    (tools := tmp_path / "cuda" / "bin").mkdir(parents=True)
    a_compiler(tools / "nvcc", "exit 0")
    for home, path, found in ((tmp_path, tools, False), (tmp_path / "cuda", tmp_path, True), ("", tools, True)):
        monkeypatch.setenv("CUDA_HOME", str(home))
        monkeypatch.setenv("CUDA_PATH", "")
        monkeypatch.setenv("PATH", str(path))
        assert has_cuda_toolkit() == found


def real_compiler() -> str:
    """The command of this machine's compiler, for a script that wraps it."""
    if not (found := compiler()):
        pytest.skip("needs g++")
    return shlex.join(found)


def test_libaio_without_its_header(tmp_path):
    """The real compiler, asked for a header that does not exist."""
    without = a_compiler(tmp_path / "g++", f'sed s/libaio.h/no-such-header.h/ | {real_compiler()} "$@"')
    assert "finds no libaio with its header: install it" in libaio_problem([without])


LIBRARY = """
printf 'extern "C" int probe() { return ANSWER; }' > "$0.cpp"
while [ "$1" != -o ]; do shift; done
COMPILER -shared -fPIC "$0.cpp" -o "$2"
"""
"""A compiler that ignores its input and builds a library whose ``probe`` returns ANSWER, as the kernel would."""


@pytest.mark.parametrize(("answer", "words"), [("1", "the system refuses io_setup"), ("0", "")])
def test_refused_asynchronous_io_is_a_problem(tmp_path, answer, words):
    script = LIBRARY.replace("ANSWER", answer).replace("COMPILER", real_compiler())
    wrapped = [a_compiler(tmp_path / "ccache", 'exec "$@"'), a_compiler(tmp_path / "g++", script)]
    problem = libaio_problem(wrapped)
    assert words in problem
    assert bool(problem) == bool(words)


def test_a_temporary_folder_whose_libraries_cannot_be_loaded(tmp_path):
    """As on a file system mounted noexec; here the file is not a library."""
    script = a_compiler(tmp_path / "g++", 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"')
    problem = libaio_problem([script])
    assert problem.startswith(f"cannot load a library that was compiled in {tempfile.gettempdir()} (OSError: ")
    assert problem.endswith("): set TMPDIR to another folder")


def test_direct_io(tmp_path, monkeypatch, snapshot):
    assert direct_io_problem(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    original = os.open

    def without_direct_io(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)  # what tmpfs answers before Linux 6.6
        return original(path, flags, *more)

    monkeypatch.setattr(os, "open", without_direct_io)
    assert without_paths(direct_io_problem(tmp_path), tmp_path) == snapshot
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_a_folder_that_cannot_be_written():
    assert direct_io_problem(Path("/proc")).startswith("files in /proc cannot be written")


def test_memory_that_may_be_locked():
    """In a separate process, because it gives up the right to exceed the limit."""
    once = f"""
import ctypes, os, resource, sys
sys.path[:0] = {sys.path!r}
from dsgpt.machine.probe import may_lock

resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**20, 2**20))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
before = open("/proc/self/statm").read()
answers = [may_lock(size) for size in (0, 2**20, 2**20 + 4096, 2**30, 2**62)]
assert int(open("/proc/self/statm").read().split()[1]) - int(before.split()[1]) < 1000, "pages were taken"
print(answers)
"""
    done = subprocess.run([sys.executable, "-c", once], capture_output=True, text=True, check=False)
    assert done.stdout == "[True, True, False, False, False]\n", done.stderr


def test_no_limit(monkeypatch):
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(machine_probe.resource, "getrlimit", lambda _: no_limit)
    assert may_lock(2**62)
