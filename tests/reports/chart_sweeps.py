"""Records of sweeps for the tests, with made-up figures: no measurement of anything."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsgpt.record.runs import Footprint
from dsgpt.record.sweeps import Compared, Comparison, Spread, State, Sweep, SweepCell, Turn

MB = 10**6
STATE = {"weights": 8.0 * MB, "gradients": 8.0 * MB, "optimizer": 16.0 * MB}
FOOTPRINT = Footprint(
    model_state=STATE,
    state_rank0=32.0 * MB,
    predicted={**STATE, "activations": 10.0 * MB, "other": 2.0 * MB},
    peak=400.0 * MB,
    peak_kind="resident",
    step_times_sec=[0.1 + 0.001 * step for step in range(21)],
)


def spread(value: float) -> Spread:
    return Spread(median=value, smallest=0.9 * value, largest=1.1 * value, values=[0.9 * value, value, 1.1 * value])


def cell(name: str, devices: int, *, state: State = State.DONE, footprint: Footprint | None = FOOTPRINT) -> SweepCell:
    """A cell with one turn."""
    done = state == State.DONE
    turn = Turn(
        cell=name,
        repeat=1,
        place=1,
        state=state,
        message=None if done else "CUDA out of memory",
        seconds=5.0,
        footprint=footprint if done else None,
    )
    speed = spread(1000.0 * devices) if done else None
    return SweepCell(
        name=name,
        devices=devices,
        launcher="torchrun",
        flags=[],
        turns=[turn],
        tokens_per_sec=speed,
        sent_bytes_per_step=8e6 if done else None,
        communication_share=spread(0.25) if done else None,
    )


def compared(name: str, speed_up: float | None, devices: int, *, same: bool = True) -> Compared:
    """A cell beside a baseline on one device."""
    return Compared(
        cell=name,
        same_work="same work: yes" if same else "same work: no (global batch 8 vs 16)",
        comparable=same and speed_up is not None,
        speed_up=None if speed_up is None else spread(speed_up),
        efficiency=None if speed_up is None else speed_up / devices,
    )


def sweep(cells: Sequence[SweepCell], comparisons: Sequence[Comparison], **changes: Any) -> Sweep:
    values: dict[str, Any] = {
        "schema_version": "1.0",
        "timestamp_utc": "2026-03-04T05:06:07+00:00",
        "git_commit": None,
        "env": {},
        "hardware": {"device": "cpu", "cpu_name": "Fixture CPU", "cpu_count": 2},
        "suite": "scaling",
        "seed": 1,
        "repeats": 3,
        "limit_sec": 900,
        "target_loss": None,
        "price_per_device_hour": None,
        "seconds": 60.0,
    }
    return Sweep(**values | changes, cells=list(cells), comparisons=list(comparisons))


def scaling(speeds: Mapping[str, Mapping[int, float]], *, weak: bool = False) -> Sweep:
    """A sweep of a baseline and of strategies with these speed-ups by number of devices."""
    base = cell("baseline on 1 device", 1)
    cells, others = [base], []
    for name, by_devices in speeds.items():
        for devices, value in by_devices.items():
            words = f"{name} on {devices} device{'s' * (devices > 1)}" + (f", batch {32 * devices}" if weak else "")
            cells.append(cell(words, devices))
            others.append(compared(words, value, devices))
    kind = ("weak scaling", "weak scaling") if weak else ("strong scaling", "same training")
    return sweep(cells, [Comparison(name=kind[0], kind=kind[1], baseline=base.name, cells=others)])


def write_sweep(folder: Path, record: Sweep) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.json"
    path.write_text(json.dumps(asdict(record)))
    return path
