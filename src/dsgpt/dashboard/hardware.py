"""What the GPUs and the first process of a run are doing now. Imports no Streamlit."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dsgpt.common.files import is_regular_file
from dsgpt.common.json_files import JsonError, parse_json
from dsgpt.common.problems import is_number
from dsgpt.reports.fields import is_figure

_FILE = re.compile(r"hardware(-\d+)?\.jsonl")
_TAIL_BYTES = 1 << 18
FIGURES = {
    "utilisation": "utilisation (%)",
    "memory_used_bytes": "memory (GB)",
    "power_watts": "power (W)",
    "temperature_celsius": "temperature (°C)",
    "sm_clock_mhz": "clock (MHz)",
}
"""Keys of a GPU in ``hardware.jsonl`` that are shown, and their headings."""
_UNITS = {"utilisation": 100.0, "memory_used_bytes": 1e-9}


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one time."""

    time: float
    """Seconds since 1970."""
    gpu: str
    figures: dict[str, float | None]
    """By heading of ``FIGURES``."""


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    """What a process has used."""

    process: int
    at: float
    """When this was read: a clock in seconds."""
    cpu_sec: float
    memory_bytes: int

    def cores_since(self, earlier: "ProcessUse | None") -> float | None:
        """Cores that it kept busy since ``earlier``; None without an earlier reading of this process."""
        if earlier is None or earlier.process != self.process or self.at <= earlier.at:
            return None
        return (self.cpu_sec - earlier.cpu_sec) / (self.at - earlier.at)


def recent_samples(run_dir: Path) -> list[GpuSample]:
    """The samples of the last minutes of every GPU of a run, oldest first.

    Lines that are no sample are left out, and so are files that cannot be read.
    """
    files = [path for path in sorted(run_dir.glob("hardware*.jsonl")) if _FILE.fullmatch(path.name)]
    found = [sample for path in files if is_regular_file(path) for sample in _samples(path)]
    return sorted(found, key=lambda sample: (sample.time, sample.gpu))


def _samples(path: Path) -> Iterator[GpuSample]:
    machine = path.name.removeprefix("hardware").removesuffix(".jsonl")
    for line in _last_lines(path):
        try:
            value = parse_json(line)
        except JsonError:
            continue
        if not isinstance(value, dict) or not is_number(value.get("time")) or not isinstance(value.get("gpus"), list):
            continue
        for place, gpu in enumerate(value["gpus"]):
            if isinstance(gpu, dict):
                yield GpuSample(time=value["time"], gpu=f"GPU {place}{machine}", figures=_figures(gpu))


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read(_TAIL_BYTES).split(b"\n")[:-1]
    except OSError:
        return []
    return lines[1:] if start else lines


def _figures(gpu: dict[str, Any]) -> dict[str, float | None]:
    found = {key: gpu[key] if is_number(gpu.get(key)) and is_figure(gpu[key]) else None for key in FIGURES}
    return {FIGURES[key]: None if value is None else value * _UNITS.get(key, 1.0) for key, value in found.items()}


def latest(samples: Sequence[GpuSample]) -> list[GpuSample]:
    """The last sample of each GPU."""
    return [*{sample.gpu: sample for sample in samples}.values()]


def process_use(process: int | None) -> ProcessUse | None:
    """What a process of this machine has used; None if there is none, or if it may not be asked."""
    if process is None:
        return None
    try:
        asked = psutil.Process(process)
        spent, memory = asked.cpu_times(), asked.memory_info().rss
    except psutil.Error:
        return None
    return ProcessUse(process=process, at=time.monotonic(), cpu_sec=spent.user + spent.system, memory_bytes=memory)
