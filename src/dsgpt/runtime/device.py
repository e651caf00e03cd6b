"""The device of one process: a GPU, or a share of the CPU."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from dsgpt.runtime.host_memory import keep_freed_memory
from dsgpt.runtime.topology import Topology

INSTRUCTION_SETS = {
    **{"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512 bf16", "amx_tile": "AMX", "amx_bf16": "AMX bf16"},
    **{"asimd": "NEON", "sve": "SVE", "bf16": "bf16", "i8mm": "i8mm"},
}
"""What decides how fast a CPU multiplies matrices, on x86 and on ARM, by the flag of Linux."""


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
    return (
        f"{processes} processes were started on this machine, but it has only {gpus} GPU{'s' * (gpus != 1)}: start at "
        f"most {gpus} (deepspeed --num_gpus {gpus}), or use --device cpu"
    )


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


def instruction_sets(flags: str | None) -> str | None:
    """Those of ``INSTRUCTION_SETS`` that a CPU with these flags of the kernel has; None where there are no flags."""
    if flags is None:
        return None
    found = [name for flag, name in INSTRUCTION_SETS.items() if flag in flags.split()]
    return ", ".join(found) or "none that matters"


def _of_the_cpu(entry: str) -> str | None:
    """An entry of the first CPU in ``/proc/cpuinfo``."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == entry:
                return value.strip()
    return None
