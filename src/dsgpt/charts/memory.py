"""The charts of ranks and GPUs: memory, planned and measured, the time of a step, and what the GPUs did."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dsgpt.charts import style
from dsgpt.charts.comparison import shorten
from dsgpt.charts.style import Frame, Row, Texts
from dsgpt.charts.themes import LIGHT
from dsgpt.record.runs import OTHER, PARTS, read_objects
from dsgpt.record.schema import Fields
from dsgpt.record.suites import Measured

if TYPE_CHECKING:
    from dsgpt.planner.plan import Plan

# The chart of memory: what it holds, predicted beside measured.

REST = "activations and all else"
"""Measured beyond the model state; PyTorch's allocator does not know what it is."""
WHOLE = "all tensors"
"""Measured as a whole."""
STACKED = (*PARTS, REST, WHOLE)
"""The parts in the order in which they are drawn."""
COLOURS = ("weights", "gradients", "optimizer", "master weights", "activations", OTHER, PARTS[-2], REST, WHOLE)
"""The parts in the order of the theme's colours."""
MEASURED = "Model state: measured on the rank that holds most, while the optimizer steps."
TENSORS = "Predicted and measured: tensors of the rank that needed most, at the peak of a step."
ALLOCATED = "Activations and all else: what PyTorch allocated beyond it at rank 0's peak."
PREDICTED = "Predicted: tensors of rank 0 at the peak of a step."
RESIDENT = "The resident set of a process is another quantity: it holds Python, libraries and freed memory too."


def memory_chart(rows: Sequence[Measured], texts: Texts) -> Frame | str:
    """Stacked bars of each run or cell, predicted beside measured; on CPUs also its peak resident set."""
    prints = [row.footprint for row in rows]
    if not any(each.model_state or each.predicted or each.peak_kind == "tensors" for each in prints):
        return "no record has model state or a predicted peak"
    resident, counted = (any(each.peak_kind == kind for each in prints) for kind in ("resident", "tensors"))
    pairs = any(each.predicted for each in prints)
    said = {MEASURED: any(each.model_state for each in prints), TENSORS: counted}
    said |= {ALLOCATED: any(each.rest for each in prints), PREDICTED: pairs and not counted, RESIDENT: resident}
    heights = [1.5 + (0.62 if pairs else 0.4) * len(rows), *([0.9 + 0.36 * len(rows)] if resident else [])]
    caption = " ".join(text for text, applies in said.items() if applies)
    picture = texts.frame("Memory of a rank, and what it holds", caption, height=sum(heights))
    panels = picture.panels(len(heights), height_ratios=heights)
    unit, size = unit_of([sum((each.predicted or each.model_state or {}).values()) for each in prints])
    _draw_stacks(panels[0], rows, unit=unit, size=size, pairs=pairs)
    if resident:
        peaks = [row.footprint.peak if row.footprint.peak_kind == "resident" else None for row in rows]
        unit, size = unit_of([peak for peak in peaks if peak is not None])
        form = ("{:,.2f}" if unit == "GB" else "{:,.0f}").format
        style.draw_rows(panels[1], [_bar(row, peak, size, form) for row, peak in zip(rows, peaks, strict=True)])
        for bar in panels[1].patches:  # the colours above mean parts of memory
            bar.set(facecolor=style.current().quiet, hatch="")
        panels[1].set(xlabel=f"{unit} resident (RSS) in rank 0's process, at its peak")
    stacks = [parts for row in rows for parts in (_measured(row), row.footprint.predicted or {})]
    drawn = {name for parts in stacks for name, part in parts.items() if part > 0}
    handles = [Patch(label=name, **_look(name, hatched=False)) for name in STACKED if name in drawn]
    if pairs:  # how predictions are told from measurements
        grey: dict[str, Any] = {"facecolor": style.current().quiet, "edgecolor": style.current().background}
        handles += [Patch(**grey, hatch="////", label="predicted"), Patch(**grey, label="measured")]
    picture.legend(handles, columns=4)
    return picture


def unit_of(sizes: Sequence[float]) -> tuple[str, float]:
    """GB or MB, and the bytes of one: the largest unit of which the largest size has at least two."""
    return ("GB", 1e9) if max(sizes, default=0.0) >= 2e9 else ("MB", 1e6)


