"""What a machine can do: devices, kernels, memory, huge pages, and who else uses it."""

import errno
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
from small_run import without_paths

from dsgpt.machine import device, probe
from dsgpt.machine.device import CHUNK_BYTES, HUGE_PAGE_BYTES, HugePages, multiplies, packs
from dsgpt.machine.probe import compiler, direct_io_problem, keep_freed_memory, libaio_problem
from dsgpt.machine.topology import Topology
from dsgpt.telemetry import monitor
from dsgpt.telemetry.monitor import LoadOfOthers

# Whether each process of a machine has a GPU. The tests need none.


TASK = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "11"}


@pytest.mark.parametrize(
    ("gpus", "environment", "fits"),
    [
        (8, {}, True),
        (4, {}, False),
        (1, TASK, True),
        (1, TASK | {"SLURM_GPUS_PER_TASK": "2"}, False),
        (1, TASK | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, False),
    ],
    ids=["enough", "too few", "one per task", "two per task", "a launcher inside each task"],
)
def test_each_process_needs_a_gpu(monkeypatch, snapshot, gpus, environment, fits):
    monkeypatch.setattr(device, "cuda_devices", lambda: gpus)
    topology = Topology(rank=11, local_rank=3, world_size=16, local_world_size=8, launcher="launcher")
    problem = device.gpu_problem(topology, environment)
    assert bool(problem) != fits
    assert problem == snapshot


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "AVX2, AVX512, AVX512 bf16, AMX, AMX bf16"),
        ("fp asimd sve i8mm bf16", "NEON, SVE, bf16, i8mm"),
        ("fpu sse2", "none that matters"),
    ],
)
def test_instruction_sets_are_those_of_the_kernels_flags(flags, sets):
    assert device.instruction_sets(flags) == sets


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (8, 3)])
def test_the_only_visible_gpu_has_index_0(monkeypatch, visible, index):
    chosen = []
    monkeypatch.setattr(device, "cuda_devices", lambda: visible)
    monkeypatch.setattr(device.torch.cuda, "set_device", chosen.append)
    assert device.bring_up("cuda", local_rank=3, threads=None).index == index
    assert [one.index for one in chosen] == [index]


# What PyTorch's private operators say that this CPU can do is what they do.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_arranged_where_the_answer_is_yes(dtype):
    """Under ``ONEDNN_MAX_CPU_ISA=AVX2``, or on a CPU without AVX512, the second answer is no."""
    weight, x = torch.randn(8, 4).to(dtype), torch.randn(3, 4).to(dtype)
    if packs(dtype):
        arranged = torch.ops.mkldnn._reorder_linear_weight(weight, 3)
        torch.testing.assert_close(torch.ops.mkldnn._linear_pointwise(x, arranged, None, "none", [], ""), x @ weight.T)
    elif not multiplies(dtype):
        with pytest.raises(RuntimeError, match="needs the cpu support"):
            torch.ops.mkldnn._reorder_linear_weight(weight, 3)


# Freed memory stays with the process: large tensors that come again cause few page faults.


PROGRAM = """
import resource, statistics, sys
import torch
from dsgpt.machine.probe import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(size) for size in (12_500_000, 5_000_000, 20_000_000)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(kept, statistics.median_low([faults() for _ in range(30)]))
"""
"""The median of 30 rounds: in up to ten, small allocations between large ones make a tensor take new pages."""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are those of glibc")
def test_tensors_that_come_again_cause_few_page_faults():
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    (_, without), (kept, with_it) = (
        subprocess.check_output([sys.executable, "-c", PROGRAM, mode], env=own, text=True).split()
        for mode in ("leave", "keep")
    )
    assert kept == "True"
    assert int(with_it) < int(without) / 4


