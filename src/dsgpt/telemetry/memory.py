"""Peak memory of this process, in bytes; None where it is unknown."""

from pathlib import Path

import torch


def peak_rss_bytes() -> int | None:
    """Largest resident set of this process so far.

    From ``/proc/self/status`` (VmHWM): ``getrusage`` also counts the launcher's memory from before the ``exec``.
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


def peak_bytes(kind: str) -> int | None:
    """The peak of what this process used of its device so far: allocated on its GPU, or resident in host memory.

    Args:
        kind: ``cuda`` or ``cpu``.
    """
    return peak_cuda_bytes(torch.device(kind))[0] if kind == "cuda" else peak_rss_bytes()


class TrainingPeaks:
    """Peak memory of training steps and validations, without that of saves and generation as far as possible.

    The GPU's counters are reset after each save. The peak of the resident set cannot be reset: from the next ``note``
    on it includes what a save used. It never includes what the last save or measuring inference used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated: int | None = None
        self._reserved: int | None = None
        self._rss: int | None = None
        self.reset()

    def reset(self) -> None:
        """Reset the GPU's counters: what was allocated until now was not for training."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def note(self) -> None:
        """Read the peaks so far."""
        allocated, reserved = peak_cuda_bytes(self._device)
        self._allocated = _larger(self._allocated, allocated)
        self._reserved = _larger(self._reserved, reserved)
        self._rss = _larger(self._rss, peak_rss_bytes())

    def figures(self) -> dict[str, int | None]:
        """The memory keys of an epoch's record and of the summary, as of the last ``note``."""
        return {
            "max_cuda_mem_allocated_bytes_rank0": self._allocated,
            "max_cuda_mem_reserved_bytes_rank0": self._reserved,
            "peak_rss_bytes_rank0": self._rss,
        }


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
