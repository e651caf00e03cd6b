"""What ``docs/dashboard.md`` says about the dashboard's cost, made from the record of ``measure.py``."""

from statistics import median
from typing import Any

from dashboard_server import REPOSITORY

from dsgpt.benchmarks.cells import counted
from dsgpt.benchmarks.frame import table

PAGE = REPOSITORY / "docs" / "dashboard.md"
HEADING = "\n## What it costs\n"
OPENED = {
    "overview": "Overview opens, first and later",
    "compare": "Compare opens",
    "live": "Live opens, with the newest run",
}
MEMORY = ("before", "opened", "watched")


def costs(record: dict[str, Any], *, source: str) -> str:
    """The part of the page below ``HEADING``; ``source`` is the record's path, for the reader."""
    work, rounds, hardware = record["work"], record["rounds"], record["hardware"]
    opened = dict(OPENED)
    if "long" in rounds[0]["opened_sec"]:  # not in records of 1.0
        opened["long"] = f"Compare opens {work['long_runs']} runs of {work['long_steps']:,} steps, and again"
    rows = [
        (what, ", ".join(_spread([each["opened_sec"][page][state] for each in rounds], " s") for state in (0, 1)))
        for page, what in opened.items()
    ]
    memory = [_spread([each["memory_bytes"][when] / 1e6 for each in rounds], " MB", digits=0) for when in MEMORY]
    rows.append(("memory of the server: before the first page, after these pages, after watching", ", ".join(memory)))
    shares = [100 * each["watching_cores"] for each in rounds]
    rows.append((f"watching {work['growing']} runs that grow, of a core", _spread(shares, "%")))
    return f"""
What one page has read, others need not read again: steps are kept by the identity of their file, and of a file that
grows only the new lines are read. In Chromium, with {work["runs"]} runs of {work["steps"]:,} steps, of which \
{work["growing"]} grow and are watched for
{work["watched_sec"]:g} s, on {hardware["cpu_name"]}, {hardware["cpu_count"]} cores:

{table(("", "median, and least to most"), rows)}

Live looks at the files every two seconds, and every ten if it watches ten runs.

`{source}` has the figures of {counted(len(rounds), "round")}, each on a new server.
Streamlit {record["env"]["streamlit_version"]}, Chromium {record["env"]["chromium_version"]}.
Commit `{record["git_commit"]}`, {record["timestamp_utc"]}.
`PYTHONPATH=tests .venv/bin/python tests/dashboard/browser/measure.py` measures them on your machine.
With `--table-from {source}` it writes this part of the page.
"""


def page_with(text: str, *, page: str) -> str:
    """``page``, whose last part is replaced by ``text``."""
    return page.partition(HEADING)[0] + HEADING + text


def _spread(values: list[float], unit: str, *, digits: int = 1) -> str:
    """``1.7 s (1.6 to 1.9)``."""
    middle, least, most = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle}{unit}" if least == most else f"{middle}{unit} ({least} to {most})"
