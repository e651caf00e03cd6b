"""The charts of runs: their figures as bars, their losses as curves, their inference, and the overview."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D

from dsgpt.charts import comparison, style
from dsgpt.charts.comparison import INFERENCE_NOISE, Quantity, shorten, speed_up
from dsgpt.charts.memory import communication_chart, memory_chart, step_times_chart, utilisation_chart
from dsgpt.charts.style import Chart, Frame, Row, Texts
from dsgpt.charts.themes import LIGHT
from dsgpt.record.equal_work import inference_stamps, judge, machine_line, stamps, work_stamps
from dsgpt.record.runs import FLAT_SCHEMA, TOO_SHORT, Curve, Run, smoothed, window_of
from dsgpt.record.suites import NOT_RECORDED, of_runs

# Bar panels: one measured quantity of every run.


@dataclass(frozen=True)
class Bars:
    """One measured quantity of every run."""

    title: str
    axis: str
    """Label of the axis, unit included."""
    quantity: Quantity
    scale: float = 1.0
    """Units of the quantity per unit of the axis."""
    caption: str = ""


TRAINING_TIME = Bars("Training time", "seconds of training steps", comparison.TIME_ROW)
THROUGHPUT = Bars("Training throughput", "tokens per second, all devices", comparison.THROUGHPUT_ROW)
LATENCY = Bars("Inference latency", "seconds, batch 1", comparison.LATENCY_ROW, 1.0, INFERENCE_NOISE)
INFERENCE = Bars("Inference throughput", "tokens per second, batch 1", comparison.INFERENCE_ROW, 1.0, INFERENCE_NOISE)
_GPU, _HOST = "GB allocated on rank 0's GPU", "GB resident (RSS) in rank 0's process"
OF_RANK_0 = "Rank 0 only. GPU memory and host memory (RSS) are different quantities and never share a panel."
GPU_MEMORY = Bars("Peak GPU memory", _GPU, comparison.GPU_MEMORY_ROW, 1e9, OF_RANK_0)
HOST_MEMORY = Bars("Peak host memory", _HOST, comparison.HOST_MEMORY_ROW, 1e9, OF_RANK_0)


def memory_bars(runs: Sequence[Run]) -> list[Bars]:
    """GPU memory if any run recorded it, and host memory if a run recorded only that: never both in one panel."""
    panels = [GPU_MEMORY] if any(run.gpu_memory is not None for run in runs) else []
    if any(run.gpu_memory is None and run.host_memory is not None for run in runs) or not panels:
        panels.append(HOST_MEMORY)
    return panels


def draw_bars(axes: Axes, bars: Bars, runs: Sequence[Run], *, label_width: int = 30) -> None:
    """Draw one bar per run, the first run on top; a run without the value gets a note instead of a bar."""
    rows = []
    for run in runs:
        value = bars.quantity.value(run)
        label = TOO_SHORT if bars is THROUGHPUT and run.too_short_to_time else NOT_RECORDED
        if value is not None:
            value, label = value / bars.scale, bars.quantity.form(value)
        rows.append(Row(name=run.name, value=value, label=label))
    style.draw_rows(axes, rows, label_width=label_width)
    axes.set(title=bars.title, xlabel=f"{bars.axis}\n({'less' if bars.quantity.lower_is_better else 'more'} is better)")


# Loss panels: one curve per run, against optimizer steps, training seconds, tokens, money or epochs.


LOSS_KINDS = ("train", "validation")
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
    """Words for a run that cannot be drawn on this axis, because its record lacks something."""
    scale: Callable[[Run], float | None] = lambda _: 1.0
    """Units of the axis per unit of the field; None if the run cannot be drawn on it."""


STEPS = Axis("step", "optimizer steps", "Loss by optimizer step", "steps not recorded")
EPOCHS = Axis("epoch", "epochs (optimizer steps not recorded)", "Loss by epoch", "not recorded")


def curve_of(run: Run, kind: str) -> Curve:
    """The run's "train" or "validation" curve."""
    return run.train_curve if kind == "train" else run.val_curve


