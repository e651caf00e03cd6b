"""The rates at which a machine computes, reads and sends: measured, or assumed from its datasheet.

Predictions of time divide by the rates of a machine. The rates of a GPU that nobody measured are shares of its
datasheet's peaks, assumed as ranges. A share is the likely one between the least and the most that a tuned PyTorch
program is expected to reach. None of them was measured on a GPU by this project; ``docs/planner-published.md`` holds
what follows from them against published figures.
"""

import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Finite, JsonError, Positive, parse_as, parse_json, read_as, read_bytes
from dsgpt.machine.topology import ring_factor
from dsgpt.model.config import GPT2Config
from dsgpt.planner.hardware import Gpu, recognise

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one device while every device of its machine works."""

    matrix: Mapping[str, Mapping[int, Mapping[int, float]]]
    """FLOP/s of the matrix products of a block, by precision, the model's width and the rows: tokens of a micro batch.
    With few rows, reading and packing the weights takes most of the time."""
    attention: Mapping[str, Mapping[int, Mapping[int, float]]]
    """FLOP/s of causal attention, by precision, head size and length; FLOPs of the masked half do not count."""
    elementwise: Mapping[str, float]
    """Bytes read and written per second by LayerNorm, GELU and sums, by precision."""
    logits: Mapping[str, float]
    """Logits per second through the softmax and its gradient, by precision."""
    memory: float
    """Bytes read and written per second by an operation on arrays that fit into no cache."""
    kernel_sec: float
    """Seconds that every operation takes in addition, however small it is."""
    bus: Mapping[int, float]
    """Bytes that a device sends per second in a ring that sums fp32 numbers, by the number of ranks of the ring."""
    collective_sec: Mapping[int, float]
    """Seconds of a collective operation without data, by the number of its ranks."""
    slowness: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Time of other operations for as many ring bytes, in units of an all-reduce of fp32 numbers, by operation and
    precision; empty where they were not measured."""
    network: float
    """Bytes per second between two machines, in one direction, all links of a machine together."""
    rings_power: float = 0.0
    """Power of the number of rings that pass the network at a time, with which the share of it grows that they reach.
    """
    network_sec: float = 0.0
    """Seconds of a small message between two machines."""
    host_link: float
    """Bytes per second between the device and its host, in one direction."""
    host_memory: float
    """Bytes read and written per second by a process of the host, while one for each device does so."""
    disk: float
    """Bytes written to disk per second by a single process."""
    half_width: float = 0.0
    """Width of the model at which matrix products reach half of ``matrix``; 0: they reach it at every width."""
    half_rows: float = 0.0
    """Tokens of a micro batch, for each tensor rank, at which matrix products reach half of it."""
    odd_heads: float = 1.0
    """Time of attention in fp16 or bf16 whose heads are no multiple of 8 wide, in units of the time of others."""
    contention: float = 0.0
    """Seconds of computation lost in a second of communication that it hides: both use a GPU's units and memory."""
    gathers_hidden: float = 1.0
    """Share of ZeRO-3's communication that computation hides, of what ``Traffic.hidden`` allows."""
    host_sec: float = 0.0
    """Seconds that the host of a GPU needs to start an operation; a GPU with less to do waits."""
    host_apart: bool = field(default=False, repr=False)
    """Whether ``kernel_sec`` was measured without the start by the host: then any program may wait for it."""

    def in_precision(self, precision: str, *, slower: float) -> "Rates":
        """The rates with which computation in ``precision`` takes ``slower`` times as long."""
        slower_rates: dict[str, Any] = {}
        for name in COMPUTED:
            rates = getattr(self, name)
            slower_rates[name] = {**rates, precision: changed(rates[precision], lambda rate: rate / slower)}
        return replace(self, **slower_rates)

    def slower(self, times: float, *names: str) -> "Rates":
        """The rates with which that which these fields are of takes ``times`` as long."""
        seconds = {name for name in names if name.endswith("_sec")}
        longer = {name: changed(getattr(self, name), lambda each: each * times) for name in seconds}
        lower = {name: changed(getattr(self, name), lambda each: each / times) for name in {*names} - seconds}
        return replace(self, **longer, **lower)

    def scaled(self, *, compute: float, communication: float) -> "Rates":
        """The rates with which computation and communication take these times as long."""
        return self.slower(compute, *COMPUTING).slower(communication, *SENDING)


