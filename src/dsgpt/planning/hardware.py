"""The table of GPUs, ``hardware.json``, from the vendor's datasheets. Imports no torch.

Every peak is dense. Datasheets of GPUs since Ampere often print the figure with 2:4 sparsity, which is twice as large;
training does not use it.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dsgpt.common.divisors import in_words
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Positive, read_as
from dsgpt.common.problems import did_you_mean

TABLE = Path(__file__).with_name("hardware.json")
MEANT = {"h100": "h100-80gb"}
"""Names that leave out what decides, and the GPU of the table that is meant."""
_LEAST, _MOST = 0.98, 1.12
"""Memory that a device reports, in units of the datasheet's: an H200 of 141 GB reports 151e9 bytes. A slice of a GPU
(MIG) reports less, and reaches only a part of the peak."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense FLOP/s that the datasheet promises for each number format; None where the hardware has no units for it."""

    fp32: Positive
    """Without tensor cores: what PyTorch uses for fp32 unless TF32 is allowed."""
    tf32: Positive | None
    fp16: Positive | None
    """With fp32 accumulation."""
    bf16: Positive | None


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """What connects the GPUs of a machine."""

    kind: str
    """The generation of NVLink or PCIe."""
    bytes_per_sec: Positive
    """Of one GPU in one direction: half of the figure that datasheets print."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A document of the vendor."""

    title: str
    url: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of the table."""

    key: str
    """Its name on command lines."""
    reported_names: list[str]
    """Regular expressions of the names that drivers report for it."""
    memory_bytes: Positive
    """As the datasheet says, in GB of 10^9 bytes. Devices report up to 8% more."""
    peak_flops: Peaks
    memory_bytes_per_sec: Positive
    interconnect: Interconnect
    tdp_watts: Positive
    sources: list[Source]

    def peak(self, precision: str) -> int | None:
        """Dense FLOP/s in ``fp32``, ``tf32``, ``fp16`` or ``bf16``; None where the hardware has no units for it."""
        peaks = {name: getattr(self.peak_flops, name) for name in ("fp32", "tf32", "fp16", "bf16")}
        found: int | None = peaks[precision]
        return found


@dataclass(frozen=True, kw_only=True)
class _Table:
    gpus: list[Gpu]


@cache
def gpus() -> dict[str, Gpu]:
    """Every GPU of the table, by its key."""
    return {gpu.key: gpu for gpu in read_as(TABLE, _Table).gpus}


def find_gpu(name: str) -> Gpu:
    """The GPU with this key, in any case; ``h100`` is that of most clouds.

    Raises:
        UserError: the table has none; the message names the nearest key and all keys.
    """
    known, key = gpus(), MEANT.get(name.lower(), name.lower())
    if key not in known:
        longer = [each for each in known if name and each.startswith(key)]
        near = f" (did you mean {in_words(longer)}?)" if longer else did_you_mean(name, known)
        raise UserError(f"no GPU {name} in the table{near}: known are {', '.join(known)}")
    return known[key]


def recognise(device_name: str, memory_bytes: int) -> Gpu | None:
    """The GPU that a driver reports; None if it is not in the table, or if this is only a slice of it.

    Args:
        device_name: from ``torch.cuda.get_device_name`` or NVML.
        memory_bytes: all memory of the device, from the same place.
    """
    for gpu in gpus().values():
        named = any(re.fullmatch(pattern, device_name) for pattern in gpu.reported_names)
        if named and _LEAST * gpu.memory_bytes <= memory_bytes <= _MOST * gpu.memory_bytes:
            return gpu
    return None
