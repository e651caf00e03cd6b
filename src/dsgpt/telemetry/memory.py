"""Peak memory of this process, in bytes; None where it cannot be known."""

from pathlib import Path

import torch


def peak_rss_bytes() -> int | None:
    """Largest resident set of this process so far.

    From ``/proc/self/status`` (VmHWM): ``getrusage`` counts what the launcher held before it became this process.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def peak_cuda_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Largest memory (allocated, reserved by PyTorch) on this rank's GPU so far; (None, None) on CPU."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