def _draw_stacks(axes: Axes, rows: Sequence[Measured], *, unit: str, size: float, pairs: bool) -> None:
    """Draw a stacked bar with its total for what was measured; with ``pairs``, one of the prediction above it."""
    top = max(sum(parts.values()) for row in rows for parts in (_measured(row), row.footprint.predicted or {})) / size
    for place, row in enumerate(rows):
        measured, predicted = _measured(row), row.footprint.predicted or {}
        word = "measured" if {REST, WHOLE} & measured.keys() else "of model state measured"
        stacks = [(place + (0.19 if pairs else 0), measured, word, False)]
        if pairs:
            stacks.insert(0, (place - 0.19, predicted, "predicted", True))
        if not measured and not predicted:
            style.note_inside(axes, row.lacking, x=top * 0.015, y=place)
        for middle, parts, word, hatched in stacks:
            end = 0.0
            for name in STACKED:
                if (value := parts.get(name, 0.0) / size) > 0:
                    height = 0.34 if pairs else style.BAR_WIDTH
                    axes.barh(middle, value, left=end, height=height, **_look(name, hatched=hatched))
                    end += value
            if parts:
                text = f"{end:,.{1 if top < 100 else 0}f} {word}"
                axes.text(end + top * 0.012, middle, text, va="center", fontsize=8.5, bbox=style.behind_text())
    axes.set_xlim(0, top * 1.36)
    style.name_rows(axes, [row.name for row in rows])
    style.number_axis(axes.xaxis, 5)
    axes.set(xlabel=f"{unit} of tensors of a rank (less is better)")


def _bar(row: Measured, value: float | None, unit: float, form: Callable[[float], str]) -> Row:
    """A bar of ``value`` in ``unit``, or what the record lacks."""
    scaled = None if value is None else value / unit
    return Row(name=row.name, value=scaled, label=row.lacking if scaled is None else form(scaled), group=row.group)


def _look(name: str, *, hatched: bool) -> dict[str, Any]:
    theme = style.current()
    colour = theme.edge if name == WHOLE else theme.palette[COLOURS.index(name)]
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": theme.background, "linewidth": 0.6}
    return {**look, "hatch": "////", "hatchcolor": theme.background} if hatched else look


def _measured(row: Measured) -> dict[str, float]:
    """The model state, and what else was allocated where that is known."""
    if row.footprint.peak_kind == "tensors" and row.footprint.peak is not None:
        return {WHOLE: row.footprint.peak}
    state = dict(row.footprint.model_state or {})
    rest = row.footprint.rest
    return state | {REST: rest} if state and rest else state


# The charts of a step: how its time is distributed, and how much of it is communication.

TIMES = (
    "Steps after the warm-up. Box: the middle half of the steps, with the median; line: from the fastest 5% to the "
    "slowest 5%; dots: the fastest and the slowest."
)


def step_times_chart(rows: Sequence[Measured], texts: Texts) -> Frame | str:
    """A box of the step times of each run or cell."""
    times = [sorted(row.footprint.step_times_sec or ()) for row in rows]
    if not any(times):
        return "no run recorded the times of its steps"
    picture = texts.frame("Time of a step", TIMES, height=1.0 + 0.48 * len(rows))
    axes, ink = picture.body.subplots(), style.current().ink
    longest = max(values[-1] for values in times if values)
    unit, scale = ("seconds", 1.0) if longest >= 2 else ("milliseconds", 1000.0)
    for place, (row, values) in enumerate(zip(rows, times, strict=True)):
        if values:
            quantiles = scale * np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])
            stats = dict(zip(("whislo", "q1", "med", "q3", "whishi"), quantiles.tolist(), strict=True))
            look, line = style.look(row.group, count=len(rows)), {"color": ink, "linewidth": 1.1}
            box: dict[str, Any] = {"boxprops": {"facecolor": look.colour, "edgecolor": ink, "linewidth": 0.8}}
            box |= {"medianprops": {"color": ink, "linewidth": 2}, "whiskerprops": line, "capprops": line}
            box["flierprops"] = {"marker": ".", "markersize": 5, "markerfacecolor": ink, "markeredgecolor": ink}
            box |= {"widths": style.BAR_WIDTH * 0.8, "orientation": "horizontal", "patch_artist": True}
            drawn = axes.bxp([stats | {"fliers": [scale * values[0], scale * values[-1]]}], positions=[place], **box)
            drawn["boxes"][0].set(hatch=look.hatch, hatchcolor=look.hatch_colour)
            median = stats["med"]
            label = f"median {median:,.{0 if median >= 1000 else 1 if median >= 10 else 2}f}"
            axes.annotate(label, (median, place), (0, 14), textcoords="offset points", ha="center", fontsize=8)
    style.name_rows(axes, [row.name for row in rows])
    low, high = axes.get_xlim()
    axes.set_xlim(max(0.0, low), high)
    for place, (row, values) in enumerate(zip(rows, times, strict=True)):
        if not values:
            style.note_inside(axes, row.lacking, x=low + 0.02 * (high - low), y=place)
    style.number_axis(axes.xaxis, 6)
    start = "" if axes.get_xlim()[0] == 0 else f"; {style.ZOOMED}"
    axes.set(xlabel=f"{unit} per optimizer step (less is better{start})")
    return picture


