"""What happens on a machine while something is measured: a thread samples its GPUs, and others' CPU time is counted.

A sample is what the driver of a GPU reports at an instant (NVML): a line in a file, and figures for the record.
"""

import contextlib
import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from dsgpt.common.files import append_to
from dsgpt.machine.launcher import waiting_processes

REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "temperature, by the driver",
    0x040: "temperature, by the hardware",
    0x080: "power brake",
}
"""Why a GPU runs below its highest clocks: the bits of ``nvmlClocksEventReasons``, without idleness and display."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one instant; None where its driver does not report a figure."""

    utilisation: float | None
    """Share of the driver's last period in which a kernel ran. A single small kernel makes it 1: see ``mfu``."""
    memory_used_bytes: int | None
    """Bytes used by all processes."""
    power_watts: float | None
    temperature_celsius: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    throttled: list[str] | None
    """Values of ``REASONS``."""


class Gpus:
    """Reads NVML for some GPUs of this machine.

    Args:
        nvml: the module ``pynvml``, initialised.
        uuids: of the GPUs; those that this machine lacks are left out.
    """

    def __init__(self, nvml: Any, uuids: Iterable[str]) -> None:
        self._nvml = nvml
        handles = {uuid: self._ask(nvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in dict.fromkeys(uuids)}
        self._handles = {uuid: handle for uuid, handle in handles.items() if handle is not None}

    @property
    def uuids(self) -> list[str]:
        """UUIDs of the GPUs that exist."""
        return list(self._handles)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of NVML; None where the GPU or its driver has none."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def sample(self, uuid: str) -> GpuSample:
        """The GPU now."""
        nvml, handle = self._nvml, self._handles[uuid]
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        return GpuSample(
            utilisation=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            throttled=None if reasons is None else [name for bit, name in REASONS.items() if reasons & bit],
        )

    def health(self, uuid: str) -> dict[str, Any]:
        """The driver's facts about a GPU and its memory; None where it has none."""
        nvml, handle = self._nvml, self._handles[uuid]
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        ecc = self._ask(nvml.nvmlDeviceGetEccMode, handle)
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        causes = range(nvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT)
        retired = [page for cause in causes for page in self._ask(nvml.nvmlDeviceGetRetiredPages, handle, cause) or ()]
        corrected, uncorrected, pending, failed = self._ask(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
        return {
            "name": self._ask(nvml.nvmlDeviceGetName, handle),
            "driver": self._ask(nvml.nvmlSystemGetDriverVersion),
            "memory_bytes": memory and memory.total,
            "used_bytes": memory and memory.used,
            "ecc": ecc and bool(ecc[0]),
            "uncorrected_errors": self._ask(nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds),
            "replaced": len(retired) + corrected + uncorrected,
            "repair_pending": bool(pending or self._ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)),
            "repair_failed": bool(failed),
        }

    def energy_joules(self, uuid: str) -> float | None:
        """The counter of energy that the GPU used since its driver was loaded; GPUs before Volta have none."""
        millijoules = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handles[uuid])
        return None if millijoules is None else millijoules / 1000

    def close(self) -> None:
        """Leave NVML."""
        self._ask(self._nvml.nvmlShutdown)


def open_gpus(uuids: Iterable[str]) -> Gpus | None:
    """The GPUs with these ids; None without a driver, or if this machine has none of them."""
    try:
        import pynvml  # noqa: PLC0415 - needed on GPUs only

        pynvml.nvmlInit()
    except ImportError:  # an environment of an earlier version
        return None
    except pynvml.NVMLError:
        return None
    gpus = Gpus(pynvml, uuids)
    if gpus.uuids:
        return gpus
    gpus.close()
    return None


HARDWARE_FILE = "hardware.jsonl"
_PATIENCE_SEC = 5.0
"""Longest time that the end of a run waits for the thread: a driver that hangs must not hold it up."""


def hardware_file(node: int) -> str:
    """The name of a machine's file in the run folder; ``node`` 0 is the machine of rank 0."""
    return HARDWARE_FILE if node == 0 else f"hardware-{node}.jsonl"