COMPUTED = ("matrix", "attention", "elementwise", "logits")
"""Fields with rates by precision."""
COMPUTING, SENDING = (*COMPUTED, "memory", "kernel_sec"), ("bus", "collective_sec", "network", "network_sec")
"""Fields of computation and of communication."""


def changed(rates: Any, change: Callable[[float], float]) -> Any:
    """A rate, or a mapping of rates, nested or not, after ``change``."""
    if isinstance(rates, Mapping):
        return {key: changed(rate, change) for key, rate in rates.items()}
    return change(rates)


def interpolated(values: Mapping[int, float], place: float) -> float:
    """The value at ``place``, interpolated on a logarithmic scale; outside of the keys, that of the nearest key."""
    points = sorted(values.items())
    low, slow = max((point for point in points if point[0] <= place), default=points[0])
    high, fast = min((point for point in points if point[0] >= place), default=points[-1])
    share = 0.0 if low == high else math.log(place / low) / math.log(high / low)
    return float(slow * (fast / slow) ** min(1.0, max(0.0, share)))


def on_grid(values: Mapping[int, Mapping[int, float]], first: float, second: float) -> float:
    """The value at a place of two dimensions, as ``interpolated`` along each."""
    return interpolated({each: interpolated(along, second) for each, along in values.items()}, first)


def at_ranks(by_ranks: Mapping[int, T], ranks: int) -> T:
    """The value of the smallest key that is at least ``ranks``, or else of the largest key."""
    return by_ranks[min((number for number in by_ranks if number >= ranks), default=max(by_ranks))]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, or several that are alike, and what its devices do: likely, at least and at most."""

    name: str
    kind: str
    """``cpu`` or ``cuda``."""
    devices: int
    """Number of devices of one machine."""
    memory_bytes: int
    """Memory of one device."""
    host_bytes: int
    """Memory of the host, for each device; on a CPU it is the device's own."""
    precisions: tuple[str, ...]
    """Precisions that the devices support and for which rates are known."""
    rates: Rates
    slowest: Rates
    fastest: Rates
    assumed: bool
    """Whether the rates are assumed shares of a datasheet's peaks."""
    basis: str
    """Source of the rates, in a sentence."""
    network_gbps: float | None = None
    """Gbit/s between two machines; None if nobody measured or stated them."""
    network_basis: str = ""
    """Source of this speed; empty if it is stated or assumed."""
    uncorrected: "Machine | None" = None
    """The same before own runs corrected its rates; None if none did."""

    @property
    def fingerprint(self) -> str:
        """Tells machines with other rates apart; own runs change none.

        Of six digits: another CPU, or another Python's ``sum``, rounds the last ones of a fit differently.
        """
        machine = self.uncorrected or self
        rates = re.sub(r"\d+\.\d+(e[+-]?\d+)?", lambda number: f"{float(number[0]):.6g}", repr(machine.rates))
        return hashlib.sha256(f"{machine.name} {rates}".encode()).hexdigest()[:12]

    shares: Mapping[str, "Share"] = field(default_factory=dict)
    """Shares of a datasheet's peaks, by the names of ``ASSUMED``; empty where others hold, and without a datasheet."""
    unmeasured: tuple[str, ...] = ()
    """Names in ``ASSUMED`` of the rates that a calibration lacks, and that the datasheet's constants stand for."""


# ``calibration.json``: what a machine was measured to do, and its rates for predictions.

SCHEMA_VERSION = "2.1"
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Precision = Annotated[str, Field(pattern=r"^(fp32|bf16|fp16)$")]
Operation = Annotated[str, Field(pattern=r"^(all_reduce|reduce_scatter|all_gather|all_to_all|send)$")]
Size = Annotated[int, Field(ge=1, lt=10**9)]
BySize = Annotated[dict[Size, Annotated[dict[Size, Rate], Field(min_length=1)]], Field(min_length=1)]
_BY_PRECISION = ("matrix_flops", "attention_flops", "elementwise_bytes", "logits")
_NEEDED = (*(f"{name}_per_sec" for name in (*_BY_PRECISION, "triad_bytes", "host_link_bytes")), "operation_sec")
"""What a calibration must have if no datasheet stands for it."""
ALLOWANCE = 1.25
"""Factor by which a step may take longer, or shorter, than measured rates say: a roofline leaves out caches, memory
allocation and how processes disturb each other."""


