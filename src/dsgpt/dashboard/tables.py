"""Rows of figures as the columns of a table. Imports no Streamlit."""

from collections.abc import Mapping, Sequence
from typing import Any


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of every heading; the first row has all headings."""
    return {heading: [row[heading] for row in rows] for heading in rows[0]} if rows else {}