@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")])
def test_settings_of_the_user_stay(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


# Copies of weights in huge pages.


SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")


def flags_of(address: int) -> str:
    """The flags of the memory area at ``address``, of Linux: ``rd wr mr mw me ac hg``."""
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, end = (int(word, 16) for word in area.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return re.search(r"VmFlags: (.*)", area)[1]
    raise ValueError(f"nothing is at {address:x}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_copies_are_contiguous_equal_and_apart_also_when_their_owner_is_gone(dtype):
    rows = [7, 3, 2000, 5] if dtype != torch.float32 else [7, 3, 2000, CHUNK_BYTES // 301 // 4 + 1, 5]
    memory, weights = HugePages(), [torch.randn(count, 301).mul(50).to(dtype) for count in rows]
    copies = [memory.copy(weight.t()) for weight in weights]
    del memory
    for copy, weight in zip(copies, weights, strict=True):
        assert copy.is_contiguous() and copy.dtype == dtype
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, weight.t())
    for number, copy in enumerate(copies):
        copy.fill_(number)
    assert all((copy == number).all() for number, copy in enumerate(copies))


@pytest.mark.skipif("VmFlags" not in Path("/proc/self/smaps").read_text(), reason="this kernel does not show flags")
def test_the_system_is_asked_for_huge_pages_from_a_boundary_on():
    copy = HugePages().copy(torch.ones(HUGE_PAGE_BYTES))
    assert copy.data_ptr() % HUGE_PAGE_BYTES == 0
    assert ("hg" in flags_of(copy.data_ptr()).split()) == SYSTEM.is_dir()
    assert device.huge_page_setting() in ({"always", "madvise", "never"} if SYSTEM.is_dir() else {None})


# Whose CPU time counts as that of others. Other programs may use this machine meanwhile.


BURN = "import time\nwhile time.process_time() < 1: pass"
ORPHANED = ["sh", "-c", '"$@" & echo $!', "sh"]
"""Its child belongs to nobody of ours, as a program of another user would."""


def test_own_children_are_not_others_while_they_live_and_afterwards():
    """Here a grandchild, which ends before the shell between them."""
    found = LoadOfOthers()
    before = found.own_seconds()
    command = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", f"{BURN}\nprint(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert found.own_seconds() - before >= 0.95
        child.communicate(b"\n")
    assert found.own_seconds() - before >= 0.95


def test_another_program_is(monkeypatch):
    monkeypatch.setattr(monitor, "SHORTEST_SEC", 0.0)
    found = LoadOfOthers()
    own, busy, started = found.own_seconds(), found.busy_seconds(), time.monotonic()
    done = subprocess.run([*ORPHANED, sys.executable, "-c", BURN], check=True, stdout=subprocess.PIPE)
    while psutil.pid_exists(int(done.stdout)):
        time.sleep(0.05)
    share, seconds = found.figures()["cpu_share_of_others"], time.monotonic() - started
    assert found.own_seconds() - own < 0.5 and found.busy_seconds() - busy >= 0.9
    assert share * seconds * len(psutil.Process().cpu_affinity()) >= 0.5


@pytest.mark.parametrize(
    ("owner", "name"), [(psutil.Process, "children"), (psutil.Process, "cpu_affinity"), (Path, "read_text")]
)
def test_what_the_system_hides_is_unknown(monkeypatch, owner, name):
    """Linux with hidepid, macOS, a masked /proc: nothing ends a training. A short measurement judges nothing."""
    before = LoadOfOthers()
    assert before.figures()["cpu_share_of_others"] is None
    monkeypatch.setattr(monitor, "SHORTEST_SEC", 0.0)
    monkeypatch.setattr(owner, name, Mock(side_effect=psutil.AccessDenied if owner is psutil.Process else OSError))
    assert LoadOfOthers().figures()["cpu_share_of_others"] is None
    before.figures()


# The probes name each thing that offload needs and the machine lacks.


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
    monkeypatch.setenv("CXX", "g++ '-isystem /with blanks'")
    assert compiler() == (str(tmp_path / "g++"), "-isystem /with blanks")
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
        assert probe.has_cuda_toolkit() == found


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
    problem = libaio_problem([a_compiler(tmp_path / "ccache", 'exec "$@"'), a_compiler(tmp_path / "g++", script)])
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

    def without_direct_io(path: str, flags: int, *more: int, **at: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)  # what tmpfs answers before Linux 6.6
        return original(path, flags, *more, **at)

    monkeypatch.setattr(os, "open", without_direct_io)
    assert without_paths(direct_io_problem(tmp_path), tmp_path) == snapshot
    assert list(tmp_path.iterdir()) == []
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
