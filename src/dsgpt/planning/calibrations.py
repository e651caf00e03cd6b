"""``calibration.json``: what a machine was measured to do, and its rates for predictions. Imports no torch."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Finite, JsonError, Positive, clipped, parse_as, parse_json, read_bytes
from dsgpt.planning.rates import Machine, Rates, nearest_ranks

SCHEMA_VERSION = "2.0"
_PRECISION, _SIZE = re.compile("fp32|bf16|fp16"), re.compile("[1-9][0-9]{0,8}")
_OPERATION = re.compile("all_reduce|reduce_scatter|all_gather|all_to_all|send")
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
    """Read the file, or the calibration in a record of ``benchmark.py plan``.

    Raises:
        UserError: it is missing, or not a calibration of this schema; one line.
    """
    try:
        data = _calibration_in(read_bytes(path))
        schema = parse_as(data, _Schema, unknown_keys=True).schema_version
        readable = schema.partition(".")[0] == SCHEMA_VERSION.partition(".")[0]
        found = parse_as(data, Calibration, unknown_keys=True) if readable else None
    except JsonError as error:
        raise UserError(
            f"--machine {path}: cannot be read as a calibration ({error}); write one with --calibrate"
        ) from error
    if found is None:
        raise UserError(
            f"--machine {path}: has schema {schema}, but this program reads {SCHEMA_VERSION}: write it again with "
            "--calibrate"
        )
    wrong = next(_impossible(asdict(found)), None)
    if wrong:
        raise UserError(f"--machine {path}: {wrong}; write it again with --calibrate")
    return found


def _calibration_in(data: bytes) -> bytes:
    """The file itself, unless it is a record that holds a calibration."""
    record = parse_json(data)
    inner = record.get("calibration") if isinstance(record, dict) else None
    return json.dumps(inner).encode() if isinstance(inner, dict) else data


def _impossible(calibration: dict[str, Any]) -> Iterator[str]:
    """Rates with which a prediction would be wrong or end in an error."""
    if not calibration["machine"].isprintable():
        yield "its machine has a name that cannot be printed"
    if calibration["disk_bytes_per_sec"] <= 0:
        yield "disk_bytes_per_sec must be above 0"
    for number, ceilings in enumerate(calibration["ceilings"]):
        place, precisions = f"ceilings.{number}", set(ceilings["matrix_flops_per_sec"])
        for name in ("attention_flops_per_sec", "elementwise_bytes_per_sec", "logits_per_sec"):
            if set(ceilings[name]) != precisions:
                yield f"{place}.{name}: has other precisions than matrix_flops_per_sec"
        if ceilings["bus_bytes_per_sec"] and "fp32" not in ceilings["bus_bytes_per_sec"].get("all_reduce", {}):
            yield f"{place}.bus_bytes_per_sec: has no all_reduce of fp32"
        for name, value in ceilings.items():
            keys = (_OPERATION, _PRECISION) if name == "bus_bytes_per_sec" else (_PRECISION, _SIZE, _SIZE)
            yield from _impossible_rates(value, f"{place}.{name}", keys=keys)


def _impossible_rates(value: Any, place: str, *, keys: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """The same inside a part of the file, whose keys at each depth match the pattern of that depth."""
    if not isinstance(value, dict):
        if value is not None and value <= 0:
            yield f"{place} must be above 0, not {value:g}"
        return
    if not value:
        yield f"{place}: has no rate"
    for name, part in value.items():
        if not keys[0].fullmatch(name):
            yield f"{place}: has the key {clipped(name)}"
        yield from _impossible_rates(part, f"{place}.{name}", keys=keys[1:])


def matrix_ceiling(calibration: Calibration, hardware: Mapping[str, Any], precision: str) -> float | None:
    """FLOP/s of the fastest matrix product that one device reached; None if it was measured on other hardware.

    Args:
        calibration: a machine's.
        hardware: the block of that name of a record.
        precision: of the product.
    """
    same = all(calibration.hardware.get(key) == hardware.get(key) for key in ("device", "cpu_name", "cpu_count"))
    ranks, threads = hardware.get("local_world_size"), hardware.get("threads_per_device")
    if not same or calibration.kind != "cpu" or ranks is None or threads != calibration.threads_per_device:
        return None
    by_devices = {each.devices: each for each in calibration.ceilings}
    by_width = by_devices[nearest_ranks(by_devices, ranks)].matrix_flops_per_sec.get(precision, {})
    return max((rate for by_rows in by_width.values() for rate in by_rows.values()), default=None)


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