@dataclass(frozen=True, kw_only=True)
class _Schema:
    """Fields of the files of every schema."""

    schema_version: str


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates of the slowest device while ``devices`` processes measured at the same time.

    None, or no entry, where they were not measured. Of a GPU in the table its datasheet's constant stands for them.
    """

    devices: Positive
    matrix_flops_per_sec: dict[Precision, BySize] = field(default_factory=dict)
    """FLOP/s of a linear layer's forward and backward pass, by precision, width and rows."""
    attention_flops_per_sec: dict[Precision, BySize] = field(default_factory=dict)
    """FLOP/s by precision, head size and length."""
    elementwise_bytes_per_sec: dict[Precision, Rate] = field(default_factory=dict)
    logits_per_sec: dict[Precision, Rate] = field(default_factory=dict)
    triad_bytes_per_sec: Rate | None = None
    """``a = b + s * c`` on arrays that fit into no cache."""
    operation_sec: Rate | None = None
    """Seconds of an operation on 16 numbers, in a forward or backward pass; of a GPU's host, that starts it."""
    kernel_sec: Rate | None = None
    """Seconds that a GPU needs for such an operation that waits in its queue."""
    bus_bytes_per_sec: dict[Operation, dict[Precision, Rate]] | None = None
    """Ring bytes, by collective operation and precision; None for one device."""
    all_reduce_sec: Rate | None = None
    """Seconds of the all-reduce of one number."""
    message_sec: dict[Operation, dict[Size, Rate]] = field(default_factory=dict)
    """Seconds of a collective operation, by its payload in bytes; empty where ``all_reduce_sec`` says all."""
    host_link_bytes_per_sec: Rate | None = None

    def __post_init__(self) -> None:
        """Refuse rates that a prediction would miss.

        Raises:
            ValueError: one line.
        """
        for name in _BY_PRECISION:
            found = getattr(self, f"{name}_per_sec")
            if found and self.matrix_flops_per_sec and found.keys() != self.matrix_flops_per_sec.keys():
                raise ValueError(f"{name}_per_sec: has other precisions than matrix_flops_per_sec")
        bus = self.bus_bytes_per_sec or {}
        for operation in ("all_reduce", *self.message_sec) if bus else ():
            if "fp32" not in bus.get(operation, {}):
                raise ValueError(f"bus_bytes_per_sec: has no {operation} of fp32")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Speed of the slowest link between machines, as ``doctor.py --machine`` measured it with all of them at once."""

    timestamp_utc: str
    machines: Positive
    transport: str
    """Library that carried the messages."""
    bytes_per_sec: Rate
    """Bytes per second from all ranks of a machine to those of another, while as many come from a third."""
    latency_sec: Rate
    """Seconds of a small message."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The file."""

    schema_version: str
    timestamp_utc: str
    machine: Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]
    """Processor or GPU, and number of devices; in characters that can be printed."""
    hardware: dict[str, Any]
    env: dict[str, Any]
    threads_per_device: int | None
    """CPU threads of a process; None on GPUs."""
    memory_bytes_per_device: Positive
    host_bytes_per_device: Positive
    seconds: Finite
    """Duration of the calibration, in seconds."""
    disk_bytes_per_sec: Rate
    ceilings: Annotated[list[Ceilings], Field(min_length=1)]
    """Rates by the number of devices."""
    network: Network | None = None

    def __post_init__(self) -> None:
        """Refuse a calibration with gaps that no datasheet fills.

        Raises:
            ValueError: one line.
        """
        lacking = [name for name in _NEEDED for each in self.ceilings if not getattr(each, name)]
        if lacking and self.gpu is None:
            raise ValueError(f"ceilings: have no {lacking[0]}, and the table has no such GPU to take it from")

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``."""
        return str(self.hardware.get("device", "cpu"))

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that was measured; None on a CPU, and if the table lacks it."""
        name, memory = (self.hardware.get(key) for key in ("gpu_name", "gpu_memory_bytes"))
        return recognise(name, memory) if self.kind != "cpu" and name and memory else None