def communication_chart(rows: Sequence[Measured], texts: Texts) -> Frame | str:
    """A chart of the bytes sent in a step, and of the share of its time that this takes, where it was measured."""
    sent = [_bar(row, row.sent_bytes_per_step, 1e6, lambda sent: f"{sent:,.1f}" if sent else "nothing") for row in rows]
    shares = [_bar(row, row.communication_share, 0.01, "{:.1f}%".format) for row in rows]
    both = {"MB sent per step by a rank": sent, "% of a step that waits for communication": shares}
    panels = {label: bars for label, bars in both.items() if any(bar.value is not None for bar in bars)}
    if not panels:
        return "no run recorded what it sent"
    rings = "Bytes count what the rank that sends most sends, if collectives are rings."
    caption = rings if sent in panels.values() else ""
    picture = texts.frame("Communication of a step", caption, height=len(panels) * (0.9 + 0.4 * len(rows)))
    for axes, (label, bars) in zip(picture.panels(len(panels)), panels.items(), strict=True):
        style.draw_rows(axes, bars)
        axes.set(xlabel=f"{label} (less is better)")
    return picture


# What GPUs were doing over time: ``hardware.jsonl`` of a run.


PATTERN = "hardware*.jsonl"
"""A file per machine."""
PAUSE_SEC = 60
"""A longer time without a sample is between two processes of a run: it is left out."""
GPUS = (
    "Line: mean of the run's GPUs (of their power: sum); band: from the lowest to the highest GPU. Utilisation is the "
    "share of time in which a kernel ran, however small."
)


Sample = tuple[float, list[float], list[float]]
"""Seconds since the first sample, without pauses; the utilisation of each GPU, from 0 to 1, and its power in watts."""


def read_samples(folder: Path) -> list[Sample]:
    """The samples in a run folder, by second; of all machines.

    Raises:
        UserError: a file cannot be read.
    """
    seconds: dict[int, dict[str, Fields]] = {}
    for file in sorted(folder.glob(PATTERN)):
        for line in read_objects(file, []):
            fields = Fields(line, notes=[])
            time = fields.number("time")
            for gpu in fields.sections("gpus") if time is not None else ():
                seconds.setdefault(int(time or 0), {})[gpu.text("uuid") or ""] = gpu
    elapsed, samples, before = 0.0, list[Sample](), min(seconds, default=0)
    for second in sorted(seconds):
        elapsed, before = elapsed + (second - before if second - before <= PAUSE_SEC else 1), second
        utilisation, power = (
            [value for gpu in seconds[second].values() if (value := gpu.number(key)) is not None]
            for key in ("utilisation", "power_watts")
        )
        samples.append((elapsed, utilisation, power))
    return samples


