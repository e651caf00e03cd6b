"""The device of one process, a GPU or a share of the CPU, and the process group of all ranks.

The device has kernels, memory, named ranges and software.

Memory in pages of 2 MiB, for weights that are read again and again. A processor remembers where few pages are. Weights
of hundreds of megabytes in pages of 4 KiB make it look up an address for almost every page that it reads. Linux gives
huge pages to every process, or only to those that ask (``/sys/kernel/mm/transparent_hugepage/enabled``); this asks.

Which of PyTorch's own CPU kernels the inference engine may use here. docs/inference.md has the table. PyTorch's
private operators raise where the CPU lacks their instructions, so they are asked about first.

Named ranges of a step, which profilers show: ``data``, ``train_step``, ``forward``, ``backward``, ``optimizer``.
Outside of ``ranges_made_by`` they do nothing.
"""

import contextlib
import mmap
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dsgpt.common.text import counted
from dsgpt.machine.peers import open_store
from dsgpt.machine.probe import keep_freed_memory
from dsgpt.machine.topology import Topology, free_port

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

INSTRUCTION_SETS = {
    **{"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512 bf16", "amx_tile": "AMX", "amx_bf16": "AMX bf16"},
    **{"asimd": "NEON", "sve": "SVE", "bf16": "bf16", "i8mm": "i8mm"},
}
"""Instruction sets that decide how fast a CPU multiplies matrices, on x86 and on ARM, by the flag of Linux."""


def cuda_devices() -> int:
    """GPUs that this process can see."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_problem(topology: Topology, environment: Mapping[str, str] = os.environ) -> str:
    """Why the processes of this machine cannot have a GPU each; empty if they can.

    Slurm may show each task only its own GPU (``srun --gpus-per-task=1``). Then one visible GPU is enough if each
    process is a separate task; ranks that another launcher started inside a task would share its GPU.
    """
    gpus, processes = cuda_devices(), topology.local_world_size
    tasks = {"SLURM_GPUS_PER_TASK": 1, "SLURM_NTASKS": topology.world_size, "SLURM_PROCID": topology.rank}
    if processes <= gpus or (gpus == 1 and all(environment.get(name) == str(value) for name, value in tasks.items())):
        return ""
    cure = f"start at most {gpus} (deepspeed --num_gpus {gpus}), or use --device cpu"
    return f"{processes} processes were started on this machine, but it has only {counted(gpus, 'GPU')}: {cure}"


def default_precision(kind: str) -> str:
    """fp32 on CPU, bf16 on GPUs that support it, fp16 on older GPUs."""
    if kind == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def bring_up(kind: str, *, local_rank: int, threads: int | None) -> torch.device:
    """Select the device of this process, and make it the default for CUDA calls; on a CPU, keep freed memory.

    Args:
        kind: ``cpu`` or ``cuda``.
        local_rank: the GPU's index on this machine, if more than one is visible.
        threads: CPU threads of this process; None keeps torch's default.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if kind == "cpu":
        keep_freed_memory()
        return torch.device("cpu")
    device = torch.device("cuda", local_rank if cuda_devices() > 1 else 0)
    torch.cuda.set_device(device)
    return device


