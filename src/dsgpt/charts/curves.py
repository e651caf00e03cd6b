"""Loss panels: one curve per run, against optimizer steps, training seconds or epochs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dsgpt.charts.comparison import shorten
from dsgpt.charts.options import current
from dsgpt.charts.style import look, note_inside, number_axis
from dsgpt.record.runs import Curve, Point, Run, smoothed, window_of

TIME_TITLE = "Loss by training time"
ZOOMED = "axis does not start at 0"
SMALLEST_SPAN = 0.01
"""The least range of a loss axis, in nats per token: rounding differences must not fill a panel."""


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a loss panel."""

    coordinate: str
    """The ``Point`` field that it shows."""
    label: str
    picture: str
    """The title of a picture drawn on it."""
    missing: str
    """What a run did not record if it cannot be drawn on this axis."""
    scale: float = 1.0
    """Units of the field per unit of the axis."""


STEPS = Axis("step", "optimizer steps", "Loss by optimizer step", "steps not recorded")
EPOCHS = Axis("epoch", "epochs (optimizer steps not recorded)", "Loss by epoch", "not recorded")


def curve_of(run: Run, kind: str) -> Curve:
    """The run's "train" or "validation" curve."""
    return run.train_curve if kind == "train" else run.val_curve


def step_axis(runs: Sequence[Run]) -> Axis:
    """Optimizer steps, or epochs if no run recorded steps."""
    points = [point for run in runs for kind in ("train", "validation") for point in curve_of(run, kind).points]
    return EPOCHS if points and all(point.step is None for point in points) else STEPS


def time_axis(runs: Sequence[Run]) -> Axis:
    """Training time, in the largest unit that is at most a third of the longest run."""
    longest = _largest(runs, "time")
    for unit, seconds in (("hours", 3600), ("minutes", 60)):
        if longest >= 3 * seconds:
            return Axis("time", f"training time ({unit})", TIME_TITLE, "times not recorded", seconds)
    return Axis("time", "training time (s)", TIME_TITLE, "times not recorded")


def token_axis(runs: Sequence[Run]) -> Axis:
    """Tokens trained on, in the largest unit of which the longest run has at least one."""
    most = _largest(runs, "tokens")
    units = (("billions of tokens", 1e9), ("millions of tokens", 1e6), ("thousands of tokens", 1e3))
    unit, count = next((each for each in units if most >= each[1]), ("tokens", 1.0))
    return Axis("tokens", unit, "Loss by tokens", "tokens not recorded", count)


def money_axis(price: float) -> Axis:
    """Money, for runs that ``in_money`` returned."""
    label = f"cost of all devices, at {price:g} for a device hour"
    return Axis("time", label, "Loss by money", "times or devices not recorded")


def in_money(run: Run, price: float) -> Run:
    """The run with the money that its devices cost in place of the time of each point; ``price`` of a device hour."""
    per_second = None if run.device_count is None else run.device_count * price / 3600

    def priced(curve: Curve) -> Curve:
        known = [
            None if point.time is None or per_second is None else point.time * per_second for point in curve.points
        ]
        points = (point._replace(time=cost) for point, cost in zip(curve.points, known, strict=True))
        return replace(curve, points=tuple(points))

    return replace(run, train_curve=priced(run.train_curve), val_curve=priced(run.val_curve))


def _largest(runs: Sequence[Run], coordinate: str) -> float:
    points = (point for run in runs for kind in ("train", "validation") for point in curve_of(run, kind).points)
    return max((getattr(point, coordinate) or 0 for point in points), default=0)


def is_drawable(runs: Sequence[Run], axis: Axis) -> bool:
    """Whether a curve of any run can be drawn on ``axis``."""
    return any(placeable(curve_of(run, kind), axis) for run in runs for kind in ("train", "validation"))


@dataclass(frozen=True)
class End:
    """The end of a curve, in the units of its panel."""

    name: str
    x: float
    y: float


