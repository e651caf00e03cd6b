"""The figures of all runs side by side: comparison.md, and the table on the console."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsgpt.common.text import NO_DIFFERENCE, UNKNOWN, no_difference
from dsgpt.record import equal_work
from dsgpt.record.runs import TOO_SHORT, Run
from dsgpt.record.work import DEVICES, HARDWARE, STRATEGY

SIGN_CONVENTION = (
    "Improvements are percentages of the first run's value; **positive is better**: less time, latency, loss and"
    " memory, more tokens per second. Unknown is what was not recorded or cannot be compared; it is never taken as 0."
    ' Figures whose repetitions overlap read "no difference"; one that was measured once is not judged.'
)
INFERENCE_NOISE = (
    "Inference runs on one device with one prompt, whatever the strategy: between equal models on one machine,"
    " differences in its figures are measurement noise."
)


@dataclass(frozen=True)
class Quantity:
    """One measured quantity: how to read it from a run, how to format it, and which values are better."""

    label: str
    value: Callable[[Run], float | None]
    form: Callable[[float], str]
    lower_is_better: bool
    gpu_only: bool = False
    """Leave the row out if no run has the quantity: GPU memory does not exist on a CPU."""
    several_epochs_only: bool = False
    """Leave the row out if no run has a second epoch: it would repeat another row."""


def gigabytes(value: float) -> str:
    """Bytes, formatted in GB (10^9 bytes)."""
    return f"{value / 1e9:.2f}"


TIME_ROW = Quantity("training time (s)", lambda run: run.train_time, "{:,.1f}".format, True)
THROUGHPUT_ROW = Quantity("tokens per second, all devices", lambda run: run.tokens_per_sec, "{:,.0f}".format, False)
LATENCY_ROW = Quantity("inference latency, batch 1 (s)", lambda run: run.inference_latency, "{:,.3f}".format, True)
INFERENCE_ROW = Quantity(
    "inference tokens per second", lambda run: run.inference_tokens_per_sec, "{:,.1f}".format, False
)
GPU_MEMORY_ROW = Quantity("peak GPU memory allocated, rank 0 (GB)", lambda run: run.gpu_memory, gigabytes, True, True)
HOST_MEMORY_ROW = Quantity("peak host memory (RSS), rank 0 (GB)", lambda run: run.host_memory, gigabytes, True)
LOSS_ROWS = (
    Quantity("final train loss (nats per token)", lambda run: run.final_train_loss, "{:,.4f}".format, True),
    Quantity(
        "best train loss, lowest epoch mean", lambda run: run.best_train_loss, "{:,.4f}".format, True, False, True
    ),
    Quantity("final validation loss (nats per token)", lambda run: run.final_val_loss, "{:,.4f}".format, True),
    Quantity("best validation loss", lambda run: run.best_val_loss, "{:,.4f}".format, True),
)
_RESERVED = "peak GPU memory reserved, rank 0 (GB)"
RESERVED_ROW = Quantity(_RESERVED, lambda run: run.gpu_memory_reserved, gigabytes, True, True)
ROWS = (TIME_ROW, THROUGHPUT_ROW, *LOSS_ROWS, LATENCY_ROW, INFERENCE_ROW, GPU_MEMORY_ROW, RESERVED_ROW, HOST_MEMORY_ROW)


SEGMENT_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "training time (s)": ("train_time_sec", "{:,.1f}".format),
    "tokens per second": ("mean_tokens_per_sec_global", "{:,.0f}".format),
    "peak GPU memory allocated (GB)": ("max_cuda_mem_allocated_bytes_rank0", gigabytes),
    "peak host memory (GB)": ("peak_rss_bytes_rank0", gigabytes),
}
"""Columns of the table of segments."""


def speed_up(base: Run, other: Run) -> float | None:
    """Training time of ``base`` divided by that of ``other``; None if either is unknown or 0."""
    return base.train_time / other.train_time if base.train_time and other.train_time else None


def comparison_markdown(runs: Sequence[Run], *, sources: str = "") -> str:
    """The contents of comparison.md; the first run is the baseline, and ``sources`` a paragraph about the records."""
    verdict = equal_work.judge(runs)
    memory = "No run recorded GPU memory; host memory is the resident set of rank 0's process alone, not of all ranks."
    if any(run.gpu_memory is not None for run in runs):
        memory = "GPU memory is what PyTorch allocated or reserved on rank 0's device; host memory is another quantity."
    parts = ["# Comparison", escape(verdict.line())]
    if verdict.answer == "no":
        parts.append(f"**{verdict.mark}**: no figure below is the speed-up of one and the same training.")
    parts += [f"**{escape(line)}**" for line in (*equal_work.stamps(runs), *equal_work.inference_stamps(runs))]
    parts += [escape(equal_work.equal_loss_line(runs[0], other)) for other in runs[1:]]
    parts += [escape(equal_work.machine_line(runs)), sources]
    parts += ["## Results", _table(result_rows(runs)), SIGN_CONVENTION, INFERENCE_NOISE, memory]
    parts += ["## Work", _table(work_rows(runs)), _segments(runs)]
    notes = [f"- {escape(run.name)}: {escape(note)}" for run in runs for note in run.notes]
    parts += ["## Notes", "\n".join(notes)] if notes else []
    return "\n\n".join(part for part in parts if part) + "\n"


def console_summary(runs: Sequence[Run]) -> str:
    """The table on the console: a line per run, then the verdicts."""
    lines = [["run", "time (s)", "tokens/s", "speed-up", "train loss", "val loss", "inference (s)"]]
    for run in runs:
        cells = [_cell(row, run) for row in (ROWS[0], ROWS[1], ROWS[2], ROWS[4], ROWS[6])]
        lines.append([shorten(run.name, 32), *cells[:2], _speed_up_cell(runs[0], run), *cells[2:]])
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    table = ["  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in lines]
    closing = [equal_work.judge(runs).line(), *equal_work.stamps(runs)]
    closing += [equal_work.equal_loss_line(runs[0], other) for other in runs[1:]]
    return "\n".join([*table, *closing])


def shorten(name: str, width: int) -> str:
    """``name`` in at most ``width`` characters. The middle is cut out: names of runs differ at their ends."""
    if len(name) <= width:
        return name
    head = (width - 1) // 2
    return f"{name[:head]}…{name[-(width - 1 - head) :]}"


def _cell(row: Quantity, run: Run) -> str:
    value = row.value(run)
    if value is not None:
        return row.form(value)
    return TOO_SHORT if row is THROUGHPUT_ROW and run.too_short_to_time else UNKNOWN


def _speed_up_cell(base: Run, run: Run) -> str:
    """The speed-up, with a label if the work was not the same."""
    ratio = speed_up(base, run)
    if ratio is None:
        return UNKNOWN
    label = {"no": " (not equal work)", "unknown": " (work unknown)", "yes": ""}[equal_work.judge([base, run]).answer]
    return f"{ratio:.2f}x{'' if run is base else label}"


def result_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Rows of what was measured, the first of which is the header; beside the runs, how much better than the first."""
    base, *others = runs
    header = ["", *(run.name for run in runs)]
    for other in others:
        mark = equal_work.judge([base, other]).mark
        header.append(f"{other.name} vs {base.name}" + (f", {mark}" if mark else ""))
    rows = [header]
    for row in ROWS:
        repeats = row.several_epochs_only and all(run.epochs <= 1 for run in runs)
        if not (repeats or (row.gpu_only and all(row.value(run) is None for run in runs))):
            cells = [_cell(row, run) for run in runs]
            rows.append([row.label, *cells, *(_improvement_cell(row, base, other) for other in others)])
    rows.insert(3, ["speed-up in training time", *(_speed_up_cell(base, run) for run in runs), *("" for _ in others)])
    return rows