def places(run: Run, kind: str, axis: Axis) -> list[tuple[float, float]]:
    """Coordinates on ``axis`` and losses of the points of a curve, without points whose coordinate was not recorded."""
    scale = axis.scale(run)
    points = [(getattr(point, axis.coordinate), point.loss) for point in curve_of(run, kind).points]
    return [(place * scale, loss) for place, loss in points if scale is not None and place is not None]


def step_axis(runs: Sequence[Run]) -> Axis:
    """Optimizer steps, or epochs if no run recorded steps."""
    has_steps = any(places(run, kind, STEPS) for run in runs for kind in LOSS_KINDS)
    return STEPS if has_steps or not any(curve_of(run, kind).points for run in runs for kind in LOSS_KINDS) else EPOCHS


def _most(runs: Sequence[Run], coordinate: str) -> float:
    points = [point for run in runs for kind in LOSS_KINDS for point in curve_of(run, kind).points]
    return max((getattr(point, coordinate) or 0.0 for point in points), default=0.0)


def time_axis(runs: Sequence[Run]) -> Axis:
    """Training time, in the largest unit that is at most a third of the longest run."""
    units = (("hours", 3600), ("minutes", 60))
    unit, size = next((each for each in units if _most(runs, "time") >= 3 * each[1]), ("s", 1))
    return Axis("time", f"training time ({unit})", "Loss by training time", "times not recorded", lambda _: 1 / size)


def token_axis(runs: Sequence[Run]) -> Axis:
    """Tokens trained on, in the largest unit of which the longest run has at least one."""
    units = (("billions of tokens", 1e9), ("millions of tokens", 1e6), ("thousands of tokens", 1e3))
    unit, count = next((each for each in units if _most(runs, "tokens") >= each[1]), ("tokens", 1.0))
    return Axis("tokens", unit, "Loss by tokens", "tokens not recorded", lambda _: 1 / count)


def money_axis(price: float) -> Axis:
    """The axis of the cost of a run's devices, at ``price`` for a device hour."""
    label, missing = f"cost of all devices, at {price:g} for a device hour", "times or devices not recorded"
    return Axis(
        "time", label, "Loss by money", missing, lambda run: run.device_count and run.device_count * price / 3600
    )


End = tuple[str, float, float]
"""The name of a run, and the end of its curve in the units of its panel."""