def utilisation_chart(folders: Mapping[str, Path], texts: Texts) -> Frame | str:
    """Utilisation and power over time of every run that was sampled; ``folders`` are those of the runs, by name."""
    sampled = {name: samples for name, folder in folders.items() if (samples := read_samples(folder))}
    if not any(utilisation for samples in sampled.values() for _, utilisation, _ in samples):
        return "no run folder has samples of GPUs (hardware.jsonl)"
    powered = any(power for samples in sampled.values() for _, _, power in samples)
    picture = texts.frame("GPUs over time", GPUS, height=(5.6 if powered else 3.0) + style.legend_height(len(sampled)))
    axes = picture.panels(2 if powered else 1, sharex=True)
    handles = []
    for index, (name, samples) in enumerate(sampled.items()):
        look = style.look(index, count=len(sampled))
        line = look.line | {"marker": ""}
        busy = [(time, [100 * value for value in gpus]) for time, gpus, _ in samples if gpus]
        times = [time for time, _ in busy]
        axes[0].plot(times, [statistics.fmean(gpus) for _, gpus in busy], **line)
        low, high = [min(gpus) for _, gpus in busy], [max(gpus) for _, gpus in busy]
        axes[0].fill_between(times, low, high, color=look.colour, alpha=0.2, linewidth=0)
        if powered:
            drawing = [(time, sum(power)) for time, _, power in samples if power]
            axes[1].plot([time for time, _ in drawing], [watts for _, watts in drawing], **line)
        handles.append(Line2D([], [], **line, label=shorten(name, 34)))
    for panel in axes:
        style.number_axis(panel.xaxis, 6)
        style.number_axis(panel.yaxis)
        panel.set_xlim(left=0)
    axes[0].set(ylabel="% of time with a kernel", ylim=(0, 105))
    if powered:
        axes[1].set(ylabel="watts, all GPUs", ylim=(0, None))
    axes[-1].set(xlabel="seconds since the first sample")
    picture.legend(handles, handlelength=4)
    return picture


# The picture of a plan: who holds what on which rank, and how much of it.


MOST_RANKS = 16
"""More ranks are not drawn: they hold the same as others."""
_LEAST_SHARE = 0.005
"""Least share of a bar: smaller parts are not drawn."""


def draw_plan(plan: "Plan", path: Path) -> None:
    """Draw the memory of every rank to ``path``, an SVG or PNG by its ending."""
    from dsgpt.planner.formulas import peak_memory  # noqa: PLC0415 - who draws records needs no planner
    from dsgpt.planner.plan import GB, held_in_words  # noqa: PLC0415

    setup, usable = plan.setup, plan.usable_bytes / GB
    ranks = range(min(setup.world_size, MOST_RANKS))
    peaks = [peak_memory(setup, rank=rank, device=plan.machine.kind) for rank in ranks]
    shown = [name for name in peaks[0].parts if any(peak.parts[name] > _LEAST_SHARE * peak.total for peak in peaks)]
    more = f" (ranks 0 to {len(ranks) - 1} of {setup.world_size})" if setup.world_size > len(ranks) else ""
    with style.quiet_style(LIGHT):
        picture = Texts().frame(
            f"Who holds what: {setup.strategy_name} on {setup.world_size} x {plan.machine.name}{more}",
            f"Predicted peak of tensor memory of each rank, {setup.precision}, micro batch {setup.micro_batch_size}, "
            f"{setup.seq_length:,} tokens a sequence. The line is what tensors can fill of a device. Not measured.",
            height=1.3 + 0.46 * len(ranks),
        )
        axes, theme = picture.body.subplots(), style.current()
        starts = [0.0] * len(ranks)
        for index, name in enumerate(shown):
            drawn = style.look(index, count=len(shown))
            sizes = [peak.parts[name] / GB for peak in peaks]
            bars = axes.barh(ranks, sizes, left=starts, color=drawn.colour, height=0.66, label=name.replace("_", " "))
            for bar in bars:
                bar.set(hatch=drawn.hatch, hatchcolor=drawn.hatch_colour, edgecolor=theme.background, linewidth=0.6)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
        for rank, (end, peak) in enumerate(zip(starts, peaks, strict=True)):
            axes.text(end, rank, f" {peak.total / GB:,.1f} GB, {peak.moment}", va="center", color=theme.ink, fontsize=8)
        axes.axvline(usable, color=theme.ink, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.text(usable, -0.75, f"{usable:,.1f} GB ", ha="right", va="center", color=theme.quiet, fontsize=8)
        axes.set_yticks(list(ranks), [f"rank {rank}: {held_in_words(setup, rank)}" for rank in ranks])
        axes.set(xlabel="GB", xlim=(0, 1.2 * max([usable, *starts])), ylim=(len(ranks) - 0.5, -1.1))
        axes.grid(visible=False, axis="y")
        picture.body.legend(loc="outside lower center", ncols=min(6, len(shown)), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        style.save(picture.figure, path)