def _improvement_cell(row: Quantity, base: Run, other: Run) -> str:
    """Percent with its sign; inference with different numbers of tokens is not compared."""
    if row.label.startswith("inference") and base.new_tokens != other.new_tokens:
        return UNKNOWN
    one, two = base.latency_range, other.latency_range
    if row.label.startswith("inference") and one and two and no_difference(*two, than=one):
        return NO_DIFFERENCE
    before, after = row.value(base), row.value(other)
    if not before or after is None:  # a percentage of 0 does not exist
        return UNKNOWN
    percent = (after - before) / before * (-100 if row.lower_is_better else 100)
    return f"{round(percent, 1) + 0.0:+.1f} %".replace("+0.0 %", "0.0 %")


def work_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Rows of what was trained and how, the first of which is the header."""
    rows = [["", *(run.name for run in runs)], ["strategy", *(run.strategy or UNKNOWN for run in runs)]]
    rows.append(["machine", *(run.machine or UNKNOWN for run in runs)])
    rows.append(["instruction sets", *(run.instruction_sets or "not recorded" for run in runs)])
    rows.append(["devices used", *(run.devices or UNKNOWN for run in runs)])
    rows.append(["status", *(run.status or UNKNOWN for run in runs)])
    for fact in equal_work.compared_facts(runs):
        rows += _fact_rows(fact, [run.work[fact] for run in runs])
    rows.append(["inference: prompt tokens", *(equal_work.show(run.prompt_tokens) for run in runs)])
    rows.append(["inference: new tokens", *(equal_work.show(run.new_tokens) for run in runs)])
    rows.append(["record", *(run.schema for run in runs)])
    return rows


def _fact_rows(fact: str, values: Sequence[Any]) -> list[list[str]]:
    """One row, or one per setting if the fact is a set of settings. Only hashes are shortened."""
    recorded = [value for value in values if value is not None]
    settings = all(isinstance(value, dict) for value in recorded)
    keys = dict.fromkeys(key for value in recorded for key in value) if settings else {}
    if not keys:  # of a hash the beginning is enough
        return [[fact, *(equal_work.show(value, whole=not fact.endswith((" data", " weights"))) for value in values)]]
    rows = []
    for key in keys:
        leaves = [None if value is None else value.get(key, "absent") for value in values]
        if any(isinstance(leaf, dict) for leaf in leaves):
            rows += _fact_rows(f"{fact} {key}", leaves)
        else:  # null means that a setting was not given, unless the run recorded no settings
            pairs = zip(values, leaves, strict=True)
            given = ["not given" if value and leaf is None else leaf for value, leaf in pairs]
            rows.append([f"{fact} {key}", *(equal_work.show(leaf, whole=True) for leaf in given)])
    return rows


def _segments(runs: Sequence[Run]) -> str:
    """A row for each segment of the runs that have several."""
    resumed = [run for run in runs if len(run.segments) > 1]
    if not resumed:
        return ""
    segments = [(run.name, segment) for run in resumed for segment in run.segments]
    figures = {
        label: (name, form)
        for label, (name, form) in SEGMENT_FIGURES.items()
        if "GPU" not in label or any(segment.figures.get(name) is not None for _, segment in segments)
    }
    rows = [["run", "steps", STRATEGY, DEVICES, HARDWARE, *figures]]
    for name, segment in segments:
        steps = f"{segment.first_step:,} to {'the end' if segment.last_step is None else f'{segment.last_step:,}'}"
        setup = [segment.setup.get(what) or UNKNOWN for what in (STRATEGY, DEVICES, HARDWARE)]
        values = [(segment.figures.get(figure), form) for figure, form in figures.values()]
        rows.append([name, steps, *setup, *(UNKNOWN if value is None else form(value) for value, form in values)])
    return "\n\n".join(["## Segments", _table(rows)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(map(escape, cells)) + " |" for cells in rows]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(rows[0]) - 1), *lines[1:]])


def escape(text: str) -> str:
    """Text with Markdown's special characters escaped, also for tables."""
    return re.sub(r"[\\|*_`<]|(?<=\])\(", r"\\\g<0>", text).replace("\n", " ")
