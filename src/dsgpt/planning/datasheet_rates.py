"""The rates of a GPU that nobody measured: shares of its datasheet's peaks, assumed as ranges.

A share is the likely one between the least and the most that a tuned PyTorch program is expected to reach. None of them
was measured on a GPU by this project; ``docs/planner-published.md`` holds what follows from them against published
figures.
"""

from dataclasses import dataclass

from dsgpt.planning.hardware import Gpu
from dsgpt.planning.rates import Machine, Rates

DEVICES_PER_MACHINE = 8
NETWORK_BYTES_PER_SEC = 12_500_000_000
"""100 Gbit/s."""


@dataclass(frozen=True)
class Share:
    """Of a peak: at least, likely, at most."""

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
"""Of the process of each GPU; a host's memory bandwidth is divided by its GPUs."""
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
"""What is assumed: the fields of ``Rates``, the values, and their scale and unit for people."""
BYTES_PER_LOGIT = {"fp32": 24, "bf16": 20, "fp16": 28}
"""What the steps of softmax and gradient read and write: logits, log-probabilities in fp32, their exponentials."""


def datasheet_machine(
    gpu: Gpu,
    *,
    devices: int = DEVICES_PER_MACHINE,
    network: float = NETWORK_BYTES_PER_SEC,
    host_bytes: int | None = None,
) -> Machine:
    """Machines with GPUs of this kind.

    Args:
        gpu: from the table.
        devices: GPUs of a machine.
        network: bytes per second between two machines, in one direction.
        host_bytes: memory of the host for each GPU; None for ``HOST_SHARE`` of the GPU's.
    """
    return Machine(
        name=gpu.key,
        kind="cuda",
        devices=devices,
        memory_bytes=gpu.memory_bytes,
        host_bytes=HOST_SHARE * gpu.memory_bytes if host_bytes is None else host_bytes,
        precisions=tuple(name for name in ("fp32", "bf16", "fp16") if gpu.peak(name)),
        rates=_rates(gpu, "likely", network),
        slowest=_rates(gpu, "least", network),
        fastest=_rates(gpu, "most", network),
        assumed=True,
        basis=(
            f"assumed: {MATRIX.least:.0%} to {MATRIX.most:.0%} of the datasheet's matrix peak, {MEMORY.least:.0%} to "
            f"{MEMORY.most:.0%} of its memory bandwidth, {LINK.least:.0%} to {LINK.most:.0%} of its link; not measured"
        ),
    )


def _rates(gpu: Gpu, which: str, network: float) -> Rates:
    def of(share: Share) -> float:
        found: float = getattr(share, which)
        return found

    peaks = {name: peak for name in ("fp32", "bf16", "fp16") if (peak := gpu.peak(name))}
    memory = of(MEMORY) * gpu.memory_bytes_per_sec
    return Rates(
        matrix={name: {1: {1: of(MATRIX) * peak}} for name, peak in peaks.items()},
        attention={name: {1: {1: of(ATTENTION) * peak}} for name, peak in peaks.items()},
        elementwise=dict.fromkeys(peaks, memory),
        logits={name: memory / BYTES_PER_LOGIT[name] for name in peaks},
        memory=memory,
        kernel_sec=of(KERNEL_SEC),
        bus={1: of(LINK) * gpu.interconnect.bytes_per_sec},
        collective_sec={1: of(COLLECTIVE_SEC)},
        network=of(LINK) * network,
        host_link=of(HOST_LINK_BYTES_PER_SEC),
        host_memory=of(HOST_MEMORY_BYTES_PER_SEC),
        disk=of(DISK_BYTES_PER_SEC),
    )
