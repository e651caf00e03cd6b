"""Stands in for ``pynvml`` where there is no driver: two GPUs whose figures a test sets. Only the functions in use."""

from collections.abc import Callable
from functools import partial
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
        self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC = 1, 0
        self.NVML_PAGE_RETIREMENT_CAUSE_COUNT = 2
        self.driver, self.unsupported = driver, unsupported
        self.open = 0
        self.samples = 0
        self.reasons = 0x1
        for name, (what, value) in {
            "UtilizationRates": ("utilisation", lambda gpu: SimpleNamespace(gpu=50 + gpu, memory=10)),
            "MemoryInfo": ("memory", lambda gpu: SimpleNamespace(total=80_000, free=70_000 - gpu, used=10_000 + gpu)),
            "PowerUsage": ("power", lambda _: 200_000 + 100_000 * (self.samples % 2)),
            "Temperature": ("temperature", lambda gpu: 60 + gpu),
            "CurrentClocksEventReasons": ("reasons", lambda _: self.reasons),
            "TotalEnergyConsumption": ("energy", lambda _: 1_000_000 + 3_000 * self.samples),
            "Name": ("name", lambda _: "A100"),
            "EccMode": ("ecc", lambda gpu: [1 - gpu, 1]),
            "TotalEccErrors": ("errors", lambda gpu: 10 + gpu),
            "RetiredPages": ("pages", lambda gpu: [0x1000] * (1 + gpu)),
            "RetiredPagesPendingStatus": ("pending", lambda gpu: gpu),
            "RemappedRows": ("rows", lambda gpu: (0, 3 + gpu, 0, 0)),
        }.items():
            setattr(self, f"nvmlDeviceGet{name}", partial(self._answer, what, value))

    def _answer(self, name: str, value: Callable[[int], Any], handle: int, *_: int) -> Any:
        self.samples += name == "utilisation"
        if name in self.unsupported or not self.open:
            raise NVMLError(name)
        return value(handle)

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("no driver")
        self.open += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580"

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in {"GPU-0", "GPU-1"}:
            raise NVMLError(uuid)
        return int(uuid[-1])

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return self._answer("clock", lambda _: {NVML_CLOCK_SM: 1500, NVML_CLOCK_MEM: 2600}[kind], handle)
