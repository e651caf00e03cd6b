"""The page "Spikes": the steps of a run whose loss or gradient norm stands out, and the documents that they read."""

from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st

from dsgpt.common.errors import UserError
from dsgpt.dashboard import reading, ui
from dsgpt.dashboard.reading import Steps, Version
from dsgpt.record.readings import DEVIATIONS, FIGURES, TRAILING, Reading, Spikes, find_spikes, suspects
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE
from dsgpt.record.where import excerpt

MOST_DOCUMENTS = 50
"""Documents in the table."""
RULE = (
    f"A step stands out if its loss or its gradient norm is {DEVIATIONS:g} deviations or more above the median of the "
    f"{TRAILING} values before it. A deviation is 1.4826 times their median distance from that median."
)
_X = {"type": "quantitative", "field": "x", "title": "optimizer steps", "axis": ui.NUMBERS}
_Y = {"type": "quantitative", "field": "y", "title": "training loss (nats per token)", "scale": {"zero": False}}
_POINT = {"type": "point", "size": 60, "strokeWidth": 2, "aria": False}
_LAYERS = [{"mark": {"type": "line"}}, {"transform": [{"filter": "datum.out"}], "mark": _POINT}]


def show() -> None:
    """Show the page."""
    folder = reading.current_folder()
    names = [each.name for each in reading.in_order(reading.summaries_of(folder))]
    if not names:
        st.info("There is no run yet: Overview says how to make one.")
        return
    name = st.selectbox("Run", names, key="run", bind="query-params")
    try:
        run_dir = reading.inside(folder, name)
        path, record = (reading.own_file(run_dir, file) for file in (STEPS_FILE, RECORD_FILE))
        if path is None or (steps := reading.steps_of(folder, name)) is None:
            st.info("This run has recorded no step yet.")
            return
        judged = _judged(run_dir, version := reading.version_of(path))
        st.write(f"{ui.plain(judged.words)}.")
        st.caption(RULE)
        _show_curve(steps, {spike.step for spike in judged.spikes})
        if not judged.spikes or record is None:
            return
        st.header("Steps")
        rows = []
        for spike in judged.spikes:
            row: dict[str, Any] = {"step": spike.step}
            for key, name in FIGURES.items():
                value, median, deviations = spike.values.get(key, (None, None, None))
                row |= {name: value, f"{name}: median before it": median, f"{name}: deviations above": deviations}
            rows.append(row)
        ui.show_table(ui.columns(rows), key="steps", name="Steps that stand out")
        st.header("Documents")
        if st.toggle("Look them up in the training data", key="documents", help="By the index beside the data."):
            count, table = _documents(run_dir, judged, (version, reading.version_of(record)))
            st.caption(
                f"{count:,} documents were read by these steps. First come those that chance explains least. *By "
                "chance* is how many would be in as many steps that stand out if chance dealt them out: far below 1 is "
                "suspicious."
            )
            ui.show_table(table, key="suspects", name="Documents behind them")
    except (UserError, OSError) as error:
        st.warning(ui.plain(str(error)))


@st.cache_resource(max_entries=32, show_spinner=False)
def _judged(run_dir: Path, version: Version) -> Spikes:  # noqa: ARG001 - part of the key
    return find_spikes(run_dir)


@st.cache_resource(max_entries=8, show_spinner="Looking them up")
def _documents(run_dir: Path, _judged: Spikes, versions: tuple[Version, Version]) -> tuple[int, ui.Table]:  # noqa: ARG001
    """How many documents the steps that stand out have read, and the first of them."""
    found = suspects(Reading(run_dir), _judged)
    rows = []
    for each in found[:MOST_DOCUMENTS]:
        row: dict[str, Any] = {"by chance": each.by_chance, "stand out": len(each.spikes)}
        row |= {"of steps that read it": each.steps, "document": each.document.number, "source": each.document.origin}
        row["text"] = excerpt(each.file, each.document.start, each.document.stop)
        rows.append(row | {"first such step": each.spikes[0]})
    return len(found), ui.columns(rows)


def _show_curve(steps: Steps, spikes: set[int]) -> None:
    drawn = ~np.isnan(steps.train["loss"])
    x, y = steps.train["step"][drawn], steps.train["loss"][drawn]
    out = np.isin(x, [*spikes])
    places = np.union1d(ui.thinned(y), np.flatnonzero(out))
    ui.figure(
        {"height": ui.HEIGHT, "encoding": {"x": _X, "y": _Y}, "layer": _LAYERS},
        points={name: values[places].tolist() for name, values in (("x", x), ("y", y), ("out", out))},
        numbers={"step": x.tolist(), "loss": y.tolist(), "stands out": out.tolist()},
        title="Training loss, with the steps that stand out",
        alternative=f"The training loss over the steps; {len(spikes)} of them stand out: the table below lists them",
        key="spikes",
        level=2,
    )
