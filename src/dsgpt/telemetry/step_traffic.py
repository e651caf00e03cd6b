"""Bytes of model state that a rank holds in an optimizer step, and bytes that it sends. Measured once in a run.

The record calls the result ``cost``.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsgpt.runtime.process_group import gather_objects
from dsgpt.telemetry.communication import Communication, Traffic
from dsgpt.telemetry.meter import WARM_UP_STEPS
from dsgpt.telemetry.model_state import state_bytes

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
        gradients = _GradientWatch(self._state_tensors)
        with gradients, Communication() as communication:
            yield
        state: KnownStateBytes = {**state_bytes(self._state_tensors()), "gradients": gradients.most}
        ranks: list[RankTraffic] = gather_objects((state, communication.traffic, communication.unknown))
        self.own = None if communication.unknown else communication.traffic
        self.done = all(state["gradients"] is not None for state, _, _ in ranks)
        if self.done or step == self._last_step:
            self._report(traffic_record(step, ranks))


class _GradientWatch:
    """The most bytes that gradients take when an optimizer begins to step; None if no optimizer stepped.

    An engine may step one parameter group after another, and free the gradients of each.
    """

    def __init__(self, state_tensors: Callable[[], Mapping[str, Iterable[Tensor]]]) -> None:
        self._state_tensors = state_tensors
        self.most: dict[str, int] | None = None

    def _note(self, *_: Any) -> None:
        now = state_bytes(self._state_tensors())["gradients"]
        self.most = max(self.most or {}, now, key=lambda by_device: sum(by_device.values()))

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._note)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def traffic_line(measured: dict[str, Any]) -> str:
    """The ``cost`` block in one line."""
    state, traffic = measured["model_state_bytes_per_rank"], measured["communication_per_step"]
    parts = ", ".join(f"{name} {_size(state[name])}" for name in MODEL_STATE if state[name] != 0)
    sent = "unknown" if traffic is None else _size(traffic["ring_bytes_per_rank"])
    return f"cost: model state of a rank {_size(state['total'])} ({parts}); sent per step {sent}"


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    unit, name = next(
        (10**power, name)
        for power, name in ((9, "GB"), (6, "MB"), (3, "kB"), (0, "B"))
        if size >= 10**power or power == 0
    )
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
    known = all(state["gradients"] is not None for state in sums)
    totals = [sum(state[name] or 0 for name in MODEL_STATE) for state in sums]
    largest = totals.index(max(totals))
    devices: dict[str, int] = {}
    for name in MODEL_STATE:
        for device, size in (ranks[largest][name] or {}).items():
            devices[device] = devices.get(device, 0) + size
    return {
        "rank": largest,
        **{name: sums[largest][name] for name in MODEL_STATE},
        "total": totals[largest] if known else None,
        "by_device": devices,
        "buffers": sums[largest]["buffers"],
        "total_by_rank": totals if known else None,
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