def read_calibration(path: Path) -> Calibration:
    """Read the file, or the calibration in a record of ``benchmark.py plan``.

    Raises:
        UserError: it is missing, or not a calibration of this schema; one line.
    """
    try:
        data = read_bytes(path)
        record = parse_json(data)
        if isinstance(record, dict) and isinstance(record.get("calibration"), dict):
            data = json.dumps(record["calibration"]).encode()
        schema = parse_as(data, _Schema, unknown_keys=True).schema_version
        if schema.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
            reads = f"this program reads {SCHEMA_VERSION}: write it again with --calibrate"
            raise UserError(f"--machine {path}: has schema {schema}, but {reads}")
        return parse_as(data, Calibration, unknown_keys=True)
    except JsonError as error:
        cure = "write one with --calibrate"
        raise UserError(f"--machine {path}: cannot be read as a calibration ({error}); {cure}") from error


def calibrated_machine(
    calibration: Calibration, *, devices: int | None = None, network: float | None = None
) -> Machine:
    """The machine that was measured.

    Args:
        calibration: its file.
        devices: how many of its devices work at the same time; None for all that were measured.
        network: bytes per second between two such machines, in one direction, instead of what was measured; as of a
            datasheet, an assumed share of them is reached.
    """
    by_devices = {each.devices: each for each in calibration.ceilings}
    most = max(by_devices)
    chosen = at_ranks(by_devices, devices or most)
    measured, found, gpu = _measured(calibration, chosen), calibration.network, calibration.gpu
    if network is not None:
        measured.pop("network", None)
    sheet = datasheet_machine(gpu, devices=most, network=network) if gpu else None
    if sheet:
        bases = [sheet.rates, sheet.slowest, sheet.fastest]
    else:  # a CPU or an unknown GPU; one device has no link: its memory stands for it
        bus, starts = measured.get("bus", {1: chosen.triad_bytes_per_sec}), {1: chosen.operation_sec}
        missing = {"bus": bus, "collective_sec": starts, "network": min(bus.values())}
        bases = [Rates(**missing | {"host_memory": HOST_MEMORY_BYTES_PER_SEC.likely} | measured)] * 3
    rates, slowest, fastest = (
        _completed(base, {name: getattr(scaled, name) for name in measured}) if sheet else scaled
        for base, times in zip(bases, (1, ALLOWANCE, 1 / ALLOWANCE), strict=True)
        for scaled in [_completed(bases[0], measured).scaled(compute=times, communication=times)]
    )
    if network is None:
        network = found.bytes_per_sec if found else None
    elif sheet is None:
        rates, slowest, fastest = (
            replace(each, network=share * network)
            for each, share in ((rates, LINK.likely), (slowest, LINK.least), (fastest, LINK.most))
        )
    unmeasured = [what for what, (names, *_) in ASSUMED.items() if sheet and not measured.keys() >= set(names)]
    assumed = f" (assumed from its datasheet: {', '.join(unmeasured)})" if unmeasured else ""
    return Machine(
        name=calibration.machine,
        kind=calibration.kind,
        devices=most,
        memory_bytes=calibration.memory_bytes_per_device,
        host_bytes=calibration.host_bytes_per_device,
        precisions=tuple(each for each in rates.matrix if all(each in getattr(rates, name) for name in COMPUTED)),
        rates=rates,
        slowest=slowest,
        fastest=fastest,
        assumed=False,
        basis=(
            f"measured on {calibration.timestamp_utc[:10]} with {chosen.devices} of {most} "
            f"device{'s' * (most != 1)} at work{assumed}; the range allows {ALLOWANCE - 1:.0%} for what a roofline "
            "leaves out"
        ),
        shares=sheet.shares if sheet else {},
        unmeasured=tuple(unmeasured),
        network_gbps=network and network * 8 / 1e9,
        network_basis=f"measured on {found.timestamp_utc[:10]} with {found.transport}" if found else "",
    )


def _completed(base: Rates, measured: Mapping[str, Any]) -> Rates:
    """``base`` with what was measured, one by one: matrices at several widths and rows, networks with all ranks."""
    no_longer: dict[str, Any] = {"half_width": 0.0, "half_rows": 0.0} if "matrix" in measured else {}
    no_longer |= {"rings_power": 0.0} if "network" in measured else {}
    return replace(base, **measured, **no_longer, host_apart=measured.keys() >= {"kernel_sec", "host_sec"})


