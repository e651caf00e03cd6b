"""The figures of the dashboard's page are those of the committed record."""

import json

from costs import PAGE, costs, page_with
from dashboard_server import REPOSITORY

RECORD = "checkpoint/reference/cpu-2-cores/dashboard.json"


def test_the_page_has_the_figures_of_the_record():
    record, page = json.loads((REPOSITORY / RECORD).read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    assert page == page_with(costs(record, source=RECORD), page=page)
    record["rounds"][0]["watching_cores"] += 1
    assert page != page_with(costs(record, source=RECORD), page=page)
    record["work"] |= {"long_runs": 3, "long_steps": 100_000}
    for figures in record["rounds"]:
        figures["opened_sec"]["long"] = [2.5, 0.75]
    assert "| Compare opens 3 runs of 100,000 steps, and again | 2.5 s, 0.8 s |" in costs(record, source=RECORD)
