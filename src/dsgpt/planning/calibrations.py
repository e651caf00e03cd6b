"""``calibration.json``: what a machine was measured to do, and its rates for predictions. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Finite, JsonError, Positive, read_as
from dsgpt.planning.rates import Machine, Rates, nearest_ranks

SCHEMA_VERSION = "2.0"
ALLOWANCE = 1.25
"""How much longer, or shorter, a step may take than measured rates say: a roofline leaves out caches, memory
allocation and how processes disturb each other."""


@dataclass(frozen=True, kw_only=True)
class _Schema:
    """What files of every schema have."""

    schema_version: str


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What each device did while ``devices`` processes measured at the same time; of the slowest process."""

    devices: Positive
    matrix_flops_per_sec: dict[str, dict[str, dict[str, Finite]]]
    """By precision, width and rows, of a linear layer's forward and backward pass."""
    attention_flops_per_sec: dict[str, dict[str, dict[str, Finite]]]
    """By precision, head size and length."""
    elementwise_bytes_per_sec: dict[str, Finite]
    logits_per_sec: dict[str, Finite]
    triad_bytes_per_sec: Finite
    """``a = b + s * c`` on arrays that fit into no cache."""
    operation_sec: Finite
    """Of an operation on 16 numbers, in a forward or backward pass."""
    bus_bytes_per_sec: dict[str, dict[str, Finite]] | None
    """Ring bytes, by collective operation and precision; None for one device."""
    all_reduce_sec: Finite | None
    """Of one number."""
    host_link_bytes_per_sec: Finite


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The file."""

    schema_version: str
    timestamp_utc: str
    machine: str
    """Its processor or GPU, and how many devices."""
    hardware: dict[str, Any]
    env: dict[str, Any]
    threads_per_device: int | None
    """CPU threads of a process; None on GPUs."""
    memory_bytes_per_device: Positive
    host_bytes_per_device: Positive
    seconds: Finite
    """That it took."""
    disk_bytes_per_sec: Finite
    ceilings: Annotated[list[Ceilings], Field(min_length=1)]
    """By number of devices."""

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``."""
        return str(self.hardware.get("device", "cpu"))


def read_calibration(path: Path) -> Calibration:
    """Read the file.

    Raises:
        UserError: it is missing, or not a calibration of this schema; one line.
    """
    try:
        schema = read_as(path, _Schema, unknown_keys=True).schema_version
        if schema.partition(".")[0] == SCHEMA_VERSION.partition(".")[0]:
            return read_as(path, Calibration, unknown_keys=True)
    except JsonError as error:
        raise UserError(
            f"--machine {path}: cannot be read as a calibration ({error}); write one with --calibrate"
        ) from error
    raise UserError(
        f"--machine {path}: has schema {schema}, but this program reads {SCHEMA_VERSION}: write it again with "
        "--calibrate"
    )


def calibrated_machine(calibration: Calibration, *, devices: int | None = None) -> Machine:
    """The machine that was measured.

    Args:
        calibration: its file.
        devices: how many of its devices work at the same time; None for all that were measured.
    """
    by_devices = {each.devices: each for each in calibration.ceilings}
    most = max(by_devices)
    chosen = by_devices[nearest_ranks(by_devices, devices or most)]
    rates = _rates(calibration, chosen)
    return Machine(
        name=calibration.machine,
        kind=calibration.kind,
        devices=most,
        memory_bytes=calibration.memory_bytes_per_device,
        host_bytes=calibration.host_bytes_per_device,
        precisions=tuple(chosen.matrix_flops_per_sec),
        rates=rates,
        slowest=rates.scaled(compute=ALLOWANCE, communication=ALLOWANCE),
        fastest=rates.scaled(compute=1 / ALLOWANCE, communication=1 / ALLOWANCE),
        assumed=False,
        basis=(
            f"measured on {calibration.timestamp_utc[:10]} with {chosen.devices} of {most} "
            f"device{'s' * (most != 1)} at work; the range allows {ALLOWANCE - 1:.0%} for what a roofline leaves out"
        ),
    )


def _rates(calibration: Calibration, ceilings: Ceilings) -> Rates:
    several = {each.devices: each for each in calibration.ceilings if each.bus_bytes_per_sec and each.all_reduce_sec}
    bus = {number: (each.bus_bytes_per_sec or {})["all_reduce"]["fp32"] for number, each in several.items()}
    begun = {number: each.all_reduce_sec or 0.0 for number, each in several.items()}
    return Rates(
        matrix={
            precision: {
                int(width): {int(rows): rate for rows, rate in by_rows.items()} for width, by_rows in by_width.items()
            }
            for precision, by_width in ceilings.matrix_flops_per_sec.items()
        },
        attention={
            precision: {
                int(size): {int(length): rate for length, rate in by_length.items()}
                for size, by_length in by_size.items()
            }
            for precision, by_size in ceilings.attention_flops_per_sec.items()
        },
        elementwise=ceilings.elementwise_bytes_per_sec,
        logits=ceilings.logits_per_sec,
        memory=ceilings.triad_bytes_per_sec,
        kernel_sec=ceilings.operation_sec,
        bus=bus or {1: ceilings.triad_bytes_per_sec},
        collective_sec=begun or {1: ceilings.operation_sec},
        slowness=_slowness(several[max(several)].bus_bytes_per_sec or {}) if several else {},
        network=min(bus.values(), default=ceilings.triad_bytes_per_sec),
        host_link=ceilings.host_link_bytes_per_sec,
        host_memory=ceilings.triad_bytes_per_sec,
        disk=calibration.disk_bytes_per_sec,
    )


def _slowness(rates: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """How many times as long as an all-reduce in fp32 each operation takes."""
    fastest = rates["all_reduce"]["fp32"]
    return {name: {each: fastest / rate for each, rate in known.items()} for name, known in rates.items()}