def _measured(calibration: Calibration, ceilings: Ceilings) -> dict[str, Any]:
    """The fields of ``Rates`` that were measured."""
    several = {each.devices: each for each in calibration.ceilings if each.bus_bytes_per_sec and each.all_reduce_sec}
    bus = {number: each.bus_bytes_per_sec or {} for number, each in several.items()}
    most, on_cpu = bus[max(bus)] if bus else {}, calibration.kind == "cpu"
    found = calibration.network
    fields = {
        **{"matrix": ceilings.matrix_flops_per_sec, "attention": ceilings.attention_flops_per_sec},
        **{"elementwise": ceilings.elementwise_bytes_per_sec, "logits": ceilings.logits_per_sec},
        "memory": ceilings.triad_bytes_per_sec,
        "kernel_sec": ceilings.operation_sec if on_cpu else ceilings.kernel_sec,
        "host_sec": None if on_cpu else ceilings.operation_sec,
        "bus": {number: each["all_reduce"]["fp32"] for number, each in bus.items()},
        "collective_sec": {number: _start_sec(each) for number, each in several.items()},
        "slowness": changed(most, lambda rate: most["all_reduce"]["fp32"] / rate),
        **({"network": found.bytes_per_sec, "network_sec": found.latency_sec} if found else {}),
        **{"host_link": ceilings.host_link_bytes_per_sec, "disk": calibration.disk_bytes_per_sec},
        "host_memory": ceilings.triad_bytes_per_sec if on_cpu else None,
    }
    return {name: value for name, value in fields.items() if value}


def _start_sec(ceilings: Ceilings) -> float:
    """Seconds that a collective operation takes to start: of those of any message, the nearest to the times of all.

    A message takes its start, and its ring bytes at the rate of the largest ones. Distances are of logarithms: an
    operation that starts fast counts as much as one that starts slowly. The sum of one number is a message, too.
    """
    bus = ceilings.bus_bytes_per_sec or {}
    messages = [
        (seconds, size * ring_factor(operation, ceilings.devices) / bus[operation]["fp32"])
        for operation, by_size in ceilings.message_sec.items()
        for size, seconds in by_size.items()
    ]
    starts = [ceilings.all_reduce_sec or 0.0, *(seconds - sent for seconds, sent in messages if seconds > sent)]
    return min(starts, key=lambda start: sum(math.log((start + sent) / seconds) ** 2 for seconds, sent in messages))


DEVICES_PER_MACHINE = 8
NETWORK_BYTES_PER_SEC = 12_500_000_000
"""100 Gbit/s."""


@dataclass(frozen=True)
class Share:
    """Assumed shares of a peak."""

    least: float
    likely: float
    most: float


MATRIX = Share(0.40, 0.60, 0.80)
ATTENTION = Share(0.20, 0.35, 0.50)
MEMORY = Share(0.60, 0.75, 0.90)
LINK = Share(0.40, 0.65, 0.85)
HOST_LINK_BYTES_PER_SEC = Share(8e9, 16e9, 25e9)
"""PCIe 3.0 x16 to 4.0 x16; GPUs of a machine often share a switch."""
HOST_MEMORY_BYTES_PER_SEC = Share(8e9, 16e9, 32e9)
"""Bandwidth of the process of each GPU; a host's memory bandwidth is divided by its GPUs."""
HOST_SHARE = 2
"""Assumed memory of a host, in units of that of its GPUs; cloud instances have from 1.5 to 4."""
DISK_BYTES_PER_SEC = Share(0.3e9, 1e9, 2e9)
KERNEL_SEC = Share(8e-6, 4e-6, 2e-6)
"""A short kernel and its launch."""
COLLECTIVE_SEC = Share(40e-6, 20e-6, 10e-6)
ASSUMED = {
    "matrix products": (("matrix",), MATRIX, 100, "% of the peak"),
    "attention": (("attention",), ATTENTION, 100, "% of the peak"),
    "memory": (("memory", "elementwise", "logits"), MEMORY, 100, "% of the bandwidth"),
    "link between GPUs": (("bus",), LINK, 100, "% of the bandwidth"),
    "link to the host": (("host_link",), HOST_LINK_BYTES_PER_SEC, 1e-9, " GB/s"),
    "memory of the host": (("host_memory",), HOST_MEMORY_BYTES_PER_SEC, 1e-9, " GB/s"),
    "disk": (("disk",), DISK_BYTES_PER_SEC, 1e-9, " GB/s"),
    "start of an operation": (("kernel_sec",), KERNEL_SEC, 1e6, " \N{MICRO SIGN}s"),
    "start of a collective operation": (("collective_sec",), COLLECTIVE_SEC, 1e6, " \N{MICRO SIGN}s"),
}
"""Assumptions: the fields of ``Rates``, the values, and their scale and unit for people."""
BYTES_PER_LOGIT = {"fp32": 24, "bf16": 20, "fp16": 28}
"""Bytes per logit that softmax and its gradient read and write: logits, log-probabilities in fp32, their
exponentials."""


