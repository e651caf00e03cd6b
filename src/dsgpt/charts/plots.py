"""The charts of runs, and the list of all charts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from matplotlib.figure import SubFigure

from dsgpt.charts.bars import INFERENCE, LATENCY, THROUGHPUT, TRAINING_TIME, Bars, draw_bars, memory_bars
from dsgpt.charts.command import Inputs
from dsgpt.charts.comparison import INFERENCE_NOISE, shorten, speed_up
from dsgpt.charts.curves import (
    Axis,
    curve_of,
    draw_losses,
    ends_can_be_labelled,
    in_money,
    is_drawable,
    label_ends,
    legend_handles,
    money_axis,
    step_axis,
    time_axis,
    token_axis,
)
from dsgpt.charts.hardware import utilisation_chart
from dsgpt.charts.inference import concurrency_chart, latency_chart
from dsgpt.charts.memory import communication_chart, memory_chart, step_times_chart
from dsgpt.charts.options import INFERENCE_CHART, PLAN_CHART
from dsgpt.charts.style import Chart, Frame, frame, legend_height
from dsgpt.charts.sweeps import charts_of_sweep
from dsgpt.record.equal_work import inference_stamps, judge, machine_line, partial_stamps, setup_stamps, work_stamps
from dsgpt.record.runs import FLAT_SCHEMA, Run, window_of
from dsgpt.record.suites import of_runs

# The pictures: their panels, titles, warnings and captions.

LOSS_KINDS = ("train", "validation")
COLUMNS = 2
"""Of panels in the overview: more would be too small on a page."""
NO_PRICE = "give --price, of a device hour"


def charts_of_runs(runs: Sequence[Run], *, folders: Mapping[str, Path], price: float | None = None) -> dict[str, Chart]:
    """Every chart of these runs by name; the first run is the baseline.

    Args:
        runs: to compare.
        folders: of the runs, by name.
        price: of a device hour.
    """
    named = _with_short_names(runs)
    rows, texts = of_runs(named), {"warnings": _warnings(named), "captions": [_footer(named)]}
    bars = {
        "training_time": [TRAINING_TIME],
        "throughput": [THROUGHPUT],
        "inference_latency": [LATENCY],
        "inference_throughput": [INFERENCE],
        "peak_memory": memory_bars(named),
    }
    axes = {"loss_vs_step": step_axis(named), "loss_vs_time": time_axis(named), "loss_vs_tokens": token_axis(named)}
    charts: dict[str, Chart] = {name: partial(_bars_picture, named, panels=panels) for name, panels in bars.items()}
    charts |= {name: partial(_loss_picture, named, axis=axis) for name, axis in axes.items()}
    return charts | {
        "loss_vs_money": partial(_money_picture, named, price=price),
        "memory": partial(memory_chart, rows, **texts),
        "communication": partial(communication_chart, rows, **texts),
        "step_times": partial(step_times_chart, rows, **texts),
        "latency_vs_throughput": partial(latency_chart, named, **texts),
        "utilisation": partial(utilisation_chart, folders, **texts),
        "overview": partial(_overview, named),
    }


def _bars_picture(runs: Sequence[Run], *, panels: Sequence[Bars]) -> Frame | str:
    if all(bars.value(run) is None for bars in panels for run in runs):
        return f"no run recorded its {panels[0].title.lower()}"
    inference = inference_stamps(runs) if LATENCY in panels or INFERENCE in panels else []
    picture = frame(
        panels[0].title if len(panels) == 1 else "Peak memory",
        warnings=[*_warnings(runs), *inference],
        captions=[_caption_of_bars(panels[0], runs), _footer(runs)],
        width=8.4,
        height=len(panels) * (1.0 + 0.42 * len(runs)),
    )
    for axes, bars in zip(picture.body.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        draw_bars(axes, bars, runs)
        if len(panels) == 1:
            axes.set_title("")  # the figure's title is the same
    return picture


def _money_picture(runs: Sequence[Run], *, price: float | None) -> Frame | str:
    if price is None:
        return NO_PRICE
    return _loss_picture([in_money(run, price) for run in runs], axis=money_axis(price))


def _loss_picture(runs: Sequence[Run], *, axis: Axis) -> Frame | str:
    if not is_drawable(runs, axis):
        return f"no run recorded losses with their {axis.coordinate.removesuffix('s')}s"
    picture = frame(
        axis.picture,
        warnings=_warnings(runs),
        captions=[_caption_of_curves(runs), _footer(runs)],
        width=9.6,
        height=4.0 + legend_height(len(runs)),
    )
    _draw_loss_panels(picture.body, runs, places=[(kind, axis) for kind in LOSS_KINDS], columns=2)
    return picture


def _overview(runs: Sequence[Run]) -> Frame:
    panels = [TRAINING_TIME, THROUGHPUT, *memory_bars(runs), LATENCY]
    bar_rows = -(-len(panels) // COLUMNS)
    bar_height = bar_rows * (1.1 + 0.33 * len(runs))
    loss_height = 3.4 + legend_height(len(runs), columns=COLUMNS)
    verdict = judge(runs)
    picture = frame(
        "Overview" if len(runs) < 2 else f"{len(runs)} runs compared (same work: {verdict.answer})",
        warnings=[*_warnings(runs), *inference_stamps(runs)],
        captions=[_speed_ups(runs), _caption_of_curves(runs), _footer(runs)],
        width=9.6,
        height=bar_height + loss_height,
    )
    upper, lower = picture.body.subfigures(2, 1, squeeze=False, height_ratios=[bar_height, loss_height])[:, 0]
    places = upper.subplots(bar_rows, COLUMNS, sharey=True, squeeze=False).flat
    for index, axes in enumerate(places):
        axes.set_visible(index < len(panels))
        if index < len(panels):
            draw_bars(axes, panels[index], runs, label_width=22)
            axes.tick_params(axis="y", labelleft=index % COLUMNS == 0)
    losses = [("train", step_axis(runs)), ("validation", time_axis(runs))]
    _draw_loss_panels(lower, runs, places=losses, columns=COLUMNS)
    return picture


def _draw_loss_panels(
    body: SubFigure, runs: Sequence[Run], *, places: Sequence[tuple[str, Axis]], columns: int
) -> None:
    """Draw loss panels side by side. Names are at the ends of the curves if all panels have room, else in a legend."""
    panels = list(body.subplots(1, len(places)))
    ends = [draw_losses(axes, runs, kind=kind, axis=axis) for axes, (kind, axis) in zip(panels, places, strict=True)]
    drawn = list(zip(panels, ends, strict=True))
    if all(len(found) == len(runs) and ends_can_be_labelled(axes, found) for axes, found in drawn):
        for axes, found in drawn:
            label_ends(axes, found)
    else:
        handles = legend_handles(runs, places[0][1])
        body.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, handlelength=4)


def _warnings(runs: Sequence[Run]) -> list[str]:
    return [*work_stamps(judge(runs)), *partial_stamps(runs), *setup_stamps(runs)]


def _footer(runs: Sequence[Run]) -> str:
    """The runs, their dates, whether they did the same work, and where."""
    dates = sorted({run.date for run in runs if run.date})
    when = f" of {dates[0]}" if len(dates) == 1 else f" of {dates[0]} to {dates[-1]}" if dates else ""
    names = f"run{'s' * (len(runs) > 1)} {', '.join(run.name for run in runs)}{when}; "
    return names + (f"same work: {judge(runs).answer}; " if len(runs) > 1 else "") + machine_line(runs)


def _with_short_names(runs: Sequence[Run]) -> list[Run]:
    """The runs with names that fit into a picture, unless two shortened names would be equal."""
    names = [shorten(run.name, 32) for run in runs]
    if len(set(names)) < len(names):
        return list(runs)
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _speed_ups(runs: Sequence[Run]) -> str:
    """Speed-ups in training time of the runs that did the same work as the baseline."""
    base, *others = runs
    equal = [(run.name, speed_up(base, run)) for run in others if judge([base, run]).answer == "yes"]
    known = [f"{name} {ratio:.2f}x" for name, ratio in equal if ratio is not None]
    return f"Speed-up over {base.name} in training time: {', '.join(known)}." if known else ""


def _caption_of_bars(bars: Bars, runs: Sequence[Run]) -> str:
    if bars is TRAINING_TIME:
        old = any(run.schema == FLAT_SCHEMA for run in runs)
        what = (
            "Older records do not say what their times include." if old else "Evaluation and saving are not included."
        )
        return f"{what} {_speed_ups(runs)}"
    if bars is LATENCY:
        counts = {run.new_tokens for run in runs if run.new_tokens is not None}
        what = f"Seconds to generate {counts.pop():.0f} tokens from one prompt. " if len(counts) == 1 else ""
        return what + INFERENCE_NOISE
    if bars is INFERENCE:
        return INFERENCE_NOISE
    if bars in memory_bars(runs):
        return "Rank 0 only. GPU memory and host memory (RSS) are different quantities and never share a panel."
    return ""


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


# All charts of what was read.


def charts_of(inputs: Inputs, *, folders: Mapping[str, Path], price: float | None = None) -> dict[str, Chart]:
    """Every chart of ``inputs`` by name.

    Args:
        inputs: what was read.
        folders: of the runs, by name.
        price: of a device hour, in any currency.
    """
    charts = charts_of_runs(inputs.runs, folders=folders, price=price) if inputs.runs else {}
    for name, sweep in inputs.sweeps.items():
        charts |= charts_of_sweep(sweep, name=name)
    if inputs.predictions is not None:
        captions = [inputs.predictions.footer]
        charts[PLAN_CHART] = partial(memory_chart, inputs.predictions.rows, warnings=[], captions=captions)
    if inputs.concurrency is not None:
        charts[INFERENCE_CHART] = partial(concurrency_chart, inputs.concurrency)
    return charts
