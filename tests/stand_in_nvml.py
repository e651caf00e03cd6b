"""Stands in for ``pynvml`` where there is no driver: two GPUs whose figures a test sets. Only the functions in use."""

from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2


class NVMLError(Exception):
    """What every function raises that the GPU or its driver cannot answer."""


class StandInNvml(SimpleNamespace):
    """The module: each of its GPUs draws 300 W by its counter, and reports other figures than the other."""

    def __init__(self, *, driver: bool = True, unsupported: tuple[str, ...] = ()) -> None:
        super().__init__(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2)
        self.driver, self.unsupported = driver, unsupported
        self.open = 0
        self.samples = 0
        self.reasons = 0x1

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.unsupported or not self.open:
            raise NVMLError(name)
        return value

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in {"GPU-0", "GPU-1"}:
            raise NVMLError(uuid)
        return int(uuid[-1])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.samples += 1
        return self._answer("utilisation", SimpleNamespace(gpu=50 + handle, memory=10))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return self._answer("memory", SimpleNamespace(total=80_000, free=70_000 - handle, used=10_000 + handle))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._answer("power", 200_000 + 100_000 * (self.samples % 2))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._answer("temperature", 60 + handle)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return self._answer("clock", {NVML_CLOCK_SM: 1500, NVML_CLOCK_MEM: 2600}[kind])

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self._answer("reasons", self.reasons)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self._answer("energy", 1_000_000 + 3_000 * self.samples)