def draw_losses(axes: Axes, runs: Sequence[Run], *, kind: str, axis: Axis) -> list[End]:
    """Draw the "train" or "validation" curves of all runs that have one, and return their ends."""
    ends = []
    for index, run in enumerate(runs):
        if placeable(curve_of(run, kind), axis):
            ends.append(_draw_curve(axes, run, kind=kind, axis=axis, order=index, count=len(runs)))
    axes.set(title=f"{kind.capitalize()} loss", xlabel=axis.label, ylabel=f"nats per token ({ZOOMED})")
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)  # tick labels are the losses, without offset
    sns.despine(ax=axes)
    if ends:
        axes.set_xlim(left=0)
        low, high = axes.get_ylim()
        missing = max(0.0, SMALLEST_SPAN - (high - low))
        axes.set_ylim(low - missing / 2, high + missing / 2)
        number_axis(axes.xaxis, 6, whole=axis.coordinate in {"step", "epoch"})
    else:
        axes.set(xticks=[], yticks=[], ylabel="")
        recorded = any(curve_of(run, kind).points for run in runs)
        text = axis.missing if recorded else "not recorded"
        note_inside(axes, text, x=0.5, y=0.5, transform=axes.transAxes, ha="center")
    return ends


def ends_can_be_labelled(axes: Axes, ends: Sequence[End]) -> bool:
    """Whether names at the ends of the curves would overlap neither each other nor a curve."""
    low, high = axes.get_ylim()
    losses = sorted(end.y for end in ends)
    apart = all(b - a > 0.08 * (high - low) for a, b in pairwise(losses))
    return apart and min(end.x for end in ends) > 0.97 * max(end.x for end in ends) if ends else False


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write each run's name and last drawn loss at the end of its curve."""
    for end in ends:
        axes.annotate(
            f"{shorten(end.name, 18)}\n{end.y:.3f}", (end.x, end.y), xytext=(7, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip


def placeable(curve: Curve, axis: Axis) -> list[Point]:
    """The points whose coordinate on ``axis`` was recorded."""
    return [point for point in curve.points if getattr(point, axis.coordinate) is not None]


def legend_handles(runs: Sequence[Run], axis: Axis) -> list[Line2D]:
    """Legend entries, one per run, with what the run did not record."""
    handles = []
    for index, run in enumerate(runs):
        drawn = [kind for kind in ("train", "validation") if placeable(curve_of(run, kind), axis)]
        label = shorten(run.name, 34)
        if not drawn:
            label += f" ({axis.missing})"
        elif len(drawn) == 1:
            label += f" ({drawn[0]} only)"
        handles.append(Line2D([], [], **look(index, count=len(runs)).line, label=label))
    return handles


def _draw_curve(axes: Axes, run: Run, *, kind: str, axis: Axis, order: int, count: int) -> End:
    style = look(order, count=count)
    curve = curve_of(run, kind)
    points = placeable(curve, axis)
    x = [getattr(point, axis.coordinate) / axis.scale for point in points]
    y = [point.loss for point in points]
    draw = partial(sns.lineplot, estimator=None, sort=False, color=style.colour, ax=axes, legend=False)
    window = window_of(len(curve.points))
    if window > 1:
        draw(x=x, y=y, alpha=max(0.07, 0.3 / count), lw=0.5, zorder=1.5)  # under every mean
        y = smoothed(y, window=window)
    apart = max(1, len(x) // 8)  # about eight markers per curve, at different places for each run
    size = style.marker_size if len(x) <= 12 else 6
    every = 1 if len(x) <= 12 else (order * apart // 3 % apart, apart)
    draw(
        x=x,
        y=y,
        linestyle=style.dashes,
        lw=style.width,
        marker=style.marker,
        markersize=size,
        markeredgecolor=current().background,
        markevery=every,
        clip_on=False,  # the marker of the last step is whole
        zorder=2 + order / count,
    )
    return End(run.name, x[-1], y[-1])
