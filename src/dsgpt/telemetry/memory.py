"""Memory: the peak of the process, the model state of a rank, and both with the traffic of one step.

Bytes of model state that a rank holds, by device: what ``planner.strategies`` predicts. Storages are counted, so
views add nothing.

Bytes of model state that a rank holds in an optimizer step, and bytes that it sends. Measured once in a run. The
record calls the result ``cost``.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsgpt.machine.device import gather_objects
from dsgpt.record.schema import PEAKS
from dsgpt.telemetry.communication import Communication, Traffic
from dsgpt.telemetry.meter import WARM_UP_STEPS

# Peak memory of this process, in bytes; None where it is unknown.


def peak_rss_bytes() -> int | None:
    """Largest resident set of this process so far.

    From ``/proc/self/status`` (VmHWM): ``getrusage`` also counts the launcher's memory from before the ``exec``.
    """
    with contextlib.suppress(FileNotFoundError):
        peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
        return int(peak[1]) * 1024 if peak else None
    return None


def peak_cuda_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Largest memory (allocated, reserved by PyTorch) on this rank's GPU so far; (None, None) on CPU."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def peak_bytes(kind: str) -> int | None:
    """The peak of what this process used of its device so far: allocated on its GPU, or resident in host memory.

    Args:
        kind: ``cuda`` or ``cpu``.
    """
    return peak_cuda_bytes(torch.device(kind))[0] if kind == "cuda" else peak_rss_bytes()


class TrainingPeaks:
    """Peak memory of training steps and validations, without that of saves and generation as far as possible.

    The GPU's counters are reset after each save. The peak of the resident set cannot be reset: from the next ``note``
    on it includes what a save used. It never includes what the last save or measuring inference used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.figures: dict[str, int | None] = dict.fromkeys(PEAKS)
        """The memory keys of an epoch's record and of the summary, as of the last ``note``."""
        self.reset()

    def reset(self) -> None:
        """Reset the GPU's counters: what was allocated until now was not for training."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def note(self) -> None:
        """Read the peaks so far."""
        for name, peak in zip(PEAKS, (*peak_cuda_bytes(self._device), peak_rss_bytes()), strict=True):
            self.figures[name] = max((value for value in (self.figures[name], peak) if value is not None), default=None)


StateBytes = dict[str, dict[str, int]]
"""Bytes by category and device type, for example ``{"optimizer": {"cpu": 4096}}``."""


def state_bytes(categories: Mapping[str, Iterable[Tensor]]) -> StateBytes:
    """Bytes of the storages under the tensors of each category.

    A storage counts whole and once, in the first category that has a tensor in it: views of a flat buffer, or gradients
    in a bucket, count as the buffer. A category without bytes has an empty dictionary.
    """
    seen: set[tuple[str, int]] = set()
    totals: StateBytes = {}
    for category, tensors in categories.items():
        by_device = totals.setdefault(category, {})
        for tensor in tensors:
            storage, kind = tensor.untyped_storage(), tensor.device.type
            place = (str(tensor.device), storage.data_ptr())
            if storage.nbytes() and place not in seen:
                seen.add(place)
                by_device[kind] = by_device.get(kind, 0) + storage.nbytes()
    return totals


MODEL_STATE = ("parameters", "gradients", "optimizer", "master")
"""The categories that make up the total; buffers are reported separately."""


class TrafficMeter:
    """Measures one step of this process on every rank; other steps run unchanged.

    It measures the last warm-up step, or the last step of a shorter run: the first steps allocate and trace, and the
    times of later ones are reported. A step that fp16 overflow skipped has no gradients to measure, so the next step is
    measured too.

    Args:
        state_tensors: returns this rank's model state at the moment, by category, with ``gradients`` among them.
        last_step: of the run.
        report: called on every rank with the ``cost`` block of the record.
    """

    def __init__(
        self,
        state_tensors: Callable[[], Mapping[str, Iterable[Tensor]]],
        *,
        last_step: int,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._state_tensors = state_tensors
        self._last_step = last_step
        self._report = report
        self._steps_seen = 0
        self.done = False
        """Whether a step was measured."""
        self.watched = False
        """Whether the latest step was measured, which made it slower."""
        self.own: list[Traffic] | None = None
        """The traffic of this rank in the measured step; None before, and if it cannot be counted."""

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """A context for optimizer step ``step``: measures it if it is the one to measure; collective."""
        self._steps_seen += 1
        self.watched = not self.done and (self._steps_seen >= WARM_UP_STEPS or step == self._last_step)
        if not self.watched:
            yield
            return
        gradients: dict[str, int] | None = None

        def note(*_: Any) -> None:
            """Keep the most: an engine may step one parameter group after another, and free the gradients of each."""
            nonlocal gradients
            now = state_bytes(self._state_tensors())["gradients"]
            gradients = max(gradients or {}, now, key=lambda by_device: sum(by_device.values()))

        hook = register_optimizer_step_pre_hook(note)
        try:
            with Communication() as communication:
                yield
        finally:
            hook.remove()
        state: KnownStateBytes = {**state_bytes(self._state_tensors()), "gradients": gradients}
        ranks: list[RankTraffic] = gather_objects((state, communication.traffic, communication.unknown))
        self.own = None if communication.unknown else communication.traffic
        self.done = all(state["gradients"] is not None for state, _, _ in ranks)
        if self.done or step == self._last_step:
            self._report(traffic_record(step, ranks))


def traffic_line(measured: dict[str, Any]) -> str:
    """The ``cost`` block in one line."""
    state, traffic = measured["model_state_bytes_per_rank"], measured["communication_per_step"]
    parts = ", ".join(f"{name} {_size(state[name])}" for name in MODEL_STATE if state[name] != 0)
    sent = "unknown" if traffic is None else _size(traffic["ring_bytes_per_rank"])
    return f"cost: model state of a rank {_size(state['total'])} ({parts}); sent per step {sent}"


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= pair[0]), (1, "B"))
    return f"{size / unit:.3g} {name}"


KnownStateBytes = Mapping[str, dict[str, int] | None]
"""``StateBytes``, with None for gradients that no optimizer stepped on."""
RankTraffic = tuple[KnownStateBytes, list[Traffic], set[str]]
"""What one rank measured: its model state, its traffic, and operators that could not be counted."""


def traffic_record(step: int, ranks: list[RankTraffic]) -> dict[str, Any]:
    """The ``cost`` block of the record: every rank's totals, and details of the ranks that hold and send most."""
    unknown = sorted({operator for _, _, unknown in ranks for operator in unknown})
    return {
        "measured_step": step,
        "model_state_bytes_per_rank": _state_record([state for state, _, _ in ranks]),
        "communication_per_step": None if unknown else _communication_record([traffic for _, traffic, _ in ranks]),
        "uncounted_operators": unknown,
    }