class _Device:
    """The figures of one GPU.

    Args:
        energy_joules: its counter at the beginning.
    """

    def __init__(self, energy_joules: float | None) -> None:
        self._counter, self._samples = energy_joules, 0
        self._known, self._sums = Counter[str](), defaultdict[str, float](float)
        self._least, self._most = dict[str, float](), dict[str, float]()
        self._reasons: Counter[str] | None = None

    def add(self, sample: GpuSample, *, seconds: float) -> None:
        """Count a sample, taken ``seconds`` after the one before."""
        self._samples += 1
        values = {name: value for name, value in vars(sample).items() if value is not None and name != "throttled"}
        if sample.power_watts is not None:
            values["energy"] = sample.power_watts * seconds
        for name, value in values.items():
            self._known[name] += 1
            self._sums[name] += value
            self._least[name] = min(value, self._least.get(name, value))
            self._most[name] = max(value, self._most.get(name, value))
        if sample.throttled is not None:
            self._reasons = (self._reasons or Counter()) + Counter(sample.throttled)

    def figures(self, energy_joules: float | None) -> dict[str, Any]:
        """The figures so far.

        Args:
            energy_joules: the counter now; without counters, energy is the sum of power over time.
        """
        means = {name: self._sums[name] / count for name, count in self._known.items()}
        energy = self._sums["energy"] if self._samples and self._known["energy"] == self._samples else None
        if self._counter is not None and energy_joules is not None:
            energy = energy_joules - self._counter
        reasons = None if self._reasons is None else sorted(self._reasons.items())
        return {
            "samples": self._samples,
            "energy_joules": energy,
            "power_watts_mean": means.get("power_watts"),
            "power_watts_max": self._most.get("power_watts"),
            "utilisation_mean": means.get("utilisation"),
            "memory_used_bytes_max": self._most.get("memory_used_bytes"),
            "temperature_celsius_max": self._most.get("temperature_celsius"),
            "sm_clock_mhz_mean": means.get("sm_clock_mhz"),
            "sm_clock_mhz_min": self._least.get("sm_clock_mhz"),
            "throttled_share": None if reasons is None else {name: count / self._samples for name, count in reasons},
        }


class Monitor:
    """Samples GPUs in a thread while its context is open.

    Args:
        gpus: to sample; None samples nothing.
        path: the file that receives a line per sample.
        every: seconds between samples.
    """

    def __init__(self, gpus: Gpus | None = None, *, path: Path = Path(HARDWARE_FILE), every: float = 1.0) -> None:
        self._gpus, self._path, self._every = gpus, path, every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="GPU monitor", daemon=True)
        self._devices: dict[str, _Device] = {}
        self.figures: list[dict[str, Any]] = []
        """Figures of each GPU, once the context is closed; empty where nothing was sampled."""

    def __enter__(self) -> Self:
        if self._gpus is not None:
            self._devices = {uuid: _Device(self._gpus.energy_joules(uuid)) for uuid in self._gpus.uuids}
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._gpus is None:
            return
        self._thread.join(_PATIENCE_SEC)
        if self._thread.is_alive():
            return
        self.figures = [
            {"uuid": uuid, **device.figures(self._gpus.energy_joules(uuid))} for uuid, device in self._devices.items()
        ]
        self._gpus.close()

    def _watch(self) -> None:
        with contextlib.ExitStack() as stack:
            file = None
            with contextlib.suppress(OSError):  # another machine may not have the run folder
                file = stack.enter_context(append_to(self._path))
            assert self._gpus is not None  # else there is no thread
            last, ended = time.perf_counter(), False
            while not ended:
                ended = self._ended.wait(self._every)
                now = time.perf_counter()
                samples = {uuid: self._gpus.sample(uuid) for uuid in self._gpus.uuids}
                for uuid, sample in samples.items():
                    self._devices[uuid].add(sample, seconds=now - last)
                last = now
                gpus = [{"uuid": uuid, **asdict(sample)} for uuid, sample in samples.items()]
                if file is not None:
                    with contextlib.suppress(OSError):  # a full disk loses the line
                        file.write(json.dumps({"time": time.time(), "gpus": gpus}).encode() + b"\n")


def gpu_use(devices: list[dict[str, Any]], *, expected: int, tokens: int) -> dict[str, Any] | None:
    """The record's figures of the GPUs of a run; None where none was sampled.

    Args:
        devices: their figures.
        expected: how many GPUs the run uses; if some were not sampled, its energy is unknown.
        tokens: that the run trained on while they were sampled.
    """
    if not devices:
        return None
    energies = [device["energy_joules"] for device in devices]
    joules = sum(energies) if len(energies) == expected and None not in energies else None
    per_token = joules / tokens if joules is not None and tokens else None
    return {"energy_joules": joules, "joules_per_token": per_token, "gpus": devices}


# CPU time of other processes while something is measured.

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