def draw_losses(axes: Axes, runs: Sequence[Run], *, kind: str, axis: Axis) -> list[End]:
    """Draw the "train" or "validation" curves of all runs that have one, and return their ends."""
    ends = []
    for index, run in enumerate(runs):
        look, points = style.look(index, count=len(runs)), places(run, kind, axis)
        if not points:
            continue
        x, y = [place for place, _ in points], [loss for _, loss in points]
        window = window_of(len(curve_of(run, kind).points))
        if window > 1:  # every step, under every mean
            axes.plot(x, y, color=look.colour, alpha=max(0.07, 0.3 / len(runs)), lw=0.5, zorder=1.5)
            y = smoothed(np.array(y), window=window).tolist()
        apart = max(1, len(x) // 8)  # about eight markers per curve, at different places for each run
        few = len(x) <= 12
        marks: dict[str, Any] = {"markersize": look.marker_size if few else 6, "markeredgewidth": 0.75}
        marks["markevery"] = 1 if few else (index * apart // 3 % apart, apart)
        marks |= {"markeredgecolor": style.current().background, "clip_on": False}  # the last step's marker is whole
        axes.plot(x, y, **look.line, **marks, zorder=2 + index / len(runs))
        ends.append((run.name, x[-1], y[-1]))
    axes.set(title=f"{kind.capitalize()} loss", xlabel=axis.label, ylabel=f"nats per token ({style.ZOOMED})")
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)  # tick labels are the losses, without offset
    if ends:
        axes.set_xlim(left=0)
        low, high = axes.get_ylim()
        missing = max(0.0, SMALLEST_SPAN - (high - low))
        axes.set_ylim(low - missing / 2, high + missing / 2)
        style.number_axis(axes.xaxis, 6, whole=axis.coordinate in {"step", "epoch"})
    else:
        axes.set(xticks=[], yticks=[], ylabel="")
        text = axis.missing if any(curve_of(run, kind).points for run in runs) else "not recorded"
        style.note_inside(axes, text, x=0.5, y=0.5, transform=axes.transAxes, ha="center")
    return ends


def ends_can_be_labelled(axes: Axes, ends: Sequence[End]) -> bool:
    """Whether names at the ends of the curves would overlap neither each other nor a curve."""
    low, high = axes.get_ylim()
    apart = all(b - a > 0.08 * (high - low) for a, b in pairwise(sorted(y for _, _, y in ends)))
    return apart and min(x for _, x, _ in ends) > 0.97 * max(x for _, x, _ in ends) if ends else False


# Inference: latency against throughput.


def latency_chart(runs: Sequence[Run], texts: Texts) -> Frame | str:
    """Tokens per second over latency, a point for each run that has both; below and to the right is worse."""
    points = [(run.inference_latency, run.inference_tokens_per_sec) for run in runs]
    if not any(latency and speed for latency, speed in points):
        return "no run recorded both its inference latency and throughput"
    captions = ("Greedy generation from one prompt, with a key-value cache.", INFERENCE_NOISE)
    title, height = "Inference: latency against throughput", 3.6 + style.legend_height(len(runs))
    picture = texts.frame(title, *captions, warnings=inference_stamps(runs), height=height)
    axes = picture.body.subplots()
    handles = []
    for index, (run, (latency, speed)) in enumerate(zip(runs, points, strict=True)):
        look = style.look(index, count=len(runs))
        mark = look.line | {"linestyle": "", "markeredgecolor": style.current().background}
        figures = " (not recorded)"
        if latency and speed:
            axes.plot([latency], [speed], **mark, markersize=look.marker_size + 3, zorder=2 + index / len(runs))
            figures = f": {latency:,.3g} s, {speed:,.4g} tokens/s"
        handles.append(Line2D([], [], **mark, markersize=8, label=shorten(run.name, 34) + figures))
    axes.set_xlim(0, 1.15 * max(latency or 0 for latency, _ in points))
    axes.set_ylim(0, 1.15 * max(speed or 0 for _, speed in points))
    style.number_axis(axes.xaxis, 6)
    style.number_axis(axes.yaxis, 6)
    axes.set_xlabel("seconds to the last new token, batch 1 (less is better)")
    axes.set_ylabel("tokens per second (more is better)")
    picture.legend(handles)
    return picture


# The pictures: their panels, titles, warnings and captions.


COLUMNS = 2
"""Columns of panels in the overview: more would be too small on a page."""


def charts_of_runs(runs: Sequence[Run], *, folders: Mapping[str, Path], price: float | None = None) -> dict[str, Chart]:
    """Every chart of these runs by name; the first run is the baseline.

    Args:
        runs: to compare.
        folders: of the runs, by name.
        price: of a device hour.
    """
    short = [shorten(run.name, 32) for run in runs]  # so that they fit into a picture
    named = [replace(run, name=name) for run, name in zip(runs, short, strict=True)]
    if len(set(short)) < len(short):
        named = [*runs]
    warnings = [*work_stamps(judge(named)), *stamps(named)]
    dates = sorted({run.date for run in runs if run.date})
    when = f" of {dates[0]}" if len(dates) == 1 else f" of {dates[0]} to {dates[-1]}" if dates else ""
    footer = f"run{'s' * (len(runs) > 1)} {', '.join(run.name for run in named)}{when}; "
    footer += (f"same work: {judge(named).answer}; " if len(runs) > 1 else "") + machine_line(named)
    rows, texts = of_runs(named), Texts(warnings, footer)
    bars = {"training_time": [TRAINING_TIME], "throughput": [THROUGHPUT], "inference_latency": [LATENCY]}
    bars |= {"inference_throughput": [INFERENCE], "peak_memory": memory_bars(named)}
    axes = {"loss_vs_step": step_axis(named), "loss_vs_time": time_axis(named), "loss_vs_tokens": token_axis(named)}
    axes |= {} if price is None else {"loss_vs_money": money_axis(price)}
    charts: dict[str, Chart] = {}
    charts |= {name: partial(_bars_picture, named, texts, panels=panels) for name, panels in bars.items()}
    charts |= {name: partial(_loss_picture, named, texts, axis=axis) for name, axis in axes.items()}
    charts.setdefault("loss_vs_money", lambda: "give --price, of a device hour")
    of_rows = {"memory": memory_chart, "communication": communication_chart, "step_times": step_times_chart}
    charts |= {name: partial(draw, rows, texts) for name, draw in of_rows.items()}
    charts["latency_vs_throughput"] = partial(latency_chart, named, texts)
    charts["utilisation"] = partial(utilisation_chart, folders, texts)
    return charts | {"overview": partial(_overview, named, texts)}


def _bars_picture(runs: Sequence[Run], texts: Texts, *, panels: Sequence[Bars]) -> Frame | str:
    if all(bars.quantity.value(run) is None for bars in panels for run in runs):
        return f"no run recorded its {panels[0].title.lower()}"
    title, caption = panels[0].title if len(panels) == 1 else "Peak memory", _caption_of_bars(panels[0], runs)
    warnings = inference_stamps(runs) if LATENCY in panels or INFERENCE in panels else []
    picture = texts.frame(title, caption, warnings=warnings, width=8.4, height=len(panels) * (1.0 + 0.42 * len(runs)))
    for axes, bars in zip(picture.panels(len(panels)), panels, strict=True):
        draw_bars(axes, bars, runs)
        if len(panels) == 1:
            axes.set_title("")  # the figure's title is the same
    return picture


def _loss_picture(runs: Sequence[Run], texts: Texts, *, axis: Axis) -> Frame | str:
    if not any(places(run, kind, axis) for run in runs for kind in LOSS_KINDS):
        return f"no run recorded losses with their {axis.coordinate.removesuffix('s')}s"
    height = 4.0 + style.legend_height(len(runs))
    picture = texts.frame(axis.picture, _caption_of_curves(runs), width=9.6, height=height)
    _draw_loss_panels(picture.body, runs, [(kind, axis) for kind in LOSS_KINDS])
    return picture


def _overview(runs: Sequence[Run], texts: Texts) -> Frame:
    panels = [TRAINING_TIME, THROUGHPUT, *memory_bars(runs), LATENCY]
    bar_rows = -(-len(panels) // COLUMNS)
    bar_height = bar_rows * (1.1 + 0.33 * len(runs))
    loss_height = 3.4 + style.legend_height(len(runs), columns=COLUMNS)
    title = "Overview" if len(runs) < 2 else f"{len(runs)} runs compared (same work: {judge(runs).answer})"
    captions, warnings = (_speed_ups(runs), _caption_of_curves(runs)), inference_stamps(runs)
    picture = texts.frame(title, *captions, warnings=warnings, width=9.6, height=bar_height + loss_height)
    upper, lower = picture.body.subfigures(2, 1, squeeze=False, height_ratios=[bar_height, loss_height])[:, 0]
    for index, axes in enumerate(upper.subplots(bar_rows, COLUMNS, sharey=True, squeeze=False).flat):
        axes.set_visible(index < len(panels))
        if index < len(panels):
            draw_bars(axes, panels[index], runs, label_width=22)
            axes.tick_params(axis="y", labelleft=index % COLUMNS == 0)
    _draw_loss_panels(lower, runs, [("train", step_axis(runs)), ("validation", time_axis(runs))])
    return picture


def _draw_loss_panels(body: SubFigure, runs: Sequence[Run], drawn: Sequence[tuple[str, Axis]]) -> None:
    """Draw two loss panels. Names are at the ends of the curves if both panels have room, else in a legend."""
    panels = list(body.subplots(1, COLUMNS))
    ends = [draw_losses(axes, runs, kind=kind, axis=axis) for axes, (kind, axis) in zip(panels, drawn, strict=True)]
    both = list(zip(panels, ends, strict=True))
    if all(len(of_panel) == len(runs) and ends_can_be_labelled(axes, of_panel) for axes, of_panel in both):
        for axes, of_panel in both:
            for name, x, y in of_panel:
                away = {"xytext": (7, 0), "textcoords": "offset points"}
                axes.annotate(f"{shorten(name, 18)}\n{y:.3f}", (x, y), **away, va="center", fontsize=9)
        return
    handles, (_, axis) = [], drawn[0]
    for index, run in enumerate(runs):
        kinds = [kind for kind in LOSS_KINDS if places(run, kind, axis)]
        lacking = f" ({axis.missing})" if not kinds else f" ({kinds[0]} only)" if len(kinds) == 1 else ""
        handles.append(Line2D([], [], **style.look(index, count=len(runs)).line, label=shorten(run.name, 34) + lacking))
    body.legend(handles=handles, loc="outside lower left", ncols=COLUMNS, frameon=False, handlelength=4)


def _speed_ups(runs: Sequence[Run]) -> str:
    """Speed-ups in training time of the runs that did the same work as the baseline."""
    base, *others = runs
    equal = [(run.name, speed_up(base, run)) for run in others if judge([base, run]).answer == "yes"]
    ratios = [f"{name} {ratio:.2f}x" for name, ratio in equal if ratio is not None]
    return f"Speed-up over {base.name} in training time: {', '.join(ratios)}." if ratios else ""


def _caption_of_bars(bars: Bars, runs: Sequence[Run]) -> str:
    if bars is TRAINING_TIME:
        what = "Evaluation and saving are not included."
        if any(run.schema == FLAT_SCHEMA for run in runs):
            what = "Older records do not say what their times include."
        return f"{what} {_speed_ups(runs)}"
    counts = {run.new_tokens for run in runs if run.new_tokens is not None}
    if bars is LATENCY and len(counts) == 1:
        return f"Seconds to generate {counts.pop():.0f} tokens from one prompt. {bars.caption}"
    return bars.caption


def _caption_of_curves(runs: Sequence[Run]) -> str:
    curves = [(run.name, curve_of(run, kind)) for run in runs for kind in LOSS_KINDS]
    windows = sorted({window_of(len(curve.points)) for _, curve in curves} - {1})
    parts = []
    if windows:
        span = " or ".join(str(window) for window in windows)
        parts.append(f"Faint: every recorded step; bold: mean of the last {span} recorded steps (fewer at the start).")
    by_epoch = list(dict.fromkeys(name for name, curve in curves if curve.per_epoch and curve.points))
    if by_epoch:
        parts.append(f"Only epoch means were recorded (points at epoch ends): {', '.join(by_epoch)}.")
    return " ".join(parts)


def draw_band(
    losses: Sequence[float], band: Mapping[str, Sequence[float]], picture: Path, *, window: int, name: str
) -> None:
    """Write the band of reference runs (its edges ``low`` and ``high`` by step) and a run's losses into ``picture``."""
    with style.quiet_style(LIGHT):
        caption = f"The thin line is the loss of each step. Judged is the thick one, its mean over {window} steps."
        frame = Texts().frame("The loss beside reference runs", caption, height=4.2)
        (axes,) = frame.panels(1)
        steps = np.arange(1, len(band["low"]) + 1)
        shade = axes.fill_between(steps, band["low"], band["high"], color="0.85", label="reference runs, other seeds")
        own = np.array(losses[: len(steps)])
        look = style.look(0, count=2).line | {"marker": ""}
        axes.plot(steps[: len(own)], own, **look | {"alpha": 0.35, "linewidth": 0.8})
        (line,) = axes.plot(steps[: len(own)], smoothed(own, window=window), **look, label=shorten(name, 60))
        axes.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
        frame.legend([shade, line])
        style.save(frame.figure, picture)