def _state_record(ranks: list[KnownStateBytes]) -> dict[str, Any]:
    """The gradients and the total are None where the measured step was skipped."""
    sums = [
        {name: None if by_device is None else sum(by_device.values()) for name, by_device in state.items()}
        for state in ranks
    ]
    complete = all(state["gradients"] is not None for state in sums)
    totals = [sum(state[name] or 0 for name in MODEL_STATE) for state in sums]
    largest = totals.index(max(totals))
    devices: dict[str, int] = {}
    for name in MODEL_STATE:
        for device, size in (ranks[largest][name] or {}).items():
            devices[device] = devices.get(device, 0) + size
    return {
        "rank": largest,
        **{name: sums[largest][name] for name in MODEL_STATE},
        "total": totals[largest] if complete else None,
        "by_device": devices,
        "buffers": sums[largest]["buffers"],
        "total_by_rank": totals if complete else None,
    }


def _communication_record(ranks: list[list[Traffic]]) -> dict[str, Any]:
    sent = [sum(entry.ring_bytes for entry in traffic) for traffic in ranks]
    busiest = sent.index(max(sent))
    return {
        "rank": busiest,
        "ring_bytes_per_rank": sent[busiest],
        "payload_bytes_per_rank": sum(entry.payload_bytes for entry in ranks[busiest]),
        "by_op": [
            {
                "op": entry.operation,
                "ranks": list(entry.group),
                "calls": entry.calls,
                "payload_bytes": entry.payload_bytes,
                "ring_bytes": entry.ring_bytes,
            }
            for entry in ranks[busiest]
        ],
        "ring_bytes_by_rank": sent,
    }
