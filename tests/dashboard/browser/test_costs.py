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
