"""How fast a device computes, reads and sends: the rates of a machine that predictions of time divide by.

They are measured (``dsgpt.planning.calibrations``), or shares of a datasheet's peaks that are assumed
(``dsgpt.planning.datasheet_rates``).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

CALIBRATION = Path("checkpoint") / "calibration.json"
"""Where a calibration is written and looked for by default."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device does while every device of its machine works."""

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
    """How many times as long as an all-reduce of fp32 numbers other operations take for as many ring bytes, by
    operation and precision; empty where they were not measured."""
    network: float
    """Bytes per second between two machines, in one direction, all links of a machine together."""
    host_link: float
    """Bytes per second between the device and its host, in one direction."""
    host_memory: float
    """Bytes read and written per second by a process of the host, while one for each device does so."""
    disk: float
    """Bytes written to disk per second by a single process."""

    def matrix_at(self, precision: str, *, width: float, rows: int) -> float:
        """FLOP/s of a block's matrices of this width with this many tokens."""
        by_width = self.matrix[precision]
        return interpolated({each: interpolated(rates, rows) for each, rates in by_width.items()}, width)

    def attention_at(self, precision: str, *, head_size: int, length: int) -> float:
        """FLOP/s of attention with heads of this size in sequences of this length."""
        by_head_size = self.attention[precision]
        return interpolated({size: interpolated(rates, length) for size, rates in by_head_size.items()}, head_size)

    def slowness_of(self, operation: str, precision: str) -> float:
        """How many times as long as an all-reduce in fp32 takes for as many ring bytes.

        Operations that only move numbers are known in fp32 alone. A reduction to one rank sums as an all-reduce does.
        """
        known = self.slowness.get("all_reduce" if operation == "reduce" else operation, {})
        return known.get(precision, known.get("fp32", 1.0))

    def in_precision(self, precision: str, *, slower: float) -> "Rates":
        """The rates with which computation in ``precision`` takes ``slower`` times as long."""

        def in_one(rates: Mapping[str, float]) -> dict[str, float]:
            return {name: rate / slower if name == precision else rate for name, rate in rates.items()}

        all_slower = self.scaled(compute=slower, communication=1)
        return replace(
            self,
            matrix={**self.matrix, precision: all_slower.matrix[precision]},
            attention={**self.attention, precision: all_slower.attention[precision]},
            elementwise=in_one(self.elementwise),
            logits=in_one(self.logits),
        )

    def scaled(self, *, compute: float, communication: float) -> "Rates":
        """The rates with which computation and communication take these times as long."""

        def slower(rates: Mapping[str, float]) -> dict[str, float]:
            return {name: rate / compute for name, rate in rates.items()}

        return replace(
            self,
            matrix=_slower(self.matrix, compute),
            attention=_slower(self.attention, compute),
            elementwise=slower(self.elementwise),
            logits=slower(self.logits),
            memory=self.memory / compute,
            kernel_sec=self.kernel_sec * compute,
            bus={ranks: rate / communication for ranks, rate in self.bus.items()},
            collective_sec={ranks: seconds * communication for ranks, seconds in self.collective_sec.items()},
        )


def _slower(
    rates: Mapping[str, Mapping[int, Mapping[int, float]]], times: float
) -> dict[str, dict[int, dict[int, float]]]:
    return {
        precision: {one: {other: rate / times for other, rate in inner.items()} for one, inner in outer.items()}
        for precision, outer in rates.items()
    }


def interpolated(known: Mapping[int, float], place: float) -> float:
    """The value at ``place`` between the nearest known ones, on a scale of powers; at the ends the nearest."""
    points = sorted(known.items())
    below = [point for point in points if point[0] <= place] or points[:1]
    above = [point for point in points if point[0] >= place] or points[-1:]
    (low, slow), (high, fast) = below[-1], above[0]
    share = 0.0 if low == high else math.log(place / low) / math.log(high / low)
    found: float = slow * (fast / slow) ** min(1.0, max(0.0, share))
    return found


def at_ranks(known: Mapping[int, float], ranks: int) -> float:
    """The value for the fewest known ranks that are not fewer than ``ranks``, else for the most."""
    return known[nearest_ranks(known, ranks)]


def nearest_ranks(known: Iterable[int], ranks: int) -> int:
    """The fewest known ranks that are not fewer than ``ranks``, else the most."""
    numbers = list(known)
    enough = [number for number in numbers if number >= ranks]
    return min(enough) if enough else max(numbers)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, or several that are alike, and what its devices do: likely, at least and at most."""

    name: str
    kind: str
    """``cpu`` or ``cuda``."""
    devices: int
    """Of one machine."""
    memory_bytes: int
    """Of one device."""
    host_bytes: int
    """Memory of the host, for each device; on a CPU it is the device's own."""
    precisions: tuple[str, ...]
    """That the devices have units for, and that were measured."""
    rates: Rates
    slowest: Rates
    fastest: Rates
    assumed: bool
    """Whether the rates are assumed shares of a datasheet's peaks."""
    basis: str
    """Where the rates come from, in a sentence."""

    @property
    def default_precision(self) -> str:
        """The one that ``--precision auto`` takes."""
        if self.kind == "cpu":
            return "fp32"
        return "bf16" if "bf16" in self.precisions else "fp16"
