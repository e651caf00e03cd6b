"""What engines took for many requests, as it stands in the record of the run whose model answered."""

from typing import Any

KEY = "by_concurrency"
"""Of the run's ``inference`` block."""


def by_concurrency(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of a record of many requests by the number of requests at once, then by engine."""
    found: dict[str, dict[str, Any]] = {}
    for engine in record["engines"]:
        for slots, load in engine[KEY].items():
            found.setdefault(slots, {})[engine["name"]] = load
    return found