def datasheet_machine(
    gpu: Gpu,
    *,
    devices: int = DEVICES_PER_MACHINE,
    network: float | None = None,
    host_bytes: int | None = None,
    values: Mapping[str, float] | None = None,
    fabric: str = "",
) -> Machine:
    """Machines with GPUs of this kind.

    Args:
        gpu: from the table.
        devices: GPUs of a machine.
        network: bytes per second between two machines, in one direction; None for an assumed 100 Gbit/s.
        host_bytes: memory of the host for each GPU; None for ``HOST_SHARE`` of the GPU's.
        values: of the constants, instead of the package's.
        fabric: the kind of the network, where one has constants of its own: ``omni-path``.
    """
    values, network = constants() if values is None else values, network or NETWORK_BYTES_PER_SEC
    shares = _shares(gpu, values, fabric)
    matrix, memory, link = shares["matrix products"], shares["memory"], shares["link between GPUs"]
    return Machine(
        name=gpu.key,
        kind="cuda",
        devices=devices,
        memory_bytes=gpu.memory_bytes,
        host_bytes=HOST_SHARE * gpu.memory_bytes if host_bytes is None else host_bytes,
        precisions=tuple(name for name in ("fp32", "bf16", "fp16") if gpu.peak(name)),
        rates=_datasheet_rates(gpu, "likely", network, values, shares),
        slowest=_datasheet_rates(gpu, "least", network, values, shares),
        fastest=_datasheet_rates(gpu, "most", network, values, shares),
        assumed=True,
        basis=(
            f"{'assumed' if matrix == MATRIX else 'fitted to steps that others measured (docs/exam.md)'}: "
            f"{matrix.least:.0%} to {matrix.most:.0%} of the datasheet's matrix peak, {memory.least:.0%} to "
            f"{memory.most:.0%} of its memory bandwidth, {link.least:.0%} to {link.most:.0%} of its link; not measured"
        ),
        shares=shares,
        network_gbps=network * 8 / 1e9,
    )


_FULL_WIDTH = 312e12
"""Matrix peak, in FLOP/s, of the A100; ``half_width`` and ``half_rows`` are those of GPUs with at least as many units.
Smaller matrices fill smaller GPUs, in proportion."""
_AS_FITTED = ("rings_power", "odd_heads", "contention", "gathers_hidden")
"""Constants that are fields of ``Rates``, and the same for every GPU."""


def _shares(gpu: Gpu, values: Mapping[str, float], fabric: str) -> dict[str, Share]:
    """Shares that ``gpu`` reaches, by the names of ``ASSUMED``, and of the network: fitted where a constant says so.

    The assumed range is laid around the fitted one, and ends at the whole.
    """
    shares = dict[str, Share]()
    for what, name, assumed, kind in (
        ("matrix products", "matrix_share", MATRIX, gpu.family),
        ("attention", "attention_share", ATTENTION, gpu.family),
        ("memory", "memory_share", MEMORY, ""),
        ("link between GPUs", "link_share", LINK, ""),
        ("network", "network_share", LINK, fabric),
    ):
        fitted = values.get(f"{name}.{kind}", values.get(name, assumed.likely)) / assumed.likely
        least, likely, most = (min(1.0, fitted * share) for share in (assumed.least, assumed.likely, assumed.most))
        shares[what] = Share(least, likely, most)
    return shares


