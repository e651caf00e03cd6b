"""Loss curves: from metrics.jsonl if there is one, otherwise one point at the end of each epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from dsgpt.common.errors import UserError
from dsgpt.reports.fields import Fields, parse_json

SMOOTH_FROM = 200
"""Curves with more points are drawn faint, with their trailing mean on top."""


class Point(NamedTuple):
    """A loss and where it was measured; a coordinate that was not recorded is None."""

    loss: float
    """Mean loss, nats per token."""
    step: float | None
    """Completed optimizer steps."""
    time: float | None
    """Seconds of training steps so far (no evaluation, no saving)."""
    epoch: float | None
    """Completed epochs; known only for the points of ``per_epoch`` curves."""
    tokens: float | None = None
    """Tokens trained on so far."""


@dataclass(frozen=True)
class Curve:
    """Losses, in the order of measurement."""

    points: tuple[Point, ...] = ()
    per_epoch: bool = False
    """True if each point is the mean of an epoch, because steps were not recorded."""

    def at_steps(self) -> dict[float, float]:
        """Loss by optimizer step, for the points whose step is known."""
        return {point.step: point.loss for point in self.points if point.step is not None}


def read_step_curves(path: Path, notes: list[str]) -> tuple[Curve, Curve]:
    """Training and validation curve of a ``metrics.jsonl``; both are empty if the file is missing.

    An incomplete last line is ignored, because a run may be writing it; other broken lines are skipped and noted. If
    a step was recorded twice, the last line counts.

    Raises:
        UserError: the file cannot be read.
    """
    train: dict[float, Point] = {}
    validation: dict[float, Point] = {}
    tokens: dict[float, float | None] = {}
    doubts: list[str] = []
    for line in read_objects(path, doubts) if path.exists() else ():
        fields = Fields(line, notes=doubts)
        step = fields.number("step")
        if step is None:
            continue
        tokens[step] = fields.number("tokens") if fields.has("tokens") else tokens.get(step)
        for key, curve in (("loss", train), ("val_loss", validation)):
            loss = fields.number(key)
            if loss is not None:
                curve[step] = Point(loss, step, fields.number("train_time_sec"), None, tokens[step])
    if doubts:
        notes.append(f"metrics.jsonl: {doubts[0]}" + (f" (and {len(doubts) - 1} more like it)" if doubts[1:] else ""))
    return _by_step(train), _by_step(validation)


def read_step_times(path: Path) -> list[float]:
    """Seconds of each step of a ``metrics.jsonl`` that it does not mark as warm-up; empty if it marks none.

    Raises:
        UserError: the file cannot be read.
    """
    times: dict[float, float] = {}
    for line in read_objects(path, []) if path.exists() else ():
        fields = Fields(line, notes=[])
        step, seconds = fields.number("step"), fields.number("step_time_sec")
        if step is not None and seconds is not None and fields.raw("warm_up") is False:
            times[step] = seconds
    return [times[step] for step in sorted(times)]


def epoch_curve(
    losses: Sequence[float | None],
    *,
    steps: Sequence[float | None],
    times: Sequence[float | None],
    tokens: Sequence[float | None] = (),
) -> Curve:
    """One point at the end of each epoch; steps, times (seconds) and tokens are per epoch and may be unknown."""
    ends = zip(*(_running_sums(values, len(losses)) for values in (steps, times, tokens)), strict=True)
    points = [
        Point(loss, step, time, epoch, count)
        for epoch, (loss, (step, time, count)) in enumerate(zip(losses, ends, strict=True), start=1)
        if loss is not None
    ]
    return Curve(tuple(points), per_epoch=True)


def smoothed(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of each value with the ``window - 1`` before it (fewer at the start)."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(window, i + 1) for i in range(len(values))]


def window_of(points: int) -> int:
    """Number of points in the trailing mean of a curve of ``points``; 1 if the points themselves are drawn."""
    return max(1, points // 50) if points > SMOOTH_FROM else 1


def _by_step(points: dict[float, Point]) -> Curve:
    return Curve(tuple(points[step] for step in sorted(points)))


def _running_sums(values: Sequence[float | None], length: int) -> list[float | None]:
    """Cumulative sums, unknown from the first unknown value on; all unknown unless there are ``length`` values."""
    if len(values) != length:
        return [None] * length
    return list(accumulate(values, _sum_if_known))


def _sum_if_known(total: float | None, value: float | None) -> float | None:
    return None if total is None or value is None else total + value


def read_objects(path: Path, doubts: list[str]) -> Iterator[dict[str, Any]]:
    """Each line of a JSON-lines file that is an object; ``doubts`` receives the others, except an incomplete last one.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line, doubts)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield value
        elif number < len(lines):  # the last line has no newline yet
            doubts.append(f"line {number} is broken: skipped")
