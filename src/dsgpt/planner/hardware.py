"""The tables of GPUs and of prices.

The table of GPUs, ``hardware.json``, from the vendor's datasheets. Every peak is dense. Datasheets of GPUs since
Ampere often print the figure with 2:4 sparsity, which is twice as large; training does not use it.

The price table, ``prices.json``: list prices of cloud instances as known on a date, and what a training costs. Nothing
here asks a provider: users check the prices, or give their own.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dsgpt.common.errors import UserError, did_you_mean
from dsgpt.common.json_files import JsonError, Positive, read_as
from dsgpt.common.text import in_words

GPUS = Path(__file__).with_name("hardware.json")
FAMILIES = {"a100": ("a100",), "h100": ("h100", "h200", "gh200", "b200"), "v100": ("v100", "t4", "quadro-rtx-8000")}
"""Family -> beginnings of the keys of its GPUs: NVIDIA's Ampere, Hopper and Volta for data centres; those after Hopper,
of which nobody measured many steps, are taken as Hopper, Turing as Volta. All others are ``other``."""
MEANT = {"h100": "h100-80gb"}
"""Names that leave out what decides, and the GPU of the table that is meant."""
_LEAST, _MOST = 0.98, 1.12
"""Memory that a device reports, in units of the datasheet's: an H200 of 141 GB reports 151e9 bytes. A slice of a GPU
(MIG) reports less, and reaches only a part of the peak."""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Links between the GPUs of a machine."""

    kind: str
    """The generation of NVLink or PCIe."""
    bytes_per_sec: Positive
    """Bandwidth of one GPU in one direction: half of the figure that datasheets print."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A document of the vendor, or a page that was read to check its figures."""

    title: str
    """Of a page that was read: what it says, and what none that could be opened says."""
    url: str
    read_on: str | None = None
    """The date on which it was read; None if nobody opened it from here."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of the table."""

    key: str
    """Name on command lines."""
    reported_names: list[str]
    """Regular expressions of the names that drivers report for it."""
    memory_bytes: Positive
    """Memory by the datasheet, in GB of 10^9 bytes. Devices report up to 8% more."""
    peak_flops: dict[str, Positive | None]
    """Dense FLOP/s that the datasheet promises for each number format; None where the hardware has no units for it.
    ``fp32`` is without tensor cores: PyTorch computes it so, unless TF32 is allowed. ``fp16`` accumulates in fp32."""
    memory_bytes_per_sec: Positive
    interconnect: Interconnect
    tdp_watts: Positive
    sources: list[Source]

    @property
    def family(self) -> str:
        """Name of the GPUs that reach similar shares of their peaks."""
        return next((name for name, keys in FAMILIES.items() if self.key.startswith(keys)), "other")

    def peak(self, precision: str) -> int | None:
        """Dense FLOP/s in ``fp32``, ``tf32``, ``fp16`` or ``bf16``; None where the hardware has no units for it."""
        return self.peak_flops[precision]


@cache
def gpus() -> dict[str, Gpu]:
    """Every GPU of the table, by its key."""
    return {gpu.key: gpu for gpu in read_as(GPUS, dict[str, list[Gpu]])["gpus"]}


def find_gpu(name: str) -> Gpu:
    """The GPU with this key, in any case; ``h100`` is that of most clouds.

    Raises:
        UserError: the table has none; the message names the nearest key and all keys.
    """
    table, key = gpus(), MEANT.get(name.lower(), name.lower())
    if key not in table:
        longer = [each for each in table if name and each.startswith(key)]
        near = f" (did you mean {in_words(longer)}?)" if longer else did_you_mean(name, table)
        raise UserError(f"no GPU {name} in the table{near}: known are {', '.join(table)}")
    return table[key]


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


PRICES = Path(__file__).with_name("prices.json")
SEC_PER_HOUR = 3600
Dollars = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Price:
    """One instance of one provider."""

    provider: str
    instance: str
    gpu: str
    """Key of the GPU in ``hardware.json``."""
    gpus: Positive
    on_demand_usd_per_hour: Dollars | None
    """Price of the whole instance; None where no list price is known."""
    spot_usd_per_hour: Dollars | None
    """Price of the whole instance; None where no list price is known."""
    region: str
    known_on: str
    """The date on which this was a list price; of a row without one, on which its page was read."""
    source: str
    """The provider's page."""
    network_gbps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Gbit/s between two of them; None where no page was read."""
    network_known_on: str | None = None
    """Date of the page that says so, or the day on which it was read if it has no date."""
    network_source: str | None = None
    network_cards: Positive | None = None
    """Network cards that carry it; None where no page was read."""
    gpu_link: str | None = None
    """What links its GPUs, in the words of a page; None where none was read, or for one GPU."""
    network_more_sources: list[str] = field(default_factory=list)
    """Pages that name the cards and the link, if it is another than ``network_source``."""


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """The file."""

    notice: str
    prices: list[Price]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a training on one offer."""

    offer: str
    """Provider and instance, or the user's own price."""
    instances: int = 1
    """Number of instances that are rented; whole ones, even if not all of their GPUs work."""
    usd_per_hour: float
    """Price of all of them."""
    usd: float
    least: float
    most: float
    known_on: str | None = None
    """The date of the price; None for the user's own."""
    source: str | None = None


def read_prices(path: Path | None = None) -> PriceTable:
    """Read a price table; without ``path`` the package's.

    Raises:
        UserError: it is missing or not a table; one line.
    """
    try:
        return read_as(path or PRICES, PriceTable)
    except JsonError as error:
        one = "src/dsgpt/planner/prices.json is one"
        raise UserError(f"--prices {path}: cannot be read as a price table ({error}); {one}") from error


def find_instance(table: PriceTable, name: str) -> Price:
    """The row of an instance, by its name in any case.

    Raises:
        UserError: the table has none of that name; one line.
    """
    rows = {price.instance: price for price in table.prices}
    if (row := next((price for key, price in rows.items() if key.lower() == name.lower()), None)) is None:
        raise UserError(f"--instance {name}: not in the price table{did_you_mean(name, rows)}: {', '.join(rows)}")
    return row


def cost(offer: str, usd_per_hour: float, *, seconds: tuple[float, float, float], **row: Any) -> Cost:
    """Cost of a training on an offer; its ``seconds`` are the likely ones, the least and the most.

    ``row`` holds the other fields of ``Cost``, if the offer is a row of the table.
    """
    usd, least, most = (usd_per_hour * each / SEC_PER_HOUR for each in seconds)
    return Cost(offer=offer, usd_per_hour=usd_per_hour, usd=usd, least=least, most=most, **row)