def _datasheet_rates(
    gpu: Gpu, which: str, network: float, values: Mapping[str, float], shares: Mapping[str, Share]
) -> Rates:
    of = operator.attrgetter(which)
    peaks = {name: peak for name in ("fp32", "bf16", "fp16") if (peak := gpu.peak(name))}
    units = min(1.0, max(peaks.values()) / _FULL_WIDTH)
    memory = of(shares["memory"]) * gpu.memory_bytes_per_sec
    as_fitted: dict[str, Any] = {name: values[name] for name in _AS_FITTED if name in values}
    return Rates(
        matrix={name: {1: {1: of(shares["matrix products"]) * peak}} for name, peak in peaks.items()},
        attention={name: {1: {1: of(shares["attention"]) * peak}} for name, peak in peaks.items()},
        elementwise=dict.fromkeys(peaks, memory),
        logits={name: memory / BYTES_PER_LOGIT[name] for name in peaks},
        memory=memory,
        kernel_sec=of(KERNEL_SEC),
        bus={1: of(shares["link between GPUs"]) * gpu.interconnect.bytes_per_sec},
        collective_sec={1: of(COLLECTIVE_SEC)},
        network=of(shares["network"]) * network,
        host_link=of(HOST_LINK_BYTES_PER_SEC),
        host_memory=of(HOST_MEMORY_BYTES_PER_SEC),
        disk=of(DISK_BYTES_PER_SEC),
        half_width=values.get("half_width", 0.0) * units,
        half_rows=values.get("half_rows", 0.0) * units,
        **as_fitted,
        host_sec=values.get("host_sec", 0.0) * of(KERNEL_SEC) / KERNEL_SEC.likely,
    )


CONSTANTS = Path(__file__).with_name("constants.json")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the predictions for GPUs, fitted to steps that others measured (``benchmark.py exam --fit``)."""

    name: str
    """What it is; after a point the family of GPUs, or the network, that it is for."""
    value: float
    neutral: float
    """The value that was assumed before, or that stands for no such effect."""
    unit: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The file."""

    constants: list[Constant]
    growth: float
    """By how much a range grows with the distance of measured rows: a logarithm for each unit of distance."""
    residuals: dict[str, tuple[float, float]]
    """Row of ``measured.json`` -> predicted time / measured time: with these constants, and without its source."""


@cache
def fitted() -> Fitted:
    """The constants, and what they were fitted to."""
    return read_as(CONSTANTS, Fitted)


@cache
def constants() -> dict[str, float]:
    """The values by name."""
    return {each.name: each.value for each in fitted().constants}


# The share of its devices' peak that a training uses: model FLOPs utilisation (MFU).


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Turns the throughput of a training into figures of one device."""

    flops_per_token: int
    devices: int | None
    """Number of devices; None if it changed during the run."""
    peak: float | None
    """Dense FLOP/s of one device; None on a CPU that was not calibrated, and on a GPU that the table lacks."""

    def per_device(self, tokens_per_sec: float | None) -> float | None:
        """Tokens per second of one device."""
        return None if tokens_per_sec is None or self.devices is None else tokens_per_sec / self.devices

    def mfu(self, tokens_per_sec: float | None) -> float | None:
        """The FLOPs that the model needs for these tokens, as a share of what the devices could do (PaLM, appendix B).

        Args:
            tokens_per_sec: over all devices.
        """
        own = self.per_device(tokens_per_sec)
        return None if own is None or self.peak is None else own * self.flops_per_token / self.peak


def utilisation(
    model: GPT2Config,
    hardware: Mapping[str, Any],
    *,
    seq_length: float,
    precision: str,
    calibration: Calibration | None = None,
) -> Utilisation:
    """The utilisation of a training.

    Args:
        model: the model.
        hardware: the block of that name of a record; its GPU is that of rank 0.
        seq_length: tokens of a sequence, or of a document, as ``flops_per_token`` takes them.
        precision: of the matrix products.
        calibration: what was measured on this machine, or another. A CPU has no datasheet's peak: the fastest product
            of one of as many devices stands for it.
    """
    name, memory = hardware.get("gpu_name"), hardware.get("gpu_memory_bytes")
    gpu = recognise(name, memory) if name is not None and memory is not None else None
    peak: float | None = gpu.peak(precision) if gpu else None
    if calibration is not None and hardware.get("device") == "cpu":
        here = calibration.hardware | {"threads_per_device": calibration.threads_per_device}
        if (
            all(here.get(key) == hardware.get(key) for key in ("device", "cpu_name", "cpu_count", "threads_per_device"))
            and (ranks := hardware.get("local_world_size")) is not None
        ):
            ceilings = at_ranks({each.devices: each for each in calibration.ceilings}, ranks)
            by_width = ceilings.matrix_flops_per_sec.get(precision, {})
            peak = max((rate for by_rows in by_width.values() for rate in by_rows.values()), default=None)
    return Utilisation(flops_per_token=model.flops_per_token(seq_length), devices=hardware.get("world_size"), peak=peak)
