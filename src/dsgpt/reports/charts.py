"""All charts of what was read."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dsgpt.reports.concurrency_chart import concurrency_chart
from dsgpt.reports.drawing import Chart
from dsgpt.reports.inputs import Inputs
from dsgpt.reports.memory import memory_chart
from dsgpt.reports.pictures_wanted import INFERENCE_CHART, PLAN_CHART
from dsgpt.reports.plots import charts_of_runs
from dsgpt.reports.sweep_plots import charts_of_sweep


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