def describe_hardware(kind: str) -> dict[str, object]:
    """The machine for a record: GPU and CPU names and counts, memory in bytes; None where unknown."""
    on_gpu = kind == "cuda"
    return {
        "device": kind,
        "gpu_name": torch.cuda.get_device_name() if on_gpu else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties().total_memory if on_gpu else None,
        "gpu_count_visible": cuda_devices(),
        "cpu_name": _of_the_cpu("model name") or platform.processor() or None,
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_sets": instruction_sets(_of_the_cpu("flags") or _of_the_cpu("Features")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def software_versions() -> dict[str, str | None]:
    """The ``env`` block of a record; None for a package that is not installed."""
    return {
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        **{f"{package}_version": _version(package) for package in ("transformers", "deepspeed")},
        "cuda_version": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def instruction_sets(flags: str | None) -> str | None:
    """Members of ``INSTRUCTION_SETS`` that a CPU with these flags of the kernel has; None where there are no flags."""
    if flags is None:
        return None
    return ", ".join(name for flag, name in INSTRUCTION_SETS.items() if flag in flags.split()) or "none that matters"


def _of_the_cpu(entry: str) -> str | None:
    """An entry of the first CPU in ``/proc/cpuinfo``."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == entry), None)


SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
"""Bytes reserved at a time; the kernel commits a page at its first write."""
_BETWEEN = 64
"""Tensors start at multiples of it, as PyTorch's own do."""


class HugePages:
    """Copies tensors one behind the other into huge pages, so that small ones have a share of them, too.

    A chunk of the memory is free again when none of its copies is left, the newest with this object, too.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor``: on a CPU in huge pages where there are any, elsewhere on its device."""
        if tensor.device.type != "cpu" or sys.platform != "linux":
            return tensor.clone(memory_format=torch.contiguous_format)
        if tensor.nbytes > len(self._room):
            size = -(-max(tensor.nbytes, CHUNK_BYTES) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel that was built without huge pages: ordinary pages do
                memory.madvise(mmap.MADV_HUGEPAGE)
            whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
            start = -whole.data_ptr() % HUGE_PAGE_BYTES  # from one boundary of huge pages to another
            self._room = whole[start : start + size]
        copy = self._room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._room = self._room[-(-tensor.nbytes // _BETWEEN) * _BETWEEN :]
        return copy.copy_(tensor)


def huge_page_setting() -> str | None:
    """Processes that get huge pages here: ``always``, ``madvise`` (those that ask) or ``never``; None if unknown."""
    if not SETTING.is_file():
        return None
    chosen = re.search(r"\[(\w+)\]", SETTING.read_text(encoding="utf-8"))
    return chosen and chosen.group(1)


_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
"""The operator that says whether oneDNN computes in a precision. ``ONEDNN_MAX_CPU_ISA`` makes it answer no, too."""


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices in ``dtype`` about as fast as in fp32, or faster.

    If not, PyTorch's product of more than a few rows takes four times as long as in fp32.
    """
    return dtype not in _ASKED or (torch._C._has_mkldnn and getattr(torch.ops.mkldnn, _ASKED[dtype])())


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN's products with a GELU or a sum take a weight of ``dtype`` in their own layout.

    On ARM, with the Arm Compute Library, they are not faster; PyTorch's compiler does not use them there either.
    """
    if not torch._C._has_mkldnn or torch.ops.mkldnn._is_mkldnn_acl_supported():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies(dtype))


def slow_precision(precision: str, *, device: str) -> str:
    """A line for the user if ``precision`` (``bf16``) is slow on ``device`` (``cpu``, ``cuda``); empty if it is not."""
    if device == "cpu" and precision == "bf16" and not multiplies(torch.bfloat16):
        return "bf16 is slow on this CPU, which has no instructions for it (AVX512 or newer): fp32 is faster"
    return ""


Maker = Callable[[str], contextlib.AbstractContextManager[Any]]
_maker: ContextVar[Maker] = ContextVar("maker", default=contextlib.nullcontext)


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context that appears under ``name`` in traces."""
    return _maker.get()(name)


@contextlib.contextmanager
def ranges_made_by(maker: Maker) -> Iterator[None]:
    """Inside, ``named_range`` returns the context that ``maker`` makes from the name."""
    token = _maker.set(maker)
    try:
        yield
    finally:
        _maker.reset(token)


def ranges_shown(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Show ranges in traces of PyTorch's profiler, and on a GPU as NVTX ranges, inside the context."""
    return ranges_made_by(_with_nvtx if device.type == "cuda" else record_function)


@contextlib.contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    with torch.cuda.nvtx.range(name), record_function(name):
        yield


@contextlib.contextmanager
def synchronisations(device: str) -> Iterator[list[str]]:
    """Collects a message for every time that Python waits for the GPU inside; on a CPU there is nothing to wait for.

    Raises:
        RuntimeError: PyTorch does not report a wait.
    """
    waits: list[str] = []
    if device == "cpu":
        yield waits
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            torch.zeros(1, device=device).item()  # one wait that must be reported
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(warning.message) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    if not said:
        raise RuntimeError("PyTorch's debug mode reports no wait for the GPU, so none can be counted")
    waits += said[1:]


# The process group of all ranks. Without a group, every function acts as for a single rank.

TIMEOUT = timedelta(minutes=30)
"""Longest time that a rank waits for the others: rank 0 may be hashing data or writing a checkpoint."""


@contextlib.contextmanager
def joined(topology: Topology, device: torch.device, *, store: "Store | None" = None) -> Iterator[None]:
    """Form the group of all ranks, over nccl on GPUs and gloo on CPU, and destroy it at the end.

    A process without a launcher forms a group of one rank, because DeepSpeed needs a group. It overwrites ``RANK``
    and related variables, which an earlier job may have left. After an error the group is not destroyed: that could
    wait for ranks that are gone.

    Args:
        topology: this rank's place.
        device: of this rank.
        store: at which all ranks have met; by default one is opened.

    Raises:
        UserError: the variables do not say where the ranks meet.
    """
    if topology.launcher == "python":
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    elif store is None:
        store = open_store(topology)
    if store is not None:
        store.set_timeout(TIMEOUT)
    backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    place: dict[str, Any] = {"rank": topology.rank, "world_size": topology.world_size, "device_id": gpu}
    dist.init_process_group(backend, store=store, timeout=TIMEOUT, **place)
    yield
    dist.destroy_process_group()


class HostGroup:
    """A gloo group of all ranks on any device: nothing here waits for a GPU. Collective: every rank must create one."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if several else None

    def largest(self, value: int) -> int:
        """The largest ``value`` of any rank, on every rank."""
        return max(int(values[0]) for values in self.gathered([value]))

    def objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank; they are pickled."""
        return [value] if self._group is None else gather_objects(value, self._group)

    def to_main(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order, on rank 0; its own alone on another. They are pickled."""
        if self._group is None:
            return [value]
        values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, values, group=self._group)
        return values or [value]

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's ``values``, in rank order, on every rank; equally many on each."""
        if self._group is None:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        boxes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(boxes, own, group=self._group)
        return [box.tolist() for box in boxes]


def barrier() -> None:
    """Wait until every rank has called this."""
    if dist.is_initialized():
        dist.barrier()


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum ``value`` over all ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, in rank order, on every rank. For small values only: they are pickled."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def from_main(value: Any) -> Any:
    """Rank 0's ``value``, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
