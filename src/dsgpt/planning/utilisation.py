"""The share of its devices' peak that a training uses: model FLOPs utilisation (MFU)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsgpt.model.config import GPT2Config
from dsgpt.planning.calibrations import Calibration, matrix_ceiling
from dsgpt.planning.hardware import recognise


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Turns the throughput of a training into figures of one device."""

    flops_per_token: int
    devices: int | None
    """None where they changed during the run."""
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
    seq_length: int,
    precision: str,
    calibration: Calibration | None = None,
) -> Utilisation:
    """The utilisation of a training.

    Args:
        model: the model.
        hardware: the block of that name of a record; its GPU is that of rank 0.
        seq_length: tokens of a sequence.
        precision: of the matrix products.
        calibration: what was measured on this machine, or another. A CPU has no datasheet's peak.
    """
    name, memory = hardware.get("gpu_name"), hardware.get("gpu_memory_bytes")
    gpu = recognise(name, memory) if name is not None and memory is not None else None
    peak: float | None = gpu.peak(precision) if gpu else None
    if calibration is not None and hardware.get("device") == "cpu":
        peak = matrix_ceiling(calibration, hardware, precision)
    return Utilisation(flops_per_token=model.flops_per_token(seq_length), devices=hardware.get("world_size"), peak=peak)
