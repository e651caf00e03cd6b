"""What the GPUs of this machine do at an instant, as their driver reports it (NVML)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
    """Of all processes."""
    power_watts: float | None
    temperature_celsius: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    throttled: list[str] | None
    """Values of ``REASONS``."""


class Gpus:
    """Some GPUs of this machine.

    Args:
        nvml: the module ``pynvml``, initialised.
        uuids: of the GPUs; those that this machine lacks are left out.
    """

    def __init__(self, nvml: Any, uuids: Iterable[str]) -> None:
        self._nvml = nvml
        found = {uuid: self._ask(nvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in dict.fromkeys(uuids)}
        self._handles = {uuid: handle for uuid, handle in found.items() if handle is not None}

    @property
    def uuids(self) -> list[str]:
        """Of the GPUs that are there."""
        return list(self._handles)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML answers; None where the GPU or its driver cannot."""
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
    except ImportError:  # an environment of an earlier version
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    gpus = Gpus(pynvml, uuids)
    if gpus.uuids:
        return gpus
    gpus.close()
    return None
